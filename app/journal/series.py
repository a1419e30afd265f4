"""The history under the names that charts and programs use, as series and as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Final

from app.audit import timestamp
from app.journal.rows import COLUMNS, COUNTS, LATENCIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from app.journal.reading import Answer
    from app.journal.rows import Row, Value

# Counts that are shown for a second; the others as they are.
RATES: Final = ("requests", "output_tokens", "prompt_tokens")
NAMES: Final[dict[str, str]] = {
    **{name: f"{name}_per_second" for name in RATES},
    **{name: name for name in COUNTS if name not in RATES},
    **{name: name for name in ("waiting", "waiting_max", "running", "running_max", "kv_usage", "kv_usage_max")},
    **{f"{name}_{p}": f"{name}_{p}_seconds" for name in LATENCIES for p in ("p50", "p95", "p99")},
    "goodput": "goodput_requests_per_second",
    **{f"attainment_{name}": f"attainment_{name}" for name in LATENCIES},
    "loop_lag": "loop_lag_seconds",
    "loop_lag_max": "loop_lag_max_seconds",
    "generation": "generation",
}
_INDEX: Final = {name: COLUMNS.index(name) for name in ("seconds", *NAMES)}
# Looks are a second and a little apart, so that now and then a second has none.
LEAST_GAP_SECONDS: Final = 3.5


def make_series(answer: Answer) -> dict[str, list[Value]]:
    """Columns by name, `time` (seconds since the epoch) first; where the server was down there is a point of `None`."""
    times: list[Value] = []
    values: dict[str, list[Value]] = {name: [] for name in NAMES.values()}
    for row in with_gaps(answer.rows, answer.step):
        times.append(row[0])
        for name, value in zip(values, name_values(row), strict=True):
            values[name].append(value)
    return {"time": times, **values}


def with_gaps(rows: Iterable[Row], step: int) -> Iterable[Row]:
    """The rows, and between those that are too far apart one of `None`, so that no line is drawn across."""
    before: float | None = None
    for row in rows:
        time = int(row[0] or 0)
        if before is not None and time - before > max(1.5 * step, LEAST_GAP_SECONDS):
            yield (int(before) + step, *[None] * (len(COLUMNS) - 1))
        before = time
        yield (time, *row[1:])


def name_values(row: Row) -> list[Value]:
    """The values of a row, in the order of `NAMES`."""
    seconds = row[_INDEX["seconds"]] or None
    return [_value(name, row[_INDEX[name]], seconds) for name in NAMES]


def _value(name: str, value: Value, seconds: Value) -> Value:
    if value is None:
        return None
    if name in RATES:
        return None if seconds is None else float(f"{value / seconds:.6g}")
    return int(value) if name in COUNTS or name == "generation" else float(f"{value:.6g}")


def csv_head() -> str:
    """The first line."""
    return ",".join(("time", *NAMES.values())) + "\r\n"


def csv_lines(rows: Sequence[Row]) -> str:
    """A line a row; the time in ISO 8601, nothing where nothing was measured."""
    text = io.StringIO()
    writer = csv.writer(text)
    for row in rows:
        writer.writerow([timestamp(float(row[0] or 0)), *("" if v is None else v for v in name_values(row))])
    return text.getvalue()


def mean(rows: Iterable[Row], name: str) -> float | None:
    """The mean of a series over the time for which it is known; `None` where nothing was measured."""
    place = [*NAMES.values()].index(name)
    known = [
        (value, float(row[_INDEX["seconds"]] or 0)) for row in rows if (value := name_values(row)[place]) is not None
    ]
    seconds = sum(lasted for _, lasted in known)
    return sum(value * lasted for value, lasted in known) / seconds if seconds else None
