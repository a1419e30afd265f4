"""Anthropic's shapes of an answer: a message, its stream of events, and errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from quart import Response

from app.api.envelope import Envelope
from app.api.parts import CallArguments, CallBegun, Text, Thinking, join_parts
from app.sse import named_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.api.envelope import Ending, Written
    from app.api.errors import ErrorAnswer
    from app.api.parts import Part
    from engine.batch import TokenLogprobs
    from engine.outbox import Usage

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING: Final = named_event({"type": "ping"})


def error_response(error: ErrorAnswer) -> Response:
    """An error as a response. What is 503 elsewhere is 529 here, as clients expect."""
    status = 529 if error.status == 503 else error.status
    answer = Response(json.dumps(error_body(error)), status, content_type="application/json")
    answer.headers.update(error.headers)
    return answer


def error_body(error: ErrorAnswer) -> dict[str, Any]:
    """An error's JSON."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessageEnvelope(Envelope):
    """A message of one choice. Its stream is a row of blocks, of which one is open at a time."""

    heartbeat = PING

    def __init__(self, answer_id: str, model: str) -> None:
        self._answer_id = answer_id
        self._model = model
        self._open: str | None = None
        self._index = -1
        self._ending: Ending | None = None

    def opening(self, prompt_tokens: Sequence[int]) -> bytes:
        """The message without its content, and a ping as Anthropic sends one."""
        usage = {"input_tokens": sum(prompt_tokens), "output_tokens": 0, **_cache(0)}
        return named_event({"type": "message_start", "message": self._message([], None, usage)}) + PING

    def piece(self, index: int, parts: Sequence[Part], entries: Sequence[TokenLogprobs]) -> bytes:  # noqa: ARG002
        """Blocks that begin, grow and end."""
        return b"".join([self._write(part) for part in parts])

    def finish(self, index: int, ending: Ending) -> bytes:  # noqa: ARG002
        """The end of the last block."""
        self._ending = ending
        return self._stop()

    def closing(self, usage: Usage) -> bytes:
        """How it ended, with usage, and the mark that this was all."""
        ending = {"stop_reason": None, "stop_sequence": None} if self._ending is None else _ending(self._ending)
        delta = {"type": "message_delta", "delta": ending, "usage": _usage(usage)}
        return named_event(delta) + named_event({"type": "message_stop"})

    def failure(self, error: ErrorAnswer) -> bytes:
        """An event of type `error`, and nothing after it."""
        return named_event(error_body(error))

    def whole(self, choices: Sequence[Written], usage: Usage) -> dict[str, Any]:
        """The message in one object."""
        choice = choices[0]
        joined = join_parts(choice.parts)
        content: list[dict[str, Any]] = []
        if joined.thinking:
            content.append({"type": "thinking", "thinking": joined.thinking, "signature": ""})
        if joined.text:
            content.append({"type": "text", "text": joined.text})
        for call in joined.calls:
            content.append(_tool_use(call.call_id, call.name) | {"input": _arguments(call.arguments)})
        return self._message(content, choice.ending, _usage(usage))

    def _message(self, content: list[Any], ending: Ending | None, usage: dict[str, Any]) -> dict[str, Any]:
        ended = {"stop_reason": None, "stop_sequence": None} if ending is None else _ending(ending)
        head = {"id": self._answer_id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **ended, "usage": usage}

    def _write(self, part: Part) -> bytes:
        match part:
            case Text(text):
                return self._grow("text", {"text": ""}, {"type": "text_delta", "text": text})
            case Thinking(text):
                empty = {"thinking": "", "signature": ""}
                return self._grow("thinking", empty, {"type": "thinking_delta", "thinking": text})
            case CallBegun(_, call_id, name):
                return self._stop() + self._start("tool_use", _tool_use(call_id, name))
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _grow(self, kind: str, empty: dict[str, Any], delta: dict[str, Any]) -> bytes:
        """A piece of a block of this kind, which is begun where none is open."""
        begun = b"" if self._open == kind else self._stop() + self._start(kind, {"type": kind, **empty})
        return begun + self._delta(delta)

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        self._index += 1
        return named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return named_event({"type": "content_block_stop", "index": self._index})


def _tool_use(call_id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments that were cut off are none: this form has no place for half an object."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ending(ending: Ending) -> dict[str, Any]:
    if ending.stop is not None and ending.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {"stop_reason": _REASONS.get(ending.reason, ending.reason), "stop_sequence": None}


def _cache(cached: int) -> dict[str, int]:
    return {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts cached tokens apart."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    return {"input_tokens": fresh, "output_tokens": usage.completion_tokens, **_cache(usage.cached_tokens)}
