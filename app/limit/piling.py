"""Whether more requests come than are answered, from how many were there as each one came.

A server that gets more than it can serve keeps a share of it, 1 - capacity/rate: for as long as that goes on there are
ever more requests, whether they wait for a seat or share the machine with ever more others. By chance there are more of
them, too, after many have come at once. So two things are looked at: by how much there are more than before, and by how
much there would be had they come at an even pace; the smaller counts. Where a server keeps up the first is small but
after a crowd, and the second is small just then. Where few come in the meantime for each that is there nothing can be
said: seats may still fill, or answers be longer than usual for a while.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the requests that come, the share that may stay unanswered, beside what may by chance. In virtual time, with 16
# seats and lengths that are exponential, 0 of 80 runs at 0.9 of what is served at most were refused so and 3 of 80 at
# 0.95; at 1.1 of it 20 of 40 with 300 requests were, and 34 of 40 with 1,000. Where all were served at once, 0 of 1,400
# were, with seven mixes of lengths, some with few that are a hundred times as long as the others.
MAX_UNANSWERED: Final = 0.04
# So many come at least, from the first quarter to the last, for each that was there.
LEAST_TURNS: Final = 6


def there_before(dues: Sequence[float], spans: Sequence[tuple[float, float]]) -> list[int]:
    """How many others are there when each of some requests comes.

    Args:
        dues: when they come.
        spans: from when to when each of all requests is there, those too; until infinity for one without an end.
    """
    came, left = sorted(begin for begin, _ in spans), sorted(end for _, end in spans)
    return [bisect_left(came, due) - bisect_right(left, due) for due in dues]


def enough_to_judge(there: Sequence[int], fills: float = 0.0) -> int:
    """How many requests must count for it to be seen whether ever more are there, where so many were.

    Args:
        fills: by how many more of them there came to be in the end anyway (`filled`).
    """
    return ceil(LEAST_TURNS * (fmean(there) + fills) * 4 / 3)  # from the first quarter to the last three quarters come


def piling_excess(due: np.ndarray, there: np.ndarray, rate: float, fills: float, weights: np.ndarray) -> np.ndarray:
    """The share of requests that stays unanswered, over what may: from the first quarter to the last.

    Args:
        due: when each request was, rising: [n] seconds.
        there: how many others were there then: [n].
        rate: requests a second that are due on average.
        fills: by how many more are there where all are served at once (`filled`).
        weights: how often each counts: [draws, n].

    Returns:
        [draws]; 0 where nothing can be said. By chance about the root of how many are there may be more.
    """
    quarter = len(due) // 4
    if not quarter:
        return np.zeros(len(weights))
    ahead = np.arange(len(due)) - rate * due  # of an even pace
    columns = np.stack([there, there - ahead, due], axis=1).astype(float)  # [n, 3]
    before, after = (_means(columns[part], weights[:, part]) for part in (slice(0, quarter), slice(-quarter, None)))
    grown, grown_evenly, passed = (after - before).T
    there_then = before[:, 0] + fills
    may = MAX_UNANSWERED * rate * passed + np.sqrt(1 + there_then)
    excess: np.ndarray = np.maximum(np.minimum(grown, grown_evenly) - fills, 0.0) / may
    return np.where(rate * passed >= LEAST_TURNS * there_then, excess, 0.0)


def filled(dues: Sequence[float], spans: Sequence[float], rate: float) -> float:
    """By how many more requests are there from the first quarter to the last where all are served at once.

    After t seconds those are there that came within as long as they take: rate times the mean of min(span, t). Where
    few answers are far longer than most, it takes as long as they do until there are no more of them.

    Args:
        dues: when each request was, rising, in seconds since the first of all, those that do not count too.
        spans: seconds that answers take, without the wait for them.
    """
    quarter = len(dues) // 4
    if not quarter or not spans:
        return 0.0
    short = np.minimum.outer(np.array([*dues[:quarter], *dues[-quarter:]]), np.array(spans)).mean(axis=1)  # [2 quarter]
    return rate * float(short[quarter:].mean() - short[:quarter].mean())


def _means(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[draws, columns] of [n, columns] and [draws, n]; the plain mean where no weight is above 0."""
    total = weights.sum(axis=1, keepdims=True)
    means: np.ndarray = np.where(total > 0, weights @ columns / np.maximum(total, 1), columns.mean(axis=0))
    return means
