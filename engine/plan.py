"""One step's plan while it is being made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import Padding, ScheduledBatch, Seated

if TYPE_CHECKING:
    from engine.config import Limits
    from engine.sequence import Sequence


class Plan:
    """The rows of a `ScheduledBatch` while they are being found, and the tokens that are left to give."""

    def __init__(self, step: int, limits: Limits) -> None:
        self.step = step
        self.limits = limits
        self.token_budget = self.tokens_left = limits.max_num_batched_tokens
        # One tuple a row, turned into columns at the end: cheaper than growing six lists.
        self.rows: list[tuple[int, int, int, int, bool, bool]] = []
        self.seated: list[Seated] = []
        self.new_blocks: list[tuple[int, tuple[int, ...]]] = []
        self.preempted: list[int] = []
        self.is_short_of_memory = False  # somebody was preempted for want of it
        self.padding: list[Padding] = []
        self.drafts: dict[int, tuple[int, ...]] = {}

    def keep_within(self, num_tokens: float) -> None:
        """Give out no more than so many, for the sake of the gaps between tokens. Before any is given."""
        if num_tokens < self.token_budget:
            self.token_budget = self.tokens_left = int(num_tokens)

    @property
    def is_paced(self) -> bool:
        """Whether there are fewer tokens than the limits have."""
        return self.token_budget < self.limits.max_num_batched_tokens

    def seat(self, sequence: Sequence, new_blocks: tuple[int, ...]) -> None:
        """Let a newcomer sit down and give it what is left, which may be nothing yet."""
        self.seated.append(
            Seated(
                seat=sequence.seat,
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=sequence.params,
                num_cached_tokens=sequence.num_computed_tokens,
            )
        )
        if self.tokens_left:
            self.add(sequence, sequence.num_tokens - sequence.num_computed_tokens, new_blocks)
        else:
            self.new_blocks.append((sequence.seat, new_blocks))

    def pad(self, padding: Padding) -> None:
        """Spend tokens for nothing."""
        self.padding.append(padding)
        self.tokens_left -= padding.count

    def add(self, sequence: Sequence, behind: int, new_blocks: tuple[int, ...]) -> None:
        """Give `sequence` tokens; `behind` is how many of its known tokens are not computed yet."""
        count = behind if behind < self.tokens_left else self.tokens_left
        if 0 < self.limits.long_prefill_token_threshold < count:
            count = self.limits.long_prefill_token_threshold
        self.tokens_left -= count
        start = sequence.num_computed_tokens
        decodes = behind == 1 and start >= sequence.num_prompt_tokens
        self.rows.append((sequence.seat, sequence.sequence_id, start, count, count == behind, decodes))
        if new_blocks:
            self.new_blocks.append((sequence.seat, new_blocks))
        sequence.last_step = self.step

    def freeze(self) -> ScheduledBatch:
        """The batch: a value that nothing changes any more."""
        seats, sequence_ids, starts, counts, samples, decodes = zip(*self.rows, strict=True) if self.rows else ((),) * 6
        return ScheduledBatch(
            step=self.step,
            seats=seats,
            sequence_ids=sequence_ids,
            starts=starts,
            counts=counts,
            samples=samples,
            decodes=decodes,
            seated=tuple(self.seated),
            new_blocks=tuple(self.new_blocks),
            preempted=tuple(self.preempted),
            padding=tuple(self.padding),
            drafts=self.drafts,
            token_budget=self.token_budget,
            generation=self.limits.generation,
        )
