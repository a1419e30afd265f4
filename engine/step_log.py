"""The last steps, as the table shows them: who sat on which seat."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.batch import ScheduledBatch, StepOutput
    from engine.config import Limits
    from engine.scheduler import Scheduler

SHOWN_STEPS: Final = 240  # in the statistics
MAX_STEPS: Final = 2400
MAX_ROWS: Final = 131_072  # of all the steps that are kept, about 0.1 KB each; the shown ones are kept in any case
MAX_READY_ROWS: Final = 65_536  # of steps whose JSON is kept, too: they are asked for again every second


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        request_ids: names, in the order of the batch's rows.
        preempted: names of those who lost their seat.
        idle: seat and name of those who sit there and got no tokens.
        time: when it was planned, on the engine's clock, or since a simulation's start.
        recomputed: seat to tokens that it computes once more, because a preemption had thrown them away.
        accepted: as in `StepOutput`, once it was computed.
    """

    batch: ScheduledBatch
    request_ids: tuple[str, ...]
    preempted: tuple[str, ...]
    idle: tuple[tuple[int, str], ...]
    time: float
    recomputed: Mapping[int, int] = field(default_factory=dict)
    accepted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler, batch: ScheduledBatch, time: float) -> StepRecord:
        """Of the step that was planned last and has not been computed yet."""
        idle: tuple[tuple[int, str], ...] = ()
        if len(batch) < scheduler.num_running:
            taken = set(batch.seats)
            idle = tuple([(s.seat, s.request_id) for s in scheduler.running if s.seat not in taken])
        recomputed = {} if all(batch.decodes) else _recomputed(scheduler, batch)
        names = scheduler.request_ids
        return cls(batch, names(batch.sequence_ids), names(batch.preempted), idle, time, recomputed)

    def as_json(self) -> dict[str, Any]:
        """`rows`: `[seat, request_id, "prefill" | "decode" | "idle" | "padding", tokens]`, a seat once or never.

        `drafts`: `[seat, drafts, how many of them were right]`; they are among the row's tokens.
        `recomputed`: `[seat, tokens]`, as many of the row's tokens had been computed before.
        All of these are tuples here, which the garbage collector does not look through: tens of thousands are kept.
        """
        batch = self.batch
        drafts = {row: len(draft) for row, draft in batch.drafts.items()}
        padded = {pad.seat: pad for pad in batch.padding if pad.seat not in batch.seats}
        return {
            "step": batch.step,
            "time": round(self.time, 4),
            "budget": batch.token_budget,
            "generation": batch.generation,
            "rows": [
                (seat, request_id, "decode" if decodes else "prefill", count + drafts.get(row, 0))
                for row, (seat, request_id, decodes, count) in enumerate(
                    zip(batch.seats, self.request_ids, batch.decodes, batch.counts, strict=True)
                )
            ]
            + [(seat, request_id, "idle", 0) for seat, request_id in self.idle if seat not in padded]
            + [(seat, pad.request_id, "padding", pad.count) for seat, pad in padded.items()],
            "drafts": [(batch.seats[row], n, len(self.accepted.get(row, ()))) for row, n in drafts.items()],
            "recomputed": [*self.recomputed.items()],
            "preempted": list(self.preempted),
        }


def _recomputed(scheduler: Scheduler, batch: ScheduledBatch) -> dict[int, int]:
    behind = {
        sequence.seat: sequence.num_tokens_thrown_away - sequence.num_computed_tokens
        for sequence in scheduler.running
        if sequence.num_tokens_thrown_away > sequence.num_computed_tokens
    }
    if not behind:
        return behind
    counts = dict(zip(batch.seats, batch.counts, strict=True))
    return {seat: min(counts[seat], left) for seat, left in behind.items() if seat in counts}


class StepLog:
    """A ring of the last steps: as many as `max_steps` or `max_rows` allow, but always those of a table."""

    def __init__(self, max_steps: int = MAX_STEPS, max_rows: int = MAX_ROWS) -> None:
        self._max_steps = max_steps
        self._max_rows = max_rows
        self._num_rows = 0
        self._records: deque[StepRecord] = deque()
        self._ready: dict[int, dict[str, Any]] = {}
        self._num_ready_rows = 0

    def append(self, record: StepRecord) -> None:
        """Add a step; the oldest ones fall out."""
        batch = record.batch
        if batch.seated or batch.new_blocks:
            # Not of any use here, and whole prompts among it.
            record = replace(record, batch=replace(batch, seated=(), new_blocks=()))
        self._records.append(record)
        self._num_rows += len(batch)
        while len(self._records) > self._max_steps or (
            self._num_rows > self._max_rows and len(self._records) > SHOWN_STEPS
        ):
            self._num_rows -= len(self._records.popleft().batch)

    def note(self, output: StepOutput) -> None:
        """The step that was added last has been computed."""
        if output.accepted:
            self._records[-1] = replace(self._records[-1], accepted=output.accepted)
            self._unready(output.step)

    def table(self, limits: Limits, num_steps: int = SHOWN_STEPS, last_step: int | None = None) -> dict[str, Any]:
        """The `table` of the statistics: `seats` counts those in use although the limit was lowered meanwhile.

        `kept` are the first and the last step that can be asked for.

        Args:
            last_step: the newest one to be told; without, or where it is not kept any more, what comes next to it.
        """
        records = self._records
        oldest = records[0].batch.step if records else 0
        newest = records[-1].batch.step if records else 0
        end = len(records)
        if last_step is not None:
            end = min(len(records), max(last_step - oldest + 1, num_steps))
        shown = list(islice(records, max(0, end - num_steps), max(0, end)))
        taken = max((max(record.batch.seats, default=-1) for record in shown), default=-1)
        return {
            "seats": max(limits.max_num_seqs, taken + 1),
            "budget": limits.max_num_batched_tokens,
            "kept": [oldest, newest],
            "steps": [self._as_json(record) for record in shown],
        }

    def _as_json(self, record: StepRecord) -> dict[str, Any]:
        """The JSON of a step, which is made once of those that are told again and again."""
        step, ready = record.batch.step, self._ready
        if step in ready:
            return ready[step]
        made = record.as_json()
        if self._records[-1].batch.step - step < SHOWN_STEPS:
            ready[step] = made
            self._num_ready_rows += len(made["rows"])
            while self._num_ready_rows > MAX_READY_ROWS or len(ready) > SHOWN_STEPS:
                self._unready(min(ready))
        return made

    def _unready(self, step: int) -> None:
        if step in self._ready:
            self._num_ready_rows -= len(self._ready.pop(step)["rows"])
