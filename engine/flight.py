"""The steps that are planned and not applied yet, and what is written down of each: one, or two where they overlap."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.batch import StepUpdate
from engine.messages import StepResult
from engine.step_log import StepLog, StepRecord

if TYPE_CHECKING:
    from engine.batch import ScheduledBatch, StepOutput
    from engine.request_log import RequestLog
    from engine.scheduler import Scheduler
    from engine.sequence import Sequence
    from engine.stats import Stats
    from engine.stepper import Ticket

log = logging.getLogger("relevo.engine")


@dataclass(slots=True, eq=False)
class UnderWay:
    """One step.

    Attributes:
        planned, started: when its planning began and ended, on the engine's clock.
        idle: those that sit and have no tokens of it although there is something to compute.
        without_token: those that decode and get no token from it: they wait for the step before it, or lost their
            seat after it was launched.
        update: what was applied of it so far.
        ticket: what the runner knows it by once it was launched; `None` where it was not.
    """

    batch: ScheduledBatch
    planned: float
    started: float
    idle: list[Sequence]
    without_token: list[int]
    update: StepUpdate = field(default_factory=StepUpdate.empty)
    ticket: Ticket = None

    @property
    def seated(self) -> tuple[tuple[int, int], ...]:
        """Who sat down in it, and how many tokens of each came from the prefix cache."""
        return tuple([(seated.sequence_id, seated.num_cached_tokens) for seated in self.batch.seated])


class Flight:
    """Keeps steps in the order in which they were planned, and the books about them.

    Attributes:
        steps: the oldest first.
        log: the last steps, for the table.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, requests: RequestLog) -> None:
        self.steps: deque[UnderWay] = deque()
        self.log = StepLog()
        self._scheduler = scheduler
        self._stats = stats
        self._requests = requests
        self._last_finished = 0.0

    def __len__(self) -> int:
        return len(self.steps)

    def begin(self, batch: ScheduledBatch, planned: float, started: float) -> UnderWay:
        """A step was planned."""
        self.log.append(StepRecord.of(self._scheduler, batch, planned))
        for older in self.steps:
            older.without_token += [i for i in batch.preempted if i in older.batch.sequence_ids]
        step = UnderWay(batch, planned, started, [], [])
        if len(batch) < self._scheduler.num_running:
            for sequence in self._scheduler.running:
                if sequence.last_step == batch.step:
                    continue
                if sequence.num_tokens > sequence.num_computed_tokens:
                    step.idle.append(sequence)
                else:
                    step.without_token.append(sequence.sequence_id)
        self.steps.append(step)
        return step

    def finish(self, output: StepOutput, now: float) -> StepResult:
        """The oldest step was computed: apply what came of it. Whoever has checked that takes it off `steps`."""
        step = self.steps[0]
        batch, update = step.batch, step.update
        # A step that was launched behind another one began when that one ended.
        planned, started = max(step.planned, self._last_finished), max(step.started, self._last_finished)
        self._requests.step(batch, planned, now, idle=step.idle, accepted=output.accepted)
        if step.without_token:
            self._requests.skip(step.without_token)
        self._scheduler.update(batch, output, now, update)
        self.log.note(output)
        self.let_go(update, now)
        self._stats.record_step(now, now - started, batch.num_tokens)
        num_read = self._scheduler.counters.num_prompt_tokens - self._stats.num_prompt_tokens
        is_full = len(batch) >= self._scheduler.limits.max_num_seqs or bool(self._scheduler.num_waiting)
        self._stats.record_prompt(now, num_read, now - started, is_full=is_full)
        if not all(batch.samples):
            chunks = sum([count for count, decodes in zip(batch.counts, batch.decodes, strict=True) if not decodes])
            self._stats.record_reading(now, chunks, now - started)
        self._last_finished = now
        return StepResult(step.planned, now, update, step.seated, batch.preempted)

    def let_go(self, update: StepUpdate, now: float) -> None:
        """The scheduler has no more of those that ended."""
        for sequence_id, _, error in update.endings:
            self._requests.leave(sequence_id, now)
            if error is not None and (record := self._requests.find(sequence_id)) is not None:
                # What stands behind a colon may quote the answer.
                log.error("request %s ends with an error: %s", record.request_id, error.partition(":")[0])

    def abandon(self) -> list[UnderWay]:
        """A step failed: none is under way any more. Gives those that were."""
        abandoned = [*self.steps]
        self.steps.clear()
        return abandoned
