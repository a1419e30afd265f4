"""What is true of a whole JSON value, however it is nested. Nothing here recurses."""

from __future__ import annotations

from math import isfinite
from typing import Any

Path = tuple[int | str, ...]


def depth(value: object) -> int:
    """Levels of lists and objects."""
    levels, level = 0, [value]
    while level := [entry for entry in level if isinstance(entry, (dict, list))]:
        levels += 1
        level = [inner for entry in level for inner in (entry.values() if isinstance(entry, dict) else entry)]
    return levels


def find_non_finite(value: object) -> Path | None:
    """Where a number stands that no float can hold (`1e999` is read as infinity), if there is one."""
    if _is_finite(value):
        return None
    rest: list[tuple[Path, Any]] = [((), value)]
    while rest:
        path, entry = rest.pop()
        if isinstance(entry, float) and not isfinite(entry):
            return path
        if isinstance(entry, dict):
            rest += [((*path, key), inner) for key, inner in entry.items()]
        elif isinstance(entry, list):
            rest += [((*path, index), inner) for index, inner in enumerate(entry)]
    return None


def _is_finite(value: object) -> bool:
    """Level by level, for that is quick where it matters: a long list of numbers costs two passes in C."""
    level: list[Any] = [value]
    while level:
        kinds = set(map(type, level))
        if float in kinds and not all(map(isfinite, [entry for entry in level if type(entry) is float])):
            return False
        if kinds.isdisjoint((dict, list)):
            return True
        inside: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inside.extend(entry.values())
            elif isinstance(entry, list):
                inside.extend(entry)
        level = inside
    return True
