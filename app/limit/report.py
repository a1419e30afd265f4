"""A result as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from markupsafe import Markup

from app.assets import static_dir
from app.limit.against import against_lines
from app.limit.bounds import bound_words
from app.limit.report_charts import charts_of
from app.limit.report_tune import tune_variables
from app.limit.runs import WANTED_SAMPLES
from app.limit.words import (
    LATENCIES,
    capacity_words,
    class_rows,
    generator_line,
    latency_cells,
    limit_lines,
    per_second,
    policy_rows,
)
from app.render import numbers
from app.render.limit import tiles_of, verdict_of, verdict_words
from app.render.plain import plain_of
from app.render.templates import make_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STYLES: Final = ("relevo.css", "limit.css")
PROMISED: Final = {"ttft": "first tokens", "itl": "gaps between tokens", "e2e": "whole answers"}


class Promise(NamedTuple):
    """A target of a class of work, and what was met of it: just below the limit, and by one user alone."""

    title: str
    target: str
    below: str
    alone: str


class Row(NamedTuple):
    """One run; of each latency its percentiles, a star behind those of few answers, and on how many they rest."""

    rate: str
    seed: int
    latencies: list[tuple[list[str], str]]
    cells: list[str]
    verdict: str
    level: str


def page_of(result: Mapping[str, Any], older: Mapping[str, Any] | None = None) -> str:
    """The HTML of a result; `older` is another one to compare with."""
    result, older = plain_of(result), plain_of(older)
    css = "\n".join((static_dir() / name).read_text(encoding="utf-8") for name in STYLES)
    rows = [_row(run) for run in result["curve"]]
    return (
        make_environment()
        .get_template("limit_report.html")
        .render(
            css=Markup(css),  # noqa: S704 (our own files)
            model=result["server"].get("model") or "a server",
            # Of a policy that was measured to its end nothing is unfinished, whatever became of those after it.
            headline=limit_lines(result["policies"][result["policy"]] if "policies" in result else result)[0],
            lead=_lead(result),
            tiles=tiles_of(result, thinks="with the time they think", priced="at the price of the machine"),
            bound=bound_words(result["limit"]["bound_by"]) if result["limit"] is not None else "",
            promises=_promises(result),
            has_single=result["single_user"] is not None,
            charts=charts_of(result, older),
            has_older=older is not None,
            against=against_lines(result, older) if older is not None else [],
            latencies=list(LATENCIES.values()),
            percents=[f"p{percent}" for percent in WANTED_SAMPLES],
            rows=rows,
            wanted=_wanted(),
            classes=class_rows(result),
            policies=policy_rows(result) if "policies" in result else [],
            policy=result.get("policy"),
            tune=tune_variables(result["tune"]) if "tune" in result else None,
            facts=_facts(result),
            generator=generator_line(result),
            remarks=result["remarks"],
        )
    )


def _lead(result: Mapping[str, Any]) -> str:
    workload = result["workload"]
    return (
        f"{workload['name']}, lengths divided by {workload['factor']:g}: prompts of "
        f"{workload['mean_prompt_tokens']:.0f} tokens and answers of {workload['mean_output_tokens']:.0f} on average, "
        f"in an open loop of {workload['arrivals']} arrivals."
    )


def _promises(result: Mapping[str, Any]) -> list[Promise]:
    """A row for each target."""
    best, single, several = _best(result), result["single_user"], len(result["classes"]) > 1
    rows = []
    for number, one in enumerate(result["classes"]):
        for name, words in PROMISED.items():
            key = f"{name}_p95_seconds"
            if not one[key]:
                continue
            of = f", {one['name']}" if several else ""
            rows.append(
                Promise(
                    f"95 % of {words}{of}",
                    str(numbers.seconds(one[key])),
                    str(numbers.seconds(_of_class(best, number)[key])) if best else numbers.MISSING,
                    str(numbers.seconds(_of_class(single, number)[key])) if single else numbers.MISSING,
                )
            )
    share = result["targets"]["max_error_share"]
    failed = _share_failed(best), _share_failed(single)
    return [*rows, Promise("Requests that fail", f"{numbers.percent(share)}", *failed)]


def _best(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The run with the highest rate of those that hold, at or below the limit."""
    limit = result["limit"]
    below = [
        run
        for run in result["curve"]
        if limit is not None and run["holds"] and run["rate"] <= limit["requests_per_second"] * 1.0001
    ]
    return max(below, key=lambda run: run["rate"], default=None)


def _of_class(run: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The latencies of one class of a run; a run of one class has its own."""
    found: Mapping[str, Any] = run["classes"][number] if run["classes"] else run
    return found


def _share_failed(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return numbers.MISSING
    return str(numbers.percent(run["errors"] / max(1, run["errors"] + run["requests"])))


def _row(run: Mapping[str, Any]) -> Row:
    return Row(
        rate=per_second(run["rate"]),
        seed=run["seed"],
        # Of gaps there are many in an answer, which are not independent.
        latencies=[(latency_cells(run, name), numbers.count(run.get(f"{name}_samples") or None)) for name in LATENCIES],
        cells=[
            numbers.count(run["requests"]),
            f"{run['goodput']:.2f}",
            f"{run['waiting']:.1f}",
            numbers.count(run["preemptions"]),
            numbers.rate(run["output_tokens_per_second"]).text,
            numbers.count(run["errors"]),
            str(numbers.seconds(run["dispatch_lag_p99_seconds"])),
        ],
        verdict=verdict_words(run),
        level=verdict_of(run),
    )


def _wanted() -> str:
    return ", ".join(f"{numbers.count(number)} for a p{percent}" for percent, number in WANTED_SAMPLES.items())


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What it was measured on, and how."""
    server, workload = result["server"], result["workload"]
    cv = f", CV {workload['gap_cv']:g}" if workload["gap_cv"] is not None else ""
    settings = result.get("settings") or _observed_settings(result["curve"])
    facts = [
        ("Model", server.get("model")),
        ("Server", ", ".join(str(value) for name, value in server.items() if name != "model" and value is not None)),
        ("Sent from", result.get("machine")),
        (
            "Settings",
            ", ".join(f"{name} {numbers.setting(value)}" for name, value in settings.items() if _is_told(name)),
        ),
        ("Workload", f"{workload['name']}, lengths divided by {workload['factor']:g}"),
        ("Arrivals", f"{workload['arrivals']}{cv}, open loop"),
        ("Capacity", capacity_words(result)),
        ("Seed", str(result["seed"])),
        ("Took", numbers.duration(result["seconds"])),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _observed_settings(curve: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the server's metrics told of its settings, where it told nothing else."""
    known: Mapping[str, Any] = next((run["observed"] for run in curve if run["observed"]), {})
    names = {"max_num_seqs": "max_num_seqs", "token_budget": "max_num_batched_tokens"}
    return {name: known[key] for key, name in names.items() if known.get(key) is not None}


def _is_told(setting: str) -> bool:
    """Targets of the server's own are not those that were measured."""
    return not setting.endswith("_p95_seconds")
