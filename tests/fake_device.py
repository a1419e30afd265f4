"""A device that is not there: steps are computed elsewhere, one after the other, and what came of them is read late."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import outcome
import trio

from tests.fakes import FakeRunner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.batch import ScheduledBatch, StepOutput

LAUNCH_SECONDS = 0.001
STEP_SECONDS = 0.01


@dataclass(frozen=True)
class FakeStep:
    """A step under way: what will have come of it, and when."""

    result: outcome.Outcome[Any]
    done: float


class FakeDevice(FakeRunner):
    """A fake runner with `launch` and `collect`; a call to it takes the loop's time under `DeviceStepper`.

    Whatever is launched behind a step that failed fails as well, until all is made anew.

    Args:
        clock: the loop's; a simulation without one gives its own.
        before_launch: called with each batch before it is launched; may raise.
        at_once: steps are known when they are launched, as by a runner that does not overlap.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        clock: Callable[[], float] = trio.current_time,
        step_seconds: float = STEP_SECONDS,
        before_launch: Callable[[ScheduledBatch], None] | None = None,
        at_once: bool = False,
        **fake: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, **fake)
        self.overlaps = not at_once
        self.caller_is_busy_until = 0.0
        self.depths: list[int] = []  # steps under way when each was launched, itself among them
        self._clock = clock
        self.step_seconds = step_seconds
        self._before_launch = before_launch
        self._under_way: deque[FakeStep] = deque()
        self._is_busy_until = 0.0
        self._failure: Exception | None = None

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        assert not self._under_way
        return self.collect(self.launch(batch))

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        assert len(self._under_way) < 2
        assert not (self._under_way and batch.drafts)
        if self._before_launch is not None:
            self._before_launch(batch)
        now = self._clock()
        self._is_busy_until = max(self._is_busy_until, now + LAUNCH_SECONDS) + self.step_seconds
        launched = FakeStep(self._compute_step(batch), self._is_busy_until)
        self._under_way.append(launched)
        self.depths.append(len(self._under_way))
        self.caller_is_busy_until = now + LAUNCH_SECONDS
        return launched

    def collect(self, ticket: FakeStep) -> StepOutput:
        assert self._under_way.popleft() is ticket
        self.caller_is_busy_until = ticket.done
        output: StepOutput = ticket.result.unwrap()
        return output

    def reset(self) -> None:
        self._under_way.clear()
        self._failure = None
        self.caller_is_busy_until = max(self.caller_is_busy_until, self._is_busy_until)
        super().reset()

    def _compute_step(self, batch: ScheduledBatch) -> outcome.Outcome[Any]:
        if self._failure is not None:
            return outcome.Error(RuntimeError(f"after {self._failure!r}"))
        result = outcome.capture(super().execute, batch)
        if isinstance(result, outcome.Error):
            assert isinstance(result.error, Exception)
            self._failure = result.error
        return result


class DeviceStepper:
    """Runs a call on the event loop; it takes as long as it keeps a fake device's caller busy."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    async def run(self, function: Callable[[], Any]) -> Any:
        result = outcome.capture(function)
        with trio.CancelScope(shield=True):
            await trio.sleep_until(self._device.caller_is_busy_until)
        return result.unwrap()


def opens(device: FakeDevice) -> Callable[[], Any]:
    """What opens the stepper of a device."""

    @asynccontextmanager
    async def open_stepper() -> AsyncIterator[DeviceStepper]:
        yield DeviceStepper(device)

    return open_stepper
