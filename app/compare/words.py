"""The figures as lines of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAMES = {
    "static": "static",
    "static_dropped": "static, dropped",
    "dynamic": "dynamic",
    "continuous": "continuous",
}


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Everything, for a terminal about 120 columns wide."""
    return [
        *what_ran(result),
        "",
        *_table(result),
        "",
        *_ratio_lines(result),
        "",
        *bound_words(result),
        "",
        what_it_rests_on(result),
        *result["remarks"],
    ]


def what_ran(result: Mapping[str, Any]) -> list[str]:
    """Model, machine, workload and settings, a line each."""
    workload, settings = result["workload"], result["settings"]
    kind = "Simulated: " if result["simulated"] else ""
    rate = workload["requests_per_second"]
    arrivals = "all waiting at the start" if rate is None else f"{rate:g} requests/s, open loop"
    return [
        f"{kind}{result['model']} in {result['dtype']} on {machine_words(result['machine'])}",
        f"{workload['name']}: {numbers.plural(workload['requests'], 'request')}, lengths divided by "
        f"{workload['factor']:g} (mean prompt {workload['mean_prompt_tokens']:.1f}, mean answer "
        f"{workload['mean_output_tokens']:.1f}, longest answer {workload['max_output_tokens']}), {arrivals}",
        f"{settings['seats']} seats, {settings['max_num_batched_tokens']} tokens a step, {settings['admission']}, "
        f"{numbers.count(settings['num_blocks'])} KV blocks of {settings['block_size']} tokens",
    ]


def machine_words(machine: Mapping[str, Any]) -> str:
    """The machine in one phrase."""
    return ", ".join(str(value) for value in machine.values())


def what_it_rests_on(result: Mapping[str, Any]) -> str:
    """How much was measured."""
    samples = result["policies"]["continuous"]["samples"]
    how = "in virtual time, without a model" if result["simulated"] else "on the engine, one loaded model"
    return (
        f"{numbers.plural(result['rounds'], 'round')} through the four policies in turn {how}, "
        f"{numbers.duration(result['seconds'])}; percentiles rest on {numbers.plural(samples, 'answer')} a policy."
    )


def bound_words(result: Mapping[str, Any]) -> list[str]:
    """The bound, and how much of it was reached."""
    bound, share, seats = result["bound"], result["share_of_bound"], result["settings"]["seats"]
    # What comes bit by bit is not there to be done at once: such a run reaches what it is given.
    backlog = result["workload"]["requests_per_second"] is None
    answers, both = share["continuous_over_static"], share["continuous_over_static_in_steps"]
    return [
        f"What the answers' lengths allow over static, in steps: {bound['continuous_over_static']:.2f} times (longest "
        f"of {seats} over mean), {bound['continuous_over_static_with_tail']:.2f} with these requests' tail."
        + (f" Reached in tokens/s: {numbers.percent(answers)} of the former." if backlog else ""),
        f"Padding comes on top: it multiplies what is read of prompts by {bound['padded_prompts']:.2f}. Prompts and "
        f"answers together allow {bound['continuous_over_static_with_prompts']:.2f} times"
        + (f"; reached in steps: {numbers.percent(both)} of that." if backlog else "."),
    ]


def columns_of(result: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """The table's columns: a header and a cell for each policy."""
    policies = list(result["policies"].values())

    def column(header: str, key: str, show: Any) -> tuple[str, list[str]]:
        return header, [str(show(figures[key])) for figures in policies]

    columns = [
        column("tokens/s", "output_tokens_per_second", numbers.rate),
        column("requests/s", "requests_per_second", lambda value: f"{value:.2f}"),
        column("first token p50", "ttft_p50_seconds", numbers.seconds),
        column("p95", "ttft_p95_seconds", numbers.seconds),
        column("whole answer p50", "e2e_p50_seconds", numbers.seconds),
        column("p95", "e2e_p95_seconds", numbers.seconds),
        column("steps", "steps", numbers.count),
        column("padded rows", "padded_rows", numbers.count),
        column("useful rows", "useful_row_share", numbers.percent),
        column("KV waste", "kv_waste", numbers.percent),
        column("goodput", "goodput_requests_per_second", lambda value: f"{value:.2f}/s"),
    ]
    if result["price_per_hour"] is not None:
        columns.append(column("per 1,000 tokens", "cost_per_1000_output_tokens", lambda value: f"{value:.4f}"))
    return columns


def ratio_words(ratio: Mapping[str, float], rounds: int) -> str:
    """A ratio and its spread over the rounds, where there are several."""
    spread = f" ({ratio['min']:.2f} to {ratio['max']:.2f})" if rounds > 1 else ""
    return f"{ratio['median']:.2f} times{spread}"


def _table(result: Mapping[str, Any]) -> list[str]:
    """Policies below each other, figures to the right."""
    columns = [("", [NAMES[policy] for policy in result["policies"]]), *columns_of(result)]
    widths = [max(map(len, (header, *cells))) for header, cells in columns]
    rows: list[Sequence[str]] = [[header for header, _ in columns]]
    rows += list(zip(*[cells for _, cells in columns], strict=True))
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(line)
        ).rstrip()
        for line in [list(zip(row, widths, strict=True)) for row in rows]
    ]


def _ratio_lines(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, ratio in result["ratio"].items():
        other = NAMES[name.removeprefix("continuous_over_")]
        steps = result["ratio_in_steps"][name]["median"]
        measured = ratio_words(ratio, result["rounds"])
        lines.append(f"continuous over {other.ljust(15)}  {measured} in tokens/s, {steps:.2f} in steps")
    return lines
