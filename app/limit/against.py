"""Two results side by side: one of now and an older one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from app.limit.words import interval_words, is_at_least
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Where these differ, two limits are not of the same thing.
SAME: Final = ("targets", "classes", "workload")


def read_result(path: Path) -> dict[str, Any]:
    """What an earlier `relevo limit --json` wrote, or a search from the dashboard has found.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and isinstance(found.get("result"), dict):
        found = found["result"]  # a search from the dashboard, which has other things beside it
    if not isinstance(found, dict) or not {"limit", "curve", *SAME} <= found.keys():
        raise ConfigError(f"{path} is no result of `relevo limit --json`, nor a search of the dashboard with one.")
    return found


def against_lines(result: Mapping[str, Any], older: Mapping[str, Any]) -> list[str]:
    """What became of the limit, or of that of each policy; whether the two can be compared at all."""
    lines = [
        f"Other {name} than then: the limits are not of the same thing."
        for name in SAME
        if _differ(name, result, older)
    ]
    both = (("Now", result), ("Then", older))
    simulated = [when for when, one in both if not one.get("machine")]
    if len(simulated) == 1 and all("machine" in one for _, one in both):
        lines.append(f"{simulated[0]} is of a machine in virtual time (--simulate), and the other was measured.")
    if "policies" not in result and "policies" not in older:
        return [*lines, _both(result["limit"], older["limit"])]
    now, then = _by_policy(result, older), _by_policy(older, result)
    lines += [f"{name}: {_both(limit, then[name])}" for name, limit in now.items() if name in then]
    if not now.keys() & then.keys():
        lines.append("Nothing can be compared: they are of other policies.")
    for when, names in (("now", now.keys() - then.keys()), ("then", then.keys() - now.keys())):
        lines += [f"{name} was measured only {when}." for name in sorted(names)]
    return lines


def _by_policy(result: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """The limit under each policy; of one that does not tell its policy, under that which stands for the other."""
    if "policies" in result:
        return {name: one["limit"] for name, one in result["policies"].items()}
    return {str((result.get("settings") or {}).get("policy") or other["policy"]): result["limit"]}


def _both(now: Mapping[str, Any] | None, then: Mapping[str, Any] | None) -> str:
    said = f"Then: {_words(then)}. Now: {_words(now)}."
    if now is None or then is None or is_at_least(now) or is_at_least(then):
        return said
    if _figures(now) == _figures(then):
        return f"{said} That is the same."
    ratio = now["requests_per_second"] / then["requests_per_second"]
    apart = now["low"] > then["high"] or now["high"] < then["low"]
    verdict = "" if apart else "; the intervals overlap, so this may be chance"
    return f"{said} That is {ratio:.2f} times{verdict}."


def _figures(limit: Mapping[str, Any]) -> list[float]:
    return [limit[name] for name in ("requests_per_second", "low", "high")]


def _differ(name: str, result: Mapping[str, Any], older: Mapping[str, Any]) -> bool:
    return bool(json.loads(json.dumps(result[name])) != older[name])


def _words(limit: Mapping[str, Any] | None) -> str:
    return "no limit" if limit is None else interval_words(limit)
