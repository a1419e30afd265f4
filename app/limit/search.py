"""Which rates are tried, from what came of those before. Nothing here measures or knows a clock.

All rates get the same requests in the same pattern, only closer together: the same seed. First one rate that holds and
one that does not are found, then the middle between them until they are close. The one that holds is repeated with
other seeds; where such a repeat fails, the next lower rate is tried with its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from app.limit.runs import COLD, LATE
from app.limit.statistics import estimate_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.limit.runs import Run

Measure = Callable[[float, int], "Run"]
PRECISION: Final = 0.03
STEP: Final = 1.3
# The share of what a server gets through in a closed loop at which a search well begins.
FIRST_SHARE: Final = 0.8
# Below and above these multiples of what the search began with there is no rate worth looking for.
LEAST, MOST = 1 / 50, 50


def search(
    measure: Measure,
    start: float,
    seeds: Sequence[int],
    *,
    afford: Callable[[float], bool] = lambda _rate: True,
    precision: float = PRECISION,
) -> list[Run]:
    """Try rates until the limit lies between two that are `precision` apart, and repeat the lower.

    Args:
        measure: runs a rate (requests a second) with a seed.
        start: the rate to begin with.
        seeds: the first is taken for the search, each other for one repeat near the limit.
        afford: whether there is time for another run at a rate.

    Returns:
        All runs in the order in which they were made, one at least. A run in which the generator was late, or the
        server not in its stride, is made again once. Where nothing is known of a rate, no higher one is tried.
    """
    runs = bracketed(measure, start, seeds[0], afford)
    low, high = edge(runs)
    while low and high and high / low > 1 + precision and afford(middle := math.sqrt(low * high)):
        runs += _valid_if_possible(measure, middle, seeds[0], afford)
        low, high = edge(runs)
    for seed in seeds[1:]:
        low, _ = edge(runs)
        rate = low or 0.0
        while rate > start * LEAST and afford(rate):
            runs += _valid_if_possible(measure, rate, seed, afford)
            if runs[-1].holds or not runs[-1].is_valid:
                break
            rate /= 1 + precision
    return runs


def highest_held(runs: Sequence[Run]) -> float | None:
    """The highest rate that was tried at which, as at each below it, every run held; `None` where there is none.

    Nothing is smoothed here, so it is no more than what was seen; runs that say nothing about the server are left out.
    """
    valid = [run for run in runs if run.is_valid]
    lost = min([run.rate for run in valid if not run.holds], default=math.inf)
    return max([run.rate for run in valid if run.rate < lost], default=None)


def edge(runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """The highest rate that was tried at or below the limit, and the next above it; `None` for none.

    Runs that say nothing about the server are above the limit of what can be known.
    """
    valid = [run for run in runs if run.is_valid]
    limit = estimate_of(valid) if valid else None
    rates = sorted({run.rate for run in runs})
    if limit is None:
        return None, rates[0]
    low = max(run.rate for run in valid if run.rate <= limit)
    return low, min([rate for rate in rates if rate > low], default=None)


def bracketed(
    measure: Measure, start: float, seed: int, afford: Callable[[float], bool], *, step: float = STEP
) -> list[Run]:
    """Runs up to the first of the other kind: that does not hold after some that did, or the other way round.

    Args:
        step: the ratio of the first two rates; those that follow are further apart.
    """
    runs = _valid_if_possible(measure, start, seed, afford)
    step = step if _holds(runs[0]) else 1 / step
    while _holds(runs[-1]) == _holds(runs[0]):
        rate = runs[-1].rate * step
        if not start * LEAST <= rate <= start * MOST or not afford(rate):
            break
        runs += _valid_if_possible(measure, rate, seed, afford)
        step **= 1.5  # it was further off than thought
    return runs


def _valid_if_possible(measure: Measure, rate: float, seed: int, afford: Callable[[float], bool]) -> list[Run]:
    """A run, and another where the first tells nothing: something else may have been up, or more are sent before."""
    runs = [measure(rate, seed)]
    if runs[0].unknown in (LATE, COLD) and afford(rate):
        runs.append(measure(rate, seed))
    return runs


def _holds(run: Run) -> bool:
    """Whether a higher rate is worth trying."""
    return run.holds and run.is_valid
