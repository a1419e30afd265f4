"""What is done with settings that were found: they are measured again with seeds of which nothing is known yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

from app.limit.search import bracketed
from app.limit.statistics import estimate_of
from app.limit.tune_controls import BUDGET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from app.limit.runs import Run
    from app.limit.tune_candidates import Measure, Standing
    from app.limit.tune_controls import Control, Values

# The limit is looked for around the one that is known, in steps that begin with this.
NEAR: Final = 1.05
# By chance alone all limits of the one lie above all of the other under 3 seeds in 1 of 20 cases, under 2 in 1 of 6.
MIN_PAIRS: Final = 3
# Of the limit: the rate at which the budgets are compared.
TRADE_OFF_SHARE: Final = 0.8
# Budgets that are compared: so many times the one that is best.
BUDGET_RATIOS: Final = (1.0, 0.5, 2.0, 0.25, 4.0, 0.125)
LEAST_BUDGET: Final = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings under one fresh seed: those that hold, and those that were found."""

    seed: int
    present: tuple[Run, ...]
    found: tuple[Run, ...]

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Of both, in requests a second; `None` where they hold at no rate that was tried."""
        present, found = (_limit(runs) for runs in (self.present, self.found))
        return present, found

    @property
    def tells(self) -> bool:
        """Whether it was seen what is too much for those that hold.

        Else, for want of time or as the generator was late, their limit is higher than what is known of it, and to
        compare with that would speak for what was found.
        """
        return self._lost is not None

    @property
    def most(self) -> float:
        """What the limit of those that hold is at most: the rate at which they were lost, where they held at none."""
        return self.limits[0] or self._lost or math.inf

    @property
    def _lost(self) -> float | None:
        """The lowest rate at which those that hold were lost."""
        return min([run.rate for run in self.present if run.is_valid and not run.holds], default=None)

    @property
    def gain(self) -> float | None:
        """The second over the first."""
        present, found = self.limits
        return found / present if present and found else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the settings that were found are to be believed in, and why; `gain` is the median of the pairs'."""

    is_believed: bool
    why: str
    gain: float | None = None


def confirm(
    measure: Measure,
    present: Standing,
    found: Standing,
    seeds: Sequence[int],
    afford: Callable[[float], bool],
    tell: Callable[[str], object] = lambda _what: None,
) -> list[Pair]:
    """The limits of both, one after the other, under each seed; pairs for which there was no time are left out."""
    pairs: list[Pair] = []
    for number, seed in enumerate(seeds):
        tell(f"fresh seed {number + 1} of {len(seeds)}")
        both = []
        for standing in (present, found):
            if not afford(standing.reached):
                return pairs
            both.append(near(partial(measure, standing.values), standing.reached, seed, afford))
        pairs.append(Pair(seed, both[0], both[1]))
    return pairs


def near(
    measure: Callable[[float, int], Run], start: float, seed: int, afford: Callable[[float], bool]
) -> tuple[Run, ...]:
    """Runs from a limit that is known of other seeds to the first rate of the other kind."""
    return tuple(bracketed(measure, start, seed, afford, step=NEAR))


def judge(pairs: Sequence[Pair]) -> Verdict:
    """Whether the gain lies outside the spread: the lowest limit of what was found above the highest of the others.

    Pairs that do not tell the latter do not count. Found settings that hold at no rate have a limit of 0.
    """
    telling = [pair for pair in pairs if pair.tells]
    if len(pairs) < MIN_PAIRS:
        why = f"there was no time to measure both again under {MIN_PAIRS} fresh seeds; give a larger --duration"
        return Verdict(False, why)
    if len(telling) < MIN_PAIRS:
        why = (
            f"under {len(telling)} of {len(pairs)} fresh seeds it was seen what is too much for the present settings, "
            f"and {MIN_PAIRS} are wanted: there was no time, or the generator was late; give a larger --duration"
        )
        return Verdict(False, why)
    most, found = [pair.most for pair in telling], [pair.limits[1] or 0.0 for pair in telling]
    present = [limit for pair in telling if (limit := pair.limits[0]) is not None]
    gains = [pair.gain for pair in telling if pair.gain is not None]
    gain = median(gains) if gains else None
    lowest = f"{min(present):.3g} to" if len(present) == len(telling) else "below"
    words = (
        f"under {len(telling)} fresh seeds the limit is {min(found):.3g} to {max(found):.3g} requests/s, "
        f"and {lowest} {max(most):.3g} with the present settings"
    )
    if min(found) > max(most):
        return Verdict(True, words, gain)
    return Verdict(False, f"that lies within the spread: {words}", gain)


def budgets_of(values: Values, control: Control) -> list[int]:
    """The token budgets to compare, the best one first."""
    least, most = control.span or (1, 1)
    wanted = [round(int(values[BUDGET]) * ratio) for ratio in BUDGET_RATIOS]
    lowest = max(least, min(LEAST_BUDGET, int(values[BUDGET])))
    return list(dict.fromkeys([value for value in wanted if lowest <= value <= most]))


def trade_off(
    measure: Measure,
    values: Values,
    budgets: Iterable[int],
    rate: float,
    seed: int,
    afford: Callable[[float], bool],
) -> Iterator[tuple[int, Run]]:
    """Each budget at the same rate, under the same requests, to the end, as long as there is time."""
    for budget in budgets:
        if not afford(rate):
            return
        yield budget, measure({**values, BUDGET: budget}, rate, seed, whole=True)


def _limit(runs: Sequence[Run]) -> float | None:
    valid = [run for run in runs if run.is_valid]
    return estimate_of(valid) if valid else None
