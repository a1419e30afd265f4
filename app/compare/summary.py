"""From runs to figures: what `--json` writes, and what terminal and page show."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from app.compare.lengths import bound_of
from app.compare.load import lengths_of
from app.compare.runs import POLICIES, growth_excess, percentile
from app.render import numbers
from app.render.figures import ENOUGH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from app.compare.options import Options
    from app.compare.runs import Run
    from engine.config import EngineConfig
    from engine.workload import Workload

# A generator that was later than this share of the target measured itself.
MAX_LAG_SHARE: Final = 0.05
OTHERS: Final = tuple(policy for policy in POLICIES if policy != "continuous")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how it was run.

    Attributes:
        machine: what it ran on, or what was simulated.
        model, dtype: what computed.
        context_length: in tokens; `num_blocks` of KV memory of `config.block_size` tokens each.
        seconds: the whole comparison took, warm-up included.
        caveat: what the figures leave out, where they do.
    """

    machine: Mapping[str, Any]
    model: str
    dtype: str
    context_length: int
    num_blocks: int
    config: EngineConfig
    simulated: bool
    seconds: float
    caveat: str = ""


def summarize(runs: Sequence[Run], workload: Workload, options: Options, setting: Setting) -> dict[str, Any]:
    """The result, keys as in the contract; `runs` holds whole rounds only."""
    by_policy = {policy: [run for run in runs if run.policy == policy] for policy in POLICIES}
    config = setting.config
    lengths = lengths_of(workload)
    bound = bound_of(lengths, seats=config.max_num_seqs, token_budget=config.max_num_batched_tokens)
    ratio = _ratios(by_policy, lambda run, other: run.output_tokens_per_second / other.output_tokens_per_second)
    in_steps = _ratios(by_policy, lambda run, other: other.counts.steps / run.counts.steps)
    result = {
        "simulated": setting.simulated,
        "machine": dict(setting.machine),
        "model": setting.model,
        "dtype": setting.dtype,
        "workload": _workload(workload, options),
        "settings": _settings(setting),
        "seed": options.seed,
        "rounds": len(by_policy["continuous"]),
        "seconds": round(setting.seconds, 3),
        "policies": {policy: _figures(those, options, config) for policy, those in by_policy.items()},
        "ratio": ratio,
        "ratio_in_steps": in_steps,
        "bound": asdict(bound),
        "share_of_bound": {
            "continuous_over_static": ratio["continuous_over_static"]["median"] / bound.continuous_over_static,
            "continuous_over_static_in_steps": in_steps["continuous_over_static"]["median"]
            / bound.continuous_over_static_with_prompts,
        },
        "price_per_hour": options.price_per_hour,
        "command": _command(workload, options, config, rounds=len(by_policy["continuous"])),
    }
    caveats = [setting.caveat] if setting.caveat else []
    return result | {"remarks": caveats + _remarks(result, by_policy)}


def _command(workload: Workload, options: Options, config: EngineConfig, *, rounds: int) -> str:
    """The line that repeats it: what was chosen by itself is spelt out."""
    words = ["relevo", "compare"]
    words += ["--workload", options.workload] if options.trace is None else ["--trace", str(options.trace)]
    words += ["--skip-bad-lines"] if options.skip_bad_lines else []
    words += ["--requests", str(len(workload.items)), "--factor", numbers.exact(workload.factor)]
    words += ["--seats", str(config.max_num_seqs), "--seed", str(options.seed)]
    if options.rate is not None:
        words += ["--rate", numbers.exact(options.rate)]
    if options.price_per_hour is not None:
        words += ["--price-per-hour", numbers.exact(options.price_per_hour)]
    if "--simulate" not in options.flags:
        words += ["--repeats", str(rounds)]
    return shlex.join([*words, *options.flags])


def _workload(workload: Workload, options: Options) -> dict[str, Any]:
    lengths = lengths_of(workload)
    return {
        "name": workload.name,
        "factor": workload.factor,
        "requests": len(lengths),
        "shortened": workload.num_shortened,
        "skipped": workload.num_skipped,
        "mean_prompt_tokens": fmean(lengths.prompts),
        "mean_output_tokens": fmean(lengths.answers),
        "max_output_tokens": workload.max_output_tokens,
        "arrivals": "backlog" if options.rate is None else "open loop",
        "requests_per_second": options.rate,
    }


def _settings(setting: Setting) -> dict[str, Any]:
    config = setting.config
    return {
        "seats": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "admission": config.admission,
        "dynamic_preferred_size": config.dynamic_preferred_size or config.max_num_seqs,
        "dynamic_max_queue_delay_seconds": config.dynamic_max_queue_delay_seconds,
        "enable_prefix_caching": config.enable_prefix_caching,
        "context_length": setting.context_length,
        "block_size": config.block_size,
        "num_blocks": setting.num_blocks,
        "targets": {
            "ttft_p95_seconds": config.slo.ttft_p95_seconds,
            "itl_p95_seconds": config.slo.itl_p95_seconds,
            "e2e_p95_seconds": config.slo.e2e_p95_seconds,
        },
    }


def _figures(runs: Sequence[Run], options: Options, config: EngineConfig) -> dict[str, Any]:
    """Speeds and counts are medians over the rounds; percentiles are taken over the answers of all rounds together."""
    answers = [answer for run in runs for answer in run.answers]
    ttft, e2e = [answer.ttft for answer in answers], [answer.e2e for answer in answers]
    speed = median(run.output_tokens_per_second for run in runs)
    rows = sum(run.counts.rows for run in runs)
    set_aside = sum(run.counts.set_aside_slots for run in runs)
    figures = {
        "output_tokens_per_second": speed,
        "output_tokens_per_second_by_round": [run.output_tokens_per_second for run in runs],
        "requests_per_second": median(run.requests_per_second for run in runs),
        "ttft_p50_seconds": percentile(ttft, 50),
        "ttft_p95_seconds": percentile(ttft, 95),
        "e2e_p50_seconds": percentile(e2e, 50),
        "e2e_p95_seconds": percentile(e2e, 95),
        "seconds": median(run.seconds for run in runs),
        "steps": _count(run.counts.steps for run in runs),
        "padded_rows": _count(run.counts.padded_rows for run in runs),
        "padding_tokens": _count(run.counts.padding_tokens for run in runs),
        "useful_row_share": 1 - sum(run.counts.padded_rows for run in runs) / rows,
        "recomputed_tokens": _count(run.counts.recomputed_tokens for run in runs),
        "preemptions": _count(run.counts.preemptions for run in runs),
        "kv_waste": sum(run.counts.unwritten_slots for run in runs) / set_aside if set_aside else None,
        "goodput_requests_per_second": median(run.goodput(config.slo) for run in runs),
        "dispatch_lag_p99_seconds": percentile([answer.submitted - answer.scheduled for answer in answers], 99),
        "samples": len(answers),
    }
    if options.price_per_hour is not None:
        figures["cost_per_1000_output_tokens"] = options.price_per_hour / 3600 / speed * 1000
    return figures


def _count(values: Iterable[int]) -> int:
    return round(median(values))


def _ratios(by_policy: Mapping[str, Sequence[Run]], of: Callable[[Run, Run], float]) -> dict[str, dict[str, float]]:
    """Continuous against each of the others, round by round: both ran in the same minutes."""
    ratios = {}
    for other in OTHERS:
        pairs = zip(by_policy["continuous"], by_policy[other], strict=True)
        values = [of(run, opposite) for run, opposite in pairs]
        ratios[f"continuous_over_{other}"] = {"median": median(values), "min": min(values), "max": max(values)}
    return ratios


def _remarks(result: Mapping[str, Any], by_policy: Mapping[str, Sequence[Run]]) -> list[str]:
    """What a reader must know to take the figures for what they are."""
    workload, settings, rounds = result["workload"], result["settings"], result["rounds"]
    samples = result["policies"]["continuous"]["samples"]
    remarks = [
        "KV waste is understated for the fixed batches: members that have ended give their blocks back at once, and "
        "padding takes none."
    ]
    if samples < ENOUGH["p95"]:
        remarks.append(f"A p95 wants {ENOUGH['p95']} answers; these rest on {samples}.")
    if rounds == 1 and not result["simulated"]:
        remarks.append("One round only: nothing is known of the spread.")
    if workload["shortened"]:
        cut = numbers.plural(workload["shortened"], "request")
        remarks.append(f"{cut} did not fit into the context and had to be cut to it.")
    if workload["skipped"]:
        remarks.append(f"Of the trace {numbers.plural(workload['skipped'], 'bad line')} had to be skipped.")
    if result["policies"]["continuous"]["preemptions"] or result["policies"]["static"]["preemptions"]:
        remarks.append("KV memory ran short: requests were preempted, and part of the work was done twice.")
    if workload["arrivals"] == "backlog":
        remarks.append("All requests wait from the start, so dynamic forms the same batches as static.")
    else:
        remarks += _remarks_on_arrivals(by_policy, workload["requests_per_second"], settings["targets"])
    if workload["requests"] < 4 * settings["seats"]:
        remarks.append(
            f"{workload['requests']} requests on {settings['seats']} seats are few: at the end of each run under "
            "continuous batching seats stay empty for want of successors."
        )
    return remarks


def _remarks_on_arrivals(by_policy: Mapping[str, Sequence[Run]], rate: float, targets: Mapping[str, Any]) -> list[str]:
    answers = [answer for run in by_policy["continuous"] for answer in run.answers]
    lag = percentile([answer.submitted - answer.scheduled for answer in answers], 99)
    target = targets["ttft_p95_seconds"] or percentile([answer.e2e for answer in answers], 50)
    remarks = ["No more tokens/s can be written than are asked for: look at the latencies and at goodput."]
    if lag > MAX_LAG_SHARE * target:
        late = numbers.seconds(lag)
        remarks.append(f"Requests were handed in up to {late} late (p99): the latencies are not to be believed.")
    behind = [policy for policy, runs in by_policy.items() if _falls_behind(runs)]
    if behind:
        remarks.append(f"Not kept up with {rate:g} requests/s: {', '.join(behind)}; latencies there grow with the run.")
    return remarks


def _falls_behind(runs: Sequence[Run]) -> bool:
    """Whether the wait for a first token grows for as long as requests come."""
    return growth_excess([(answer.scheduled, answer.ttft) for run in runs for answer in run.answers]) > 1
