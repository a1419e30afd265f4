"""What the engine tells about itself: one dict for people, one view for Prometheus. Read-only."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import RequestError, UnavailableError
from engine.experience import all_experience
from engine.handle import ABORT_CAUSES
from engine.place import line_of, why_waits
from engine.sequence import CLASSES, FinishReason
from engine.timeline import DEFAULT_WINDOW
from engine.waiting import served_by_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import EngineConfig, Limits
    from engine.errors import RelevoError
    from engine.scheduler import Scheduler
    from engine.scheduling import Scheduling
    from engine.stats import Histogram, Stats

WAIT_REASONS = ("seats", "token_budget", "kv_memory", "policy", "switching", "shared_prompt", "fault")
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
PHASES = ("door", "queued", "prefill", "decode")
# Of those that wait so many are told one by one: it is done every second.
MAX_LISTED_WAITING = 1000
PREEMPTION_REASONS = ("kv_memory", "better_right")
# `error` is the server's own fault: something at the door failed over the request. `invalid` is the request's.
REJECTION_REASONS = (
    "context_length_exceeded", "queue_full", "late", "rate_limited", "busy", "draining", "unavailable", "invalid",
    "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetricsView:
    """Numbers for Prometheus, under the stems of vLLM's names. A label's values are a closed set, present from zero.

    Attributes:
        gauges: name to value.
        counters: name to value.
        labelled_gauges: name to (label names, {label values: value}).
        labelled_counters: the same for counters.
        histograms: name to histogram.
        cache_config: labels of `cache_config_info`.
    """

    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    labelled_gauges: Mapping[str, tuple[tuple[str, ...], Mapping[tuple[str, ...], float]]]
    labelled_counters: Mapping[str, tuple[tuple[str, ...], Mapping[tuple[str, ...], float]]]
    histograms: Mapping[str, Histogram]
    cache_config: Mapping[str, str]


def reason_of(error: RelevoError) -> str:
    """Under which of `REJECTION_REASONS` the request counts that the engine refused with this."""
    if not isinstance(error, (RequestError, UnavailableError)):
        return "error"
    return error.code if error.code in REJECTION_REASONS else "invalid"


class Report:
    """Reads the scheduler and the statistics."""

    def __init__(
        self, scheduler: Scheduler, scheduling: Scheduling, stats: Stats, config: EngineConfig, *, started: float
    ) -> None:
        self._scheduler = scheduler
        self._scheduling = scheduling
        self._stats = stats
        self._config = config
        self._started = started

    def snapshot(self, now: float, limits: Limits) -> dict[str, Any]:
        """The object of `/ops/stats.json`; `now` is on the engine's clock."""
        scheduler, stats = self._scheduler, self._stats
        usage = scheduler.kv_cache.usage
        ref_counts = scheduler.kv_cache.pool.ref_counts
        owners = {s.request_id: sum([ref_counts[i] == 1 for i in s.block_ids]) for s in scheduler.running}
        return {
            "uptime_seconds": round(now - self._started, 3),
            "step": {
                "count": stats.num_steps,
                "seconds_p50": stats.step_seconds.summary(now)["p50"],
                "tokens": stats.num_step_tokens,
            },
            "requests": self._requests(),
            **self._active(now),
            "kv": {
                "block_size": self._config.block_size,
                "total": usage.total,
                "used": usage.used,
                "cached": usage.cached,
                "free": usage.free,
                "usage": round(usage.used / usage.total, 4),
                "owners": owners,
                "shared": usage.used - sum(owners.values()),
            },
            "prefix_cache": {
                "query_tokens": scheduler.counters.num_queried_tokens,
                "hit_tokens": scheduler.counters.num_hit_tokens,
                "evictions": scheduler.kv_cache.pool.num_evictions,
            },
            "preemptions": scheduler.counters.num_preemptions,
            "preemptions_by_reason": self._preemptions(),
            "recomputed_tokens": scheduler.counters.num_recomputed_tokens,
            "padding": {"rows": scheduler.counters.num_padding_rows, "tokens": scheduler.counters.num_padding_tokens},
            "speculation": {
                "drafts": scheduler.counters.num_drafts,
                "draft_tokens": scheduler.counters.num_draft_tokens,
                "accepted_tokens": scheduler.counters.num_accepted_tokens,
            },
            "kv_waste": {
                "set_aside_slots": scheduler.counters.num_set_aside_slots,
                "unwritten_slots": scheduler.counters.num_unwritten_slots,
            },
            "dropped_results": scheduler.counters.num_dropped_results,
            "faults": {"failed_steps": stats.num_failed_steps, "integrity_violations": stats.num_integrity_violations},
            "rows": {"computed": scheduler.counters.num_rows, "useful": scheduler.counters.num_useful_rows},
            "useful_row_share": scheduler.counters.num_useful_rows / scheduler.counters.num_rows
            if scheduler.counters.num_rows
            else None,
            "tokens_per_second": {
                "prompt": round(stats.prompt_rate.per_second(now), 2),
                "output": round(stats.output_rate.per_second(now), 2),
            },
            "tokens": {"prompt": stats.num_prompt_tokens, "output": stats.num_output_tokens},
            **all_experience(stats, now, DEFAULT_WINDOW),
            "config": asdict(limits),
            "table": self._scheduling.log.table(limits),
        }

    def metrics(self, limits: Limits) -> MetricsView:
        """The numbers of `/metrics`."""
        scheduler, stats = self._scheduler, self._stats
        usage = scheduler.kv_cache.usage
        waiting = self._waiting_by_reason()
        return MetricsView(
            gauges={
                "num_requests_running": scheduler.num_running,
                "num_requests_waiting": scheduler.num_waiting,
                "kv_cache_usage_perc": usage.used / usage.total,
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            },
            counters={
                "num_preemptions": scheduler.counters.num_preemptions,
                "failed_steps": stats.num_failed_steps,
                "integrity_violations": stats.num_integrity_violations,
                "recomputed_tokens": scheduler.counters.num_recomputed_tokens,
                "padding_tokens": scheduler.counters.num_padding_tokens,
                "prompt_tokens": stats.num_prompt_tokens,
                "generation_tokens": stats.num_output_tokens,
                "prefix_cache_queries": scheduler.counters.num_queried_tokens,
                "prefix_cache_hits": scheduler.counters.num_hit_tokens,
                "spec_decode_num_drafts": scheduler.counters.num_drafts,
                "spec_decode_num_draft_tokens": scheduler.counters.num_draft_tokens,
                "spec_decode_num_accepted_tokens": scheduler.counters.num_accepted_tokens,
            },
            labelled_gauges={
                "num_requests_waiting_by_reason": (
                    ("reason",),
                    {(reason,): waiting.get(reason, 0) for reason in WAIT_REASONS},
                ),
            },
            labelled_counters={
                "num_preemptions_by_reason": (("reason",), {(r,): n for r, n in self._preemptions().items()}),
                "request_success": (("finished_reason",), {(r,): stats.finished[r] for r in FINISH_REASONS}),
                "admission_rejections": (("reason",), {(r,): stats.rejected[r] for r in REJECTION_REASONS}),
                "request_aborts": (
                    ("cause", "phase"),
                    {(cause, phase): stats.aborted[cause, phase] for cause in ABORT_CAUSES for phase in PHASES},
                ),
            },
            histograms=stats.histograms,
            cache_config={"block_size": str(self._config.block_size), "num_gpu_blocks": str(usage.total)},
        )

    def _active(self, now: float) -> dict[str, Any]:
        """Who runs, and behind them who waits, class by class in the order in which they joined; of very many some."""
        scheduler = self._scheduler
        listed = [*scheduler.running, *scheduler.waiting[:MAX_LISTED_WAITING]]
        return {
            "active": [line_of(sequence, scheduler, now) for sequence in listed],
            "active_left_out": max(0, scheduler.num_waiting - MAX_LISTED_WAITING),
        }

    def _requests(self) -> dict[str, Any]:
        scheduler, stats, waiting = self._scheduler, self._stats, self._scheduler.waiting
        waiting_of = Counter([sequence.class_name for sequence in waiting])
        aborted: dict[str, dict[str, int]] = {}
        for (cause, phase), number in stats.aborted.items():
            aborted.setdefault(cause, {})[phase] = number
        return {
            "running": scheduler.num_running,
            "waiting": len(waiting),
            "waiting_tokens": sum([sequence.num_tokens for sequence in waiting]),
            "waiting_by_reason": self._waiting_by_reason(),
            "finished_by_reason": {reason: stats.finished[reason] for reason in FINISH_REASONS},
            "rejected_by_reason": {reason: stats.rejected[reason] for reason in REJECTION_REASONS},
            "aborted_by_cause_and_phase": aborted,
            "by_class": {
                name: {"running": len(work.running), "waiting": waiting_of[name]}
                for name, work in zip(CLASSES, scheduler.classes, strict=True)
            },
            "by_key": self._by_key(),
        }

    def _preemptions(self) -> dict[str, int]:
        counters = self._scheduler.counters
        amounts = (counters.num_preemptions - counters.num_yields, counters.num_yields)
        return dict(zip(PREEMPTION_REASONS, amounts, strict=True))

    def _by_key(self) -> dict[str, dict[str, int]]:
        """What each named key has, and the weighted tokens it was served (`served_by_key`)."""
        served = served_by_key(*[work.fairness for work in self._scheduler.classes])
        running = Counter([sequence.key_name for sequence in self._scheduler.running])
        waiting = Counter([sequence.key_name for sequence in self._scheduler.waiting])
        return {
            name: {"running": running[name], "waiting": waiting[name], "served_tokens": served.get(name, 0)}
            for name in sorted({*served, *running, *waiting} - {""})
        }

    def _waiting_by_reason(self) -> dict[str, int]:
        return dict(Counter([why_waits(one, self._scheduler) for one in self._scheduler.waiting]))
