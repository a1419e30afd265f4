"""Numbers in order, of which some come and some go all the time."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import itemgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PART: Final = 256
MIN_PART: Final = 64

_last = itemgetter(-1)


class Ordered:
    """A sorted multiset in short sorted lists, one behind the other.

    To add to one long sorted list moves half of it: a quarter of a megabyte at 32,768 numbers, for every token, and all
    of that must come from memory again, where a model's step has emptied the processor's caches of it.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        ordered, size = sorted(values), MAX_PART // 2
        self._parts = [ordered[first : first + size] for first in range(0, len(ordered), size)]  # none is empty
        self._size = len(ordered)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> float:
        """The number that has `index` others before it; from 0."""
        if index < 0:
            raise IndexError(index)
        for part in self._parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    def add(self, value: float) -> None:
        """One more."""
        self._size += 1
        parts = self._parts
        if not parts:
            parts.append([value])
            return
        at = min(bisect_left(parts, value, key=_last), len(parts) - 1)
        insort(parts[at], value)
        if len(parts[at]) > MAX_PART:
            parts.insert(at + 1, parts[at][MAX_PART // 2 :])
            del parts[at][MAX_PART // 2 :]

    def remove(self, value: float) -> None:
        """One less, of those that equal `value`; there must be one."""
        parts = self._parts
        at = bisect_left(parts, value, key=_last)
        part = parts[at]
        del part[bisect_left(part, value)]
        self._size -= 1
        if at and len(part) < MIN_PART:
            parts[at - 1] += part
            del parts[at]
        elif not part:
            del parts[at]
