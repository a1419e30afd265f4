"""What a running engine does beside the model's work, seen from outside its actors: they know nothing of it."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from engine.samples import nearest_rank
from engine.stepper import open_stepper

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.stepper import Stepper

T = TypeVar("T")

LAG_SLEEP_SECONDS: Final = 0.005


class LagMeter:
    """How late a task wakes that sleeps for `LAG_SLEEP_SECONDS` again and again.

    Attributes:
        samples: (when it woke, how late that was), in seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Measure, for ever."""
        while True:
            due = time.perf_counter() + LAG_SLEEP_SECONDS
            await trio.sleep(LAG_SLEEP_SECONDS)
            now = time.perf_counter()
            self.samples.append((now, now - due))


class TaskTimes(trio.abc.Instrument):
    """Adds up the event loop's time, in seconds, by the name of the task that had it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._begin = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        """It begins."""
        self._begin = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """It gives the loop back."""
        self.seconds[task.name] += time.perf_counter() - self._begin


class TimedStepper:
    """Notes when each call is handed to the torch thread, and when its result is back in the task that waits."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.calls: list[tuple[float, float]] = []

    async def run(self, function: Callable[[], T]) -> T:
        """Call `function` on the thread."""
        asked = time.perf_counter()
        result = await self._stepper.run(function)
        self.calls.append((asked, time.perf_counter()))
        return result


class EngineMeter:
    """Everything that is measured of one engine. Open it with `open_stepper` in place of the usual one."""

    def __init__(self) -> None:
        self._stepper: TimedStepper | None = None
        self._tasks = TaskTimes()
        self._lag = LagMeter()

    @asynccontextmanager
    async def open_stepper(self) -> AsyncIterator[TimedStepper]:
        """The torch thread of the engine that is measured."""
        async with open_stepper() as stepper:
            self._stepper = TimedStepper(stepper)
            yield self._stepper

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        """Measure while the body runs; from here on every call to the thread is a step."""
        if self._stepper is not None:
            self._stepper.calls.clear()
        trio.lowlevel.add_instrument(self._tasks)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._lag.run)
                yield
                nursery.cancel_scope.cancel()
        finally:
            trio.lowlevel.remove_instrument(self._tasks)

    def summary(self, executions: list[tuple[float, float]]) -> dict[str, float]:
        """Means of a step, in seconds.

        Args:
            executions: when each of the model's steps began and ended, in order.

        Returns:
            `step_seconds`, of which `execute_seconds` are the model's, `scheduling_seconds` planning, taking in what
            came back and counting it, and `hop_seconds` the way to the torch thread and back; `text_seconds`, tokens to
            text and to who reads it, pass while the next step runs; `loop_lag_p99_seconds`.
        """
        calls = [] if self._stepper is None else self._stepper.calls
        pairs = list(zip(executions, calls, strict=False))
        count = len(pairs)
        lags = sorted([lag for _, lag in self._lag.samples]) or [0.0]
        return {
            "step_seconds": (pairs[-1][1][1] - pairs[0][1][0]) / count,
            "execute_seconds": sum([end - begin for (begin, end), _ in pairs]) / count,
            "scheduling_seconds": self._tasks.seconds["scheduling"] / count,
            "hop_seconds": sum([begin - asked + back - end for (begin, end), (asked, back) in pairs]) / count,
            "text_seconds": self._tasks.seconds["streaming"] / count,
            "loop_lag_p99_seconds": nearest_rank(lags, 99),
        }
