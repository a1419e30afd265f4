"""Exact percentiles over the last minutes, and counts by fine buckets where there are too many samples to keep."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine.ordered import Ordered
from engine.timeline import DEFAULT_WINDOW, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Seq

T = TypeVar("T")

PERCENTS: Final = (50, 90, 95, 99)
# A window with more is answered from the counts: to put so many in order takes milliseconds, in which nobody is served.
MAX_SAMPLES: Final = 16_384
# A bucket's edges are a hundredth apart, the lowest is a tenth of a millisecond.
LEAST_SECONDS: Final = 1e-4
_LOG_RATIO: Final = math.log(1.01)
# The order of a window that nobody asks for is let go of after so long.
_FORGET_SECONDS: Final = 60.0
_TRIM: Final = 512


def nearest_rank(ordered: Seq[float] | Ordered, percent: int) -> float:
    """The smallest of some samples that at least `percent` per cent of them do not exceed.

    Args:
        ordered: the samples, ascending; one at least.
    """
    return ordered[_rank(len(ordered), percent)]


def bucket_of(seconds: float) -> int:
    """The number of the bucket that a sample falls into."""
    return 0 if seconds <= LEAST_SECONDS else math.ceil(math.log(seconds / LEAST_SECONDS) / _LOG_RATIO - 1e-9)


def edge_of(bucket: int) -> float:
    """The upper edge of a bucket, in seconds: at most 1 % above each sample in it, but for those in the lowest."""
    return LEAST_SECONDS * math.exp(bucket * _LOG_RATIO)


def counted_ranks(counts: Mapping[int, float], percents: Seq[int] = PERCENTS) -> list[float]:
    """Percentiles from counts by bucket, none of them empty: the edge of the bucket that the nearest rank is in."""
    buckets = sorted(counts)
    totals = list(accumulate(counts[bucket] for bucket in buckets))
    ranks = [_rank(int(totals[-1]), percent) for percent in percents]
    return [edge_of(buckets[bisect_left(totals, rank + 1)]) for rank in ranks]


@dataclass(slots=True)
class _Window:
    """The samples from number `low` up to, not including, `high`, in order."""

    low: int
    high: int
    ordered: Ordered
    asked: float


class Samples:
    """The samples of one latency, of the last hour.

    To add one costs little, as it happens for every token: a window is put in order when asked for, and goes on from
    there. Percentiles are exact while a window holds at most `max_samples`; beyond that they are the edges of buckets,
    at most 1 % too high, and `exact` says so.

    Attributes:
        timeline: the number of samples by bucket (`bucket_of`).
    """

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self.timeline: Timeline[int] = Timeline()
        self._max_samples = max_samples
        self._times = array("d")
        self._values = array("d")
        self._dropped = 0  # samples that came before the first that is kept
        self._dropped_time = -math.inf  # when the last of those came
        self._windows: dict[int, _Window] = {}
        self._measured: dict[tuple[Callable[..., Any], int], dict[float, Any]] = {}

    def add(self, now: float, value: float) -> None:
        """Take a sample, in seconds, at time `now` (never decreasing)."""
        self._times.append(now)
        self._values.append(value)
        self.timeline.add(now, bucket_of(value))
        surplus = len(self._times) - self._max_samples
        if surplus >= min(_TRIM, self._max_samples):
            self._drop(surplus)

    def summary(self, now: float, seconds: int = DEFAULT_WINDOW) -> dict[str, float | int | bool | None]:
        """Number of samples in the last `seconds`, and their percentiles (nearest rank; `None` without samples)."""
        for other, window in list(self._windows.items()):
            if window.asked < now - _FORGET_SECONDS:
                del self._windows[other]
        exact = self._dropped_time < now - seconds
        if exact:
            ordered = self._order(now, seconds)
            count = len(ordered)
            values = [nearest_rank(ordered, percent) for percent in PERCENTS] if count else None
        else:
            self._windows.pop(seconds, None)
            counts = self.timeline.total(now, seconds)
            count = counts.total()
            values = counted_ranks(counts) if count else None
        return {
            "count": count,
            **{f"p{percent}": values[index] if values else None for index, percent in enumerate(PERCENTS)},
            "window_seconds": float(seconds),
            "exact": exact,
        }

    def by_column(self, now: float, seconds: int, measure: Callable[[Mapping[int, int]], T]) -> dict[float, T]:
        """What `measure` makes of each column's counts; of a column that is over it is asked once."""
        columns = self.timeline.columns(now, seconds)
        known = self._measured.get((measure, seconds), {})
        found = {start: known[start] if start in known else measure(counts) for start, counts in columns[:-1]}
        self._measured[measure, seconds] = found
        return found | {start: measure(counts) for start, counts in columns[-1:]}

    def _order(self, now: float, seconds: int) -> Ordered:
        """The kept samples of a window: in step with those that came and went since it was asked for last."""
        start = bisect_left(self._times, now - seconds)
        low, high = self._dropped + start, self._dropped + len(self._times)
        window = self._windows.get(seconds)
        if window is None or window.high <= low:
            window = self._windows[seconds] = _Window(low, high, Ordered(self._values[start:]), now)
            return window.ordered
        self._move(window, low)
        for value in self._values[window.high - self._dropped :]:
            window.ordered.add(value)
        window.high, window.asked = high, now
        return window.ordered

    def _move(self, window: _Window, low: int) -> None:
        """Let a window begin with sample number `low`."""
        for value in self._values[window.low - self._dropped : low - self._dropped]:
            window.ordered.remove(value)
        window.low = max(window.low, low)

    def _drop(self, number: int) -> None:
        """Let go of the oldest samples."""
        for seconds, window in list(self._windows.items()):
            if window.high <= self._dropped + number:
                del self._windows[seconds]
            else:
                self._move(window, self._dropped + number)
        self._dropped += number
        self._dropped_time = self._times[number - 1]
        del self._times[:number]
        del self._values[:number]


def _rank(count: int, percent: int) -> int:
    return max(0, -(-count * percent // 100) - 1)
