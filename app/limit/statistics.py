"""The limit and its interval, from runs at several rates. Nothing here measures or knows a clock.

How far each run is from the promise is a ratio that is 1 where it just holds, and rises with the rate but for chance.
For each seed the logarithm is fitted by the rising steps nearest to it (isotonic regression), and the limit under that
seed is where the fit crosses 0. The limit is the lowest of these. It lies between rates that were tried, as a rule, and
a run just below it may have been lost by chance: what was seen to hold is `search.highest_held`. For the interval the
requests of each run are drawn anew in blocks, as those that follow one another wait together. At all rates of a seed
that were tried to the end the same blocks are drawn: the same requests came there, so a hard stretch of them is hard at
every rate. Of a run that was ended early there are fewer. It seems nearer to the promise than it would have come to be,
where waits grow, so that distances seem to rise more slowly with the rate: that makes the interval no narrower. A
repeat is made at one rate or two; for the interval its own limit is told from how far it was from the promise there.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from app.compare.runs import MAX_GROWTH
from app.limit.piling import piling_excess
from app.limit.runs import MAX_EXCESS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.limit.runs import Run

NUM_DRAWS: Final = 400
INTERVAL: Final = (5, 95)  # percentiles of the draws
# What is this far below the promise is no more held for it.
MIN_EXCESS: Final = 1 / MAX_EXCESS
# A ratio rises at least as fast as the rate; what lies further from the rates that were tried is not told.
LEAST_SLOPE, MAX_REACH = 1.0, 1.15


class Interval(NamedTuple):
    """An estimate, and between what it lies in nine of ten draws.

    Of a limit, in requests a second, `low` is of the lowest among the seeds, as the limit itself is, `high` of the
    highest. Where no run was lost beyond the limit, nobody knows its upper end: `high` is infinite.
    """

    estimate: float
    low: float
    high: float

    @property
    def is_at_least(self) -> bool:
        """Whether it may be any higher."""
        return math.isinf(self.high)

    @property
    def end(self) -> float | None:
        """Its upper end; `None` where nobody knows it."""
        return None if self.is_at_least else self.high


def limit_of(runs: Sequence[Run]) -> Interval | None:
    """Where the fit crosses the promise under the seed that does so first; `None` where that is below all rates."""
    estimate = estimate_of(runs)
    if estimate is None:
        return None
    drawn = _crossings(runs, np.array([_drawn(run) for run in runs]), _slope(runs))
    # Where a draw holds nowhere, all that is known is that its limit would be below the lowest rate.
    least = min(run.rate for run in runs)
    low, high = (
        float(np.percentile([least if pair[side] is None else pair[side] for pair in drawn], percent))
        for side, percent in enumerate(INTERVAL)
    )
    has_end = any(not run.holds and run.rate > estimate for run in runs)
    return Interval(estimate, min(low, estimate), max(high, estimate) if has_end else math.inf)


def estimate_of(runs: Sequence[Run]) -> float | None:
    """The same without its interval, which takes long."""
    (estimate, _), *_ = _crossings(runs, np.array([[_log(run.excess)] for run in runs]))
    return estimate


def margin_of(run: Run, other: Run) -> Interval | None:
    """How far a run is from the promise, over how far another is of the same requests at the same rate.

    Below 1 it is nearer. The same requests are drawn for both. `None` where one of them was ended early.
    """
    if run.stopped or other.stopped or len(run.seen) != len(other.seen):
        return None
    ratios = np.exp(_drawn(run) - _drawn(other))
    estimate = math.exp(_log(run.excess) - _log(other.excess))
    low, high = (float(np.percentile(ratios, percent)) for percent in INTERVAL)
    return Interval(estimate, min(low, estimate), max(high, estimate))


def _slope(runs: Sequence[Run]) -> float | None:
    """How fast the logarithm of the ratio rises with that of the rate, under the seed with the most runs."""
    seeds = [run.seed for run in runs]
    those = [run for run in runs if run.seed == max(seeds, key=seeds.count)]
    points = [(math.log(run.rate), _log(run.excess)) for run in those if MIN_EXCESS < run.excess < MAX_EXCESS]
    if len({rate for rate, _ in points}) < 2:
        return None
    rates, logs = zip(*points, strict=True)
    return max(LEAST_SLOPE, float(np.polyfit(rates, logs, 1)[0]))


def _beyond(rates: np.ndarray, logs: np.ndarray, slope: float) -> float:
    """Where the fit would cross 0 on the side on which no rate was tried; `crossing` where it does in between."""
    steps = isotonic(rates, logs)
    (first, lowest), (last, highest) = steps[0], steps[-1]
    rate, log = (first, lowest) if lowest > 0 else (last, highest)
    if lowest > 0 or highest <= 0:
        return float(rate * min(max(math.exp(-log / slope), 1 / MAX_REACH), MAX_REACH))
    found = crossing(rates, logs)
    assert found is not None
    return found


def _crossings(
    runs: Sequence[Run], logs: np.ndarray, slope: float | None = None
) -> list[tuple[float | None, float | None]]:
    """The lowest and the highest limit of all seeds, for each column of `logs` ([runs, columns]).

    Args:
        slope: repeats are made at one or two rates, on one side of their limit, as a rule. With a slope it is told how
            far on the other side of them it lies; without, a limit is not beyond the rates that were tried.
    """
    seeds = sorted({run.seed for run in runs})
    members = [[place for place, run in enumerate(runs) if run.seed == seed] for seed in seeds]
    rates = [np.array([runs[place].rate for place in places]) for places in members]
    # A seed that holds nowhere is taken to hold at the next lower rate that was tried with another.
    lower = [max([run.rate for run in runs if run.rate < those.min()], default=None) for those in rates]
    pairs = []
    for column in logs.T:
        found = [
            _beyond(those, column[places], slope)
            if slope is not None
            else (below if (own := crossing(those, column[places])) is None else own)
            for those, places, below in zip(rates, members, lower, strict=True)
        ]
        known = [one for one in found if one is not None]
        pairs.append((None if None in found else min(known), max(known, default=None)))
    return pairs


def crossing(rates: np.ndarray, logs: np.ndarray) -> float | None:
    """Where the rising fit of `logs` over `rates` crosses 0.

    `None` where that is below the lowest rate; the highest rate where it does not come that far.
    """
    steps = isotonic(rates, logs)
    if steps[0][1] > 0:
        return None
    for (rate, below), (next_rate, above) in pairwise(steps):
        if above > 0:
            return float(rate * (next_rate / rate) ** (-below / (above - below)))
    return float(steps[-1][0])


def isotonic(rates: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    """The rising steps with the least squared distance: (rate, fitted value), a pair for each rate.

    Neighbours that fall are pooled into their mean until none does.
    """
    blocks: list[tuple[float, float, list[float]]] = []  # weight, mean, rates
    for rate in sorted(set(rates.tolist())):
        those = values[rates == rate]
        blocks.append((len(those), float(those.mean()), [rate]))
        while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
            (weight, mean, left), (other_weight, other_mean, right) = blocks[-2:]
            total = weight + other_weight
            blocks[-2:] = [(total, (weight * mean + other_weight * other_mean) / total, left + right)]
    return [(rate, mean) for _, mean, members in blocks for rate in members]


def _drawn(run: Run) -> np.ndarray:
    """The run's distance from the promise, as the logarithm of the ratio, for requests drawn anew: [draws]."""
    ordered = sorted(range(len(run.seen)), key=lambda index: run.seen[index].due)
    size = max(1, round(math.sqrt(len(ordered))))
    entries = [(allowed, np.array(pairs)[ordered]) for _, allowed, pairs in run.entries()]
    starts = np.arange(0, len(ordered), size)
    rng = np.random.default_rng(run.seed)
    picks = rng.multinomial(len(starts), np.full(len(starts), 1 / len(starts)), NUM_DRAWS)  # [draws, blocks]
    worst = np.maximum(run.excesses().get("preemptions", 0.0), _growth_drawn(run, ordered, size, picks))
    worst = np.maximum(worst, _piling_drawn(run, ordered, size, picks))
    for allowed, pairs in entries:
        missed, total = (picks @ np.add.reduceat(pairs, starts)).T  # [draws] each
        ratio = np.where(missed > 0, MAX_EXCESS, 0.0)
        np.divide(missed, allowed * total, out=ratio, where=allowed * total > 0)
        worst = np.maximum(worst, ratio)
    logs: np.ndarray = np.log(np.clip(worst, MIN_EXCESS, MAX_EXCESS))
    return logs


def _growth_drawn(run: Run, ordered: Sequence[int], size: int, picks: np.ndarray) -> np.ndarray:
    """`growth_excess` for requests drawn anew: [draws]. The medians of both quarters are of what was drawn of them.

    Args:
        ordered: places of the requests as they were due, `size` of them to a block.
        picks: how often each block was drawn: [draws, blocks].
    """
    rows = [
        (run.seen[place].due, ttft, position // size)
        for position, place in enumerate(ordered)
        if (ttft := run.seen[place].ttft) is not None
    ]
    quarter = len(rows) // 4
    if not quarter:
        return np.zeros(len(picks))
    due, wait, block = (np.array(column) for column in zip(*rows, strict=True))
    passed = float(np.median(due[-quarter:]) - np.median(due[:quarter]))
    if passed <= 0:
        return np.zeros(len(picks))
    before, after = (_medians(wait[part], picks[:, block[part]]) for part in (slice(0, quarter), slice(-quarter, None)))
    doubled = np.divide(after, 2 * before, out=np.full(len(picks), np.inf), where=before > 0)
    grown: np.ndarray = np.where(after > before, np.minimum(doubled, (after - before) / (MAX_GROWTH * passed)), 0.0)
    return grown


def _piling_drawn(run: Run, ordered: Sequence[int], size: int, picks: np.ndarray) -> np.ndarray:
    """`piling_excess` for requests drawn anew: [draws]; `ordered`, `size` and `picks` as in `_growth_drawn`."""
    if run.is_wait_promised:
        return np.zeros(len(picks))
    due, there = np.array([(run.seen[place].due, run.seen[place].num_there) for place in ordered], float).T
    return piling_excess(due, there, run.rate, run.filled, picks[:, np.arange(len(ordered)) // size])


def _medians(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The median of `values` ([n]) under each row of `weights` ([draws, n]); the plain one where all of a row are 0."""
    order = np.argsort(values)
    reached = np.cumsum(weights[:, order], axis=1)
    half = reached[:, -1:] / 2
    # The mean of the two in the middle, as of an even number of values.
    low, high = np.argmax(reached >= half, axis=1), np.argmax(reached > half, axis=1)
    found = (values[order][low] + values[order][high]) / 2
    medians: np.ndarray = np.where(reached[:, -1] > 0, found, np.median(values))
    return medians


def _log(excess: float) -> float:
    return math.log(min(max(excess, MIN_EXCESS), MAX_EXCESS))
