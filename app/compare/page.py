"""The figures and the pictures as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from markupsafe import Markup

from app.assets import static_dir
from app.compare.words import NAMES, machine_words, what_it_rests_on
from app.render import numbers
from app.render.palette import Palette
from app.render.table import NUM_STEPS, TablePicture, draw_table
from app.render.templates import make_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from app.compare.runs import Run

PICTURED: Final = ("static", "dynamic", "continuous")
EXPLAINED: Final = {
    "static": "A batch is formed, its prompts are padded to the longest, and it runs until its last member ends.",
    "dynamic": "As static, but a batch is formed as soon as enough wait, or the first has waited long enough.",
    "continuous": "Whoever ends leaves at once, and the next one sits down between two steps.",
}


class Share(NamedTuple):
    """A piece of a bar."""

    name: str
    css: str
    percent: float


class Picture(NamedTuple):
    """One policy's first steps.

    Attributes:
        shares: what its seats did in them; they add up to 100 %.
    """

    title: str
    note: str
    drawn: TablePicture
    shares: list[Share]


class Bar(NamedTuple):
    """One policy's speed; `dots` are its rounds, in per cent of the longest bar."""

    name: str
    figure: str
    percent: float
    dots: list[float]
    is_ours: bool


class Row(NamedTuple):
    """One figure of all policies: what is printed, and whether it is the best of them."""

    name: str
    cells: list[tuple[str, bool]]


def page_of(result: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The HTML of a comparison."""
    template = make_environment().get_template("compare.html")
    return template.render(
        css=Markup((static_dir() / "relevo.css").read_text(encoding="utf-8")),  # noqa: S704 (our own file)
        result=result,
        machine=machine_words(result["machine"]),
        seconds=numbers.duration(result["seconds"]),
        ratios=_ratios(result),
        ttft={name: str(numbers.seconds(figures["ttft_p95_seconds"])) for name, figures in result["policies"].items()},
        bars=_bars(result),
        pictures=_pictures(runs, result["settings"]),
        num_steps=NUM_STEPS,
        groups=_groups(result),
        names=list(NAMES.values()),
        allowed=_allowed(result),
        command=result["command"].split(" --"),
        rests_on=what_it_rests_on(result),
        percent=numbers.percent,
    )


def _ratios(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Continuous against each of the others, with what is to be said about it."""
    ratios = []
    for name, ratio in result["ratio"].items():
        other = name.removeprefix("continuous_over_")
        ratios.append(
            {
                "other": NAMES[other],
                "figure": f"{ratio['median']:.2f}",
                "spread": f"{ratio['min']:.2f} to {ratio['max']:.2f} over {numbers.plural(result['rounds'], 'round')}"
                if result["rounds"] > 1
                else f"{result['ratio_in_steps'][name]['median']:.2f} in steps",
            }
        )
    return ratios


def _allowed(result: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """What the lengths allow over static batching, and what was reached (then the last is true)."""
    bound, share, seats = result["bound"], result["share_of_bound"], result["settings"]["seats"]
    over, in_steps = result["ratio"]["continuous_over_static"], result["ratio_in_steps"]["continuous_over_static"]
    lines = [
        (f"Answers alone: the longest of {seats} over the mean", f"{bound['continuous_over_static']:.2f}", False),
        ("The same, with the tail of these requests", f"{bound['continuous_over_static_with_tail']:.2f}", False),
        (
            "reached, in tokens/s",
            f"{over['median']:.2f} · {numbers.percent(share['continuous_over_static'])} of the first",
            True,
        ),
        (
            "Prompts too, padded to the longest, at this token budget",
            f"{bound['continuous_over_static_with_prompts']:.2f}",
            False,
        ),
        (
            "reached, in steps",
            f"{in_steps['median']:.2f} · {numbers.percent(share['continuous_over_static_in_steps'])} of it",
            True,
        ),
    ]
    # What comes bit by bit is not there to be done at once: such a run reaches what it is given.
    backlog = result["workload"]["requests_per_second"] is None
    return [line for line in lines if backlog or not line[2]]


def _bars(result: Mapping[str, Any]) -> list[Bar]:
    by_round = {name: figures["output_tokens_per_second_by_round"] for name, figures in result["policies"].items()}
    longest = max(max(values) for values in by_round.values())
    return [
        Bar(
            name=NAMES[name],
            figure=str(numbers.rate(figures["output_tokens_per_second"])),
            percent=100 * figures["output_tokens_per_second"] / longest,
            dots=[100 * value / longest for value in by_round[name]],
            is_ours=name == "continuous",
        )
        for name, figures in result["policies"].items()
    ]


def _pictures(runs: Sequence[Run], settings: Mapping[str, Any]) -> list[Picture]:
    """The first steps of the first round; a request has the same colour in all of them."""
    tables = {run.policy: run.table for run in runs if run.round == 0 and run.policy in PICTURED}
    palette = Palette()
    palette.update(row[1] for table in tables.values() for step in table for row in step["rows"])
    pictures = []
    for policy in PICTURED:
        steps = tables.get(policy) or []
        if not steps:
            continue
        shares = _shares(steps, settings["seats"])
        words = ", ".join(f"{share.name} {share.percent:.0f} %" for share in shares)
        drawn = draw_table(
            {"steps": _filled(steps), "budget": settings["max_num_batched_tokens"]},
            palette,
            seats=settings["seats"],
            label=f"The table under {policy} batching, {len(steps)} steps on {settings['seats']} seats: {words}.",
        )
        pictures.append(Picture(NAMES[policy], EXPLAINED[policy], drawn, shares))
    return pictures


def _filled(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A short run is followed by empty steps, so that all pictures begin at their left edge."""
    empty = {**steps[-1], "rows": [], "preempted": []}
    return [*map(dict, steps[:NUM_STEPS]), *[dict(empty)] * (NUM_STEPS - len(steps))]


def _shares(steps: Sequence[Mapping[str, Any]], seats: int) -> list[Share]:
    """What became of every seat in every one of the steps."""
    kinds = [row[2] for step in steps for row in step["rows"]]
    cells = 100 / (len(steps) * seats)
    useful = cells * sum(kind in ("prefill", "decode") for kind in kinds)
    wasted = cells * kinds.count("padding")
    return [
        Share("computed for an answer", "used", useful),
        Share("computed for nothing", "cached", wasted),
        Share("empty or waiting", "free", max(0.0, 100 - useful - wasted)),
    ]


def _groups(result: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """The table of all figures: a row a figure, a column a policy."""
    policies = list(result["policies"].values())

    def row(name: str, key: str, show: Callable[[Any], object], best: Callable[..., Any] | None = None) -> Row:
        values = [figures[key] for figures in policies]
        known = best is not None and None not in values and len(set(values)) > 1
        winner = best(values) if best is not None and known else None
        return Row(name, [(str(show(value)), known and value == winner) for value in values])

    def plain(value: float) -> str:
        return f"{value:.2f}"

    speed = [
        row("Output tokens/s", "output_tokens_per_second", numbers.rate, max),
        row("Requests/s", "requests_per_second", plain, max),
        row("Goodput, requests/s", "goodput_requests_per_second", plain, max),
        row("Length of a run", "seconds", numbers.seconds, min),
    ]
    if result["price_per_hour"] is not None:
        speed.append(row("Cost of 1,000 output tokens", "cost_per_1000_output_tokens", lambda v: f"{v:.4f}", min))
    latency = [
        row("First token, median", "ttft_p50_seconds", numbers.seconds, min),
        row("First token, p95", "ttft_p95_seconds", numbers.seconds, min),
        row("Whole answer, median", "e2e_p50_seconds", numbers.seconds, min),
        row("Whole answer, p95", "e2e_p95_seconds", numbers.seconds, min),
    ]
    work = [
        row("Steps", "steps", numbers.count),
        row("Useful rows", "useful_row_share", numbers.percent, max),
        row("Rows computed for nothing", "padded_rows", numbers.count),
        row("Tokens computed for nothing", "padding_tokens", numbers.count),
        row("KV memory never written", "kv_waste", numbers.percent),
        row("Preemptions", "preemptions", numbers.count),
        row("Tokens computed again", "recomputed_tokens", numbers.count),
    ]
    return [("Speed", speed), ("Latency", latency), ("Work in a run", work)]
