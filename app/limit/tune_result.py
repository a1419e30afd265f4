"""What came of tuning, as `tune` of `--json` has it.

{"controls":   [{"name", "range": [least, most] or null, "choices": [...] or null, "present", "best", "tried": [...],
                 "idle": why it was not turned, or null}],
 "candidates": [{"control", "value", "settings", "against", "rate", "seed", "requests", "ended_early", "excess",
                 "their_excess", "margin": {"ratio", "low", "high"} or null, "verdict",
                 "beyond": {"rate", "excess"} or null, "limit": {...} or null, "why"}],
 "present":    {"settings", "limit": {"requests_per_second", "low", "high": null where it is only "at least"} or null},
 "found":      the same of the best that the search came upon, or null,
 "best":       {"settings", "changes": {name: [present, best]}, "limit"}: the present ones where none is believed in,
 "evidence":   {"believed", "complete": there was time for it, "why", "gain",
                "pairs": [{"seed", "present", "found", "gain"}], those that count},
 "trade_off":  {"control", "rate", "seed", "points": [{"value", "ttft_p95_seconds", "itl_p95_seconds",
                "e2e_p95_seconds", "requests", "holds"}]} or null,
 "complete":   whether everything was tried in the time,
 "unfinished": what has ended it before its time, or null,
 "applied":    whether the server has the best settings now}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.limit.summary import figures
from app.limit.tune_confirm import MIN_PAIRS
from app.limit.tune_controls import BUDGET, changes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.limit.runs import Run
    from app.limit.statistics import Interval
    from app.limit.tune import Tuned
    from app.limit.tune_candidates import Candidate, Standing
    from app.limit.tune_controls import Control

POINT: Final = ("ttft_p95_seconds", "itl_p95_seconds", "e2e_p95_seconds", "requests", "holds")


def tune_result(tuned: Tuned, *, applied: bool) -> dict[str, Any]:
    """The object, keys as above."""
    present, best = tuned.present, tuned.best
    return {
        "controls": [_control(one, tuned) for one in tuned.controls],
        "candidates": [_candidate(one) for one in tuned.candidates],
        "present": _standing(present),
        "found": _standing(tuned.found) if tuned.found is not None else None,
        "best": {**_standing(best), "changes": changes_of(best.values, present.values)},
        "evidence": _evidence(tuned),
        "trade_off": _trade_off(tuned.budgets),
        "complete": not tuned.is_cut and not tuned.unfinished,
        "unfinished": tuned.unfinished or None,
        "applied": applied,
    }


def _control(control: Control, tuned: Tuned) -> dict[str, Any]:
    return {
        "name": control.name,
        "range": list(control.span) if control.span is not None else None,
        "choices": list(control.choices) or None,
        "present": tuned.present.values[control.name],
        "best": tuned.best.values[control.name],
        "tried": [one.value for one in tuned.candidates if one.control == control.name],
        "idle": tuned.idle.get(control.name),
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    margin = one.margin
    return {
        "control": one.control,
        "value": one.value,
        "settings": {**one.against, one.control: one.value},
        "against": one.against,
        "rate": one.theirs.rate,
        "seed": one.theirs.seed,
        "requests": len(one.run.finished) if one.run is not None else 0,
        "ended_early": one.run is not None and one.run.stopped,
        "excess": one.run.excess if one.run is not None else None,
        "their_excess": one.theirs.excess,
        "margin": None if margin is None else {"ratio": margin.estimate, "low": margin.low, "high": margin.high},
        "verdict": one.verdict,
        "beyond": {"rate": one.beyond.rate, "excess": one.beyond.excess} if one.beyond is not None else None,
        "limit": _limit(one.standing.limit) if one.standing is not None else None,
        "why": one.why or None,
    }


def _standing(standing: Standing) -> dict[str, Any]:
    return {"settings": standing.values, "limit": _limit(standing.limit)}


def _limit(limit: Interval | None) -> dict[str, float | None] | None:
    if limit is None:
        return None
    return {"requests_per_second": limit.estimate, "low": limit.low, "high": limit.end}


def _evidence(tuned: Tuned) -> dict[str, Any]:
    verdict = tuned.verdict
    if verdict is None:
        number = len(tuned.candidates)
        none = "nothing else was tried in the time there was" if tuned.is_cut else "nothing else could be tried"
        why = f"of {number} none was better" if number else none
        is_complete = number > 0 or not tuned.is_cut
        return {"believed": False, "complete": is_complete, "why": why, "gain": None, "pairs": []}
    pairs = []
    for pair in [pair for pair in tuned.pairs if pair.tells]:
        present, found = pair.limits
        pairs.append({"seed": pair.seed, "present": present, "found": found, "gain": pair.gain})
    return {
        "believed": verdict.is_believed,
        "complete": len(pairs) >= MIN_PAIRS,
        "why": verdict.why,
        "gain": verdict.gain,
        "pairs": pairs,
    }


def _trade_off(budgets: Sequence[tuple[int, Run]]) -> dict[str, Any] | None:
    if not budgets:
        return None
    points = []
    for value, run in budgets:
        known = figures(run)
        points.append({"value": value, **{name: known[name] for name in POINT}})
    _, first = budgets[0]
    return {"control": BUDGET, "rate": first.rate, "seed": first.seed, "points": points}
