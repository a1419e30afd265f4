"""The last steps, as the table shows them: who sat on which seat."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.batch import ScheduledBatch, StepOutput
    from engine.config import Limits
    from engine.scheduler import Scheduler

MAX_STEPS = 240


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step.

    Attributes:
        request_ids: names, in the order of the batch's rows.
        preempted: names of those who lost their seat.
        idle: seat and name of those who sit there and got no tokens.
        time: when it was planned, on the engine's clock, or since a simulation's start.
        accepted: as in `StepOutput`, once it was computed.
    """

    batch: ScheduledBatch
    request_ids: tuple[str, ...]
    preempted: tuple[str, ...]
    idle: tuple[tuple[int, str], ...]
    time: float
    accepted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler, batch: ScheduledBatch, time: float) -> StepRecord:
        """Of the step that was planned last and has not been computed yet."""
        idle: tuple[tuple[int, str], ...] = ()
        if len(batch) < scheduler.num_running:
            taken = set(batch.seats)
            idle = tuple([(s.seat, s.request_id) for s in scheduler.running if s.seat not in taken])
        names = scheduler.request_ids
        return cls(batch, names(batch.sequence_ids), names(batch.preempted), idle, time)

    def as_json(self) -> dict[str, Any]:
        """`rows`: `[seat, request_id, "prefill" | "decode" | "idle" | "padding", tokens]`, a seat once or never.

        `drafts`: `[seat, drafts, how many of them were right]`; they are among the row's tokens.
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
                [seat, request_id, "decode" if decodes else "prefill", count + drafts.get(row, 0)]
                for row, (seat, request_id, decodes, count) in enumerate(
                    zip(batch.seats, self.request_ids, batch.decodes, batch.counts, strict=True)
                )
            ]
            + [[seat, request_id, "idle", 0] for seat, request_id in self.idle if seat not in padded]
            + [[seat, pad.request_id, "padding", pad.count] for seat, pad in padded.items()],
            "drafts": [[batch.seats[row], n, len(self.accepted.get(row, ()))] for row, n in drafts.items()],
            "preempted": list(self.preempted),
        }


class StepLog:
    """A ring of the last steps."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_steps)

    def append(self, record: StepRecord) -> None:
        """Add a step; the oldest one falls out."""
        self._records.append(record)

    def note(self, output: StepOutput) -> None:
        """The step that was added last has been computed."""
        if output.accepted:
            self._records[-1] = replace(self._records[-1], accepted=output.accepted)

    def table(self, limits: Limits, num_steps: int = MAX_STEPS) -> dict[str, Any]:
        """The `table` of the statistics: `seats` counts those in use although the limit was lowered meanwhile."""
        taken = max((max(record.batch.seats, default=-1) for record in self._records), default=-1)
        return {
            "seats": max(limits.max_num_seqs, taken + 1),
            "budget": limits.max_num_batched_tokens,
            "steps": [r.as_json() for r in islice(self._records, max(0, len(self._records) - num_steps), None)],
        }
