"""Counts of the last hour in columns of time: what windows and charts are made of, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

# Seconds that can be looked back, and the width of a column there, in seconds: each is a multiple of the first.
WIDTHS: Final = {60: 2, 300: 4, 900: 12, 3600: 48}
WINDOWS: Final = tuple(WIDTHS)
DEFAULT_WINDOW: Final = 300
_SLICE: Final = min(WIDTHS.values())

K = TypeVar("K", bound="Hashable")


class Column(NamedTuple, Generic[K]):
    """What was counted from `start` on, for the width of a column."""

    start: float
    counts: Counter[K]


class Timeline(Generic[K]):
    """Adds up amounts by key, once for each window: a minute in columns of two seconds, an hour in columns of 48.

    At most 77 columns a window are kept, each with the keys that came up in it.
    """

    def __init__(self) -> None:
        self._columns: dict[int, deque[Column[K]]] = {seconds: deque() for seconds in WINDOWS}
        self._open: Counter[K] = Counter()
        self._end = -math.inf
        self._began: float | None = None

    def add(self, now: float, key: K, amount: float = 1) -> None:
        """Count `amount` at time `now` (never decreasing)."""
        if now >= self._end:
            self._turn(now)
        self._open[key] += amount  # type: ignore[assignment]

    def columns(self, now: float, seconds: int) -> list[Column[K]]:
        """The columns that lie wholly in the last `seconds`, one of `WINDOWS`, and the one that is being filled.

        Columns in which nothing was counted may be missing.
        """
        if now >= self._end:
            self._turn(now)
        start = self.start(now, seconds)
        kept = [column for column in self._columns[seconds] if column.start >= start]
        if self._open:
            begun = _floor(self._end - _SLICE, WIDTHS[seconds])
            if kept and kept[-1].start == begun:
                kept[-1] = Column(begun, kept[-1].counts + self._open)
            else:
                kept.append(Column(begun, self._open))
        return kept

    def total(self, now: float, seconds: int) -> Counter[K]:
        """All that `columns` has, together."""
        total: Counter[K] = Counter()
        for column in self.columns(now, seconds):
            total.update(column.counts)
        return total

    def start(self, now: float, seconds: int) -> float:
        """Where the first column begins that lies wholly in the window."""
        return -_floor(seconds - now, WIDTHS[seconds])

    def covered(self, now: float, seconds: int) -> float:
        """Seconds that `total` is about: at least one, and no more than there were since the first count."""
        began = now if self._began is None else self._began
        return max(1.0, now - max(self.start(now, seconds), began))

    def _turn(self, now: float) -> None:
        """Put what was counted up to here into its columns, and begin anew."""
        if self._open:
            begun = self._end - _SLICE
            for seconds, columns in self._columns.items():
                start = _floor(begun, WIDTHS[seconds])
                if not columns or columns[-1].start != start:
                    columns.append(Column(start, Counter()))
                columns[-1].counts.update(self._open)
            self._open = Counter()
        if self._began is None:
            self._began = now
        for seconds, columns in self._columns.items():
            while columns and columns[0].start < now - seconds - WIDTHS[seconds]:
                columns.popleft()
        self._end = _floor(now, _SLICE) + _SLICE


def _floor(value: float, width: int) -> float:
    return math.floor(value / width) * float(width)
