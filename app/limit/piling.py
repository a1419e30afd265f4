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

# Of the requests that come, the share that may stay unanswered, beside what may by chance. In virtual time, on three
# machines, 0 of 66 runs at 0.95 of what they serve at most were refused so. At 1.1 of it, on the two with 16 seats, 27
# of 34 with 300 requests and 16 of 16 with 1,000 were.
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


def enough_to_judge(there: Sequence[int]) -> int:
    """How many requests must count for it to be seen whether ever more are there, where so many were."""
    return ceil(LEAST_TURNS * fmean(there) * 4 / 3)  # from the first quarter to the last three quarters come


def piling_excess(due: np.ndarray, there: np.ndarray, rate: float, weights: np.ndarray) -> np.ndarray:
    """The share of requests that stays unanswered, over what may: from the first quarter to the last.

    Args:
        due: when each request was, rising: [n] seconds.
        there: how many others were there then: [n].
        rate: requests a second that are due on average.
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
    may = MAX_UNANSWERED * rate * passed + np.sqrt(1 + before[:, 0])
    excess: np.ndarray = np.maximum(np.minimum(grown, grown_evenly), 0.0) / may
    return np.where(rate * passed >= LEAST_TURNS * before[:, 0], excess, 0.0)


def _means(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[draws, columns] of [n, columns] and [draws, n]; the plain mean where no weight is above 0."""
    total = weights.sum(axis=1, keepdims=True)
    means: np.ndarray = np.where(total > 0, weights @ columns / np.maximum(total, 1), columns.mean(axis=0))
    return means
