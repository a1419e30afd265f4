"""What a server tells of itself while it is measured, and what it says about what bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Relevo's names and vLLM's are the same behind the prefix; ours stand first, as Relevo serves both.
PREFIXES: Final = ("relevo:", "vllm:")
# Above these shares a resource is taken to be used up.
FULL_CACHE, FULL_SEATS, FULL_BUDGET = 0.95, 0.9, 0.8


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of a server during a run; `None` is not told.

    Attributes:
        running, waiting: requests, on average.
        kv_cache_usage: share of the blocks in use at its fullest, 0 to 1.
        max_num_seqs: seats.
        step_tokens: computed in a step, on average; `token_budget` is the most.
        preemptions: while it ran.
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
    if observed.preemptions or _share(observed.kv_cache_usage, 1) >= FULL_CACHE:
        return "KV memory"
    if _share(observed.running, observed.max_num_seqs) >= FULL_SEATS:
        return "sequences"
    if _share(observed.step_tokens, observed.token_budget) >= FULL_BUDGET:
        return "token budget"
    if observed.max_num_seqs is None and (observed.waiting or 0) >= 1:
        return "sequences or token budget"
    return "compute"


def _share(used: float | None, most: float | None) -> float:
    return used / most if used is not None and most else 0.0


def values_of(text: str) -> dict[str, float]:
    """The numbers of one scrape that are looked at, by their name without prefix; summed over other labels.

    Empty for text that is not what Prometheus reads.
    """
    found: dict[str, dict[str, float]] = {prefix: {} for prefix in PREFIXES}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                for prefix in PREFIXES:
                    if sample.name.startswith(prefix) and "le" not in sample.labels:
                        values, name = found[prefix], sample.name.removeprefix(prefix)
                        values[name] = values.get(name, 0.0) + sample.value
    except ValueError:
        return {}
    return next((values for values in found.values() if values), {})


def observe(scrapes: Iterable[str]) -> Observed | None:
    """What some scrapes, in their order, tell together; `None` where they tell nothing."""
    read = [values for text in scrapes if (values := values_of(text))]
    if not read:
        return None
    steps = _grown(read, "iteration_tokens_total_count")
    tokens = _grown(read, "iteration_tokens_total_sum")
    preemptions = _grown(read, "num_preemptions_total")
    usage = [values.get("kv_cache_usage_perc", values.get("gpu_cache_usage_perc")) for values in read]
    return Observed(
        running=_mean(read, "num_requests_running"),
        waiting=_mean(read, "num_requests_waiting"),
        kv_cache_usage=max([value for value in usage if value is not None], default=None),
        max_num_seqs=_whole(read[-1].get("max_num_seqs")),
        step_tokens=tokens / steps if tokens and steps else None,
        token_budget=_whole(read[-1].get("max_num_batched_tokens")),
        preemptions=_whole(preemptions),
    )


def _mean(read: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [one[name] for one in read if name in one]
    return fmean(values) if values else None


def _grown(read: Sequence[Mapping[str, float]], name: str) -> float | None:
    """By how much a counter grew from the first scrape to the last."""
    return read[-1][name] - read[0][name] if name in read[0] and name in read[-1] else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
