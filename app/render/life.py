"""One request's life: its times, its steps, and a strip of what it did when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.render import numbers, words
from app.render.requests import short_id
from app.render.svg import number, rect, svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

STRIP_HEIGHT: Final = 30


def life_variables(life: Mapping[str, Any]) -> dict[str, Any]:
    """What the page of a request shows of `GET /ops/requests/<number>.json`."""
    is_open = life["finish_reason"] is None
    length = life["age_seconds"] if is_open else life["e2e_seconds"]
    return {
        "number": life["number"],
        "id": life["request_id"],
        "short": short_id(life["request_id"]),
        "is_open": is_open,
        "state": _state(life),
        "note": _note(life),
        "facts": _facts(life),
        "length": numbers.seconds(length),
        "strip": draw_strip(life["spans"], length),
        "spans": [_row(span) for span in life["spans"]],
        "left_out": life["spans_left_out"],
        "was_preempted": life["num_preemptions"] > 0,
    }


def _state(life: Mapping[str, Any]) -> str:
    if life["finish_reason"] is None:
        seat = "" if life["seat"] is None else f" on seat {life['seat'] + 1}"
        return f"{life['state']}{seat}".capitalize()
    return words.word(words.FINISHED, life["finish_reason"]).capitalize()


def _note(life: Mapping[str, Any]) -> str:
    if life["reason"]:
        return f"waits: {words.word(words.WAITING, life['reason'])}"
    if life["abort_cause"]:
        return words.word(words.ABORTED, life["abort_cause"])
    return life["error"] or ""


def _facts(life: Mapping[str, Any]) -> list[tuple[str, str]]:
    times, drafts = life["times"], life["drafts"]
    shown = [
        ("key", life["key"] or ""),
        ("prompt", f"{numbers.plural(life['prompt_tokens'], 'token')}, {numbers.count(life['cached_tokens'])} cached"),
        ("answer", numbers.plural(life["output_tokens"], "token")),
        ("first token after", str(numbers.seconds(life["ttft_seconds"]))),
        ("waited", str(numbers.seconds(times["queue_seconds"]))),
        ("read for", str(numbers.seconds(times["prefill_seconds"]))),
        ("answered for", str(numbers.seconds(times["decode_seconds"]))),
    ]
    if life["num_preemptions"]:
        lost = f"{life['num_preemptions']} times, {numbers.seconds(times['preempted_seconds'])} without a seat"
        shown.append(("preempted", lost))
        shown.append(("computed again", numbers.plural(life["recomputed_tokens"], "token")))
    if drafts["made"]:
        shown.append(
            ("drafted tokens", f"{numbers.count(drafts['accepted'])} of {numbers.count(drafts['made'])} right")
        )
    if life["class"] == "background":
        shown.append(("class", "background"))
    return [(name, value) for name, value in shown if value]


def _row(span: Mapping[str, Any]) -> dict[str, Any]:
    first, last = span["steps"]
    has_steps = span["phase"] not in ("queued", "preempted")
    steps = "—" if not has_steps else f"{numbers.count(first)} to {numbers.count(last)}" if last else f"{first:,} on"
    return {
        "step": (last or first) if has_steps else None,
        "steps": numbers.count(first) if has_steps and first == last else steps,
        "what": words.word(words.PHASES, span["phase"]),
        "seat": "" if span["seat"] is None or not has_steps else span["seat"] + 1,
        "tokens": numbers.count(span["tokens"]) if span["tokens"] else "",
        "at": numbers.seconds(span["at_seconds"]) if span["at_seconds"] else "0",
        "took": "goes on" if span["seconds"] is None else numbers.seconds(span["seconds"]),
    }


def draw_strip(spans: Sequence[Mapping[str, Any]], length: float) -> Markup:
    """What it did over its time: filled where it computed, hatched where it read, dashed where it waited."""
    shapes: list[str] = []
    scale = 100 / max(length, 1e-9)
    middle = number(STRIP_HEIGHT / 2)
    for span in spans:
        seconds = length - span["at_seconds"] if span["seconds"] is None else span["seconds"]
        begin, wide = span["at_seconds"] * scale, max(0.0, min(seconds, length - span["at_seconds"])) * scale
        x, width = f"{number(begin)}%", f"{number(wide)}%"
        phase = span["phase"]
        title = f"{words.word(words.PHASES, phase)}, {numbers.seconds(seconds)}"
        if phase in ("queued", "preempted", "idle"):
            css = {"queued": "wait", "preempted": "lost", "idle": "still"}[phase]
            shapes.append(f'<line class="{css}" x1="{x}" x2="{number(begin + wide)}%" y1="{middle}" y2="{middle}"/>')
            shapes.append(rect("unfilled", x, 0, width, STRIP_HEIGHT, title))
            continue
        shapes.append(rect("c8", x, 3, width, STRIP_HEIGHT - 6, f"{title}, {numbers.plural(span['tokens'], 'token')}"))
        if phase != "decode":
            css = "hatch again" if phase == "recompute" else "hatch"
            shapes.append(rect(css, x, 3, width, STRIP_HEIGHT - 6))
            # Chunks that follow each other are told apart.
            shapes.append(rect("chunk", x, 3, "1", STRIP_HEIGHT - 6))
    return svg("strip", shapes, height=STRIP_HEIGHT, label=_describe(spans))


def _describe(spans: Sequence[Mapping[str, Any]]) -> str:
    counts: dict[str, int] = {}
    for span in spans:
        counts[span["phase"]] = counts.get(span["phase"], 0) + 1
    told = ", ".join(f"{words.word(words.PHASES, phase)} {amount} times" for phase, amount in counts.items())
    return f"Its time: {told or 'nothing yet'}."
