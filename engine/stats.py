"""Counters, histograms, and what users met over a sliding window. Time comes in as an argument."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING

from engine.config import NO_TARGETS
from engine.samples import Samples
from engine.timeline import DEFAULT_WINDOW, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from engine.config import SloTargets

RATE_SECONDS = 10.0
FINISH_SECONDS = 60.0
BUSY_SECONDS = 30.0


def _series(first: float, last: float) -> tuple[float, ...]:
    """Bucket bounds 1, 2, 5, 10, … times a power of ten, from `first` to `last`, both included."""
    bounds = [digit * 10.0**power for power in range(-3, 7) for digit in (1.0, 2.0, 5.0)]
    return (*(round(bound, 6) for bound in bounds if first <= bound < last), last)


LATENCY_BOUNDS = _series(0.01, 7200.0)
ITL_BOUNDS = _series(0.001, 7200.0)
TOKEN_BOUNDS = _series(1.0, 1_000_000.0)
PREEMPTION_BOUNDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
ITERATION_BOUNDS = tuple(float(2**power) for power in range(16))

# Stems of vLLM's histogram names, so that existing dashboards find them.
HISTOGRAMS = {
    "time_to_first_token_seconds": LATENCY_BOUNDS,
    "inter_token_latency_seconds": ITL_BOUNDS,
    "request_time_per_output_token_seconds": LATENCY_BOUNDS,
    "e2e_request_latency_seconds": LATENCY_BOUNDS,
    "request_queue_time_seconds": LATENCY_BOUNDS,
    "request_prefill_time_seconds": LATENCY_BOUNDS,
    "request_decode_time_seconds": LATENCY_BOUNDS,
    "request_prompt_tokens": TOKEN_BOUNDS,
    "request_generation_tokens": TOKEN_BOUNDS,
    "request_num_preemptions": PREEMPTION_BOUNDS,
    "iteration_tokens_total": ITERATION_BOUNDS,
}
LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
# Causes of an abort that are the server's failure: it did not come to the end in the time that it had.
OUT_OF_TIME = ("timeout", "queue_timeout")
# Where a request's time goes; together they are all of it, but for what it spent at the door.
SPENT = ("queue", "prefill", "decode", "preempted")


class Rate:
    """Sum per second of what was added over the last `seconds`."""

    def __init__(self, seconds: float = RATE_SECONDS) -> None:
        self.seconds = seconds
        self._started: float | None = None
        self._total = 0.0
        self._added: deque[tuple[float, float]] = deque()

    def add(self, now: float, amount: float) -> None:
        """Count `amount` at time `now`."""
        if self._started is None:
            self._started = now
        self._added.append((now, amount))
        self._total += amount
        self._expire(now)

    def per_second(self, now: float) -> float:
        """Rate at `now`; in the first seconds of life over the time there was."""
        self._expire(now)
        if self._started is None:
            return 0.0
        return max(0.0, self._total) / max(1.0, min(self.seconds, now - self._started))

    def _expire(self, now: float) -> None:
        while self._added and self._added[0][0] < now - self.seconds:
            self._total -= self._added.popleft()[1]
        if not self._added:
            self._total = 0.0


class BusyRate:
    """Amount per second of the time in which there was work, however long ago that was.

    Args:
        seconds: of such time, after which about two thirds of what was measured before are forgotten.
    """

    def __init__(self, seconds: float = BUSY_SECONDS) -> None:
        self._keep_seconds = seconds
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So much was done in `seconds` of work."""
        kept = math.exp(-seconds / self._keep_seconds)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float | None:
        """The rate; `None` before anything was measured."""
        return self._amount / self._seconds if self._seconds else None


class Histogram:
    """Counts by bucket, as Prometheus wants them."""

    def __init__(self, bounds: Seq[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """`(le, count)` pairs from the lowest bound to +Inf."""
        total, pairs = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            pairs.append((bound, total))
        return pairs


@dataclass(slots=True)
class RequestTimes:
    """One accepted request's times, in seconds on the engine's clock, as its tokens come out."""

    arrival: float
    background: bool = False
    num_prompt_tokens: int = 0
    seated: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output_tokens: int = 0
    num_gaps_over_target: int = 0
    num_preemptions: int = 0
    preempted: float | None = None
    prefill_stall: float = 0.0
    decode_stall: float = 0.0

    def sit_again(self, now: float) -> None:
        """It sits again after a preemption; `prefill_stall` and `decode_stall` are what that cost it."""
        if self.preempted is not None:
            if self.first_token is None:
                self.prefill_stall += now - self.preempted
            else:
                self.decode_stall += now - self.preempted
            self.preempted = None

    @property
    def phase(self) -> str:
        """How far it came: `queued`, `prefill` or `decode`."""
        if self.first_token is not None:
            return "decode"
        return "queued" if self.seated is None else "prefill"


@dataclass
class ClassStats:
    """What one class of work met lately: latencies, and how its requests ended.

    Attributes:
        windows: by the name of the latency.
        outcomes: requests that came to their end, without those that were given up: `finished`, `failed` (of these
            `timed_out`, of which `timed_out_queued` had no seat yet), `good` (within every target); by target
            `ttft_asked` and `ttft_met`, …; those that are `timed`, and their seconds by `SPENT`.
        finish_rate: requests that came to an end of their own.
        finish_token_rate: the prompt tokens of those.
    """

    slo: SloTargets
    windows: dict[str, Samples] = field(default_factory=lambda: {name: Samples() for name in LATENCIES})
    outcomes: Timeline[str] = field(default_factory=Timeline)
    finish_rate: Rate = field(default_factory=lambda: Rate(FINISH_SECONDS))
    finish_token_rate: Rate = field(default_factory=lambda: Rate(FINISH_SECONDS))

    def attainment(self, now: float, seconds: int = DEFAULT_WINDOW) -> dict[str, float | None]:
        """Share of the window's finished requests that met each target; `None` without a target or a request."""
        total = self.outcomes.total(now, seconds)
        return {
            name: total[f"{name}_met"] / total[f"{name}_asked"] if total[f"{name}_asked"] else None
            for name in ("ttft", "itl", "e2e")
        }

    def record_end(self, times: RequestTimes, now: float, *, failed: bool) -> None:
        """A request meets the inter-token target when at most 5 % of its gaps are longer; one that failed, none."""
        ttft = None if times.first_token is None else times.first_token - times.arrival
        gaps = max(1, times.num_output_tokens - 1)
        met = {
            "ttft": _within(ttft, self.slo.ttft_p95_seconds),
            "itl": None if self.slo.itl_p95_seconds is None else times.num_gaps_over_target <= 0.05 * gaps,
            "e2e": _within(now - times.arrival, self.slo.e2e_p95_seconds),
        }
        add = self.outcomes.add
        add(now, "failed" if failed else "finished")
        for name, ok in met.items():
            if ok is not None:
                add(now, f"{name}_asked")
                if ok and not failed:
                    add(now, f"{name}_met")
        if not failed and all(ok is not False for ok in met.values()):
            add(now, "good")
        if times.seated is not None and times.first_token is not None and times.last_token is not None:
            add(now, "timed")
            add(now, "queue", times.seated - times.arrival)
            add(now, "prefill", times.first_token - times.seated - times.prefill_stall)
            add(now, "decode", times.last_token - times.first_token - times.decode_stall)
            add(now, "preempted", times.prefill_stall + times.decode_stall)


@dataclass
class Stats:
    """Everything that is counted. Counters only grow; each accepted request ends in one of `finished`.

    Counters and histograms count all requests; windows and targets are kept by class of work.

    Attributes:
        full_prompt_rate: prompt tokens read, while every seat was taken or somebody waited for one.
        reading_rate: prompt tokens computed by steps that had more of them than they could compute.
        read_at: when one of those has ended.
    """

    slo: InitVar[SloTargets]
    slo_background: InitVar[SloTargets] = NO_TARGETS
    interactive: ClassStats = field(init=False)
    background: ClassStats = field(init=False)
    num_steps: int = 0
    num_failed_steps: int = 0
    num_integrity_violations: int = 0
    num_step_tokens: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    aborted: Counter[tuple[str, str]] = field(default_factory=Counter)
    histograms: dict[str, Histogram] = field(default_factory=lambda: {k: Histogram(v) for k, v in HISTOGRAMS.items()})
    step_seconds: Samples = field(default_factory=Samples)
    prompt_rate: Rate = field(default_factory=Rate)
    output_rate: Rate = field(default_factory=Rate)
    full_prompt_rate: BusyRate = field(default_factory=BusyRate)
    reading_rate: BusyRate = field(default_factory=BusyRate)
    read_at: float = -math.inf

    def __post_init__(self, slo: SloTargets, slo_background: SloTargets) -> None:
        self.interactive, self.background = ClassStats(slo), ClassStats(slo_background)

    def promise(self, slo: SloTargets, slo_background: SloTargets) -> None:
        """From now on these are the targets. Who has ended was judged by those that held then."""
        self.interactive.slo, self.background.slo = slo, slo_background

    def of(self, times: RequestTimes) -> ClassStats:
        """The class of work that a request belongs to."""
        return self.background if times.background else self.interactive

    def record_step(self, now: float, seconds: float, num_tokens: int) -> None:
        """Count a step: its wall time and the tokens it computed."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.step_seconds.add(now, seconds)
        self.histograms["iteration_tokens_total"].observe(num_tokens)

    def record_prompt(self, now: float, num_tokens: int, seconds: float, *, is_full: bool) -> None:
        """Count what a step of `seconds` read of prompts for the first time, or found in the cache."""
        self.num_prompt_tokens += num_tokens
        self.prompt_rate.add(now, num_tokens)
        if is_full:
            self.full_prompt_rate.add(num_tokens, seconds)

    def record_reading(self, now: float, num_tokens: int, seconds: float) -> None:
        """Count what a step computed of prompts that had more to compute.

        One that reads them whole, however short they are, says nothing of how fast it could have read.
        """
        if not self.knows_reading(now):
            self.reading_rate = BusyRate()
        self.reading_rate.add(num_tokens, seconds)
        self.read_at = now

    def knows_reading(self, now: float) -> bool:
        """Whether `reading_rate` was measured lately."""
        return now - self.read_at <= BUSY_SECONDS

    def record_token(self, times: RequestTimes, now: float) -> None:
        """Count a token that was generated at `now`."""
        times.num_output_tokens += 1
        self.num_output_tokens += 1
        self.output_rate.add(now, 1)
        if times.last_token is None:
            times.first_token = now
            self._record(times, "ttft", "time_to_first_token_seconds", now, now - times.arrival)
        else:
            gap = now - times.last_token
            self._record(times, "itl", "inter_token_latency_seconds", now, gap)
            target = self.of(times).slo.itl_p95_seconds
            if target is not None and gap > target:
                times.num_gaps_over_target += 1
        times.last_token = now

    def record_seated(self, times: RequestTimes, now: float) -> None:
        """Count the wait of a request that takes a seat for the first time."""
        times.seated = now
        self._record(times, "queue", "request_queue_time_seconds", now, now - times.arrival)

    def record_finish(self, times: RequestTimes, now: float, reason: str, cause: str | None = None) -> None:
        """Count an accepted request's ending; `cause` says who aborted it."""
        self.finished[reason] += 1
        self.histograms["request_prompt_tokens"].observe(times.num_prompt_tokens)
        self.histograms["request_generation_tokens"].observe(times.num_output_tokens)
        self.histograms["request_num_preemptions"].observe(times.num_preemptions)
        if times.first_token is not None and times.last_token is not None and times.seated is not None:
            self.histograms["request_prefill_time_seconds"].observe(times.first_token - times.seated)
            self.histograms["request_decode_time_seconds"].observe(times.last_token - times.first_token)
        if reason == "abort":
            self.record_abort(times, now, cause, times.phase)
            return
        self._record(times, "e2e", "e2e_request_latency_seconds", now, now - times.arrival)
        if times.first_token is not None and times.last_token is not None and times.num_output_tokens > 1:
            tpot = (times.last_token - times.first_token) / (times.num_output_tokens - 1)
            self._record(times, "tpot", "request_time_per_output_token_seconds", now, tpot)
        work = self.of(times)
        work.record_end(times, now, failed=reason == "error")
        if reason != "error":
            work.finish_rate.add(now, 1)
            work.finish_token_rate.add(now, times.num_prompt_tokens)

    def record_abort(self, times: RequestTimes, now: float, cause: str | None, phase: str) -> None:
        """Count one that was ended by somebody, also at the door; `cause` says by whom.

        One that ran out of time was not given up but failed: else none would miss its target in an overload.
        """
        self.aborted[cause or "client", phase] += 1
        if cause in OUT_OF_TIME:
            work = self.of(times)
            work.record_end(times, now, failed=True)
            work.outcomes.add(now, "timed_out")
            if times.phase == "queued":
                work.outcomes.add(now, "timed_out_queued")

    def _record(self, times: RequestTimes, window: str, histogram: str, now: float, value: float) -> None:
        self.of(times).windows[window].add(now, value)
        self.histograms[histogram].observe(value)


def _within(value: float | None, target: float | None) -> bool | None:
    if target is None:
        return None
    return value is not None and value <= target
