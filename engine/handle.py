"""What a caller asks for, and what it holds while it is being answered."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from engine.outbox import Delta, Outbox, Usage
from engine.sequence import FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from engine.errors import RelevoError
    from engine.grammar.spec import GrammarSpec
    from engine.sequence import Sequence

# Whose doing it was; `error` is the server's own: another part of the same answer failed or was refused.
ABORT_CAUSES = ("client", "timeout", "queue_timeout", "slow_client", "shutdown", "admin", "error")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text. Control tokens in it are parsed; a leading BOS as the tokenizer's metadata says."""

    text: str
    param: str = "prompt"


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]
    param: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template. Their content is text and never becomes a control token.

    Attributes:
        options: what else the template is given: `tools`, switches of a thinking model.
    """

    messages: tuple[dict[str, Any], ...]
    param: str = "messages"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        request_id: the name shown on pages and in logs; need not be unique.
        stop: strings that end the answer; nothing of them is ever shown.
        ignore_eos: the model's own end tokens do not end the answer.
        grammar: what the answer must look like; `None` is anything.
        skip_special_tokens: control tokens are not shown; otherwise as the vocabulary spells them.
        shown_token_ids: control tokens that are shown in any case.
        cache_root: only requests of the same root share cached blocks.
        key_name: name of the API key that asked, empty without keys; shown to people.
        key_identity: what tells that key from every other, also from an earlier one of its name; between keys the
            engine is fair. Empty where the name is enough.
        background: background work waits for the interactive.
        priority: the lower goes first among the waiting ones of the same key.
        timeout_seconds: its caller asked for an end so long after it was handed in; goes before what its class of work
            is promised. This and the next two are what the door reckons with, no more.
        ends_within_seconds: by then it is ended, whatever it asked for.
        seated_within_seconds: by then it is ended where it has no seat.
    """

    request_id: str
    prompt: TextPrompt | TokensPrompt | ChatPrompt
    params: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_root: Hashable = ""
    key_name: str = ""
    key_identity: str = ""
    background: bool = False
    priority: int = 0
    skip_special_tokens: bool = True
    shown_token_ids: frozenset[int] = frozenset()
    grammar: GrammarSpec | None = None
    timeout_seconds: float | None = None
    ends_within_seconds: float = math.inf
    seated_within_seconds: float = math.inf

    @property
    def key(self) -> str:
        """What tells whose request it is; all that come without a key are one caller's."""
        return self.key_identity or self.key_name


class Handle:
    """One request as its caller sees it; made by `Engine.submit`.

    The permit to be inside the engine travels with it: the place is free again when the engine has let go of the
    sequence, not when the caller loses interest.

    Args:
        after: another answer to the same prompt: this one starts when the prompt was computed for that one.

    Attributes:
        sequence: what became of it inside, once it was taken in.
    """

    def __init__(
        self, request: GenerationRequest, sequence_id: int, arrival_time: float, after: Handle | None = None
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sequence_id = sequence_id
        self.arrival_time = arrival_time
        self.num_prompt_tokens = 0
        self.after = after
        self.sequence: Sequence | None = None
        self.outbox = Outbox()
        self.abort_cause: str | None = None
        self._refusal: RelevoError | None = None
        self._decided = trio.Event()
        self._on_abort: Callable[[], None] | None = None

    async def accepted(self) -> int:
        """Wait until the request has been looked at.

        Returns:
            The number of prompt tokens.

        Raises:
            RequestError: it can never be served as it stands.
            UnavailableError: it cannot be served now.
        """
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal
        return self.num_prompt_tokens

    @property
    def has_sat(self) -> bool:
        """Whether it has had a seat."""
        return self.sequence is not None and self.sequence.first_seated_time is not None

    @property
    def is_decided(self) -> bool:
        """Whether it was taken in or refused, or its caller has left."""
        return self._decided.is_set()

    async def take(self) -> Delta:
        """The next piece of the answer; a cancelled wait loses nothing. Nothing comes after a finish reason.

        A refused request ends with `ERROR`; `accepted()` tells why.
        """
        return await self.outbox.take()

    def abort(self, cause: str) -> None:
        """End the request now, in whatever state it is. Synchronous, and harmless the second time.

        Args:
            cause: one of `ABORT_CAUSES`; a label value of the metrics.
        """
        if cause not in ABORT_CAUSES:
            raise ValueError(f"unknown cause {cause!r}: one of {ABORT_CAUSES}")
        if self.abort_cause is not None or self.outbox.last is not None or self._refusal is not None:
            return
        self.abort_cause = cause
        self.outbox.close("", FinishReason.ABORT, Usage(self.num_prompt_tokens, 0), cause)
        self._decided.set()
        if self._on_abort is not None:
            self._on_abort()

    def watch(self, on_abort: Callable[[], None]) -> None:
        """From now on, until it is taken in, an abort is told to `on_abort`, at once where there was one already."""
        self._on_abort = on_abort
        if self.abort_cause is not None:
            on_abort()

    def accept(self, sequence: Sequence, on_abort: Callable[[], None]) -> None:
        """The engine took it in; from now on an abort is told to `on_abort`."""
        self.sequence = sequence
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self._on_abort = on_abort
        self._decided.set()

    def refuse(self, error: RelevoError) -> None:
        """The engine will not serve it; `accepted()` raises `error`."""
        self._refusal = error
        self.outbox.close("", FinishReason.ERROR, Usage(0, 0), str(error))
        self._decided.set()
