"""What came of tuning, for a report: what was tried, what was found, and whether it is to be believed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.limit.tune_controls import changes_of
from app.limit.tune_words import candidate_cells, point_cells, ran_out, setting_words, times, verdict_lines
from app.limit.words import per_second
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping


def tune_variables(tune: Mapping[str, Any]) -> dict[str, Any]:
    """Tables and sentences."""
    found, trade_off = tune["found"], tune["trade_off"]
    return {
        "verdict": verdict_lines(tune),
        "ran_out": ran_out(tune),
        "candidates": [candidate_cells(one) for one in tune["candidates"]],
        "idle": [f"{one['name']}: {one['idle']}" for one in tune["controls"] if one["idle"]],
        "pairs": [
            [str(pair["seed"]), *[_rate(pair[name]) for name in ("present", "found")], times(pair["gain"])]
            for pair in tune["evidence"]["pairs"]
        ],
        "found": setting_words(changes_of(found["settings"], tune["present"]["settings"])) if found else "",
        "trade_off": _trade_off(trade_off) if trade_off else None,
    }


def _trade_off(trade_off: Mapping[str, Any]) -> dict[str, Any]:
    rows = [point_cells(point) for point in trade_off["points"]]
    return {"control": trade_off["control"], "rate": per_second(trade_off["rate"]), "rows": rows}


def _rate(value: float | None) -> str:
    return numbers.MISSING if value is None else per_second(value)
