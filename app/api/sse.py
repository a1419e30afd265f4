"""Server-sent events, and the objects that every route's answers share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

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


def extension_json(usage: Usage) -> dict[str, Any]:
    """The `relevo` object of an answer: where its time went. Several choices run side by side: the longest counts."""
    timing = usage.timing
    return {
        "queue_seconds": round(timing.queue_seconds, 6),
        "prefill_seconds": round(timing.prefill_seconds, 6),
        "decode_seconds": round(timing.decode_seconds, 6),
        "cached_tokens": usage.cached_tokens,
        "preemptions": timing.preemptions,
    }
