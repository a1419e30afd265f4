"""One run at one rate, as a value: what each request saw, and how far that is from what was promised."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Final

import numpy as np

from app.compare.runs import SLOW_GAPS_ALLOWED, growth_excess, percentile
from app.limit.exchange import NOT_FINISHED
from app.limit.piling import filled, piling_excess

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from app.limit.elsewhere import Share
    from app.limit.scrapes import Observed
    from engine.config import SloTargets

# A target is of the 95th percentile: so many may miss it.
ALLOWED_MISSES: Final = 0.05
# Preemptions repeat where there are more than this share of the requests, and more than one.
ALLOWED_PREEMPTIONS: Final = 0.01
# A generator that was later than this share of the smallest target measured itself.
MAX_LAG_SHARE: Final = 0.05
# Why nothing is known of a server: the generator was late or had no connection left; or the promises were kept, but by
# a server that was not in its stride.
LATE, WANTING, COLD = "late", "wanting", "cold"
# Requests that a percentile wants, fewer leave it to chance.
WANTED_SAMPLES: Final = {50: 20, 95: 300, 99: 1000}
# Of one user alone: with fewer requests of a class of work, a long one of them may be all that was seen of it.
MIN_JUDGED: Final = 5
# What is further from the promise than this is no more lost for it.
MAX_EXCESS: Final = 1 / ALLOWED_MISSES
# Of a run's seconds: a wait that is promised to be shorter is broken while it grows.
MAX_WAIT_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Seen:
    """What one counted request saw; seconds from when it was due.

    Attributes:
        due: seconds from the start of the run.
        lag: how late it was sent.
        watched: until it ended, or until nobody looked any more.
        ttft: to its first text; `None` if none came.
        e2e: to its end; `None` if it was not seen.
        gaps: seconds a token, of each gap; empty where they are not known one by one.
        asked_tokens: that the answer was to have; 0 where that is not known.
        num_there: other requests that were there when it was due, those that do not count too.
        num_gaps, num_slow_gaps: all gaps, and those longer than the target of its class.
        error: the kind of it; empty where there was none.
        work_class: index of its class of work.
    """

    due: float
    lag: float
    watched: float
    ttft: float | None
    e2e: float | None
    prompt_tokens: int
    output_tokens: int
    num_gaps: int
    num_slow_gaps: int
    gaps: Sequence[float] = field(default=(), repr=False)
    error: str = ""
    work_class: int = 0
    asked_tokens: int = 0
    num_there: int = 0

    def is_good(self, targets: SloTargets) -> bool:
        """Whether it met every target that there is."""
        return (
            not self.error
            and self.e2e is not None
            and not _is_over(self.ttft, targets.ttft_p95_seconds)
            and not _is_over(self.e2e, targets.e2e_p95_seconds)
            and (targets.itl_p95_seconds is None or self.num_slow_gaps <= SLOW_GAPS_ALLOWED * max(1, self.num_gaps))
        )


@dataclass(frozen=True, slots=True)
class Promise:
    """What is to hold.

    Attributes:
        targets: of each class of work.
        max_error_share: of all requests.
        names: of the classes; without, they have numbers.
    """

    targets: tuple[SloTargets, ...]
    max_error_share: float
    names: tuple[str, ...] = ()

    def of(self, number: int) -> str:
        """What tells the promise to one class from those to the others; empty where there are none."""
        if len(self.targets) == 1:
            return ""
        return f" of {self.names[number] if self.names else f'class {number + 1}'}"

    @property
    def smallest(self) -> float:
        """The smallest of all targets, in seconds; infinite without any."""
        return min(self._seconds, default=math.inf)

    @property
    def largest(self) -> float:
        """The largest of them; 0 without any."""
        return max(self._seconds, default=0.0)

    @property
    def _seconds(self) -> list[float]:
        return [seconds for one in self.targets for seconds in given(one).values()]


def given(targets: SloTargets) -> dict[str, float]:
    """The targets that there are: `ttft`, `itl`, `e2e` to seconds."""
    every = {"ttft": targets.ttft_p95_seconds, "itl": targets.itl_p95_seconds, "e2e": targets.e2e_p95_seconds}
    return {name: seconds for name, seconds in every.items() if seconds is not None}


@dataclass(frozen=True)
class Run:
    """All counted requests of one run.

    Attributes:
        rate: requests a second that were due.
        seed: of lengths and arrivals.
        tokens: of prompts and of answers, a second (`tokens_per_second`).
        preemptions: for want of KV memory while it ran; `None` where the server does not tell.
        cpu_share: of one core, what the generator took; `None` where there is none.
        stopped: it was ended when it was certain to be lost: percentiles are of what had come by then.
        observed: what the server told of itself; `None` where it tells nothing.
        others: answers that it gave to somebody else meanwhile, at least; `None` where it does not tell.
        lead_seconds: from the first request that was sent to the first that counts; `None` where none are to be served
            by then.
        elsewhere: what others took of the machine that all of it was on; `None` where that is not known.
        own_want: what this machine wanted for to send all of them, an error in words; empty where it was nothing.
    """

    rate: float
    seed: int
    promise: Promise
    seen: tuple[Seen, ...] = field(repr=False)
    tokens: tuple[float, float] = (0.0, 0.0)
    preemptions: int | None = None
    cpu_share: float | None = None
    stopped: bool = False
    observed: Observed | None = None
    others: int | None = None
    lead_seconds: float | None = None
    own_want: str = ""
    elsewhere: Share | None = None

    @property
    def finished(self) -> list[Seen]:
        """Those with a whole answer."""
        return [seen for seen in self.seen if seen.e2e is not None and not seen.error]

    @property
    def lag_p50(self) -> float:
        """How late requests left, in seconds."""
        return percentile([seen.lag for seen in self.seen], 50)

    @cached_property
    def lag_p99(self) -> float:
        """The same of the latest hundredth."""
        return percentile([seen.lag for seen in self.seen], 99)

    @property
    def is_valid(self) -> bool:
        """Whether this says anything about the server."""
        return not self.unknown

    @cached_property
    def unknown(self) -> str:
        """Why it does not: `LATE`, `WANTING` or `COLD`; empty where it does."""
        if self.own_want:
            return WANTING
        if self.lag_p99 > MAX_LAG_SHARE * self.promise.smallest:
            return LATE
        return COLD if self.is_cold and self.holds else ""

    @property
    def mean_stay(self) -> float:
        """Seconds that a request is there, on average; 0 where none was finished."""
        return fmean([seen.e2e for seen in self.finished if seen.e2e is not None] or [0.0])

    @property
    def is_cold(self) -> bool:
        """Whether fewer were answered when counting began than would have been later on: answers take longer."""
        spans = [seen.e2e - (seen.ttft or 0.0) for seen in self.finished if seen.e2e is not None]
        return self.lead_seconds is not None and bool(spans) and fmean(spans) > self.lead_seconds

    @cached_property
    def filled(self) -> float:
        """By how many more requests are there from the first quarter to the last because answers take so long."""
        ends = [(seen.watched if seen.e2e is None else seen.e2e, seen.ttft) for seen in self.seen]
        spans = [end - ttft for end, ttft in ends if ttft is not None]
        return filled(sorted([seen.due for seen in self.seen]), spans, self.rate)

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return self.excess <= 1

    @cached_property
    def excess(self) -> float:
        """What was missed over what may be missed, of the promise that is furthest from being kept; 1 just holds."""
        return max(self.excesses().values(), default=0.0)

    def excesses(self) -> dict[str, float]:
        """The same of each promise, `ttft of assistant` and so on; nothing counts for more than `MAX_EXCESS`."""
        found = {name: _ratio(missed, allowed * total) for name, missed, total, allowed in self._counts()}
        points = [(seen.due, seen.ttft) for seen in self.seen if seen.ttft is not None]
        found["waiting grows"] = max(growth_excess(points), self._piling())
        if self.preemptions is not None:
            found["preemptions"] = _ratio(self.preemptions, max(1.0, ALLOWED_PREEMPTIONS * len(self.seen)))
        return {name: min(value, MAX_EXCESS) for name, value in found.items()}

    @cached_property
    def is_wait_promised(self) -> bool:
        """Whether a first token or a whole answer is promised so soon, to each class, that a growing wait breaks it.

        Then it is left to that to tell whether more requests come than can be answered: on a real machine, whose speed
        wavers, there are ever more for as long as a short run takes at three quarters of what it can serve.
        """
        dues = [seen.due for seen in self.seen]
        most = MAX_WAIT_SHARE * (max(dues, default=0.0) - min(dues, default=0.0))
        waits = [[seconds for name, seconds in given(one).items() if name != "itl"] for one in self.promise.targets]
        return all([min(promised, default=math.inf) <= most for promised in waits])

    def _piling(self) -> float:
        if self.is_wait_promised:
            return 0.0
        rows = sorted([(seen.due, seen.num_there) for seen in self.seen])
        due, there = np.array(rows, float).reshape(-1, 2).T
        return float(piling_excess(due, there, self.rate, self.filled, np.ones((1, len(rows))))[0])

    @property
    def hopeless(self) -> list[str]:
        """The promises that more than half of the requests miss: of one user alone, no rate can keep them.

        What fewer than `MIN_JUDGED` requests tell is left out.
        """
        known = {name: [entry for entry in entries if entry[1]] for name, _, entries in self.entries()}
        return [
            name
            for name, entries in known.items()
            if len(entries) >= MIN_JUDGED and 2 * sum([one for one, _ in entries]) > sum([all_ for _, all_ in entries])
        ]

    def _counts(self) -> Iterator[tuple[str, float, float, float]]:
        """Name, misses, all, and the share that may miss."""
        for name, allowed, entries in self.entries():
            yield name, sum([missed for missed, _ in entries]), sum([total for _, total in entries]), allowed

    def entries(self) -> Iterator[tuple[str, float, list[tuple[int, int]]]]:
        """Each promise about requests: its name, the share that may miss, and (missed, all) of every request."""
        for number, targets in enumerate(self.promise.targets):
            for name, seconds in given(targets).items():
                label = name + self.promise.of(number)
                entries = [_entry(seen, name, seconds) if seen.work_class == number else (0, 0) for seen in self.seen]
                yield label, ALLOWED_MISSES, entries
        yield "errors", self.promise.max_error_share, [(1, 1) if seen.error else (0, 1) for seen in self.seen]


def tokens_per_second(answers: Iterable[tuple[float, int, int]], begin: float, until: float) -> tuple[float, float]:
    """Tokens of prompts and of answers a second, of what was completed between two times.

    Args:
        answers: when each was completed, and its tokens; those that do not count too, as they take their share.
        begin, until: when the first and the last request that counts were due, so that no tail makes it less.
    """
    within = [tokens for finished, *tokens in answers if begin <= finished <= until]
    if until <= begin:
        return 0.0, 0.0
    prompt, answer = (sum([tokens[place] for tokens in within]) / (until - begin) for place in (0, 1))
    return prompt, answer


def _entry(seen: Seen, name: str, seconds: float) -> tuple[int, int]:
    """Whether one request missed a target; nothing is known of one that was not watched for long enough."""
    if seen.error and seen.error != NOT_FINISHED:
        return 0, 0
    if name == "itl":
        return seen.num_slow_gaps, seen.num_gaps
    value = seen.ttft if name == "ttft" else seen.e2e
    if value is None:
        return (1, 1) if seen.watched > seconds else (0, 0)
    return int(value > seconds), 1


def _is_over(value: float | None, target: float | None) -> bool:
    return target is not None and (value is None or value > target)


def _ratio(missed: float, allowed: float) -> float:
    if not missed:
        return 0.0
    return missed / allowed if allowed else MAX_EXCESS
