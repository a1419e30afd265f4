"""What the tuning page shows: each control with what it does, the history, and what came of each change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.live_change import ABSENT, CHOICES, KEYS, SOURCES
from app.live_config import STATE
from app.preview import drain_words, flush_words, now_words
from app.render import numbers, words
from engine.config import MAX_TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.audit import AuditEntry
    from app.preview import Situation
    from engine.config import Limits

EFFECTS: Final = {
    "policy": "Continuous: whoever comes takes the first free seat. Static, dynamic: whole batches, to compare with.",
    "admission": "What a newcomer must find free. On demand: what it needs now. Reserve: its longest answer; nobody is "
    "ever preempted. Predicted: an answer of usual length.",
    "max_num_seqs": "More: more requests at once, each a little slower. Fewer: each is faster, others wait longer.",
    "max_num_batched_tokens": "Lower: steadier tokens for those being answered. Higher: sooner first tokens.",
    "long_prefill_token_threshold": "Of one prompt in one step; 0 is no limit of its own. Lower: short prompts get in "
    "beside a long one.",
    "dynamic_preferred_size": "Requests that make a batch; 0 is as many as there are seats.",
    "dynamic_max_queue_delay_seconds": "The first waits so long for the others.",
    "num_speculative_tokens": "Tokens drafted from what a text repeats, of one request in one step; 0 is none.",
    "max_waiting": "Lower: who comes late is refused sooner, instead of waiting in vain. Of each class of work.",
    "max_waiting_tokens": "The same by the length of what waits. A prompt alone is never too long for it.",
    "slo_admission": "On: who would have its first token after a deadline, or the target of its class, is refused "
    "at once, with what was expected, and steps read no more of prompts than the gaps promised leave time for. Off: it "
    "waits.",
    "ttft_p95_seconds": "95 % of first tokens are to come within it; 0 promises nothing. All pages and metrics measure "
    "by it at once; a request is judged by what holds when it ends.",
    "itl_p95_seconds": "The same of the gaps between tokens.",
    "e2e_p95_seconds": "The same of whole answers.",
    "background_ttft_p95_seconds": "The same of background work: first tokens.",
    "background_itl_p95_seconds": "The same of background work: gaps between tokens.",
    "background_e2e_p95_seconds": "The same of background work: whole answers.",
    "enable_prefix_caching": "On: what prompts begin with alike is computed once. Off: each is read from its start.",
}
RARE: Final = (
    "long_prefill_token_threshold",
    "dynamic_preferred_size",
    "dynamic_max_queue_delay_seconds",
    "num_speculative_tokens",
    "background_ttft_p95_seconds",
    "background_itl_p95_seconds",
    "background_e2e_p95_seconds",
)
# A slider with more values than pixels helps nobody.
MAX_SLIDER: Final = 8192
MAX_ROWS: Final = 50
FEW_SAMPLES: Final = 20


def admin_variables(config: Mapping[str, Any], limits: Limits, now: Situation) -> dict[str, Any]:
    """What the page shows of the live settings (`GET /admin/config`), and of how it stands."""
    effective = config["effective"]
    return {
        "generation": config["generation"],
        "above": config["pending_drain"].get("max_num_seqs", 0),
        "switching": config["pending_drain"].get("policy", 0),
        "draining": effective.get(STATE, False),
        "inside": config["pending_drain"].get("draining", 0),
        "running": now.running,
        "waiting": now.waiting,
        "drain_words": drain_words(now),
        "flush_words": flush_words(now),
        "reverts": [
            {
                "title": words.word(words.SETTINGS, key),
                "to": _shown(key, revert["to"]),
                "at": numbers.clock_of(revert["at"]),
            }
            for key, revert in config["reverts"].items()
        ],
        "fields": [_field(key, effective[key], config, now_words(key, limits, now)) for key in effective],
    }


def _field(key: str, value: Any, config: Mapping[str, Any], now: str) -> dict[str, Any]:
    """A live setting: `choices` where it is a word or a switch, else the range of a number.

    Values are as the form sends them, `shown` is for people.
    """
    choices = config["choices"].get(key, ())
    least, most = (0, 0) if choices else config["ranges"][key]
    start = config["start"][key]
    return {
        "key": key,
        "title": words.word(words.SETTINGS, key),
        "value": form_text(value),
        "shown": _shown(key, value),
        "start": _shown(key, start),
        "moved": value != start,
        "choices": [(form_text(choice), numbers.setting(choice)) for choice in choices],
        "least": least,
        "most": int(most),
        "slider": not choices and most <= MAX_SLIDER and key not in MAX_TARGETS,
        "step": "any" if key in MAX_TARGETS else "0.01" if key.endswith("_seconds") else "1",
        "unit": SOURCES[key].unit if key in SOURCES else "",
        "effect": EFFECTS.get(key, ""),
        "now": now,
        "rare": key in RARE,
    }


def form_text(value: Any) -> str:
    """A value as a form sends it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_form(form: Mapping[str, str]) -> dict[str, Any]:
    """The settings that somebody changed in the form, as `PATCH /admin/config` takes them.

    What a field was when the form was drawn is sent beside it, so that nobody sends back what another has changed.
    """
    body: dict[str, Any] = {}
    for key in KEYS:
        text, was = form.get(key), form.get(f"was.{key}")
        if text is None or text.strip() == was:
            continue
        body[key] = _read(key, text.strip())
    return body


def _read(key: str, text: str) -> Any:
    """A value; what is none is left as it is, to be refused in the same words as elsewhere."""
    if key in CHOICES:
        return {"on": True, "off": False}.get(text, text) if True in CHOICES[key] else text
    if len(text) > 24 or not text.isascii():
        return text
    try:
        return float(text) if key.endswith("_seconds") else int(text)
    except ValueError:
        return text


def list_history(effective: Mapping[str, Any], generation: int, entries: Sequence[AuditEntry]) -> list[dict[str, Any]]:
    """The generations, newest first, each with the values that held then: worked out backwards from what holds now."""
    values = dict(effective)
    rows: list[dict[str, Any]] = []
    for entry in reversed(entries):
        values = dict(entry.effective) or values
        rows.append({
            "generation": entry.generation,
            "entry": entry,
            "current": not entry.deed and not any(row["current"] for row in rows),
            "deed": entry.deed,
            "outcome": entry.outcome,
            "time": numbers.clock_of(entry.time),
            "time_iso": entry.time,
            "who": entry.who,
            "reason": entry.reason,
            "expires": numbers.clock_of(entry.expires) if entry.expires else None,
            "reverted": numbers.clock_of(entry.reverted) if entry.reverted else None,
            "changes": list_changes(entry.changes),
            "values": dict(values),
            "effect": None,
        })  # fmt: skip
        values.update((key, old) for key, (old, _) in entry.changes.items() if key in values)
    first = next((entry for entry in entries if not entry.deed), None)
    rows.append({
        "generation": generation if first is None else first.generation - 1,
        "entry": None,
        "current": first is None,
        "deed": None,
        "outcome": None,
        "time": None,
        "time_iso": None,
        "who": "at the start",
        "reason": None,
        "expires": None,
        "reverted": None,
        "changes": [
            {"title": words.word(words.SETTINGS, key), "old": None, "new": _shown(key, value)}
            for key, value in values.items()
        ],
        "values": dict(values),
        "effect": None,
    })  # fmt: skip
    return rows


def list_changes(changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Old and new values in words."""
    return [
        {"title": words.word(words.SETTINGS, key), "old": _shown(key, old), "new": _shown(key, new)}
        for key, (old, new) in changes.items()
    ]


def effect_view(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An `effect` of `GET /admin/audit` as the page shows it; a cell is a text, and whether it rests on few samples."""
    if told is None:
        return None
    others = [
        f"{other['generation']} ({', '.join(words.word(words.SETTINGS, key) for key in other['settings'])})"
        for other in told["others"]
    ]
    return {
        "state": told["state"],
        "at": numbers.clock_of(told["at"]) if told["at"] else None,
        "window": numbers.duration(told["window_seconds"]),
        "rows": _effect_rows(told["before"], told["after"]) if told["before"] else [],
        "others": others,
        "note": told["note"],
    }


def _effect_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name in ("ttft", "itl"):
        for p in ("p50", "p95"):
            sides = [str(numbers.seconds(side[name][p])) for side in (before, after)]
            rows.append(
                _row(
                    f"{words.LATENCIES[name]} {p}",
                    *sides,
                    few=[side[name]["count"] < FEW_SAMPLES for side in (before, after)],
                )
            )
        rows.append(_row("samples", *[numbers.count(side[name]["count"]) for side in (before, after)], small=True))
    for name, title in (("ttft", "Requests within, first token"), ("itl", "Requests within, gaps")):
        shares = [side["attainment"][f"{name}_p95_seconds"] for side in (before, after)]
        rows.append(_row(title, *[str(numbers.percent(share)) for share in shares]))
    for name, title in (
        ("output_tokens_per_second", "Output tokens/s"),
        ("requests_per_second", "Requests/s ended"),
        ("waiting", "Waiting, on average"),
    ):
        rows.append(_row(title, *[str(numbers.rate(side[name])) for side in (before, after)]))
    lasted = [numbers.duration(side["seconds"]) for side in (before, after)]
    rows.append(_row("of so long", *lasted, small=True))
    return rows


def _row(
    title: str, before: str, after: str, *, few: Sequence[bool] = (False, False), small: bool = False
) -> dict[str, Any]:
    return {"title": title, "cells": [(before, few[0]), (after, few[1])], "small": small}


def _shown(key: str, value: Any) -> Any:
    """A setting's value, or the word for it."""
    return ABSENT.get(key, value) if value == 0 and not isinstance(value, bool) else value
