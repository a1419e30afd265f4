"""What the scheduler decided for one step, and what the step gave back: values, never live references.

The columns of a `ScheduledBatch` run in parallel: row `i` is `seats[i]`, `sequence_ids[i]`, `starts[i]`,
`counts[i]`. A runner keeps one persistent row a seat and needs only the differences: `seated` for rows whose seat
changed hands, `new_blocks` for rows that crossed a block border.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.sequence import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Seated:
    """A sequence takes a seat: all that a runner must know of it.

    Attributes:
        token_ids: every token known now (prompt, and output after a preemption).
        num_prompt_tokens: how many of them are prompt, for `min_tokens`.
        num_cached_tokens: how many of them need not be computed: their blocks come from the prefix cache.
    """

    seat: int
    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Padding:
    """Tokens `start` to `start + count` of a seat, to be computed and thrown away: what a padded batch wastes.

    Attributes:
        samples: whether the next token is computed too, as for every row of an answer.
    """

    seat: int
    start: int
    count: int
    request_id: str = ""
    samples: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work.

    Attributes:
        step: number of the step, from 1.
        seats: seat of each row; a seat appears once.
        sequence_ids: sequence of each row.
        starts: position of the first token each row computes (`num_computed_tokens`).
        counts: tokens each row computes, at least 1 (`num_scheduled_tokens`).
        samples: whether the row reaches its last known token, so that a new one is drawn.
        decodes: whether the row continues an answer by one token (else it reads a prompt, reads it again, or reads
            tokens that followed without a draw).
        seated: rows that changed hands, to be applied first.
        new_blocks: `(seat, block_ids)` appended to the seat's block table, after `seated`.
        preempted: sequence ids that lost their seat when this step was planned.
        padding: computed beside the rows for nothing; only fixed batches have any.
        drafts: row index to tokens that are computed behind the row's last one as if they were known, a draw behind
            each of them. Such a row is plain, samples, and has blocks for them; `counts` is without them.
        token_budget: tokens that the step could have: the limit, or fewer where the gaps promised leave less time.
        generation: of the limits it was planned under.
    """

    step: int
    seats: tuple[int, ...] = ()
    sequence_ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    decodes: tuple[bool, ...] = ()
    seated: tuple[Seated, ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    preempted: tuple[int, ...] = ()
    padding: tuple[Padding, ...] = ()
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    token_budget: int = 0
    generation: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all rows, drafts among them."""
        return sum(self.counts) + self.num_draft_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Drafts computed in this step."""
        return sum(map(len, self.drafts.values())) if self.drafts else 0

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed for nothing, beside those."""
        return sum([padding.count for padding in self.padding])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.seats and not self.padding

    def __len__(self) -> int:
        return len(self.seats)


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, before temperature, penalties, bias and constraints.

    Attributes:
        token_id: the token that was drawn.
        logprob: its log-probability.
        top: (token id, log-probability) of the likeliest, as many as were asked for; of equal ones the lower id first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave back.

    Attributes:
        token_ids: a token for each row of the batch; -1 where the row did not sample.
        failures: row index to one line of cause, for rows that cannot go on (NaN logits).
        seconds: wall time of the model execution.
        logprobs: row index to what is told of its token, for rows that asked.
        forced: row index to tokens that follow the drawn one without a choice: the next step reads them as it reads
            a prompt. Rows that asked for log-probabilities have none.
        accepted: row index to tokens drawn behind its first, one for each draft that was right; for rows where one was.
    """

    step: int
    token_ids: tuple[int, ...]
    failures: Mapping[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    accepted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Ending(NamedTuple):
    """A sequence ended; `error` is one line of cause where it failed."""

    sequence_id: int
    reason: FinishReason
    error: str | None = None


class StepUpdate(NamedTuple):
    """What a step meant.

    Attributes:
        tokens: `(sequence_id, token_id)` in order; a sequence with tokens that were forced or drafted stands there
            several times.
        endings: those that ended.
        logprobs: sequence id to what is told of its tokens in this step, for those that asked.
    """

    tokens: list[tuple[int, int]]
    endings: list[Ending]
    logprobs: dict[int, list[TokenLogprobs]]

    @classmethod
    def empty(cls) -> StepUpdate:
        """What means nothing yet."""
        return cls([], [], {})
