"""From runs to figures: what `--json` writes, and what the terminal shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from app.compare.runs import percentile
from app.limit.bounds import GENERATOR, NOT_FILLED, NOT_REACHED
from app.limit.policies import ratios
from app.limit.remarks import longer_words, remarks_on, why_not
from app.limit.runs import COLD, WANTED_SAMPLES
from app.limit.scrapes import FULL, bound_by
from app.limit.search import highest_held
from app.limit.statistics import limit_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.limit.load import Source
    from app.limit.options import Options
    from app.limit.runs import Run, Seen
    from app.limit.statistics import Interval


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was measured.

    Attributes:
        server: facts about what was asked, for the reader.
        settings: of the server; `None` where it does not tell.
        machine: that sent the requests, in words; `None` where none were sent.
        source: the requests, with the factor that was taken.
        single: one user alone, `None` where that was not measured.
        capacity: requests a second in a closed loop.
        capacity_factor: by which lengths were divided there; `None` where by the same as in the runs.
        runs: of the search; none where one user alone was too much already.
        seconds: all of it took.
        remarks: what a reader must know beside the figures.
        unfinished: why there is no more of it, a sentence without its full stop; empty where it went to its end.
        wanted_seconds: about what the whole would have taken, where the time was over before; `None` where not known.
        tune: what came of tuning (`app/limit/tune_result.py`), where the server was tuned.
        policies: all that were measured, this one too, by the batching policy; `policy` is that of this one.
    """

    server: Mapping[str, Any]
    source: Source
    single: Run | None
    capacity: float
    runs: Sequence[Run]
    seconds: float
    remarks: Sequence[str] = ()
    settings: Mapping[str, Any] | None = None
    machine: str | None = None
    unfinished: str = ""
    wanted_seconds: int | None = None
    tune: Mapping[str, Any] | None = None
    policies: Mapping[str, Outcome] = field(default_factory=dict)
    policy: str = ""
    capacity_factor: float | None = None


def summarize(outcome: Outcome, options: Options) -> dict[str, Any]:
    """The result, keys as in the contract."""
    runs = sorted(outcome.runs, key=lambda run: (run.rate, run.seed))
    valid = [run for run in runs if run.is_valid]
    found = limit_of(valid) if valid else None
    limit = _limit(found, runs, options) if found else None
    classes, longer = outcome.source.classes, longer_words(outcome.wanted_seconds, options.duration)
    result: dict[str, Any] = {
        "server": dict(outcome.server),
        "settings": outcome.settings and dict(outcome.settings),
        "machine": outcome.machine,
        "targets": {**asdict(options.targets), "max_error_share": options.max_error_share},
        "classes": [{"name": one.name, "share": one.share, **asdict(one.targets)} for one in classes],
        "workload": _workload(outcome.source, options),
        "recorded_requests": outcome.source.num_recorded,
        "limit": limit,
        "unfinished": outcome.unfinished or None,
        "single_user": figures(outcome.single) if outcome.single else None,
        "capacity_requests_per_second": outcome.capacity,
        "capacity_factor": outcome.source.factor if outcome.capacity_factor is None else outcome.capacity_factor,
        "curve": [figures(run) for run in runs],
        "seed": options.seed,
        "seconds": round(outcome.seconds, 3),
    }
    if limit is None:
        # What has ended the search under another policy is not what this one ran into.
        own = outcome.policies.get(outcome.policy, outcome)
        result["why"] = why_not(own.single, runs, own.capacity, own.unfinished, longer)
    if outcome.tune is not None:
        result["tune"] = dict(outcome.tune)
    if outcome.policies:
        result |= _under_policies(outcome, options)
    cut = [f"{outcome.unfinished}: this is what was measured by then."] if outcome.unfinished else []
    return result | {"remarks": [*cut, *outcome.remarks, *remarks_on(result, runs, options.repeats, longer)]}


def _under_policies(outcome: Outcome, options: Options) -> dict[str, Any]:
    """What stands beside the figures of one policy: a whole result for each, and how they compare."""
    results = {name: summarize(replace(one, policies={}), options) for name, one in outcome.policies.items()}
    return {"policy": outcome.policy, "policies": results, "ratio": ratios(outcome.policy, results)}


def figures(run: Run) -> dict[str, Any]:
    """One run: latencies in seconds, `None` where there are none."""
    span = max(seen.due for seen in run.seen) - min(seen.due for seen in run.seen)
    kinds = Counter(seen.error for seen in run.seen if seen.error)
    good = sum(seen.is_good(run.promise.targets[seen.work_class]) for seen in run.seen)
    prompts, answers = run.tokens
    classes = [
        _latencies([seen for seen in run.seen if seen.work_class == number])
        for number in range(len(run.promise.targets))
    ]
    return {
        "rate": run.rate,
        "seed": run.seed,
        **_latencies(run.seen),
        "classes": classes if len(classes) > 1 else [],
        "requests": len(run.finished),
        "errors": kinds.total(),
        "errors_by_kind": dict(kinds),
        "goodput": run.rate * good / len(run.seen),
        "prompt_tokens_per_second": prompts,
        "output_tokens_per_second": answers,
        # By Little's law: those who wait are as many as come, times how long each waits.
        "waiting": sum(seen.watched if seen.ttft is None else seen.ttft for seen in run.seen) / span if span else 0.0,
        "preemptions": run.preemptions,
        "dispatch_lag_p50_seconds": run.lag_p50,
        "dispatch_lag_p99_seconds": run.lag_p99,
        "generator_cpu_share": run.cpu_share,
        "cpu_share_of_others": run.elsewhere.others if run.elsewhere else None,
        "cpu_share_stolen": run.elsewhere.stolen if run.elsewhere else None,
        "observed": asdict(run.observed) if run.observed else None,
        "requests_of_others": run.others,
        "stopped_early": run.stopped,
        "excess": run.excesses(),
        "holds": run.holds if run.is_valid else None,
        "unknown": run.unknown or None,
    }


def _latencies(seen: Sequence[Seen]) -> dict[str, float | None]:
    """Percentiles of those that did not fail, and of how many; of gaps where they are known one by one."""
    fine = [one for one in seen if not one.error]
    samples = {
        "ttft": [one.ttft for one in fine if one.ttft is not None],
        "itl": [gap for one in fine for gap in one.gaps],
        "e2e": [one.e2e for one in fine if one.e2e is not None],
    }
    found: dict[str, float | None] = {
        f"{name}_p{percent}_seconds": percentile(values, percent) if values else None
        for name, values in samples.items()
        for percent in WANTED_SAMPLES
    }
    return found | {f"{name}_samples": len(values) for name, values in samples.items()}


def _limit(found: Interval, runs: Sequence[Run], options: Options) -> dict[str, Any]:
    below = [run for run in runs if run.is_valid and run.rate <= found.estimate * 1.0001]
    best = max(below, key=lambda run: (run.holds, run.rate))
    beyond = _beyond(best, runs)
    is_lost = beyond or any(run.is_valid and not run.holds for run in runs)
    bound = _bound(beyond or [best]) if is_lost else NOT_REACHED
    known = figures(best)
    price, think = options.price_per_hour, options.think_time
    speed = known["output_tokens_per_second"]
    stay = best.mean_stay
    return {
        "requests_per_second": found.estimate,
        "low": found.low,
        "high": found.end,
        "held_requests_per_second": highest_held(runs),
        "is_at_least": found.is_at_least,
        "goodput": known["goodput"],
        "output_tokens_per_second": speed,
        "bound_by": bound,
        "broken_promise": _broken(beyond),
        "requests_at_once": found.estimate * stay,
        # A user is one request in so many seconds: the wait for the whole answer, and the time to think.
        "users": found.estimate * (stay + think) if think is not None else None,
        "cost_per_million_output_tokens": price / 3600 / speed * 1e6 if price is not None and speed else None,
    }


def _beyond(best: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs at the lowest rate above that at which the server fell short; where none did, the generator did."""
    higher = [run for run in runs if run.rate > best.rate]
    failed = [run for run in higher if run.is_valid and not run.holds] or higher
    return [run for run in failed if run.rate == min(one.rate for one in failed)]


def _bound(runs: Sequence[Run]) -> str:
    """Of the runs at one rate: what was full in the first that tells of anything; it may have had room under a seed."""
    if not any(run.is_valid for run in runs):
        return NOT_FILLED if all(run.unknown == COLD for run in runs) else GENERATOR
    told = [bound_by(run.observed) for run in runs if run.observed is not None]
    return next((bound for bound in told if bound in FULL), told[0] if told else bound_by(None))


def _broken(runs: Sequence[Run]) -> str | None:
    failed = [run for run in runs if run.is_valid and not run.holds]
    return max(failed[0].excesses().items(), key=lambda item: item[1])[0] if failed else None


def _workload(source: Source, options: Options) -> dict[str, Any]:
    load = source.make(1000, 1.0, options.seed)
    items = load.workload.items
    return {
        "name": load.workload.name,
        "factor": source.factor,
        "arrivals": source.arrivals,
        "gap_cv": options.gap_cv if source.arrivals == "gamma" else None,
        "looked_at": len(items),
        "shortened": load.workload.num_shortened,
        "skipped": load.workload.num_skipped,
        "mean_prompt_tokens": fmean([item.num_prompt_tokens for item in items]),
        "mean_output_tokens": fmean([item.num_output_tokens for item in items]),
    }
