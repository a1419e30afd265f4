"""What came of tuning, as lines of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.limit.tune_controls import changes_of
from app.limit.words import aligned, interval_words, per_second
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAME: Final = "The settings you have are as good as any that were tried"
UNKNOWN: Final = "Whether other settings are better is not known"
OVER: Final = "The time was over before everything was tried; give a larger --duration."


def tune_lines(tune: Mapping[str, Any]) -> list[str]:
    """Everything; where tuning stands in the result of a search."""
    return [
        *(["", *_candidates(tune)] if tune["candidates"] else []),
        *[f"{one['name']} was not turned: {one['idle']}." for one in tune["controls"] if one["idle"]],
        *([OVER] if ran_out(tune) else []),
        *(["", *_trade_off(tune["trade_off"])] if tune["trade_off"] else []),
        "",
        *verdict_lines(tune),
    ]


def ran_out(tune: Mapping[str, Any]) -> bool:
    """Whether the time was over before everything was tried; what was ended otherwise has said so."""
    return not tune["complete"] and not tune.get("unfinished")


def setting_words(changes: Mapping[str, Sequence[Any]]) -> str:
    """`max_num_seqs 16 to 32, policy static to continuous`."""
    return ", ".join(f"{name} {old} to {new}" for name, (old, new) in changes.items())


def _candidates(tune: Mapping[str, Any]) -> list[str]:
    rows = [["tried", "instead of", "requests/s", "missed/allowed", "before", "ratio (nine in ten draws)", ""]]
    rows += [candidate_cells(one) for one in tune["candidates"]]
    said = "One control at a time, against the best until then, with the same requests at a rate just beyond its limit:"
    return [said, *aligned(rows)]


def candidate_cells(one: Mapping[str, Any]) -> list[str]:
    """A row of the table of `candidates`."""
    return [
        f"{one['control']} {one['value']}",
        str(one["against"][one["control"]]),
        per_second(one["rate"]),
        times(one["excess"]),
        times(one["their_excess"]),
        _margin(one["margin"]),
        came_of(one),
    ]


def _margin(margin: Mapping[str, float] | None) -> str:
    if margin is None:
        return numbers.MISSING
    # A promise about the whole run, as that waiting does not grow, is not drawn anew.
    spread = f" ({margin['low']:.2f} to {margin['high']:.2f})" if margin["low"] < margin["high"] else ""
    return f"{margin['ratio']:.2f}{spread}"


def times(ratio: float | None) -> str:
    """How many times something is another."""
    return numbers.MISSING if ratio is None else f"{ratio:.2f}"


def came_of(one: Mapping[str, Any]) -> str:
    """What came of one of `candidates`."""
    if one["verdict"] == "refused":
        return f"refused: {one['why']}"
    if one["verdict"] == "unknown":
        return "unknown: the generator was late"
    early = ", ended early" if one["ended_early"] else ""
    if one["limit"]:
        return f"{one['verdict']}: limit {_limit(one['limit'])}"
    beyond = one["beyond"]
    too_many = f": lost at {per_second(beyond['rate'])} requests/s" if beyond and beyond["excess"] > 1 else ""
    return f"{one['verdict']}{early}{too_many}"


def _limit(limit: Mapping[str, float | None] | None) -> str:
    return "none" if limit is None else interval_words(limit)


def _trade_off(trade_off: Mapping[str, Any]) -> list[str]:
    rows = [[trade_off["control"], "first token p95", "gap p95", "answer p95", "answers", "holds"]]
    rows += [point_cells(point) for point in trade_off["points"]]
    return [f"The token budget at {per_second(trade_off['rate'])} requests/s:", *aligned(rows)]


def point_cells(point: Mapping[str, Any]) -> list[str]:
    """A row of the table of token budgets."""
    return [
        numbers.count(point["value"]),
        *[str(numbers.seconds(point[f"{name}_p95_seconds"])) for name in ("ttft", "itl", "e2e")],
        numbers.count(point["requests"]),
        {True: "yes", False: "no", None: "unknown"}[point["holds"]],
    ]


def verdict_lines(tune: Mapping[str, Any]) -> list[str]:
    """What to do, and why."""
    evidence, best, found = tune["evidence"], tune["best"], tune["found"]
    if not evidence["believed"]:
        if found is None:
            return [f"{SAME if tune['candidates'] and evidence['complete'] else UNKNOWN}: {evidence['why']}."]
        changes = changes_of(found["settings"], tune["present"]["settings"])
        promised = [one["limit"] for one in tune["candidates"] if one["limit"]][-1]
        hoped = f"{setting_words(changes)} promised {_limit(promised)}, but {evidence['why']}"
        return [f"{SAME if evidence['complete'] else UNKNOWN}: {hoped}."]
    gain = f": {evidence['gain']:.2f} times the limit" if evidence["gain"] is not None else ""
    lines = [
        f"Better for these targets: {setting_words(best['changes'])}{gain}; {evidence['why']}.",
    ]
    flags = " ".join(f"--{name.replace('_', '-')} {_flag(name, new)}" for name, (_, new) in best["changes"].items())
    if tune["applied"]:
        return [*lines, f"They hold now, until the server is started again; from then on with {flags}."]
    kept = " to the end" if tune.get("unfinished") else ""
    return [
        *lines,
        f"They were not kept. From the next start on: {flags}; a server of --url keeps them with --apply{kept}.",
    ]


def _flag(name: str, value: Any) -> Any:
    return "none" if name == "long_prefill_token_threshold" and not value else value
