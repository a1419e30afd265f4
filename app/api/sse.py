"""Server-sent events of a streamed answer. What repeats is serialised once a request; a delta costs one string."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.outbox import Usage

# A comment: clients ignore it, proxies and kernels see that somebody is there.
HEARTBEAT: Final = b": still here\n\n"
DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"


def event(value: Mapping[str, Any]) -> bytes:
    """One event whose data is `value` as JSON; JSON escapes line ends, so one `data:` line is enough."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Envelope(Protocol):
    """How one endpoint wraps an answer's text, streamed or whole."""

    def opening(self) -> bytes:
        """What a stream starts with, before any text."""

    def text(self, text: str) -> bytes:
        """A piece of text."""

    def finish(self, reason: str) -> bytes:
        """The only chunk with a finish reason."""

    def usage(self, usage: Usage) -> bytes:
        """The chunk after it, for clients that asked for usage."""

    def whole(self, text: str, reason: str, usage: Usage) -> dict[str, Any]:
        """The answer of a request that is not streamed."""


class _Envelope:
    """Head and tail around each choice, prepared.

    Args:
        answer_id: the same in every chunk.
        created: seconds since the epoch.
        with_usage: whether the client asked for usage; then every chunk has the key.
    """

    chunk_object: str

    def __init__(self, answer_id: str, model: str, created: int, *, with_usage: bool) -> None:
        self.answer_id = answer_id
        self.model = model
        self.created = created
        head = json.dumps(self._head(self.chunk_object), separators=(",", ":"))[:-1]
        self._before = f'data: {head},"choices":['.encode()
        self._after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: str) -> bytes:
        return self._before + choice.encode() + self._after

    def usage(self, usage: Usage) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": usage_json(usage)})


class ChatEnvelope(_Envelope):
    """`chat.completion` and its chunks."""

    chunk_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        return self._choice('{"role":"assistant","content":""}', "null")

    def text(self, text: str) -> bytes:
        return self._choice(f'{{"content":{json.dumps(text)}}}', "null")

    def finish(self, reason: str) -> bytes:
        return self._choice("{}", json.dumps(reason))

    def whole(self, text: str, reason: str, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage_json(usage)}

    def _choice(self, delta: str, reason: str) -> bytes:
        return self._chunk(f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}')


class CompletionEnvelope(_Envelope):
    """`text_completion` and its chunks, which carry the same name."""

    chunk_object = "text_completion"

    def opening(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        return self._choice(text, "null")

    def finish(self, reason: str) -> bytes:
        return self._choice("", json.dumps(reason))

    def whole(self, text: str, reason: str, usage: Usage) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head("text_completion"), "choices": [choice], "usage": usage_json(usage)}

    def _choice(self, text: str, reason: str) -> bytes:
        return self._chunk(f'{{"index":0,"text":{json.dumps(text)},"logprobs":null,"finish_reason":{reason}}}')
