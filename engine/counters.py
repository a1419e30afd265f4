"""What the scheduler counts about its own work. Counters only grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.batch import ScheduledBatch
    from engine.sequence import Sequence


@dataclass(slots=True)
class Counters:
    """Tokens, rows and slots since the start.

    Attributes:
        num_preemptions: times that a sequence lost its seat.
        num_yields: of these to one with a better right to it; all others were for want of blocks.
        num_recomputed_tokens: tokens computed again after that.
        num_prompt_tokens: prompt tokens read for the first time, from the cache or computed.
        num_queried_tokens: prompt tokens that were looked up in the prefix cache.
        num_hit_tokens: those found there.
        num_dropped_results: rows whose sequence had ended before the step did.
        num_rows: rows computed, padding included.
        num_useful_rows: those that brought a sequence forward.
        num_padding_rows, num_padding_tokens: what fixed batches computed for nothing.
        num_drafts: rows that had drafts.
        num_draft_tokens: those, all together.
        num_accepted_tokens: tokens that answers had from them without a step of their own.
        num_set_aside_slots: token slots of the blocks, or of the reservation, of sequences that have ended.
        num_unwritten_slots: those of them that were never written; their share is the waste of KV memory.
    """

    num_preemptions: int = 0
    num_yields: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_dropped_results: int = 0
    num_rows: int = 0
    num_useful_rows: int = 0
    num_padding_rows: int = 0
    num_padding_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_set_aside_slots: int = 0
    num_unwritten_slots: int = 0

    def count_step(self, batch: ScheduledBatch, num_dropped: int) -> None:
        """A step was applied; `num_dropped` of its rows meant nothing any more."""
        num_padding = len(batch.padding)
        self.num_dropped_results += num_dropped
        self.num_rows += len(batch.seats) + num_padding
        self.num_useful_rows += len(batch.seats) - num_dropped
        if num_padding:
            self.num_padding_rows += num_padding
            self.num_padding_tokens += batch.num_padding_tokens
        if batch.drafts:
            self.num_drafts += len(batch.drafts)
            self.num_draft_tokens += batch.num_draft_tokens

    def count_seated(self, sequence: Sequence, now: float) -> None:
        """One sat down: count what the cache saved a newcomer of its prompt, or who returns of what was lost."""
        hits = sequence.num_computed_tokens
        if sequence.first_seated_time is None:
            sequence.first_seated_time = now
            sequence.num_cached_tokens = hits
            sequence.num_prompt_tokens_read = hits
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += hits
            self.num_prompt_tokens += hits
        else:
            self.num_recomputed_tokens += max(0, sequence.num_tokens_thrown_away - hits)

    def count_prompt(self, sequence: Sequence, num_computed: int) -> None:
        """Count what was read of a prompt for the first time, now that so many tokens of a sequence are computed."""
        read = min(num_computed, sequence.num_prompt_tokens)
        if read > sequence.num_prompt_tokens_read:
            self.num_prompt_tokens += read - sequence.num_prompt_tokens_read
            sequence.num_prompt_tokens_read = read

    def count_slots(self, num_slots: int, num_written: int) -> None:
        """A sequence ended for which so many token slots had been set aside."""
        self.num_set_aside_slots += num_slots
        self.num_unwritten_slots += num_slots - num_written
