"""Tuning from beginning to end: the limit of the settings that there are, better ones, and whether they are better.

What measures is handed in (`tune_http`, `tune_simulated`); of a server nothing is known here but that it may fail.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from app.limit.endpoint import EndpointError
from app.limit.interrupted import Ended, number_of, words_of
from app.limit.search import search
from app.limit.tune_candidates import Standing
from app.limit.tune_confirm import (
    MIN_PAIRS,
    TRADE_OFF_SHARE,
    Pair,
    Verdict,
    budgets_of,
    confirm,
    judge,
    near,
    trade_off,
)
from app.limit.tune_controls import BUDGET, USUAL
from app.limit.tune_search import Ascent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.limit.options import Options
    from app.limit.runs import Run
    from app.limit.tune_candidates import Candidate, Measure
    from app.limit.tune_controls import Control, Values

# Of the time that there is, where each part has to be over.
PRESENT_UNTIL, ASCENT_UNTIL, CONFIRMED_UNTIL = 0.3, 0.62, 0.92
# What is said to be enough is so by a tenth. What came before the rates leaves this share of the time to the first
# settings in any case, as it would in a longer search.
MARGIN, LEAST_SHARE = 1.1, 0.1


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be tuned, and how.

    Attributes:
        names: the controls.
        apply: have the best settings hold for good, where they are believed in.
        while_serving: although others are served.
    """

    names: Sequence[str] = USUAL
    apply: bool = False
    while_serving: bool = False


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        present: the settings that the server had.
        found: the best that the search came upon; `None` where none was better than those.
        candidates: everybody who was tried, in order.
        idle: controls that were not turned, and why.
        is_cut: the time was over before everything was tried.
        unfinished: what has ended it, a sentence without its full stop; empty where it went to its end.
        pairs: both measured again under fresh seeds.
        verdict: on what was found; `None` where nothing was.
        budgets: runs of several token budgets at one rate, beside the best of the other settings.
    """

    controls: Sequence[Control]
    present: Standing
    found: Standing | None
    candidates: Sequence[Candidate]
    idle: dict[str, str]
    is_cut: bool
    unfinished: str = ""
    pairs: Sequence[Pair] = ()
    verdict: Verdict | None = None
    budgets: Sequence[tuple[int, Run]] = field(default=(), repr=False)

    @property
    def best(self) -> Standing:
        """The settings to take: those that were found where they are believed in, else those that there were."""
        return self.found if self.found and self.verdict and self.verdict.is_believed else self.present


class CutTuning(Ended):
    """A signal asks this process to end; with what came of tuning until then."""

    def __init__(self, number: int, tuned: Tuned) -> None:
        super().__init__(number)
        self.tuned = tuned


class Clock:
    """How much of the time is gone.

    Args:
        seconds_of: what a run at a rate takes.
        began: of all of it, on the clock `now`.
    """

    def __init__(
        self,
        duration: float,
        seconds_of: Callable[[float], float],
        began: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.duration, self._seconds_of, self._now = duration, seconds_of, now
        self._began = now() if began is None else began

    @property
    def gone(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self._began

    def within(self, share: float) -> Callable[[float], bool]:
        """Whether there is time for a run at a rate in that share of the whole."""
        return lambda rate: self.gone + self._seconds_of(rate) <= share * self.duration


def least_seconds(gone: float, duration: float, run_seconds: float, spare_seconds: float) -> int:
    """About how long a search has to be for one other value to be tried; 0 where it is long enough.

    Nothing can be seen to be better before the present settings have held at one rate and been lost at another, which
    is to be within their part of the time.

    Args:
        gone: of `duration`, before the first rate; that grows with it.
        run_seconds: what a run takes; one that is lost may take `spare_seconds` less.
    """
    wanted = 2 * run_seconds - spare_seconds
    if gone + wanted <= PRESENT_UNTIL * duration:
        return 0
    return math.ceil(MARGIN * wanted / max(LEAST_SHARE, PRESENT_UNTIL - gone / duration))


def tune(
    measure: Measure,
    controls: Sequence[Control],
    values: Values,
    start: float,
    options: Options,
    clock: Clock,
    tell: Callable[[str], object] = lambda _what: None,
) -> Tuned:
    """Find the best settings.

    Args:
        values: of all controls, as the server has them.
        start: the rate to begin with, in requests a second.
        tell: told what is tried.

    Raises:
        CutTuning: somebody ends it.
        EndpointError: the server fails before the present settings had a run; later, that ends it.
    """
    seen: list[tuple[Values, Run]] = []

    def watched(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        run = measure(values, rate, seed, whole=whole)
        seen.append((values, run))
        return run

    ascent = Ascent(watched, controls, options.seed, clock.within(ASCENT_UNTIL), tell)
    found: Standing | None = None
    done: Tuned | None = None
    try:
        tell("present settings")
        runs = search(partial(watched, values), start, (options.seed,), afford=clock.within(PRESENT_UNTIL))
        present = Standing(values, tuple(runs))
        climbed = ascent.climb(present)
        found = None if climbed is present or climbed.is_lost else climbed
        done = _confirmed(watched, present, found, ascent, options, clock, tell)
        return replace(done, budgets=_budgets(watched, done, options.seed, clock, tell))
    except (KeyboardInterrupt, EndpointError) as end:
        own = tuple([run for held, run in seen if held == values])
        if isinstance(end, EndpointError) and not own:
            raise
        if done is None:
            how = "interrupted" if isinstance(end, KeyboardInterrupt) else "ended before its time"
            done = Tuned(
                controls,
                Standing(values, own),
                found,
                ascent.candidates,
                ascent.idle,
                is_cut=True,
                verdict=Verdict(False, f"the search was {how}"),
            )
        if isinstance(end, EndpointError):
            return replace(done, unfinished=str(end).removesuffix("."))
        raise CutTuning(number_of(end), replace(done, unfinished=words_of(end))) from None


def _confirmed(
    measure: Measure,
    present: Standing,
    found: Standing | None,
    ascent: Ascent,
    options: Options,
    clock: Clock,
    tell: Callable[[str], object],
) -> Tuned:
    """What was found, measured again with fresh seeds beside what there was; that alone, where nothing was found."""
    fresh = range(options.seed + 1, options.seed + 1 + max(MIN_PAIRS, options.repeats - 1))
    pairs: list[Pair] = []
    if found is None:
        present = _repeated(measure, present, fresh, clock, tell)
    else:
        pairs = confirm(measure, present, found, fresh, clock.within(CONFIRMED_UNTIL), tell)
        present = Standing(present.values, (*present.runs, *[run for pair in pairs for run in pair.present]))
        found = Standing(found.values, (*found.runs, *[run for pair in pairs for run in pair.found]))
    verdict = judge(pairs) if found is not None else None
    return Tuned(
        ascent.controls,
        present,
        found,
        ascent.candidates,
        ascent.idle,
        ascent.is_cut,
        pairs=pairs,
        verdict=verdict,
    )


def _repeated(
    measure: Measure, present: Standing, seeds: Sequence[int], clock: Clock, tell: Callable[[str], object]
) -> Standing:
    """With the limit under other seeds too, where there is one."""
    if present.is_lost:
        return present
    runs = [*present.runs]
    for seed in seeds:
        tell(f"present settings, seed {seed}")
        if clock.within(CONFIRMED_UNTIL)(present.reached):
            runs += near(partial(measure, present.values), present.reached, seed, clock.within(CONFIRMED_UNTIL))
    return Standing(present.values, tuple(runs))


def _budgets(
    measure: Measure, done: Tuned, seed: int, clock: Clock, tell: Callable[[str], object]
) -> list[tuple[int, Run]]:
    """Token budgets at one rate, by size; none where it is not tuned."""
    control = next((one for one in done.controls if one.name == BUDGET), None)
    best = done.best
    if control is None:
        return []
    rate = best.reached * (1.0 if best.is_lost else TRADE_OFF_SHARE)
    tell("token budgets at one rate")
    runs = trade_off(measure, best.values, budgets_of(best.values, control), rate, seed, clock.within(1.0))
    return sorted(runs, key=lambda pair: pair[0])
