"""Who runs, who waits and why."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from app.render import numbers, words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.render.palette import Palette
    from app.render.scene import Scene

MAX_RUNNING_ROWS = 64
MAX_WAITING_ROWS = 12
MAX_ENDED_ROWS = 8
_OWN_ID = re.compile(r"(?:chatcmpl|cmpl)-([0-9a-f]{8})[0-9a-f]+(-\d+)?")


def request_variables(scene: Scene) -> dict[str, Any]:
    """The requests, those with a seat first, and in words why the others wait."""
    requests = scene.snapshot["requests"]
    active = scene.snapshot.get("active", [])
    seated = sorted(filter(_seated, active), key=lambda entry: entry["seat"])
    queue = [entry for entry in active if not _seated(entry)]
    shown = seated[:MAX_RUNNING_ROWS] + queue[:MAX_WAITING_ROWS]
    return {
        "rows": [request_row(entry, scene.palette) for entry in shown],
        "ended": [ended_row(entry) for entry in scene.ended],
        "more": requests["running"] + requests["waiting"] - len(shown),
        "keyed": any(entry["key"] for entry in (*shown, *scene.ended)),
        "running": requests["running"],
        "waiting": requests["waiting"],
        "why": [
            (amount, words.word(words.WAITING, reason))
            for reason, amount in requests["waiting_by_reason"].items()
            if amount
        ],
    }


def request_row(entry: Mapping[str, Any], palette: Palette) -> dict[str, Any]:
    """An open request, from a line of `active` of the statistics."""
    seated = _seated(entry)
    phase = entry["phase"] if seated else ""
    why = words.word(words.WAITING, entry["reason"]) if entry.get("reason") and not seated else ""
    return {
        "number": entry["number"],
        "id": entry["request_id"],
        "short": short_id(entry["request_id"]),
        "css": palette.css(entry["request_id"]) if seated else "c-none",
        "state": entry["state"],
        "seated": seated,
        "what": phase or why,
        "seat": entry["seat"] + 1 if seated else None,
        "prompt": numbers.count(entry["prompt_tokens"]),
        "output": numbers.count(entry["output_tokens"]),
        "age": numbers.age(entry["age_seconds"]),
        "ttft": numbers.seconds(entry["ttft_seconds"]),
        "preemptions": entry["num_preemptions"],
        "key": entry["key"] or "",
        "background": entry["class"] == "background",
    }


def ended_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A request that has ended, as the engine describes it."""
    reason = words.word(words.FINISHED, entry["finish_reason"])
    return {
        "number": entry["number"],
        "id": entry["request_id"],
        "short": short_id(entry["request_id"]),
        "how": f"{reason}, {words.word(words.ABORTED, entry['abort_cause'])}" if entry["abort_cause"] else reason,
        "error": entry["error"] or "",
        "level": "" if entry["finish_reason"] in ("stop", "length") else "bad" if entry["error"] else "few",
        "prompt": numbers.count(entry["prompt_tokens"]),
        "cached": numbers.count(entry["cached_tokens"]) if entry["cached_tokens"] else "",
        "output": numbers.count(entry["output_tokens"]),
        "ago": numbers.age(entry["age_seconds"] - entry["e2e_seconds"]),
        "e2e": numbers.seconds(entry["e2e_seconds"]),
        "ttft": numbers.seconds(entry["ttft_seconds"]),
        "preemptions": entry["num_preemptions"] or "",
        "key": entry["key"] or "",
        "background": entry["class"] == "background",
    }


def short_id(request_id: str) -> str:
    """Ids of our own making are recognised by their first eight digits, and the number of the choice."""
    own = _OWN_ID.fullmatch(request_id)
    return own[1] + (own[2] or "") if own else request_id


def begins_with(request_id: str, asked: str) -> bool:
    """Whether an id begins so, with its kind or without it, or is shown so."""
    return short_id(request_id) == asked or any(
        name.startswith(asked) for name in (request_id, request_id.partition("-")[2])
    )


def _seated(entry: Mapping[str, Any]) -> bool:
    return entry["seat"] is not None
