"""What came of tuning, for a report: what was tried, what was found, and whether it is to be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.limit.tune_words import came_of, ran_out, setting_words, verdict_lines
from app.limit.words import per_second
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping


def tune_variables(tune: Mapping[str, Any]) -> dict[str, Any]:
    """Tables and sentences."""
    return {
        "verdict": verdict_lines(tune),
        "ran_out": ran_out(tune),
        "candidates": [_candidate(one) for one in tune["candidates"]],
        "idle": [f"{one['name']}: {one['idle']}" for one in tune["controls"] if one["idle"]],
        "pairs": [
            [str(pair["seed"]), *[_rate(pair[name]) for name in ("present", "found")], _times(pair["gain"])]
            for pair in tune["evidence"]["pairs"]
        ],
        "found": setting_words(_changes(tune)) if tune["found"] else "",
        "trade_off": _trade_off(tune["trade_off"]) if tune["trade_off"] else None,
    }


def _candidate(one: Mapping[str, Any]) -> list[str]:
    margin = one["margin"]
    return [
        f"{one['control']} {one['value']}",
        str(one["against"][one["control"]]),
        per_second(one["rate"]),
        _times(one["excess"]),
        _times(one["their_excess"]),
        f"{margin['ratio']:.2f} ({margin['low']:.2f} to {margin['high']:.2f})" if margin else numbers.MISSING,
        came_of(one),
    ]


def _trade_off(trade_off: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "control": trade_off["control"],
        "rate": per_second(trade_off["rate"]),
        "rows": [
            [
                numbers.count(point["value"]),
                *[str(numbers.seconds(point[f"{name}_p95_seconds"])) for name in ("ttft", "itl", "e2e")],
                numbers.count(point["requests"]),
                {True: "yes", False: "no", None: "unknown"}[point["holds"]],
            ]
            for point in trade_off["points"]
        ],
    }


def _changes(tune: Mapping[str, Any]) -> dict[str, list[Any]]:
    present, found = tune["present"]["settings"], tune["found"]["settings"]
    return {name: [present[name], value] for name, value in found.items() if present[name] != value}


def _rate(value: float | None) -> str:
    return numbers.MISSING if value is None else per_second(value)


def _times(value: float | None) -> str:
    return numbers.MISSING if value is None else f"{value:.2f}"
