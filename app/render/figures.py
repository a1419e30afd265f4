"""The tables of numbers: exact latencies with what they rest on, and the counts since the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from app.render import numbers, words
from app.render.memory import wasted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.render.scene import Scene

# A percentile means little on few samples; below these numbers it is shown pale.
RECENT_STEPS = 20
ENOUGH = {"p50": 20, "p95": 300, "p99": 1000}


class Quantile(NamedTuple):
    """A percentile as printed, and how far it can be trusted."""

    text: str
    level: str
    note: str


def latency_tables(scene: Scene) -> list[dict[str, Any]]:
    """The exact percentiles of each class of work that there was, or to which something was promised."""
    snapshot = scene.snapshot
    background = snapshot["background"]
    groups = [_latency_table("Interactive", snapshot)]
    busy = any(latency["count"] for latency in background["latency"].values())
    if busy or any(background["slo"]["targets"].values()):
        groups.append(_latency_table("Background", background))
    return groups


def _latency_table(title: str, met: Mapping[str, Any]) -> dict[str, Any]:
    slo, rows = met["slo"], []
    for name, latency_title in words.LATENCIES.items():
        latency = met["latency"][name]
        target = slo["targets"].get(f"{name}_p95_seconds")
        share = slo["attainment"].get(f"{name}_p95_seconds")
        rows.append({
            "about": name,
            "title": latency_title,
            "quantiles": [_quantile(latency, key, target) for key in ENOUGH],
            "target": numbers.seconds(target) if target else None,
            "met": numbers.percent(share) if share is not None else None,
            "count": numbers.count(latency["count"]),
            "exact": latency["exact"],
        })  # fmt: skip
    ended = met["ended"]
    return {
        "title": title,
        "rows": rows,
        "exact": all(row["exact"] for row in rows),
        "goodput": numbers.rate(slo["goodput_requests_per_second"]).text,
        "ended": numbers.count(ended["finished"] + ended["failed"]),
        "failed": ended["failed"],
    }


def _quantile(latency: Mapping[str, Any], key: str, target: float | None) -> Quantile:
    if not latency["count"] or latency[key] is None:
        return Quantile(numbers.MISSING, "few", "no sample in the window")
    broken = key == "p95" and target is not None and latency[key] > target
    few = latency["count"] < ENOUGH[key]
    note = f"rests on {latency['count']} samples; {ENOUGH[key]} would be enough" if few else ""
    return Quantile(str(numbers.seconds(latency[key])), "bad" if broken else "few" if few else "", note)


def count_groups(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Totals since the start, in groups of (name, number, level, key of the glossary)."""
    requests = snapshot["requests"]
    finished, rejected = requests["finished_by_reason"], requests["rejected_by_reason"]
    computed, lost = snapshot["step"]["tokens"], snapshot["preemptions_by_reason"]
    made, right = (snapshot["speculation"][name] for name in ("draft_tokens", "accepted_tokens"))
    again = snapshot["recomputed_tokens"] / computed if computed else None
    useful = [
        ("useful rows", str(numbers.percent(snapshot["useful_row_share"])), "", "useful"),
        ("computed again", str(numbers.percent(again)), "", "recomputed"),
        ("tokens of padding", numbers.count(snapshot["padding"]["tokens"]), "", "useful"),
        ("KV never written", str(numbers.percent(wasted(snapshot))), "", "waste"),
        *([("drafts right", f"{numbers.count(right)} of {numbers.count(made)}", "", "drafts")] if made else []),
        *[_count(words.PREEMPTED, reason, n, alarms=("kv_memory",), about="lost") for reason, n in lost.items()],
    ]
    return [
        {"title": "Busy now", "rows": _busy(snapshot)},
        {"title": "Useful work", "rows": useful},
        {"title": "Finished", "rows": [_count(words.FINISHED, k, n, alarms=("error",)) for k, n in finished.items()]},
        {
            "title": "Refused",
            "rows": [_count(words.REJECTED, k, n, alarms=("queue_full", "error")) for k, n in rejected.items() if n],
        },
    ]


def _busy(snapshot: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """How much is taken of what there is."""
    steps, config = snapshot["table"]["steps"][-RECENT_STEPS:], snapshot["config"]
    tokens = sum(row[3] for step in steps for row in step["rows"])
    budget = tokens / sum(step["budget"] for step in steps) if steps else None
    return [
        ("seats taken", str(numbers.percent(snapshot["requests"]["running"] / config["max_num_seqs"])), "", "busy"),
        ("token budget used", str(numbers.percent(budget)), "", "budget"),
        ("step p50", str(numbers.seconds(snapshot["step"]["seconds_p50"])), "", "busy"),
        ("steps", numbers.count(snapshot["step"]["count"]), "", "busy"),
        ("event loop lag", str(numbers.seconds(snapshot.get("loop_lag_seconds"))), "", "lag"),
    ]


def _count(
    names: Mapping[str, str], key: str, number: int, *, alarms: tuple[str, ...], about: str = "requests"
) -> tuple[str, str, str, str]:
    return words.word(names, key), numbers.count(number), "warn" if number and key in alarms else "", about
