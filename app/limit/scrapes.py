"""What a server tells of itself while it is measured, and what it says about what bounds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What servers call the same, behind the prefix of each: Relevo first, as it serves vLLM's names beside its own.
# vLLM shows them by itself, SGLang with --enable-metrics, llama-server with --metrics.
DIALECTS: Final[dict[str, dict[str, str]]] = {
    "relevo:": {},
    "vllm:": {"gpu_cache_usage_perc": "kv_cache_usage_perc"},  # as it was called before 0.10
    "sglang:": {
        "num_running_reqs": "num_requests_running",
        "num_queue_reqs": "num_requests_waiting",
        "token_usage": "kv_cache_usage_perc",
        "num_retracted_requests_total": "num_preemptions_total",
    },
    "llamacpp:": {
        "requests_processing": "num_requests_running",
        "requests_deferred": "num_requests_waiting",
        "kv_cache_usage_ratio": "kv_cache_usage_perc",  # no longer there since the middle of 2025
    },
}
# Of several engines behind one address the fullest counts; everything else is added up.
SHARES: Final = ("kv_cache_usage_perc",)
# Above these shares a resource is taken to be used up.
FULL_CACHE, FULL_SEATS, FULL_BUDGET = 0.95, 0.9, 0.8
# So many wait on average where seats are full in turns: then this share of them is enough. Who has only just come is
# told as waiting too, so that they say nothing by themselves.
WAITED, OFTEN_FULL_SEATS = 0.5, 0.7

# Bounds of `bound_by` that were seen to be reached; `compute` is what is left.
FULL: Final = ("KV memory", "sequences", "token budget", "sequences or token budget")


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of a server during a run; `None` is not told.

    Attributes:
        running, waiting: requests, on average.
        kv_cache_usage: share of the blocks in use at its fullest, 0 to 1.
        max_num_seqs: seats.
        step_tokens: computed in a step, on average; `token_budget` is the most.
        preemptions: for want of KV memory, while it ran.
    """

    running: float | None = None
    waiting: float | None = None
    kv_cache_usage: float | None = None
    max_num_seqs: int | None = None
    step_tokens: float | None = None
    token_budget: int | None = None
    preemptions: int | None = None


def bound_by(observed: Observed | None) -> str:
    """What keeps a server from serving more, by what was seen of it near its limit."""
    if observed is None:
        return "unknown: the server shows no metrics"
    if observed.running is None and observed.kv_cache_usage is None:
        return "unknown: the server's metrics do not tell"
    if observed.preemptions or _share(observed.kv_cache_usage, 1) >= FULL_CACHE:
        return "KV memory"
    often = (observed.waiting or 0) >= WAITED
    if _share(observed.running, observed.max_num_seqs) >= (OFTEN_FULL_SEATS if often else FULL_SEATS):
        return "sequences"
    if _share(observed.step_tokens, observed.token_budget) >= FULL_BUDGET:
        return "token budget"
    if observed.max_num_seqs is None and (observed.waiting or 0) >= 1:
        return "sequences or token budget"
    return "compute"


def _share(used: float | None, most: float | None) -> float:
    return used / most if used is not None and most else 0.0


def values_of(text: str) -> dict[str, float]:
    """The numbers of one scrape that are looked at, by Relevo's names without prefix; summed over other labels.

    What is counted by a reason is there for each reason too, as `name/reason`. Empty for text that is not what
    Prometheus reads.
    """
    found: dict[str, dict[str, float]] = {prefix: {} for prefix in DIALECTS}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix, colon, name = sample.name.partition(":")
                values = found.get(prefix + colon)
                if values is not None and "le" not in sample.labels and math.isfinite(sample.value):
                    name = DIALECTS[prefix + colon].get(name, name)
                    reason = sample.labels.get("reason") or sample.labels.get("finished_reason")
                    for key in (name, *([f"{name}/{reason}"] if reason else [])):
                        before = values.get(key, 0.0)
                        values[key] = max(before, sample.value) if key in SHARES else before + sample.value
    except (ValueError, KeyError, IndexError):
        return {}
    return next((values for values in found.values() if values), {})


def observe(scrapes: Iterable[str], *, max_num_seqs: int | None = None) -> Observed | None:
    """What some scrapes, in their order, tell together; `None` where they tell nothing.

    Args:
        max_num_seqs: seats, where metrics do not tell them.
    """
    read = [values for text in scrapes if (values := values_of(text))]
    if not read:
        return None
    steps = _grown(read, "iteration_tokens_total_count")
    tokens = _grown(read, "iteration_tokens_total_sum")
    # Relevo's seats also change hands between classes of work, which is no want of memory.
    short = _grown(read, "num_preemptions_by_reason_total/kv_memory")
    preemptions = _grown(read, "num_preemptions_total") if short is None else short
    usage = [values["kv_cache_usage_perc"] for values in read if "kv_cache_usage_perc" in values]
    return Observed(
        running=_mean(read, "num_requests_running"),
        waiting=_mean(read, "num_requests_waiting"),
        kv_cache_usage=max(usage, default=None),
        max_num_seqs=_whole(read[-1].get("max_num_seqs")) or max_num_seqs,
        step_tokens=tokens / steps if tokens and steps else None,
        token_budget=_whole(read[-1].get("max_num_batched_tokens")),
        preemptions=_whole(preemptions),
    )


def num_answered(first: str, last: str) -> int | None:
    """Whole answers that were given between two scrapes, to whomever; `None` where that is not told."""
    read = [values_of(first), values_of(last)]
    ends = [_grown(read, f"request_success_total/{reason}") for reason in ("stop", "length")]
    known = [grown for grown in ends if grown is not None]
    return int(sum(known)) if known else None


def _mean(read: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [one[name] for one in read if name in one]
    return fmean(values) if values else None


def _grown(read: Sequence[Mapping[str, float]], name: str) -> float | None:
    """By how much a counter grew from the first scrape to the last; it begins at 0 where a server was restarted."""
    if name not in read[0] or name not in read[-1]:
        return None
    grown = read[-1][name] - read[0][name]
    return read[-1][name] if grown < 0 else grown


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
