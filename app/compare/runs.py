"""One run of one policy, as a value: what each request saw, and what the engine counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from engine.samples import nearest_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.config import SloTargets

POLICIES: Final = ("static", "static_dropped", "dynamic", "continuous")
# A request meets the target between tokens when no more than this share of its gaps is longer.
SLOW_GAPS_ALLOWED: Final = 0.05
# Seconds that the wait for a first token may grow by in a second of arrivals: about what a tenth too little speed does.
MAX_GROWTH: Final = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request saw. Times are seconds from the start of the run.

    Attributes:
        scheduled: when it was due; latencies count from here.
        submitted: when it was handed in.
        first_token, finished: when its first and its last token came.
        num_output_tokens: length of the answer.
        num_slow_gaps: gaps between its tokens that were longer than the target.
    """

    scheduled: float
    submitted: float
    first_token: float
    finished: float
    num_output_tokens: int
    num_slow_gaps: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token - self.scheduled

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.finished - self.scheduled

    def is_good(self, targets: SloTargets) -> bool:
        """Whether it met every target that there is."""
        if targets.ttft_p95_seconds is not None and self.ttft > targets.ttft_p95_seconds:
            return False
        if targets.e2e_p95_seconds is not None and self.e2e > targets.e2e_p95_seconds:
            return False
        gaps = max(1, self.num_output_tokens - 1)
        return targets.itl_p95_seconds is None or self.num_slow_gaps <= SLOW_GAPS_ALLOWED * gaps


@dataclass(frozen=True, slots=True)
class Counts:
    """What the engine counted during a run.

    Attributes:
        rows: rows computed, those for nothing included; `padded_rows` is how many those were.
        padding_tokens: tokens computed for nothing, those of padded prompts included.
        set_aside_slots, unwritten_slots: places in the KV cache that were held, and those never written.
    """

    steps: int
    rows: int
    padded_rows: int
    padding_tokens: int
    preemptions: int
    recomputed_tokens: int
    set_aside_slots: int
    unwritten_slots: int


@dataclass(frozen=True, slots=True)
class Run:
    """The whole workload under one policy, once.

    Attributes:
        seconds: from the first request's due time to the last token.
        table: the first steps in the form of `/ops/stats.json`'s `table["steps"]`, where they were kept.
    """

    policy: str
    round: int
    seconds: float
    answers: tuple[Answer, ...]
    counts: Counts
    table: Sequence[dict[str, Any]] = field(default=(), repr=False)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_output_tokens for answer in self.answers)

    @property
    def output_tokens_per_second(self) -> float:
        """Over the whole run, its tail included."""
        return self.output_tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Over the whole run."""
        return len(self.answers) / self.seconds

    def goodput(self, targets: SloTargets) -> float:
        """Requests a second that met every target."""
        return sum(answer.is_good(targets) for answer in self.answers) / self.seconds


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that at least `percent` per cent do not exceed."""
    return nearest_rank(sorted(samples), percent)


def growth_excess(points: Sequence[tuple[float, float]]) -> float:
    """How far the wait for a first token grows for as long as requests come: their last quarter against the first.

    Args:
        points: when each request was due and how long it waited, in seconds.

    Returns:
        More than 1 where the wait has more than doubled and grew by more than `MAX_GROWTH` seconds a second; 0 for
        fewer than four requests, which show nothing.
    """
    ordered = sorted(points)
    quarter = len(ordered) // 4
    if not quarter:
        return 0.0
    first, last = ordered[:quarter], ordered[-quarter:]
    before, after = (median(wait for _, wait in part) for part in (first, last))
    passed = median(due for due, _ in last) - median(due for due, _ in first)
    if after <= before or passed <= 0:
        return 0.0
    return min(after / (2 * before) if before else math.inf, (after - before) / (MAX_GROWTH * passed))
