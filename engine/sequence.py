"""One sequence of tokens: what it is, how far it has come, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from engine.constraint import Constraint
    from engine.drafting import PromptLookup


class SequenceStatus(Enum):
    """Where a sequence is. It never leaves `FINISHED`."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a sequence ended. The values are label values of the metrics."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# The most that `num_logprobs` may be: OpenAI's limit, and what a step on a GPU has room for.
MAX_LOGPROBS = 20

# Classes of work: somebody waits for the one; the other takes what is left.
CLASSES = ("interactive", "background")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p; 1 keeps all.
        min_p: drop tokens below `min_p` times the likeliest one's probability; 0 drops none.
        seed: key of the noise. The token drawn depends on (seed, choice_index, position) alone.
        choice_index: which of several answers to one prompt this is.
        max_tokens: longest answer, in tokens; `None` is whatever fits.
        min_tokens: neither a stop token nor a stop string ends the answer before this many tokens.
        stop_token_ids: tokens that end the answer (the model's own end tokens unless `ignore_eos`).
        end_token_ids: those of them that are the model's own. Under a constraint nothing can follow one.
        frequency_penalty: taken from a token's logit for each time it stands in the answer.
        presence_penalty: taken once from the logit of each token that stands in the answer.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that stand in the prompt
            or the answer; 1 changes nothing.
        logit_bias: (token id, what is added to its logit).
        num_logprobs: with each token tell its log-probability and those of the n likeliest, `MAX_LOGPROBS` at most;
            `None` tells none.
        constraint: what the answer may consist of; `None` is anything.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    end_token_ids: frozenset[int] = frozenset()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    constraint: Constraint | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens there are already, or on a bias."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )

    @property
    def is_plain(self) -> bool:
        """Whether a draw takes nothing but the model's logits and gives nothing but a token."""
        return self.num_logprobs is None and self.constraint is None and not self.has_penalties


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what has been generated from it.

    There is no prefill or decode state: `num_computed_tokens` catches up with `num_tokens`, that is all.

    Attributes:
        sequence_id: unique for the life of the engine; what batches and results refer to.
        request_id: the name the outside world knows it by.
        token_ids: prompt followed by output.
        num_computed_tokens: how many of its tokens have their keys and values in the cache, or will have them when the
            steps under way are computed.
        num_pending_tokens: how many more tokens it has than `token_ids`: drawn by steps under way, and not known yet.
        num_tokens_thrown_away: computed tokens that the last preemption discarded, to be computed again.
        num_prompt_tokens_read: how much of the prompt was ever computed; a preemption does not lower it.
        end_length: the number of tokens at which it ends with `LENGTH`; set by the scheduler.
        room: tokens that its blocks hold.
        seat: the row of the batch it holds while running, else -1.
        last_step: the last step it took part in, else -1.
        arrival_time: seconds on the engine's clock.
        num_yields: how often it gave its seat to one with a better right to it.
        num_overtaken: how often one behind it in the queue was seated before it, for want of memory.
        key_name: name of the API key that asked, empty without keys; shown to people.
        key_identity: what its key's account goes by; the name where nothing else is given.
        background: whether it is background work, which waits for the interactive.
        priority: the lower goes first among those of its key.
        num_charged_tokens: tokens that its key's account was charged for.
        cache_root: where its chain of cached blocks starts; only sequences of the same root share blocks.
        cache_parent: uid of the last block that was remembered.
        num_cached_tokens: prompt tokens that were in the cache when it first sat down.
        next_full: the number of computed tokens at which a block becomes full.
        leader: another answer to the same prompt, whose blocks it is to share.
        lookup: where its drafts come from, once it sits and has been looked at for any.
    """

    sequence_id: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_prompt_tokens_read: int = 0
    end_length: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    seat: int = -1
    last_step: int = -1
    num_preemptions: int = 0
    num_yields: int = 0
    num_overtaken: int = 0
    num_tokens_thrown_away: int = 0
    first_seated_time: float | None = None
    first_token_time: float | None = None
    block_ids: list[int] = field(default_factory=list)
    room: int = 0
    cache_root: Hashable = ""
    cache_parent: Hashable = ""
    num_cached_tokens: int = 0
    num_remembered_blocks: int = 0
    next_full: int = 0
    key_name: str = ""
    key_identity: str = ""
    background: bool = False
    priority: int = 0
    num_charged_tokens: int = 0
    leader: Sequence | None = None
    lookup: PromptLookup | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.stop_token_ids = self.params.stop_token_ids
        self.key_identity = self.key_identity or self.key_name

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, those among them that are not known yet."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    def drop_pending(self) -> None:
        """Be as if nothing had been planned from tokens that are not known."""
        self.num_computed_tokens -= self.num_pending_tokens
        self.num_pending_tokens = 0

    @property
    def end_reason(self) -> FinishReason | None:
        """Why it ends with its last token, if it does.

        Before `min_tokens` a stop token ends nothing, but for the model's own where a constraint left nothing else.
        """
        params = self.params
        if self.token_ids[-1] in self.stop_token_ids and (
            self.num_output_tokens > params.min_tokens
            or (params.constraint is not None and self.token_ids[-1] in params.end_token_ids)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.end_length else None

    @property
    def awaits_leader(self) -> bool:
        """Whether the prompt is being computed, or is to be, for somebody else."""
        leader = self.leader
        return leader is not None and leader.first_token_time is None and not leader.is_finished

    @property
    def class_name(self) -> str:
        """One of `CLASSES`."""
        return CLASSES[self.background]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is SequenceStatus.FINISHED
