"""The history in numbers, as a page without any script shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.journal.series import make_series, mean
from app.render import numbers
from app.render.events import event_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from app.journal.events import Event
    from app.journal.reading import Answer
    from app.journal.rows import Value


class Shown(NamedTuple):
    """A line of the summary: what is averaged, of what the highest is shown, and how values are printed."""

    title: str
    name: str
    peak: str
    word: Callable[[Any], object]


def _share(value: float | None) -> object:
    return numbers.percent(value)


def _level(value: float | None) -> object:
    return numbers.MISSING if value is None else f"{value:.1f}".removesuffix(".0")


SUMMARY: Final = (
    Shown("Output tokens/s", "output_tokens_per_second", "output_tokens_per_second", numbers.rate),
    Shown("Prompt tokens/s", "prompt_tokens_per_second", "prompt_tokens_per_second", numbers.rate),
    Shown("Requests/s", "requests_per_second", "requests_per_second", numbers.rate),
    Shown("Goodput, requests/s", "goodput_requests_per_second", "goodput_requests_per_second", numbers.rate),
    Shown("Waiting", "waiting", "waiting_max", _level),
    Shown("Running", "running", "running_max", _level),
    Shown("KV memory in use", "kv_usage", "kv_usage_max", _share),
    Shown("First token, p95", "ttft_p95_seconds", "ttft_p95_seconds", numbers.seconds),
    Shown("Between tokens, p95", "itl_p95_seconds", "itl_p95_seconds", numbers.seconds),
    Shown("End to end, p95", "e2e_p95_seconds", "e2e_p95_seconds", numbers.seconds),
    Shown("Event loop lag", "loop_lag_seconds", "loop_lag_max_seconds", numbers.seconds),
)
COUNTED: Final = {"rejections": "refused", "errors": "failed", "aborts": "aborted", "preemptions": "preemptions"}
COLUMNS: Final = (
    SUMMARY[0], SUMMARY[2], SUMMARY[4], SUMMARY[5], SUMMARY[6], SUMMARY[7], SUMMARY[8], SUMMARY[9],
)  # fmt: skip


def history_variables(answer: Answer, events: Sequence[Event], start: int, end: int) -> dict[str, Any]:
    """What the page shows: a summary, a table of a few rows, and the events."""
    series = make_series(answer)
    return {
        "summary": [_summary(shown, answer, series) for shown in SUMMARY],
        "counted": [(title, numbers.count(_sum(series[name]))) for name, title in COUNTED.items()],
        "columns": [shown.title for shown in COLUMNS],
        "rows": list(_rows(series)),
        "step": numbers.duration(answer.step),
        "events": event_rows(reversed(events)),
        "start_clock": numbers.clock(start),
        "end_clock": numbers.clock(end),
    }


def _summary(shown: Shown, answer: Answer, series: dict[str, list[Value]]) -> tuple[str, str, str]:
    highest = max((value for value in series[shown.peak] if value is not None), default=None)
    # A percentile is never averaged.
    typical = numbers.MISSING if "_p95_" in shown.name else str(shown.word(mean(answer.rows, shown.name)))
    return shown.title, typical, str(shown.word(highest))


def _sum(values: Iterable[Value]) -> int:
    return int(sum(value for value in values if value is not None))


def _rows(series: dict[str, list[Value]]) -> Iterable[dict[str, Any]]:
    for index, time in enumerate(series["time"]):
        gap = series["requests_per_second"][index] is None
        cells = [str(shown.word(series[shown.peak][index])) for shown in COLUMNS]
        yield {"time": numbers.clock(float(time or 0)), "gap": gap, "cells": cells}
