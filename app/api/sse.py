"""Server-sent events of a streamed answer. What repeats is serialised once a request; a delta costs one string."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

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


class Envelope(ABC):
    """How one endpoint wraps an answer's text, streamed or whole. Head and tail of each chunk are prepared.

    Args:
        answer_id: the same in every chunk.
        created: seconds since the epoch.
        with_usage: whether the client asked for usage; then every chunk has the key.
        service_tier: the tier it was served in, for who asked for one.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    # Members of a choice, as JSON: before any text (empty: no such chunk), and beside the finish reason.
    opening_members: ClassVar[str]
    closing_members: ClassVar[str]

    def __init__(
        self, answer_id: str, model: str, created: int, *, with_usage: bool, service_tier: str | None = None
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.created = created
        self.service_tier = service_tier
        head = json.dumps(self._head(self.chunk_object), separators=(",", ":"))[:-1]
        self._before = f'data: {head},"choices":[{{"index":0,'
        self._after = '}],"usage":null}\n\n' if with_usage else "}]}\n\n"

    def opening(self) -> bytes:
        """What a stream starts with, before any text."""
        return self._chunk(self.opening_members, "null") if self.opening_members else b""

    def text(self, text: str) -> bytes:
        """A piece of text."""
        return self._chunk(self.text_members(json.dumps(text)), "null")

    def finish(self, reason: str) -> bytes:
        """The only chunk with a finish reason."""
        return self._chunk(self.closing_members, f'"{reason}"')

    def usage(self, usage: Usage) -> bytes:
        """The chunk after it, for clients that asked for usage."""
        return event({**self._head(self.chunk_object), "choices": [], "usage": usage_json(usage)})

    def whole(self, text: str, reason: str, usage: Usage) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choice = {"index": 0, **self.whole_members(text), "logprobs": None, "finish_reason": reason}
        return {**self._head(self.whole_object), "choices": [choice], "usage": usage_json(usage)}

    @abstractmethod
    def text_members(self, text_json: str) -> str:
        """The members that carry a piece of text, as JSON."""

    @abstractmethod
    def whole_members(self, text: str) -> dict[str, Any]:
        """The members that carry a whole text."""

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}
        return head if self.service_tier is None else {**head, "service_tier": self.service_tier}

    def _chunk(self, members: str, reason: str) -> bytes:
        return f'{self._before}{members},"logprobs":null,"finish_reason":{reason}{self._after}'.encode()


class ChatEnvelope(Envelope):
    """`chat.completion` and its chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    opening_members = '"delta":{"role":"assistant","content":""}'
    closing_members = '"delta":{}'

    def text_members(self, text_json: str) -> str:
        """The text under `delta`."""
        return f'"delta":{{"content":{text_json}}}'

    def whole_members(self, text: str) -> dict[str, Any]:
        """The text under `message`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionEnvelope(Envelope):
    """`text_completion` and its chunks, which carry the same name."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    opening_members = ""
    closing_members = '"text":""'

    def text_members(self, text_json: str) -> str:
        """The text as it is."""
        return f'"text":{text_json}'

    def whole_members(self, text: str) -> dict[str, Any]:
        """The text as it is."""
        return {"text": text}
