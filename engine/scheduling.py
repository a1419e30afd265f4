"""The actor that owns the scheduler: commands in, a step, results out, and again."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import trio

from engine.batch import Ending, StepUpdate
from engine.errors import EngineError
from engine.faults import IntegrityError, has_lost_device, let_go
from engine.flight import Flight
from engine.messages import Add, Drain, End, SetLimits, StepResult
from engine.panics import without_panic
from engine.recovery import Recovery
from engine.sequence import FinishReason, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.batch import StepOutput
    from engine.faults import Notice
    from engine.flight import UnderWay
    from engine.messages import Command, Result
    from engine.request_log import RequestLog
    from engine.scheduler import Scheduler
    from engine.sequence import Sequence
    from engine.stats import Stats
    from engine.stepper import Runner, Stepper

    T = TypeVar("T")

log = logging.getLogger("relevo.engine")

# The sums are held against each other after so many steps, or one for so many blocks where there are very many of
# them: less than a thousandth of the time. All is, block by block, when there is nothing to do, but not more often
# than this.
CHECK_STEPS = 256
BLOCKS_PER_CHECK_STEP = 64
CHECK_SECONDS = 1.0
# A step that takes no longer than this never hangs; nor one that is within so many times the slowest of the last
# minutes or, for its tokens, the usual. Before there are enough steps to compare with, it has this long.
STALL_SECONDS = 3.0
STALL_FACTOR = 10
STALL_TOKEN_FACTOR = 2
ENOUGH_STEPS = 20
UNKNOWN_STALL_SECONDS = 15.0
UNKNOWN_STALL_TOKEN_SECONDS = 0.1
# Before a broken engine ends, those who wait for an answer are to read that there is none.
FAREWELL_SECONDS = 1.0


class Scheduling:
    """Plans a step, has it executed, applies what came back. Nobody else touches the scheduler's state.

    Where the runner and the scheduler can, a step is launched before what came of the one before it is read.

    What fails in one of these is no end: see `engine.recovery`.

    Args:
        scheduler: the pure rules.
        runner: executes a batch.
        stepper: where the runner's calls are made.
        commands: requests to add, sequences to end, limits to set.
        results: tokens and endings, for the streaming actor.
        stats: counts steps and tokens.
        requests: told what became of each request.
        notify: told of faults and what was done about them.

    Attributes:
        step_started: since when a step is waited for; `None` between two steps.
        turn_started: when it was last seen to that the next step is planned.
        log: the last steps.
        broken: why nothing can be computed any more; `None` while it can.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        stepper: Stepper,
        commands: trio.MemoryReceiveChannel[Command],
        results: trio.MemorySendChannel[Result],
        stats: Stats,
        requests: RequestLog,
        notify: Callable[[Notice], None],
    ) -> None:
        self.scheduler = scheduler
        self.step_started: float | None = None
        self.turn_started = trio.current_time()
        self.broken: str | None = None
        self._runner = runner
        self._stepper = stepper
        self._commands = commands
        self._results = results
        self._stats = stats
        self._requests = requests
        self._recovery = Recovery(scheduler, stats, notify)
        self._flight = Flight(scheduler, stats, requests)
        self.log = self._flight.log
        self._current: UnderWay | None = None  # that is launched, waited for or applied now
        self._command: Command | None = None  # that is being applied
        self._check_steps = max(CHECK_STEPS, scheduler.kv_cache.pool.num_blocks // BLOCKS_PER_CHECK_STEP)
        self._checked = self.turn_started

    async def run(self) -> None:
        """Schedule → execute → update, for ever; waits for a command when there is nothing to do now.

        Raises:
            EngineError: nothing can be computed any more, whatever it is.
        """
        try:
            while True:
                try:
                    await self._turn()
                except Exception as error:
                    await self._cope(error)
        finally:
            await self._leave()

    def stall(self, now: float) -> str | None:
        """What does not come to its end although it should have: a step, or what is between two steps."""
        scheduler = self.scheduler
        if self.step_started is not None:
            lasted = now - self.step_started
            hangs = lasted > STALL_SECONDS and lasted > self._patience(now)
            return f"a step has been running for {lasted:.0f} s" if hangs else None
        lasted = now - max(self.turn_started, scheduler.look_again_at or 0.0)
        number = scheduler.num_running + scheduler.num_waiting
        return f"no step has begun for {lasted:.0f} s, and {number} wait" if number and lasted > STALL_SECONDS else None

    def _patience(self, now: float) -> float:
        """Seconds that the step under way may take."""
        stats = self._stats
        recent = stats.step_seconds.summary(now)
        batch = self._flight.steps[0].batch if self._flight else None
        num_tokens = 0 if batch is None else batch.num_tokens + batch.num_padding_tokens
        if (recent["count"] or 0) < ENOUGH_STEPS:
            return UNKNOWN_STALL_SECONDS + UNKNOWN_STALL_TOKEN_SECONDS * num_tokens
        usual = (recent["p50"] or 0.0) * num_tokens * stats.num_steps / max(1, stats.num_step_tokens)
        return max(STALL_FACTOR * (recent["p99"] or 0.0), STALL_TOKEN_FACTOR * usual)

    async def _turn(self) -> None:
        self.turn_started = trio.current_time()
        await self._apply_commands()
        self._recovery.raise_limits(self.turn_started)
        if self._runner.overlaps and self.scheduler.may_overlap and not self._recovery.is_trying:
            await self._turn_ahead()
        else:
            await self._turn_by_turn()

    async def _turn_by_turn(self) -> None:
        """Plan a step, have it computed, apply what came of it."""
        while self._flight:
            await self._tell(await self._collect())
        step = self._plan()
        if step is None:
            await self._rest()
            return
        self._current = step
        output = await self._call(partial(self._runner.execute, step.batch))
        await self._tell(self._finish(output))
        if self._recovery.is_trying:
            await self._look_at_trial()

    async def _turn_ahead(self) -> None:
        """Plan a step and have it launched; only then wait for the one before it."""
        step = self._plan()
        if step is not None:
            self._current = step
            self.scheduler.launched(step.batch)
            step.ticket = await self._call(partial(self._runner.launch, step.batch))
            self._current = None
        elif not self._flight:
            await self._rest()
            return
        if step is None or len(self._flight) > 1:
            await self._tell(await self._collect())

    async def _rest(self) -> None:
        """Nothing can be computed now."""
        if self.scheduler.look_again_at is not None:
            await self._wait(self.scheduler.look_again_at)
        elif self._recovery.is_trying:
            await self._look_at_trial(is_stuck=True)
        elif self.scheduler.num_waiting:
            await self._results.send(self._give_up_on_first())
        else:
            if self.turn_started - self._checked >= CHECK_SECONDS:
                self._checked = self.turn_started
                _check(self.scheduler.check_integrity)
            await self._wait(self._recovery.raises_at)

    async def _wait(self, until: float) -> None:
        """For a command, but not for ever."""
        command: Command | None = None
        with trio.move_on_at(until):
            command = await self._commands.receive()
        if command is not None:  # outside: half of a command must not be cancelled
            await self._apply(command)

    async def _tell(self, result: StepResult) -> None:
        """Hand a result on. The next step is not to wait for whoever takes it, unless that one lags far behind."""
        try:
            self._results.send_nowait(result)
        except trio.WouldBlock:
            await self._results.send(result)

    def _plan(self) -> UnderWay | None:
        """The next step; `None` where there is nothing to compute."""
        planned = trio.current_time()
        batch = self.scheduler.schedule(planned)
        return None if batch.is_empty else self._flight.begin(batch, planned, trio.current_time())

    async def _collect(self) -> StepResult:
        """Wait for the oldest step under way and apply what came of it."""
        self._current = self._flight.steps[0]
        return self._finish(await self._call(partial(self._runner.collect, self._current.ticket)))

    def _finish(self, output: StepOutput) -> StepResult:
        """Apply what came of the oldest step. Nothing is awaited here: its effects are applied as one."""
        result = self._flight.finish(output, trio.current_time())
        if output.step % self._check_steps == 0:
            _check(self.scheduler.check_sums)
        self._flight.steps.popleft()
        self._current = None
        return result

    async def _call(self, function: Callable[[], T]) -> T:
        """Have the stepper call something."""
        self.step_started = trio.current_time()
        try:
            return await self._stepper.run(partial(without_panic, function))
        finally:
            self.step_started = None

    async def _cope(self, error: Exception) -> None:
        """Go on after a fault, or end.

        Raises:
            EngineError: there is nothing more to be done.
        """
        if has_lost_device(error):
            cause = str(error).strip().partition("\n")[0]
            await self._end(f"the device has failed, and nothing can be computed on it any more: {cause}", error)
        try:
            await self._recover(error)
        except Exception as failure:
            await self._end(
                f"the engine's state could not be made anew after a fault: {type(failure).__name__}", failure
            )
        if self._recovery.is_hopeless:
            await self._end(self._recovery.why_hopeless(error), error)

    async def _recover(self, error: Exception) -> None:
        """Make everything anew after a fault, wherever in a turn that was; what it had done so far is told as usual."""
        now, failed, abandoned = trio.current_time(), self._current, self._flight.abandon()
        self._current = None
        batch, update = (None, StepUpdate.empty()) if failed is None else (failed.batch, failed.update)
        lost = self._recovery.begin_anew(error, batch, update, now)
        self._flight.let_go(update, now)
        self._requests.preempt([i for step in abandoned for i in step.batch.preempted] + lost, now)
        await self._reset()
        for step in abandoned:
            await self._tell(StepResult(step.planned, now, StepUpdate.empty(), step.seated, step.batch.preempted))
        await self._tell(StepResult(now, now, update, (), tuple(lost)))
        if isinstance(self._command, End):  # it was lost with the state it could not be applied to
            await self._apply(self._command)

    async def _reset(self) -> None:
        """Make the runner's memory anew. What failed may have held some until now, so this has a second try."""
        try:
            await self._call(self._runner.reset)
        except Exception as error:
            log.exception("the runner's memory could not be made anew, which is tried once more")
            let_go(error)
            await self._call(self._runner.reset)

    async def _leave(self) -> None:
        """A step is never abandoned, also when it is over: nobody is to free memory that it computes in."""
        for step in [step for step in self._flight.abandon() if step.ticket is not None]:
            try:
                await self._call(partial(self._runner.collect, step.ticket))
            except Exception:
                log.exception("step %d failed while the engine ended", step.batch.step)

    async def _look_at_trial(self, *, is_stuck: bool = False) -> None:
        now = trio.current_time()
        passed = self._recovery.look(now, is_stuck=is_stuck)
        self._requests.preempt(passed, now)
        if passed:
            await self._tell(StepResult(now, now, StepUpdate.empty(), (), tuple(passed)))

    async def _end(self, why: str, error: Exception) -> NoReturn:
        """Tell everybody who is inside, and who still comes in, that it is over."""
        self.broken = why
        log.critical("%s", why)
        farewell = f"The engine cannot go on and ends: {type(error).__name__}."
        with trio.move_on_after(FAREWELL_SECONDS):
            # The scheduler's state may be torn, so it is only asked who there is.
            for sequence in [*self.scheduler.sequences]:
                await self._part(sequence, farewell)
            while True:
                match await self._commands.receive():
                    case Add(sequence):
                        await self._part(sequence, farewell)
                    case SetLimits(done=done):
                        done.set()
        raise EngineError(why) from error

    async def _part(self, sequence: Sequence, why: str) -> None:
        """Tell that one has ended with an error."""
        now = trio.current_time()
        await self._results.send(_ending(sequence.sequence_id, FinishReason.ERROR, now, why))
        self._requests.leave(sequence.sequence_id, now)

    def _give_up_on_first(self) -> StepResult:
        """Something waits, nothing runs and nothing could be seated: never wait for ever, fail exactly one request."""
        now = trio.current_time()
        queues = [work.queue for work in self.scheduler.classes]
        waiting = (sequence for queue in queues for sequence in queue.candidates())
        # Followers come last: they have waited for one that is in no queue.
        followers = (sequence for queue in queues for sequence in queue.candidates(with_followers=True))
        first = next(chain(waiting, followers), None)
        if first is None:
            raise IntegrityError(f"{self.scheduler.num_waiting} wait, and none of them in a queue")
        sequence_id = first.sequence_id
        self.scheduler.abort(sequence_id, FinishReason.ERROR)
        self._requests.leave(sequence_id, now)
        log.error("sequence %d could not be seated in an empty engine", sequence_id)
        return _ending(sequence_id, FinishReason.ERROR, now, "The request could not be scheduled.")

    async def _apply_commands(self) -> None:
        while True:
            try:
                command = self._commands.receive_nowait()
            except trio.WouldBlock:
                return
            await self._apply(command)

    async def _apply(self, command: Command) -> None:
        self._command = command
        match command:
            case Add(sequence):
                await self._add(sequence)
            case SetLimits(changes, done, flush):
                try:
                    self._set_limits(changes, flush=flush)
                finally:
                    done.set()  # whoever waits is not to wait for ever
            case End(sequence_id, reason):
                now = trio.current_time()
                known = self.scheduler.abort(sequence_id, reason) is not None
                self._requests.leave(sequence_id, now)
                if known and reason is FinishReason.ABORT:
                    await self._results.send(_ending(sequence_id, reason, now))
            case Drain():
                self.scheduler.is_ending = True
        self._command = None

    def _set_limits(self, changes: Mapping[str, Any], *, flush: bool) -> None:
        limits = self.scheduler.limits
        limits = replace(limits, generation=limits.generation + 1, **changes)
        self.scheduler.set_limits(limits)
        self.scheduler.kv_cache.enable_prefix_caching = limits.enable_prefix_caching
        self._stats.promise(limits.slo, limits.slo_background)
        if flush:
            self.scheduler.kv_cache.flush(self.scheduler.running)

    async def _add(self, sequence: Sequence) -> None:
        try:
            self._requests.open(sequence)
            self.scheduler.add(sequence)
        except Exception:
            log.exception("request %s could not be let in", sequence.request_id)
            self.scheduler.abort(sequence.sequence_id, FinishReason.ERROR)
            # Also where the scheduler never had it: others may wait for it to read their prompt.
            sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, FinishReason.ERROR
            await self._part(sequence, "The request could not be scheduled.")


def _check(check: Callable[[], None]) -> None:
    """Raise `IntegrityError` where a check of the scheduler finds something wrong."""
    try:
        check()
    except RuntimeError as error:
        raise IntegrityError(str(error)) from error


def _ending(sequence_id: int, reason: FinishReason, now: float, why: str | None = None) -> StepResult:
    return StepResult(now, now, StepUpdate([], [Ending(sequence_id, reason, why)], {}))
