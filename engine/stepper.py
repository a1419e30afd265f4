"""One OS thread that makes every torch call: load, warm up, execute.

torch's thread pool belongs to the thread that calls it, and `trio.to_thread` promises no thread twice; hence one
thread of our own. A call is never abandoned: a cancelled caller still waits for the step to end.
"""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.batch import ScheduledBatch, StepOutput

T = TypeVar("T")

# What a runner knows a launched step by; nobody else looks into it.
Ticket: TypeAlias = Any


class Runner(Protocol):
    """Whatever can execute a step. All calls come from one thread.

    A step is computed at once (`execute`) or in two halves (`launch`, `collect`). Steps are computed in the order in
    which they were launched and collected in that order, each once; not more than two are launched and not collected.
    """

    @property
    def overlaps(self) -> bool:
        """Whether `launch` comes back before the step is computed, so that the next one can be planned meanwhile.

        A batch may then begin where the one before it has drawn a token that nobody has read yet: for a row without a
        constraint, the runner itself takes the token from there. Such a batch has no drafts.
        """
        ...

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch's tokens and draw a token for each row that samples: `launch` and `collect` in one."""
        ...

    def launch(self, batch: ScheduledBatch) -> Ticket:
        """Begin a step, behind those that were launched before; does not wait for any of them."""
        ...

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the oldest step that was launched and give back what came of it."""
        ...

    def reset(self) -> None:
        """Forget every sequence and all that was computed: a step has failed, and none of it is to be trusted.

        Steps that were launched and not collected are waited for, and what they give is forgotten too.
        """
        ...


class Stepper(Protocol):
    """Runs blocking calls one after the other."""

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` and give back what it returns or raises."""
        ...


class ThreadStepper:
    """Runs calls on one dedicated thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], object], Callable[[outcome.Outcome[object]], None]] | None]
        self._jobs = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="relevo-torch", daemon=True)

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` on the thread. Cancellation does not end the wait: a step is never abandoned."""
        task = trio.lowlevel.current_task()
        token = trio.lowlevel.current_trio_token()

        def deliver(result: outcome.Outcome[object]) -> None:
            try:
                token.run_sync_soon(trio.lowlevel.reschedule, task, result)
            except trio.RunFinishedError:
                return  # the loop is gone, and with it whoever waited

        self._jobs.put((function, deliver))
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after the calls it was given."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, deliver = job
            deliver(outcome.capture(function))


@asynccontextmanager
async def open_stepper() -> AsyncIterator[ThreadStepper]:
    """A running `ThreadStepper`, ended on leaving."""
    stepper = ThreadStepper()
    stepper.start()
    try:
        yield stepper
    finally:
        stepper.stop()
