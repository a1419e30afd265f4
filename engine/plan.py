"""One step's plan while it is being made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import ScheduledBatch, Seated

if TYPE_CHECKING:
    from engine.config import Limits
    from engine.sequence import Sequence


class Plan:
    """The columns of a `ScheduledBatch` while they are being filled, and the tokens that are left to give."""

    def __init__(self, step: int, limits: Limits) -> None:
        self.step = step
        self.limits = limits
        self.tokens_left = limits.max_num_batched_tokens
        self.seats: list[int] = []
        self.sequence_ids: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.decodes: list[bool] = []
        self.seated: list[Seated] = []
        self.new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self.preempted: list[int] = []

    def add(self, sequence: Sequence, behind: int, new_blocks: tuple[int, ...]) -> None:
        """Give `sequence` tokens; `behind` is how many of its known tokens are not computed yet."""
        count = behind if behind < self.tokens_left else self.tokens_left
        self.tokens_left -= count
        self.seats.append(sequence.seat)
        self.sequence_ids.append(sequence.sequence_id)
        self.starts.append(sequence.num_computed_tokens)
        self.counts.append(count)
        self.samples.append(count == behind)
        self.decodes.append(behind == 1 and sequence.num_computed_tokens >= sequence.num_prompt_tokens)
        if new_blocks:
            self.new_blocks.append((sequence.seat, new_blocks))
        sequence.last_step = self.step

    def freeze(self) -> ScheduledBatch:
        """The batch: a value that nothing changes any more."""
        return ScheduledBatch(
            step=self.step,
            seats=tuple(self.seats),
            sequence_ids=tuple(self.sequence_ids),
            starts=tuple(self.starts),
            counts=tuple(self.counts),
            samples=tuple(self.samples),
            decodes=tuple(self.decodes),
            seated=tuple(self.seated),
            new_blocks=tuple(self.new_blocks),
            preempted=tuple(self.preempted),
            token_budget=self.limits.max_num_batched_tokens,
            generation=self.limits.generation,
        )
