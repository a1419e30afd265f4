"""Which settings are tried, from what came of those before. Nothing here measures or knows a clock.

One control is turned at a time, from the settings that there are (coordinate ascent). Whoever wants to take their place
gets the same requests at the same times, at a rate at which they just no longer hold (common random numbers). Most are
lost there, which is soon certain. For who holds there, and at a somewhat higher rate too, the limit is found, and it is
the next to be beaten. What chance there was in that is left to fresh seeds (`tune_confirm`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from app.limit.search import search
from app.limit.statistics import margin_of
from app.limit.tune_candidates import Candidate, RefusedError, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.limit.runs import Run
    from app.limit.statistics import Interval
    from app.limit.tune_candidates import Measure
    from app.limit.tune_controls import Control, Value, Values

# The ratio of neighbours that are tried: first far, then near.
STEPS: Final = (2.0, math.sqrt(2.0))
# A bar at which the settings that hold do hold when they are measured again is raised so often.
MAX_RAISES: Final = 3
# How far beyond the rate at which the others no longer hold one has to hold to be better.
BEYOND: Final = 1.05
# Where settings hold at no rate, what is nearer to the promise by less than this is no better: draws know the chance
# among requests, and not what else is up on a machine.
MAX_RATIO: Final = 0.95
# What is further from it by no more than this is about as good: behind a flat stretch it may go up, so a way is
# followed over so many values of that kind.
FLAT_RATIO, MAX_FLAT = 1.25, 2


class Ascent:
    """Looks for the settings with the highest limit.

    Args:
        seed: of all runs.
        afford: whether there is time for another run at a rate.
        tell: told what is tried next.

    Attributes:
        controls: all that are turned.
        candidates: everybody who was tried, in order.
        idle: controls that were not turned, as it would make no difference, and why.
        is_cut: the time was over before everything was tried.
    """

    def __init__(
        self,
        measure: Measure,
        controls: Sequence[Control],
        seed: int,
        afford: Callable[[float], bool],
        tell: Callable[[str], object] = lambda _what: None,
    ) -> None:
        self._measure, self.controls = measure, controls
        self._seed, self._afford, self._tell = seed, afford, tell
        self._seen: set[frozenset[tuple[str, Value]]] = set()
        self.candidates: list[Candidate] = []
        self.idle: dict[str, str] = {}
        self.is_cut = False

    def climb(self, present: Standing) -> Standing:
        """The best settings that were found; `present` where none is better."""
        self._seen.add(frozenset(present.values.items()))
        best = self._with_bar(present)
        self.is_cut = best.bar is None  # where nothing was seen to be too much, nothing can be seen to be better
        for step in STEPS:
            before = None
            while before is not best and not self.is_cut:
                before = best
                for control in self.controls:
                    best = self._turn(control, best, step)
        return present if best.values == present.values else best

    def _turn(self, control: Control, best: Standing, step: float) -> Standing:
        """Turn one control for as long as that is better or about as good; the other way where that led nowhere."""
        why = control.idle(best.runs)
        if why is not None:
            self.idle.setdefault(control.name, why)
            return best
        self.idle.pop(control.name, None)
        for way in control.ways(best.values, step):
            start, num_flat = best, 0
            for value in way:
                better = self._try(control, value, best)
                if better is not None:
                    best, num_flat = better, 0
                elif num_flat < MAX_FLAT and self._is_flat(control, value, best):
                    num_flat += 1
                else:
                    break
            if best is not start and control.span is not None:
                break
        return best

    def _is_flat(self, control: Control, value: Value, best: Standing) -> bool:
        """Whether the last that was tried is this one, and about as good as the best."""
        last = self.candidates[-1] if self.candidates else None
        if last is None or (last.control, last.value, last.against) != (control.name, value, best.values):
            return False
        return last.run is not None and last.run.excess <= FLAT_RATIO * last.theirs.excess

    def _try(self, control: Control, value: Value, best: Standing) -> Standing | None:
        """Its standing where it is better, else `None`."""
        values = {**best.values, control.name: value}
        key = frozenset(values.items())
        theirs = best.bar
        if theirs is None or key in self._seen or self.is_cut:
            return None
        if not self._afford(theirs.rate):
            self.is_cut = True
            return None
        self._seen.add(key)
        self._tell(f"{control.name} {value}")
        turned = partial(Candidate, control.name, value, best.values, theirs)
        try:
            run = self._valid(values, theirs.rate, whole=best.is_lost)
        except RefusedError as error:
            self.candidates.append(turned(None, None, "refused", why=str(error)))
            return None
        margin, beyond = margin_of(run, theirs), None
        if _holds(run) and not best.is_lost and self._afford(theirs.rate * BEYOND):
            beyond = self._valid(values, theirs.rate * BEYOND, whole=False)
        verdict = _verdict(run, beyond, margin, is_lost=best.is_lost)
        standing = self._standing(values, run, beyond) if verdict == "better" else None
        self.candidates.append(turned(run, margin, verdict, beyond, standing))
        return standing

    def _standing(self, values: Values, first: Run, beyond: Run | None) -> Standing:
        """With the limit of settings that are better; one run or two of them are known already."""
        if not first.holds:
            return Standing(values, (first,))
        known = [beyond or first]

        def measure(rate: float, seed: int) -> Run:
            return known.pop() if known else self._measure(values, rate, seed)

        runs = search(measure, known[0].rate, (self._seed,), afford=self._afford)
        return self._with_bar(Standing(values, tuple([first, *runs] if beyond else runs)))

    def _with_bar(self, standing: Standing) -> Standing:
        """With a run to its end at the rate at which others have to be better.

        Where it holds there after all, the next higher rate is taken.
        """
        for _ in range(MAX_RAISES):
            bar = standing.bar
            if bar is None or not bar.stopped or not self._afford(bar.rate):
                break
            run = self._valid(standing.values, bar.rate, whole=True)
            standing = Standing(standing.values, (*standing.runs, run))
        return standing

    def _valid(self, values: Values, rate: float, *, whole: bool) -> Run:
        """A run, and another where the generator was late in the first."""
        run = self._measure(values, rate, self._seed, whole=whole)
        if not run.is_valid and self._afford(rate):
            run = self._measure(values, rate, self._seed, whole=whole)
        return run


def _holds(run: Run) -> bool:
    return run.is_valid and run.holds


def _verdict(run: Run, beyond: Run | None, margin: Interval | None, *, is_lost: bool) -> str:
    """What came of a candidate.

    Args:
        is_lost: those that held until then keep the promise at no rate, so that being nearer to it is better.
    """
    if not run.is_valid:
        return "unknown"
    if is_lost:
        nearer = margin is not None and margin.high < MAX_RATIO
        return "better" if run.holds or nearer else "no better"
    if not run.holds:
        return "lost"
    return "better" if beyond is not None and _holds(beyond) else "no better"
