"""How a route wraps an answer, streamed or whole. What repeats is serialised once; a delta costs one string."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any, ClassVar

from app.api.logprobs import ChatWriter, CompletionWriter, Writer
from app.api.parts import CallArguments, CallBegun, Text, Thinking, join_parts, join_text
from app.sse import DONE, HEARTBEAT, event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.api.errors import ErrorAnswer
    from app.api.parts import Part
    from engine.batch import TokenLogprobs
    from engine.outbox import Usage


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended.

    Attributes:
        reason: the finish reason to tell.
        stop: the stop string that ended it, where one did.
    """

    reason: str
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A choice that has come to its end.

    Attributes:
        entries: its tokens' log-probabilities; empty where none were asked for.
    """

    index: int
    parts: list[Part]
    entries: list[TokenLogprobs]
    ending: Ending


class Envelope(ABC):
    """Wraps the choices of one answer. All methods give bytes of a stream but `whole`, which gives the other form.

    Attributes:
        heartbeat: what a stream sends when there is nothing to tell.
    """

    heartbeat: bytes = HEARTBEAT

    @abstractmethod
    def opening(self, prompt_tokens: Sequence[int]) -> bytes:
        """What a stream starts with, before any text; told how long the prompt of each choice is, in tokens."""

    @abstractmethod
    def piece(self, index: int, parts: Sequence[Part], entries: Sequence[TokenLogprobs]) -> bytes:
        """What came of a choice; empty when there is nothing to tell."""

    @abstractmethod
    def finish(self, index: int, ending: Ending) -> bytes:
        """A choice has come to its end."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """What a stream ends with when every choice has come to its end."""

    def failure(self, error: ErrorAnswer) -> bytes:
        """What it ends with otherwise: nothing that a client could take for the end of a whole answer."""
        return event(error.body)

    @abstractmethod
    def whole(self, choices: Sequence[Written], usage: Usage) -> dict[str, Any]:
        """The answer of a request that is not streamed."""


class OpenAIEnvelope(Envelope):
    """What OpenAI's two routes have in common.

    Args:
        answer_id: the same in every chunk.
        created: seconds since the epoch.
        token_bytes: how tokens are spelled among log-probabilities.
        with_usage: whether the client asked for usage; then every chunk has the key.
        with_logprobs: whether it asked for log-probabilities.
        service_tier: the tier it was served in, for who asked for one.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    writer: ClassVar[type[Writer]]

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        token_bytes: Callable[[int], bytes],
        *,
        with_usage: bool = False,
        with_logprobs: bool = False,
        service_tier: str | None = None,
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.created = created
        self.service_tier = service_tier
        self._token_bytes = token_bytes
        self._with_usage = with_usage
        self._with_logprobs = with_logprobs
        self._writers: dict[int, Writer] = {}
        head = json.dumps(self._head(self.chunk_object), separators=(",", ":"))[:-1]
        self._before = f'data: {head},"choices":[{{"index":'
        self._after = '}],"usage":null}\n\n' if with_usage else "}]}\n\n"

    def piece(self, index: int, parts: Sequence[Part], entries: Sequence[TokenLogprobs]) -> bytes:
        """A chunk for each part; the log-probabilities go with the first."""
        if not entries:
            return b"".join([self._chunk(index, self.members(part)) for part in parts])
        if index not in self._writers:
            self._writers[index] = self.writer(self._token_bytes)
        logprobs = json.dumps(self._writers[index].write(entries), separators=(",", ":"))
        if not parts:
            return self._chunk(index, self.members(Text("")), logprobs)
        first = self._chunk(index, self.members(parts[0]), logprobs)
        return first + b"".join([self._chunk(index, self.members(part)) for part in parts[1:]])

    def closing(self, usage: Usage) -> bytes:
        """Usage, where it was asked for, and the mark that this was all."""
        if not self._with_usage:
            return DONE
        head = self._head(self.chunk_object)
        return event({**head, "choices": [], "usage": _usage(usage), "relevo": _extension(usage)}) + DONE

    def whole(self, choices: Sequence[Written], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        shown = [
            {
                "index": choice.index,
                **self.whole_members(choice),
                "logprobs": self.writer(self._token_bytes).write(choice.entries) if self._with_logprobs else None,
                "finish_reason": choice.ending.reason,
            }
            for choice in choices
        ]
        head = self._head(self.whole_object)
        return {**head, "choices": shown, "usage": _usage(usage), "relevo": _extension(usage)}

    @abstractmethod
    def members(self, part: Part) -> str:
        """The members of a choice that carry a part, as JSON."""

    @abstractmethod
    def whole_members(self, choice: Written) -> dict[str, Any]:
        """The members of a choice that carry all its parts."""

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return head if self.service_tier is None else {**head, "service_tier": self.service_tier}

    def _chunk(self, index: int, members: str, logprobs: str = "null", reason: str = "null") -> bytes:
        return (f'{self._before}{index},{members},"logprobs":{logprobs},"finish_reason":{reason}{self._after}').encode()


class ChatEnvelope(OpenAIEnvelope):
    """`chat.completion` and its chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    writer = ChatWriter

    def opening(self, prompt_tokens: Sequence[int]) -> bytes:
        """The role, for every choice."""
        role = '"delta":{"role":"assistant","content":""}'
        return b"".join([self._chunk(index, role) for index in range(len(prompt_tokens))])

    def finish(self, index: int, ending: Ending) -> bytes:
        """The only chunk of a choice with a finish reason."""
        return self._chunk(index, '"delta":{}', reason=f'"{ending.reason}"')

    def members(self, part: Part) -> str:
        """The part under `delta`."""
        match part:
            case Text(text):
                return f'"delta":{{"content":{quoted(text)}}}'
            case Thinking(text):
                return f'"delta":{{"reasoning_content":{quoted(text)}}}'
            case CallBegun(index, call_id, name):
                call = _call(call_id, name, "")
            case CallArguments(index, text):
                call = {"function": {"arguments": text}}
        return f'"delta":{json.dumps({"tool_calls": [{"index": index, **call}]}, separators=(",", ":"))}'

    def whole_members(self, choice: Written) -> dict[str, Any]:
        """All of them under `message`."""
        joined = join_parts(choice.parts)
        message: dict[str, Any] = {"role": "assistant", "content": joined.text, "refusal": None}
        if joined.thinking:
            message["reasoning_content"] = joined.thinking
        if joined.calls:
            message["content"] = joined.text or None
            message["tool_calls"] = [_call(call.call_id, call.name, call.arguments) for call in joined.calls]
        return {"message": message}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class CompletionEnvelope(OpenAIEnvelope):
    """`text_completion` and its chunks, which carry the same name.

    Attributes:
        echoes: what stands before each choice's text: its prompt, where that was asked for.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"
    writer = CompletionWriter

    def __init__(self, *args: Any, echoes: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.echoes = echoes

    def opening(self, prompt_tokens: Sequence[int]) -> bytes:
        """The prompts, where they are to be repeated."""
        echoes = self.echoes or [""] * len(prompt_tokens)
        return b"".join([self._chunk(index, self.members(Text(echo))) for index, echo in enumerate(echoes) if echo])

    def finish(self, index: int, ending: Ending) -> bytes:
        """The only chunk of a choice with a finish reason."""
        return self._chunk(index, '"text":""', reason=f'"{ending.reason}"')

    def members(self, part: Part) -> str:
        """The text as it is; there is nothing but text here."""
        return f'"text":{quoted(join_text([part]))}'

    def whole_members(self, choice: Written) -> dict[str, Any]:
        """The text as it is."""
        return {"text": (self.echoes[choice.index] if self.echoes else "") + join_text(choice.parts)}


def _usage(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _extension(usage: Usage) -> dict[str, Any]:
    """The `relevo` object of an answer: where its time went. Several choices run side by side: the longest counts."""
    timing = usage.timing
    return {
        "queue_seconds": round(timing.queue_seconds, 6),
        "prefill_seconds": round(timing.prefill_seconds, 6),
        "decode_seconds": round(timing.decode_seconds, 6),
        "cached_tokens": usage.cached_tokens,
        "preemptions": timing.preemptions,
    }
