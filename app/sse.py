"""Server-sent events: how they are written, and the response that carries them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from quart import Response

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Mapping

# A comment: clients ignore it, proxies and kernels see that somebody is there.
HEARTBEAT: Final = b": still here\n\n"
DONE: Final = b"data: [DONE]\n\n"


def response(events: AsyncIterable[bytes]) -> Response:
    """A response that proxies hand on as it comes. Who writes the events ends them: Quart's own time limit is off."""
    answer = Response(
        events,
        content_type="text/event-stream; charset=utf-8",
        headers={"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"},
    )
    answer.timeout = None
    return answer


def event(value: Mapping[str, Any]) -> bytes:
    """One event whose data is `value` as JSON; JSON escapes line ends, so one `data:` line is enough."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event that bears the name of its data's type."""
    return f"event: {value['type']}\n".encode() + event(value)


def text_event(name: str, text: str) -> bytes:
    """An event of plain text; each line of it gets its own `data:` line."""
    lines = "".join([f"data: {line}\n" for line in text.splitlines()]) or "data:\n"
    return f"event: {name}\n{lines}\n".encode()


BYE: Final = text_event("bye", "The server is shutting down.")
