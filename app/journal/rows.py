"""What is kept of a second of the engine's life, and how rows become one row of a longer time.

A row says what was true or what happened in the `seconds` before its `time`. One rule holds for minutes and for the
points of a chart: counts are summed; levels are averaged over the time they held, and of some the highest is kept
beside; percentiles are never averaged: the highest of those that were computed stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine.report import REJECTION_REASONS
from engine.stats import OUT_OF_TIME

if TYPE_CHECKING:
    from collections.abc import Mapping

    Value = float | int | None
    Row = tuple[Value, ...]

# What is called refused everywhere: who could have been served at another time, and not who asked for what cannot be.
REFUSED: Final = tuple([r for r in REJECTION_REASONS if r not in ("context_length_exceeded", "invalid")])
COUNTS: Final = ("requests", "output_tokens", "prompt_tokens", "rejections", "errors", "aborts", "preemptions")
LEVELS: Final = (
    "waiting", "running", "kv_usage", "goodput", "attainment_ttft", "attainment_itl", "attainment_e2e", "loop_lag",
)  # fmt: skip
PEAKS: Final = ("waiting_max", "running_max", "kv_usage_max", "loop_lag_max")
LATENCIES: Final = ("ttft", "itl", "e2e")
PERCENTILES: Final = tuple(f"{name}_{p}" for name in LATENCIES for p in ("p50", "p95", "p99"))
COLUMNS: Final = ("time", "seconds", *COUNTS, *LEVELS, *PEAKS, *PERCENTILES, "generation")


def count_totals(snapshot: Mapping[str, Any]) -> dict[str, int]:
    """The totals since the engine's start of what is counted, under the names of `COUNTS`.

    A request is counted when it has come to its end, well or not (an error, or no time left); who gave up, or was given
    up by somebody else, and who was refused are counted apart.
    """
    requests = snapshot["requests"]
    finished, rejected = requests["finished_by_reason"], requests["rejected_by_reason"]
    out_of_time = [requests["aborted_by_cause_and_phase"].get(cause, {}) for cause in OUT_OF_TIME]
    timed_out = sum(sum(phases.values()) for phases in out_of_time)
    # Who ran out of time at the door was not accepted, and is not among the finished.
    aborts = finished["abort"] - timed_out + sum(phases.get("door", 0) for phases in out_of_time)
    return {
        "requests": sum(finished.values()) - finished["abort"] + timed_out,
        "output_tokens": snapshot["tokens"]["output"],
        "prompt_tokens": snapshot["tokens"]["prompt"],
        "rejections": sum(rejected.get(reason, 0) for reason in REFUSED),
        "errors": finished["error"] + timed_out,
        "aborts": aborts,
        "preemptions": snapshot["preemptions"],
    }


def make_row(time: int, seconds: float, before: Mapping[str, int], snapshot: Mapping[str, Any]) -> Row:
    """The row of a look at the engine.

    Args:
        time: seconds since the epoch.
        seconds: since the look before.
        before: the totals of that one; all zero at the first.
    """
    totals = count_totals(snapshot)
    attainment = snapshot["slo"]["attainment"]
    levels = {
        "waiting": snapshot["requests"]["waiting"],
        "running": snapshot["requests"]["running"],
        "kv_usage": snapshot["kv"]["usage"],
        "goodput": snapshot["slo"]["goodput_requests_per_second"],
        "loop_lag": snapshot.get("loop_lag_seconds"),
        **{f"attainment_{name}": attainment[f"{name}_p95_seconds"] for name in LATENCIES},
    }
    values: dict[str, Value] = {
        "time": time,
        "seconds": round(seconds, 3),
        **{name: max(0, totals[name] - before.get(name, 0)) for name in COUNTS},
        **{name: _short(value) for name, value in levels.items()},
        **{name: _short(levels[name.removesuffix("_max")]) for name in PEAKS},
        "generation": snapshot["config"]["generation"],
    }
    for name in LATENCIES:
        latency = snapshot["latency"][name]
        for p in ("p50", "p95", "p99"):
            values[f"{name}_{p}"] = _short(latency[p]) if latency["count"] else None
    return tuple(values[name] for name in COLUMNS)


def merging(table: str, start: str) -> str:
    """The SQL that makes one row of all of a group; to be followed by WHERE and GROUP BY.

    Args:
        table: where the rows are.
        start: the expression for the new row's time.
    """
    sums = [f"sum({name})" for name in ("seconds", *COUNTS)]
    # A mean over the time for which the level is known.
    means = [f"sum({name} * seconds) / sum(CASE WHEN {name} IS NULL THEN NULL ELSE seconds END)" for name in LEVELS]
    highest = [f"max({name})" for name in (*PEAKS, *PERCENTILES, "generation")]
    return f"SELECT {', '.join([start, *sums, *means, *highest])} FROM {table}"  # noqa: S608 - names of this module


def _short(value: Value) -> Value:
    """Six digits are more than anybody reads; whole numbers take less room on the disk."""
    return None if value is None else float(f"{value:.6g}")
