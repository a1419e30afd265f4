"""The tables of numbers: exact latencies with what they rest on, and the counts since the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from app.render import numbers, words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.render.scene import Promise, Scene

LATENCIES = {
    "ttft": "First token",
    "itl": "Between tokens",
    "tpot": "Mean per token",
    "e2e": "End to end",
    "queue": "In the queue",
}
# A percentile means little on few samples; below these numbers it is shown pale.
ENOUGH = {"p50": 20, "p95": 300, "p99": 1000}


class Quantile(NamedTuple):
    """A percentile as printed, and how far it can be trusted."""

    text: str
    level: str
    note: str


def latency_rows(scene: Scene) -> list[dict[str, Any]]:
    """The exact percentiles with the number of samples and the window they rest on."""
    rows, promises = [], scene.promises
    for name, title in LATENCIES.items():
        latency = scene.snapshot["latency"][name]
        promise = promises.get(name)
        rows.append({
            "title": title,
            "quantiles": [_quantile(latency, key, promise) for key in ENOUGH],
            "target": numbers.seconds(promise.p95_seconds) if promise else None,
            "count": numbers.count(latency["count"]),
            "window": numbers.duration(latency["window_seconds"]),
        })  # fmt: skip
    return rows


def slo_words(scene: Scene) -> dict[str, Any]:
    """The share of requests that met each target, and how many a second met them all."""
    slo = scene.snapshot["slo"]
    shares = slo.get("attainment", {})
    named = ((LATENCIES[key.removesuffix("_p95_seconds")], share) for key, share in shares.items())
    met = [(title, str(numbers.percent(share))) for title, share in named if share is not None]
    return {"met": met, "goodput": numbers.rate(slo["goodput_requests_per_second"]).text}


def _quantile(latency: Mapping[str, Any], key: str, promise: Promise | None) -> Quantile:
    if not latency["count"] or latency[key] is None:
        return Quantile(numbers.MISSING, "few", "no sample in the window")
    broken = key == "p95" and promise is not None and latency[key] > promise.p95_seconds
    few = latency["count"] < ENOUGH[key]
    note = f"rests on {latency['count']} samples; {ENOUGH[key]} would be enough" if few else ""
    return Quantile(str(numbers.seconds(latency[key])), "bad" if broken else "few" if few else "", note)


def count_groups(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Totals since the start, in groups of (name, number, level)."""
    requests = snapshot["requests"]
    finished, rejected = requests["finished_by_reason"], requests["rejected_by_reason"]
    slots = snapshot["kv_waste"]
    waste = slots["unwritten_slots"] / slots["set_aside_slots"] if slots["set_aside_slots"] else None
    work = [
        ("preemptions", numbers.count(snapshot["preemptions"]), "warn" if snapshot["preemptions"] else ""),
        ("tokens computed again", numbers.count(snapshot["recomputed_tokens"]), ""),
        ("useful rows", str(numbers.percent(snapshot["useful_row_share"])), ""),
        ("tokens of padding", numbers.count(snapshot["padding"]["tokens"]), ""),
        ("KV memory never written", str(numbers.percent(waste)), ""),
        ("steps", numbers.count(snapshot["step"]["count"]), ""),
        ("event loop lag", str(numbers.seconds(snapshot.get("loop_lag_seconds"))), ""),
    ]
    return [
        {"title": "Finished", "rows": [_count(words.FINISHED, k, n, alarms=("error",)) for k, n in finished.items()]},
        {
            "title": "Refused",
            "rows": [_count(words.REJECTED, k, n, alarms=("queue_full",)) for k, n in rejected.items()],
        },
        {"title": "Work", "rows": work},
    ]


def _count(names: Mapping[str, str], key: str, number: int, *, alarms: tuple[str, ...]) -> tuple[str, str, str]:
    return words.word(names, key), numbers.count(number), "warn" if number and key in alarms else ""
