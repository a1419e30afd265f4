"""A search for the operating limit, as its page shows it: from the object of `/ops/limit/<search_id>.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.limit.against import against_lines
from app.limit.bounds import bound_title, bound_words
from app.limit.remarks import NAMES, remarks_on_others, unknown_words
from app.limit.runs import WANTED_SAMPLES
from app.limit.tune_words import OVER, ran_out, tune_lines, verdict_lines
from app.limit.words import (
    bound_clause,
    broken_words,
    divided_words,
    held_words,
    interval_words,
    is_at_least,
    per_second,
    request_words,
    spread_of,
)
from app.live_change import KEYS
from app.render import numbers
from app.render.curve import Curve, Limit, Point, draw_curve
from app.render.tuning import list_changes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from engine.config import Limits

LATENCIES: Final = {"ttft": "First token", "itl": "Between tokens", "e2e": "End to end"}
# Of a search that ended without a limit: its heading, and how bad that is.
ENDS: Final = {
    "none": ("No limit was found", "warn"),
    "cut": ("It was cut short", "warn"),
    "users": ("It ended: users came", "warn"),
    "stopped": ("It was stopped", ""),
    "failed": ("It failed", "bad"),
    "late": ("It ran out of time", "bad"),
    "shutdown": ("The server ended", ""),
}
# What the page calls flags of the command.
FIELDS: Final = {"--duration": "Seconds to take", "--factor": "Divide lengths by", "--repeats": "Seeds tried"}
MAX_SHOWN: Final = 500  # characters of what a process said
ENOUGH: Final = WANTED_SAMPLES[95]


class Tile(NamedTuple):
    """A figure of the outcome."""

    title: str
    text: str
    unit: str
    note: str


class Picture(NamedTuple):
    """A curve with its caption."""

    title: str
    note: str
    plot: Markup


def control_variables(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """Whether one runs, and whose it is."""
    if told is None:
        return {"search": None}
    return {
        "search": told["id"],
        "running": told["end"] is None,
        "stopping": told["stopping"],
        "about": _about(told),
        "note": told["asked"]["note"],
        "beside": told["asked"]["beside_users"],
    }


def progress_variables(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is tried now, and how much time is left; nothing where none runs."""
    if told is None or told["end"] is not None:
        return {"trying": None}
    trying, planned = told["trying"], told["planned_seconds"]
    what = told["what"]
    if trying["total"]:
        rate = f"{per_second(trying['rate'])} requests/s" if trying["rate"] else "As many as there are seats, at once"
        what = f"{rate}: {trying['ended']} of {numbers.plural(trying['total'], 'request')} answered"
    left = max(0.0, planned - told["seconds"])
    return {
        "trying": what[:MAX_SHOWN],
        "left": f"about {numbers.duration(left)} left" if left >= 1 else "about to end",
        "percent": min(100, round(100 * told["seconds"] / planned)) if planned else 0,
        "runs": len(told["curve"]),
    }


def outcome_variables(told: Mapping[str, Any] | None, limits: Limits) -> dict[str, Any]:
    """How it ended: the limit in tiles, or in words why there is none.

    Args:
        limits: what holds now.
    """
    if told is None or told["end"] is None:
        return {"end": None}
    heading, level = ENDS.get(told["end"], ("", ""))
    result = told["result"]
    limit = result["limit"] if result is not None else None
    return {
        "id": told["id"],
        "end": told["end"],
        "heading": heading,
        "level": level,
        "why": _for_a_form(told["why"])[:MAX_SHOWN],
        "tiles": _tiles(result, told["asked"]) if limit is not None else [],
        "bound_title": bound_title(limit["bound_by"]) if limit is not None else "",
        "bound": bound_words(limit["bound_by"]) if limit is not None else "",
        "remarks": _remarks(told),
        "few": told["result"] is None and any(told[name] for name in ("curve", "tried", "capacity", "single_user")),
        "tuned": _tuned(told["id"], result.get("tune"), limits) if result is not None else None,
    }


def _remarks(told: Mapping[str, Any]) -> list[str]:
    """Those of the search, and of the command; how many users there were is told once, as the server has counted."""
    result = told["result"]
    if result is None:
        return list(told["remarks"])
    has_counted = told["asked"]["beside_users"] and told["requests_of_users"]
    again = remarks_on_others(result["curve"]) if has_counted else []
    return [*told["remarks"], *[_for_a_form(remark) for remark in result["remarks"] if remark not in again]]


def _for_a_form(remark: str) -> str:
    """A remark of the command for somebody who has its form: flags are called as the fields are."""
    for flag, field in FIELDS.items():
        remark = remark.replace(flag, f"“{field}”")
    return remark


def _tuned(search_id: str, tune: Mapping[str, Any] | None, limits: Limits) -> dict[str, Any] | None:
    """What came of tuning: the verdict, the changes that would be for the better, and what was tried."""
    if tune is None:
        return None
    verdict = verdict_lines(tune)
    tried = [line for line in tune_lines(tune)[: -len(verdict)] if line != OVER]
    changes = {name: pair for name, pair in tune["best"]["changes"].items() if name in KEYS}
    return {
        "id": search_id,
        "verdict": verdict[0],
        "over": _for_a_form(OVER) if ran_out(tune) else "",
        "changes": list_changes(changes),
        "holds": all(getattr(limits, name) == new for name, (_, new) in changes.items()),
        "tried": _for_a_form("\n".join(tried).strip("\n")),
    }


def curve_variables(told: Mapping[str, Any] | None, older: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A picture for each latency; none before the first run has ended."""
    if told is None or not (told["curve"] or told["tried"] or told["trying"]["rate"]):
        return {"pictures": [], "older": None, "tried": False, "found": False, "trying_rate": None}
    pictures = [_picture(name, title, told, older) for name, title in LATENCIES.items()]
    return {
        "pictures": pictures,
        "older": None if older is None else _about(older),
        "tried": bool(told["tried"]),
        "found": band_of(told["result"]) is not None,
        "trying_rate": told["trying"]["rate"],
    }


def run_variables(told: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row for each run, by rising rate; before them those of the closed loops."""
    if told is None:
        return {"rows": [], "starred": False, "enough": ENOUGH}
    closed = [
        (title, told[name]) for title, name in (("one user alone", "single_user"), ("all seats at once", "capacity"))
    ]
    rows = [_row(title + _divided(run), run, "") for title, run in closed if run is not None]
    rows += [
        _row(per_second(run["rate"]), run, verdict_words(run))
        for run in sorted(told["curve"], key=lambda run: (run["rate"], run["seed"]))
    ]
    return {"rows": rows, "starred": any(row["few"] for row in rows), "enough": ENOUGH}


def _divided(run: Mapping[str, Any]) -> str:
    """By what the lengths of a closed loop were divided, which may not be those of the rates below it."""
    return f", {divided}" if (divided := divided_words(run.get("factor"))) else ""


def kept_variables(briefs: Sequence[Mapping[str, Any]], problem: str) -> dict[str, Any]:
    """The list of those that ended."""
    rows = [
        {
            "id": brief["id"],
            "time": numbers.clock_of(brief["began"]),
            "workload": brief["workload"],
            "note": brief["note"],
            "beside": brief["beside_users"],
            "limit": _interval(brief),
            "divided": _short(brief["factor"], brief["mean_output_tokens"]),
            "bound": bound_clause(brief["bound_by"]) if brief["bound_by"] else "",
            "end": ENDS.get(brief["end"], ("", ""))[0],
        }
        for brief in briefs
    ]
    return {"kept": rows, "kept_problem": problem}


def one_variables(told: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """A search that ended, or goes on; `limits` are what holds now."""
    return {
        "search": told["id"],
        "title": "A search for the limit",
        "about": _about(told),
        "note": told["asked"]["note"],
        "comparison": [],
        "has_result": told["result"] is not None,
        **outcome_variables(told, limits),
        **curve_variables(told),
        **run_variables(told),
    }


def two_variables(newer: Mapping[str, Any], older: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """Two of them; the older one is drawn pale behind the newer."""
    now, then = newer["result"], older["result"]
    comparison = [f"Then: {end_words(older)}.", f"Now: {end_words(newer)}."]
    return one_variables(newer, limits) | {
        "title": "Two searches",
        "comparison": comparison if now is None or then is None else against_lines(now, then),
        "id": None,
        "older_note": older["asked"]["note"],
        "older_rows": run_variables(older)["rows"],
        **curve_variables(newer, older),
    }


def end_words(told: Mapping[str, Any]) -> str:
    """How a search ended, in a sentence without a full stop."""
    limit = told["result"]["limit"] if told["result"] is not None else None
    if limit is None:
        heading = ENDS.get(told["end"], (told["end"], ""))[0]
        return f"{heading}: {told['why']}".rstrip(".: ")[:MAX_SHOWN]
    cut = f"{ENDS['cut'][0].lower()}; until then " if told["end"] == "cut" else ""
    return f"{cut}{_interval(limit)}{bound_clause(limit['bound_by'])}"


def verdict_of(run: Mapping[str, Any]) -> str:
    """Whether the promises held: `yes`, `no` or `unknown`."""
    return "unknown" if run["holds"] is None else "yes" if run["holds"] else "no"


def verdict_words(run: Mapping[str, Any]) -> str:
    """The same in words, with what did not hold."""
    match verdict_of(run):
        case "yes":
            return "holds"
        case "no":
            worst = max(run["excess"], key=run["excess"].get)
            return f"no: {broken_words(worst)}" + (", ended early" if run["stopped_early"] else "")
        case _:
            return f"unknown: {unknown_words(run)}"


def _picture(name: str, title: str, told: Mapping[str, Any], older: Mapping[str, Any] | None) -> Picture:
    target = None if told["asked"]["mix"] else told["asked"][f"{name}_p95_seconds"]
    drawn = draw_curve(
        Curve(
            title=f"{title}, p95",
            points=_points(name, told["curve"]),
            word=lambda value: str(numbers.seconds(value)) if value else "0",
            target=target,
            trying=told["trying"]["rate"],
            limit=band_of(told["result"]),
            older=_points(name, told["tried"] if older is None else older["curve"]),
            older_limit=band_of(older["result"]) if older is not None else None,
        )
    )
    promised = f"target {numbers.seconds(target)}" if target else "nothing promised"
    return Picture(title, f"p95, {promised}", drawn)


def _points(name: str, runs: Sequence[Mapping[str, Any]]) -> list[Point]:
    points = []
    for run in runs:
        value = run[f"{name}_p95_seconds"]
        if value is not None:
            at = f"{per_second(run['rate'])} requests/s: {numbers.seconds(value)}"
            points.append(Point(run["rate"], value, verdict_of(run), f"{at}, {verdict_words(run)}", run["seed"]))
    return points


def band_of(result: Mapping[str, Any] | None) -> Limit | None:
    """The limit of a result, to be drawn; where nobody knows its upper end, the band ends at the limit itself."""
    limit = result["limit"] if result is not None else None
    if limit is None:
        return None
    estimate = limit["requests_per_second"]
    return Limit(limit["low"], estimate, estimate if is_at_least(limit) else limit["high"])


def tiles_of(result: Mapping[str, Any], *, thinks: str, priced: str) -> list[Tile]:
    """The outcome in figures: the limit, where there is one, and one user alone.

    Args:
        thinks: the note of the number of users.
        priced: the note of the cost.
    """
    limit, single = result["limit"], result["single_user"]
    tiles = []
    if limit is not None:
        spread = spread_of(limit)
        between = f"between {spread[0]} and {spread[1]}" if spread else ""
        of = f"of requests of {request_words(result['workload'])}"
        notes = filter(None, ["at least" if is_at_least(limit) else "", between, held_words(limit), of])
        broken = limit["broken_promise"]
        speed = numbers.rate(limit["output_tokens_per_second"]).text
        tiles += [
            Tile("Operating limit", per_second(limit["requests_per_second"]), "requests/s", "; ".join(notes)),
            Tile("Bound by", limit["bound_by"], "", f"beyond it {broken_words(broken)}" if broken else ""),
            Tile("Just below it", speed, "tokens/s", f"goodput {limit['goodput']:.2f} requests/s"),
        ]
        if limit["users"] is not None:
            tiles.append(Tile("Users at once", numbers.count(round(limit["users"])), "", thinks))
        if limit["cost_per_million_output_tokens"] is not None:
            cost = f"{limit['cost_per_million_output_tokens']:.2f}"
            tiles.append(Tile("A million output tokens", cost, "", f"{priced}, prompts included".removeprefix(", ")))
    if single is not None and single["requests"]:
        first = numbers.seconds(single["ttft_p50_seconds"])
        whole = f"median; whole answer {numbers.seconds(single['e2e_p50_seconds'])}"
        tiles.append(Tile("One user alone", first.text, f"{first.unit} to the first token", whole))
    return tiles


def _tiles(result: Mapping[str, Any], asked: Mapping[str, Any]) -> list[Tile]:
    """With what the page was told of users and costs."""
    think, price = asked["think_time"], asked["price_per_hour"]
    thinks = f"each {think:g} s between an answer and the next question" if think is not None else ""
    return tiles_of(result, thinks=thinks, priced=f"at {price:g} an hour" if price is not None else "")


def _row(title: str, run: Mapping[str, Any], verdict: str) -> dict[str, Any]:
    few = run["requests"] < ENOUGH
    return {
        "title": title,
        "seed": run["seed"],
        "latencies": [str(numbers.seconds(run[f"{name}_p95_seconds"])) for name in LATENCIES],
        "few": few,
        "answers": numbers.count(run["requests"]),
        "errors": numbers.count(run["errors"]),
        "goodput": f"{run['goodput']:.2f}" if verdict else numbers.MISSING,
        "waiting": f"{run['waiting']:.1f}",
        "tokens": numbers.rate(run["output_tokens_per_second"]).text,
        "late": str(numbers.seconds(run["dispatch_lag_p99_seconds"])),
        "verdict": verdict,
        "level": verdict_of(run) if verdict else "",
    }


def _about(told: Mapping[str, Any]) -> str:
    asked = told["asked"]
    targets = [
        f"{NAMES[name]} within {asked[f'{name}_p95_seconds']:g} s"
        for name in LATENCIES
        if asked[f"{name}_p95_seconds"] is not None
    ]
    promised = f"95 % of {', '.join(targets)}" if targets else "targets of their own"
    come = f", {asked['arrivals']} arrivals" if asked.get("arrivals") else ""  # older ones do not tell
    cv = f" of CV {asked['gap_cv']:g}" if asked.get("gap_cv") else ""
    divided = _divided_by(told)
    return f"{asked['workload']}{come}{cv}{divided}; {promised}; by {told['who']}, {numbers.clock_of(told['began'])}"


def _divided_by(told: Mapping[str, Any]) -> str:
    """By what the lengths of a search are divided, as far as that is known by now, for the end of a list."""
    result = told["result"]
    if result is not None:
        workload = result["workload"]
        return _short(workload["factor"], workload["mean_output_tokens"])
    chosen = (told["single_user"] or {}).get("factor") or told["asked"].get("factor")  # older ones do not tell
    return _short(chosen, None)


def _short(factor: float | None, mean_output_tokens: float | None) -> str:
    """`, lengths divided by 64 (answers of 3.2 tokens)`; empty where they are as they were."""
    answers = f" (answers of {numbers.rate(mean_output_tokens)} tokens)" if mean_output_tokens else ""
    return f", {divided}{answers}" if (divided := divided_words(factor)) else ""


def _interval(limit: Mapping[str, Any]) -> str | None:
    return None if limit["requests_per_second"] is None else interval_words(limit)
