"""How many tokens a step may compute so that whoever is in the middle of an answer has its next token in time.

Reading prompts in chunks bounds what a neighbour's prompt does to a gap (chunked prefill, Sarathi-Serve), but a bound
in tokens is one in seconds only for a machine and a load that somebody has tried. Here the seconds are watched: a line
over the tokens of a step, fitted to the last steps by least squares that forget, and how far they stray from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.config import Limits
    from engine.work_class import WorkClass

# The share of the newest step in every mean: steps are forgotten after some fifty.
WEIGHT: Final = 0.02
ENOUGH_STEPS: Final = 8
# 95 % of the gaps are promised. So far above the line are 2 % of those that stray as chance does.
DEVIATIONS: Final = 2.0
# Where all steps have had nearly the same size, nothing is known of the line's slope but that it does not rise faster
# than the straight line from nothing through their mean: its weight, in squares of that size.
PRIOR: Final = 0.01
LEAST_SLOPE: Final = 0.05  # of that straight line's
# However long steps take, prompts have this share of the budget: a promise out of reach must not stop everything.
LEAST_SHARE: Final = 1 / 8


def longest_gap(limits: Limits, classes: Iterable[WorkClass]) -> float:
    """Seconds that a step may take for those in the middle of an answer; 0 where nothing is promised to them.

    Args:
        classes: interactive and background work.
    """
    if not limits.slo_admission:
        return 0.0
    targets = (limits.itl_p95_seconds, limits.background_itl_p95_seconds)
    return min(
        [
            target
            for target, work in zip(targets, classes, strict=True)
            if target and any(s.num_computed_tokens >= s.num_prompt_tokens for s in work.running)
        ],
        default=0.0,
    )


def held_back(limits: Limits, classes: tuple[WorkClass, WorkClass], tokens_left: int) -> int:
    """Tokens of a step that interactive prompts may not have: they are for background answers whose gaps are promised.

    Where there are few tokens those who sit and wait for nobody have theirs first, and one newcomer.
    """
    interactive, background = classes
    if not limits.slo_admission or not limits.background_itl_p95_seconds:
        return 0
    num_decoding = sum([s.num_computed_tokens >= s.num_prompt_tokens for s in background.running])
    return max(0, min(num_decoding, tokens_left - len(interactive.running) - 1))


class Pace:
    """The sizes and seconds of the last steps. Pure: who plans tells it what steps took, in seconds.

    Attributes:
        num_steps: that it was told of.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._tokens = self._seconds = 0.0  # means
        self._spread = self._joint = self._stray = 0.0  # variance of the tokens, covariance, square off the line

    def budget(self, limits: Limits, classes: tuple[WorkClass, ...]) -> float:
        """Tokens of the next step: those that are in time, but one for each that sits and some more in any case."""
        target = longest_gap(limits, classes)
        if not target:
            return math.inf
        least = sum([len(work.running) for work in classes]) + max(1, LEAST_SHARE * limits.max_num_batched_tokens)
        return max(least, self.tokens_within(target))

    def note(self, num_tokens: int, seconds: float, target: float) -> None:
        """A step was computed.

        Args:
            seconds: from the end of the step before it to its own.
            target: what is too long. By how much a step was longer says nothing about the next.
        """
        self.num_steps += 1
        weight = max(WEIGHT, 1 / self.num_steps)
        seconds = min(seconds, 2 * target)
        tokens_off, seconds_off = num_tokens - self._tokens, seconds - self._seconds
        off_line = seconds_off - self._slope * tokens_off
        self._tokens += weight * tokens_off
        self._seconds += weight * seconds_off
        keep = 1 - weight
        self._spread = keep * (self._spread + weight * tokens_off**2)
        self._joint = keep * (self._joint + weight * tokens_off * seconds_off)
        self._stray = keep * (self._stray + weight * off_line**2)

    def tokens_within(self, seconds: float) -> float:
        """Tokens of a step that takes no longer, in nearly all cases; infinity while too little is known."""
        if self.num_steps < ENOUGH_STEPS or not self._slope:
            return math.inf
        spare = seconds - self._seconds - DEVIATIONS * math.sqrt(self._stray)
        return max(0.0, self._tokens + spare / self._slope)

    @property
    def _slope(self) -> float:
        """Seconds that one more token takes."""
        if not self._tokens:
            return 0.0
        steepest = self._seconds / self._tokens
        prior = PRIOR * self._tokens**2
        slope = (self._joint + prior * steepest) / (self._spread + prior)
        return min(max(slope, LEAST_SLOPE * steepest), steepest)
