"""The actor that owns the scheduler: commands in, a step, results out, and again."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from engine.batch import Ending, StepUpdate
from engine.errors import EngineError
from engine.messages import Add, End, SetLimits, StepResult
from engine.sequence import FinishReason
from engine.step_log import StepLog, StepRecord

if TYPE_CHECKING:
    from engine.batch import ScheduledBatch
    from engine.messages import Command, Result
    from engine.request_log import RequestLog
    from engine.scheduler import Scheduler
    from engine.stats import Stats
    from engine.stepper import Runner, Stepper

log = logging.getLogger("relevo.engine")

MAX_FAILED_STEPS = 3


class Scheduling:
    """Plans a step, has it executed, applies what came back. Nobody else touches the scheduler's state.

    Args:
        scheduler: the pure rules.
        runner: executes a batch.
        stepper: where the runner's calls are made.
        commands: requests to add, sequences to end, limits to set.
        results: tokens and endings, for the streaming actor.
        stats: counts steps and tokens.
        requests: told what became of each request.
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
    ) -> None:
        self.scheduler = scheduler
        self.log = StepLog()
        self.step_started: float | None = None
        self._runner = runner
        self._stepper = stepper
        self._commands = commands
        self._results = results
        self._stats = stats
        self._requests = requests
        self._failed_steps = 0

    async def run(self) -> None:
        """Schedule → execute → update, for ever; waits for a command when there is nothing to do now.

        Raises:
            EngineError: several steps in a row failed.
        """
        while True:
            await self._apply_commands()
            batch = self.scheduler.schedule(trio.current_time())
            if not batch.is_empty:
                await self._tell(await self._step(batch))
            elif self.scheduler.look_again_at is not None:
                command: Command | None = None
                with trio.move_on_at(self.scheduler.look_again_at):
                    command = await self._commands.receive()
                if command is not None:  # outside: half of a command must not be cancelled
                    await self._apply(command)
            elif self.scheduler.num_waiting:
                await self._results.send(self._give_up_on_first())
            else:
                self.scheduler.check_integrity()
                await self._apply(await self._commands.receive())

    async def _tell(self, result: StepResult) -> None:
        """Hand a result on. The next step is not to wait for whoever takes it, unless that one lags far behind."""
        try:
            self._results.send_nowait(result)
        except trio.WouldBlock:
            await self._results.send(result)

    async def _step(self, batch: ScheduledBatch) -> StepResult:
        planned = trio.current_time()
        record = StepRecord.of(self.scheduler, batch, planned)
        self.log.append(record)
        self.step_started = planned
        error: Exception | None = None
        try:
            output = await self._stepper.run(lambda: self._runner.execute(batch))
        except Exception as caught:
            error = caught
        self.step_started = None
        # From here to the end of this function nothing is awaited: the step's effects are applied as one.
        finished = trio.current_time()
        idle = [s for s in self.scheduler.running if s.last_step != batch.step] if record.idle else []
        accepted = output.accepted if error is None else {}
        self._requests.step(batch, planned, finished, idle=idle, accepted=accepted)
        if error is None:
            self._failed_steps = 0
            update = self.scheduler.update(batch, output, finished)
            self.log.note(output)
        else:
            update = self._fail(batch, error)
        for ending in update.endings:
            self._requests.leave(ending.sequence_id, finished)
        self._stats.record_step(finished, finished - planned, batch.num_tokens)
        num_read = self.scheduler.counters.num_prompt_tokens - self._stats.num_prompt_tokens
        is_full = len(batch) >= self.scheduler.limits.max_num_seqs or bool(self.scheduler.num_waiting)
        self._stats.record_prompt(finished, num_read, finished - planned, is_full=is_full)
        seated = tuple([(seated.sequence_id, seated.num_cached_tokens) for seated in batch.seated])
        return StepResult(planned, finished, update, seated, batch.preempted)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> StepUpdate:
        self._failed_steps += 1
        log.error("step %d failed, its %d requests end with an error", batch.step, len(batch), exc_info=error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineError(f"{self._failed_steps} steps in a row failed, the last one with: {error!r}") from error
        return self.scheduler.fail(batch, f"The model failed in step {batch.step}: {type(error).__name__}.")

    def _give_up_on_first(self) -> StepResult:
        """Something waits, nothing runs and nothing could be seated: never wait for ever, fail exactly one request."""
        now = trio.current_time()
        waiting = (sequence for work in self.scheduler.classes for sequence in work.queue.candidates())
        sequence_id = next(waiting).sequence_id
        self.scheduler.abort(sequence_id, FinishReason.ERROR)
        self._requests.leave(sequence_id, now)
        log.error("sequence %d could not be seated in an empty engine", sequence_id)
        ending = Ending(sequence_id, FinishReason.ERROR, "The request could not be scheduled.")
        return StepResult(now, now, StepUpdate([], [ending]))

    async def _apply_commands(self) -> None:
        while True:
            try:
                command = self._commands.receive_nowait()
            except trio.WouldBlock:
                return
            await self._apply(command)

    async def _apply(self, command: Command) -> None:
        match command:
            case Add(sequence):
                self.scheduler.add(sequence)
                self._requests.open(sequence)
            case SetLimits(changes, done, flush):
                limits = self.scheduler.limits
                limits = replace(limits, generation=limits.generation + 1, **changes)
                self.scheduler.set_limits(limits)
                self.scheduler.kv_cache.enable_prefix_caching = limits.enable_prefix_caching
                if flush:
                    self.scheduler.kv_cache.flush(self.scheduler.running)
                done.set()
            case End(sequence_id, reason):
                now = trio.current_time()
                known = self.scheduler.abort(sequence_id, reason) is not None
                self._requests.leave(sequence_id, now)
                if known and reason is FinishReason.ABORT:
                    await self._results.send(StepResult(now, now, StepUpdate([], [Ending(sequence_id, reason)])))
