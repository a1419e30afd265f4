"""The figures as lines of a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from app.limit.remarks import NAMES, unknown_words
from app.limit.runs import WANTED_SAMPLES
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LATENCIES: Final = {"ttft": "first token", "itl": "gap", "e2e": "answer"}
# Of the columns of `table`.
LEGEND: Final = (
    "Gaps are counted over all of a run; goodput: requests/s of which each met every target by itself; waiting: "
    "requests without a first token, on average."
)
P95: Final = [f"{name} p95" for name in LATENCIES.values()]
# What happens where a promise is not kept; {of} names the class of work where there are several.
BROKEN: Final = {
    "ttft": "first tokens{of} come too late",
    "itl": "gaps between tokens{of} are too long",
    "e2e": "whole answers{of} take too long",
    "errors": "too many requests fail",
    "waiting grows": "the wait grows",
    "preemptions": "preemptions repeat",
}


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Everything, for a terminal about 150 columns wide."""
    if "policies" not in result:
        return [*what_was_asked(result), "", *_what_came(result)]
    cut = [f"{result['unfinished']}."] if result.get("unfinished") else []
    lines = [*what_was_asked(result), "", *cut, *policy_lines(result)]
    for name, one in result["policies"].items():
        lines += ["", f"Under {name}:", *_what_came(one)]
    return lines


def _what_came(result: Mapping[str, Any]) -> list[str]:
    return [
        *table(result["curve"]),
        *([LEGEND] if result["curve"] else []),
        *(["", *aligned([["requests/s", "seed", "class", *P95], *rows])] if (rows := class_rows(result)) else []),
        *([""] if result["curve"] else []),
        *limit_lines(result),
        *_single_line(result),
        *generator_line(result),
        *result["remarks"],
    ]


def what_was_asked(result: Mapping[str, Any]) -> list[str]:
    """Server, workload and targets, a line each."""
    workload = result["workload"]
    server = ", ".join(str(value) for value in result["server"].values() if value is not None)
    cv = f", CV {workload['gap_cv']:g}" if workload["gap_cv"] is not None else ""
    return [
        server,
        f"{workload['name']}: lengths divided by {workload['factor']:g} (mean prompt "
        f"{workload['mean_prompt_tokens']:.1f}, mean answer {workload['mean_output_tokens']:.1f}), arrivals "
        f"{workload['arrivals']}{cv}, open loop",
        *[f"{_name(one, result)}: {_targets(one)}" for one in result["classes"]],
    ]


def _name(one: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return "Targets" if len(result["classes"]) == 1 else f"Targets of {one['name']} (share {one['share']:g})"


def _targets(one: Mapping[str, Any]) -> str:
    given = {name: one[f"{name}_p95_seconds"] for name in NAMES}
    told = [f"95 % of {NAMES[name]} within {seconds:g} s" for name, seconds in given.items() if seconds]
    return ", ".join(told) or "none"


def table(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each run, by rising rate."""
    if not curve:
        return []
    header = ["requests/s", "seed"]
    for name in LATENCIES.values():
        header += [f"{name} p50", "p95", "p99"]
    header += ["answers", "goodput", "waiting", "preempted", "tokens/s", "errors", "holds"]
    rows = [header]
    for run in curve:
        rows.append(
            [
                per_second(run["rate"]),
                str(run["seed"]),
                *[cell for name in LATENCIES for cell in latency_cells(run, name)],
                numbers.count(run["requests"]),
                f"{run['goodput']:.2f}",
                f"{run['waiting']:.1f}",
                numbers.count(run["preemptions"]),
                str(numbers.rate(run["output_tokens_per_second"])),
                numbers.count(run["errors"]),
                _holds(run),
            ]
        )
    return aligned(rows)


def class_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Rate, seed, class and the p95 of each latency, where there are several classes of work."""
    if len(result["classes"]) == 1:
        return []
    return [
        [
            per_second(run["rate"]),
            str(run["seed"]),
            one["name"],
            *[str(numbers.seconds(latencies[f"{name}_p95_seconds"])) for name in LATENCIES],
        ]
        for run in result["curve"]
        for one, latencies in zip(result["classes"], run["classes"], strict=True)
    ]


def latency_cells(run: Mapping[str, Any], name: str) -> list[str]:
    """The percentiles of one latency, with a star where there are too few answers for one."""
    return [
        str(numbers.seconds(seconds)) + ("*" if run["requests"] < wanted and seconds is not None else "")
        for percent, wanted in WANTED_SAMPLES.items()
        for seconds in [run[f"{name}_p{percent}_seconds"]]
    ]


def _holds(run: Mapping[str, Any]) -> str:
    if run["holds"] is None:
        return f"unknown: {unknown_words(run)}"
    if run["holds"]:
        return "yes"
    return f"no: {max(run['excess'], key=run['excess'].get)}" + (", ended early" if run["stopped_early"] else "")


def per_second(rate: float) -> str:
    """A rate of requests with three digits, zeros at its end too."""
    return f"{rate:.{max(0, 2 - max(0, math.floor(math.log10(rate))))}f}" if rate > 0 else "0"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of a table, to the right, the last one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) + f"  {row[-1]}"
        for row in rows
    ]


def limit_lines(result: Mapping[str, Any]) -> list[str]:
    """The limit, or why there is none."""
    limit = result["limit"]
    if limit is None:
        return [f"No limit: {result['why']}"]
    spread = spread_of(limit)
    between = f" (between {spread[0]} and {spread[1]})" if spread else ""
    broken = f"; beyond it {broken_words(limit['broken_promise'])}" if limit["broken_promise"] else ""
    held = held_words(limit)
    cut = result.get("unfinished")
    begin = f"{cut}. Until then the limit is" if cut else "The limit is"
    lines = [
        f"{begin} {rate_words(limit)} requests/s{between}{bound_clause(limit['bound_by'])}{broken}.",
        *([f"{held[0].upper()}{held[1:]}; the limit is told from all runs together."] if held else []),
        f"Just below it: goodput {limit['goodput']:.2f} requests/s, "
        f"{numbers.rate(limit['output_tokens_per_second'])} tokens/s.",
    ]
    of = f"for requests of {request_words(result['workload'])}"
    if limit["users"] is not None:
        lines.append(f"So many users at once: {limit['users']:.0f}, {of}.")
    if limit["cost_per_million_output_tokens"] is not None:
        cost = f"{limit['cost_per_million_output_tokens']:.2f}"
        lines.append(f"A million output tokens cost {cost}, {of}: the output tokens bear the price of the prompts too.")
    return lines


def request_words(workload: Mapping[str, Any]) -> str:
    """`18.7 tokens in and 3.2 out (lengths divided by 64)`, on average."""
    tokens = [numbers.rate(workload[f"mean_{name}_tokens"]).text for name in ("prompt", "output")]
    divided = divided_words(workload["factor"])
    return f"{tokens[0]} tokens in and {tokens[1]} out{f' ({divided})' if divided else ''}"


def divided_words(factor: float | None) -> str:
    """`lengths divided by 64`; empty where they are as they were."""
    return "" if factor in (None, 1) else f"lengths divided by {factor:g}"


def is_at_least(limit: Mapping[str, Any]) -> bool:
    """Whether no run was lost beyond it; older results have an upper end there, too, which nobody knows."""
    return limit["high"] is None or bool(limit.get("is_at_least"))


def rate_words(limit: Mapping[str, Any]) -> str:
    """`7.45`, or `at least 7.45`."""
    return ("at least " if is_at_least(limit) else "") + per_second(limit["requests_per_second"])


def spread_of(limit: Mapping[str, Any]) -> tuple[str, str] | None:
    """The ends of a limit's interval; `None` where one is not known or both are the same, as where little was tried."""
    if is_at_least(limit):
        return None
    low, high = per_second(limit["low"]), per_second(limit["high"])
    return None if low == high else (low, high)


def interval_words(limit: Mapping[str, Any]) -> str:
    """`7.45 requests/s (7.04 to 8.10)`."""
    spread = spread_of(limit)
    said = f"{rate_words(limit)} requests/s"
    return f"{said} ({spread[0]} to {spread[1]})" if spread else said


def held_words(limit: Mapping[str, Any]) -> str:
    """Up to which rate every run held; empty where that is the limit itself, which is told from all runs together."""
    estimate = limit["requests_per_second"]
    held = limit.get("held_requests_per_second", estimate)  # older results do not tell
    if held is None:
        return "a run at the lowest rate that was tried was lost"
    return "" if per_second(held) == per_second(estimate) else f"every run held up to {per_second(held)} requests/s"


def capacity_words(result: Mapping[str, Any]) -> str:
    """What came through in a closed loop, which may have been of shorter requests."""
    rate, own = per_second(result["capacity_requests_per_second"]), result["workload"]["factor"]
    factor = result.get("capacity_factor", own)  # older results do not tell
    if factor == own:
        return f"{rate} requests/s in a closed loop"
    return f"about {rate} requests/s, told from a closed loop with lengths divided by {factor:g}"


def bound_clause(bound_by: str) -> str:
    """What bound a limit, behind its figures: `, bound by …`, or why that is not known."""
    _, is_unknown, why = bound_by.partition(": ")
    return f"; what bound it is unknown ({why})" if is_unknown else f", bound by {bound_by}"


def broken_words(promise: str) -> str:
    """What happens where a promise is not kept, as `excess` names it."""
    name, of, work_class = promise.partition(" of ")
    return BROKEN[name].format(of=of + work_class)


def _single_line(result: Mapping[str, Any]) -> list[str]:
    single = result["single_user"]
    if single is None:
        return []
    if not single["requests"]:
        return ["One user alone: no request was answered."]
    cells = [
        f"{LATENCIES[name]} {numbers.seconds(single[f'{name}_p50_seconds'])} (p95 "
        f"{numbers.seconds(single[f'{name}_p95_seconds'])})"
        for name in LATENCIES
    ]
    return [f"One user alone: {', '.join(cells)}, of {numbers.plural(single['requests'], 'request')}."]


def generator_line(result: Mapping[str, Any]) -> list[str]:
    """How late the process that sends was itself, and what it took of the machine."""
    curve = [run for run in result["curve"] if run["generator_cpu_share"] is not None]
    if not curve:
        return []
    usual = sorted(run["dispatch_lag_p50_seconds"] for run in curve)[len(curve) // 2]
    latest = max(run["dispatch_lag_p99_seconds"] for run in curve)
    share = max(run["generator_cpu_share"] for run in curve)
    return [
        f"Requests were sent {numbers.seconds(usual)} late (median), {numbers.seconds(latest)} at most (p99), "
        f"by a process that took {numbers.percent(share)} of a core at most."
    ]


def policy_lines(result: Mapping[str, Any]) -> list[str]:
    """A line for each policy."""
    said = f"The same requests and targets under each policy; ratio: how much more {result['policy']} serves."
    return [said, *aligned(policy_rows(result))]


def policy_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A row of cells for each policy, under a header."""
    main, results = result["policy"], result["policies"]
    rows = [["policy", "requests/s", "between", "users", "there at once", "goodput", "tokens/s", "ratio", "bound by"]]
    for name, one in results.items():
        limit = one["limit"]
        if limit is None:
            rows.append([name, "none", *["-"] * 6, one["why"]])
            continue
        spread = spread_of(limit)
        ratio = result["ratio"].get(f"{main}_over_{name}")
        rows.append(
            [
                name,
                rate_words(limit),
                f"{spread[0]} and {spread[1]}" if spread else "-",
                "-" if limit["users"] is None else f"{limit['users']:.0f}",
                f"{limit['requests_at_once']:.1f}",
                per_second(limit["goodput"]),
                f"{limit['output_tokens_per_second']:.1f}",
                "-" if ratio is None else f"{ratio['estimate']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
                limit["bound_by"],
            ]
        )
    return rows
