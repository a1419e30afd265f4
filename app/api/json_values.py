"""What is true of a whole JSON value, however it is nested. Nothing here recurses."""

from __future__ import annotations

from itertools import islice
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
    """Where a number stands that no float can hold (`1e999` is read as infinity), if there is one.

    Level by level, for that is quick where it matters: a long list of numbers costs two passes in C.
    """
    levels: list[list[Any]] = []
    level: list[Any] = [value]
    while level:
        kinds = set(map(type, level))
        if float in kinds and not all(map(isfinite, [entry for entry in level if type(entry) is float])):
            found = [type(entry) is float and not isfinite(entry) for entry in level]
            return _path_to(levels, found.index(True))
        if kinds.isdisjoint((dict, list)):
            return None
        levels.append(level)
        inside: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                inside.extend(entry.values())
            elif isinstance(entry, list):
                inside.extend(entry)
        level = inside
    return None


def _path_to(levels: list[list[Any]], index: int) -> Path:
    """The path to a value, by its number among all those just below the last of `levels`."""
    path: list[int | str] = []
    for level in reversed(levels):
        for number, entry in enumerate(level):
            size = len(entry) if isinstance(entry, (dict, list)) else 0
            if index < size:
                path.append(next(islice(entry, index, None)) if isinstance(entry, dict) else index)
                index = number
                break
            index -= size
    return tuple(reversed(path))


def is_small(data: bytes | bytearray, max_values: int, max_containers: int) -> bool:
    """Whether JSON has no more values than that, told by its commas and brackets: it is not read.

    Args:
        max_containers: how many of the values may be lists and objects.
    """
    if _has_few(data, max_values, max_containers):
        return True
    # Those that stand in texts do not count.
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 4 * max_values:
        return False
    return _has_few(b"".join(bare.split(b'"')[::2]), max_values, max_containers)


def _has_few(data: bytes | bytearray, max_values: int, max_containers: int) -> bool:
    containers = data.count(b"[") + data.count(b"{")
    return containers <= max_containers and containers + data.count(b",") <= max_values
