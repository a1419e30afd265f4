"""A crowd of requests through the scheduler and a runner, without actors, text or HTTP: what both make of a machine."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from engine.errors import ConfigError
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from engine.stepper import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.batch import ScheduledBatch, StepUpdate
    from engine.config import Limits
    from engine.stepper import Ticket


class Measured(Runner, Protocol):
    """What is asked of a runner beside steps."""

    model: Any

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache."""
        ...

    def take_seconds(self) -> dict[str, float]:
        """Where the time of steps went, on this side; `wait` is for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many durations, in seconds: the median, the 99th percentile by rank, and the longest."""

    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, durations: Iterable[float]) -> Spread:
        """Of one or more."""
        ranked = sorted(durations)
        return cls(median(ranked), ranked[math.ceil(0.99 * len(ranked)) - 1], ranked[-1])


class Crowd(NamedTuple):
    """Requests that are all there from the start. Prompts and answers have lengths of their own, evenly drawn.

    Attributes:
        num_requests: of them.
        shortest, longest: tokens of a prompt, and of an answer.
    """

    num_requests: int
    shortest: int
    longest: int

    def sequences(self, vocab_size: int) -> list[Sequence]:
        """Them, the same every time; none ends before its length."""
        rng = random.Random(0)  # noqa: S311 (the same requests every time)
        return [self._sequence(rng, number, vocab_size) for number in range(1, self.num_requests + 1)]

    def _sequence(self, rng: random.Random, number: int, vocab_size: int) -> Sequence:
        length, max_tokens = (rng.randint(self.shortest, self.longest) for _ in range(2))
        prompt = tuple([rng.randrange(vocab_size) for _ in range(length)])
        params = SamplingParams(temperature=0.6, seed=number, max_tokens=max_tokens)
        return Sequence(number, f"bench-{number}", prompt, params, arrival_time=0.0)


# By name on the command line. nano-vllm's is what many small engines tell their speed by.
CROWDS: Final = {"nano-vllm": Crowd(256, 100, 1024)}


class Pool(NamedTuple):
    """What a runner has room for.

    Attributes:
        num_blocks: of its cache, of `block_size` tokens each.
        num_seats: of its rows.
        max_model_len: tokens of the longest sequence.
    """

    num_blocks: int
    block_size: int
    num_seats: int
    max_model_len: int

    def check_room(self, crowd: Crowd) -> None:
        """Raise `ConfigError` where the longest request of a crowd has no room."""
        wanted, room = 2 * crowd.longest, min(self.max_model_len, self.num_blocks * self.block_size)
        if room < wanted:
            raise ConfigError(
                f"The workload has requests of up to {wanted} tokens with their answers, and there is room for {room}: "
                "take a model of a longer context, or give the cache more memory."
            )


def run_crowd(
    runner: Measured, pool: Pool, limits: Limits, sequences: list[Sequence], report: Callable[[int, int], object]
) -> dict[str, Any]:
    """Answer all; where the runner overlaps, each step is planned and launched before the one before it is read.

    Args:
        report: told (answers done, answers).

    Returns:
        Tokens, seconds, tokens a second, `steps`, `preemptions`, and what a step took beside waiting for the device:
        `planning_seconds` in the scheduler, where it is applied, too, and `launch_seconds` in the runner, medians; and
        all of it and reading as a `Spread`, `host_seconds`.

    Raises:
        ValueError: a sequence cannot fit.
        RuntimeError: a sequence failed or could not be seated.
    """
    scheduler = Scheduler(
        KVCache(pool.num_blocks, pool.block_size, enable_prefix_caching=False),
        limits=limits, num_seats=pool.num_seats, max_model_len=pool.max_model_len, may_draft=False,
    )  # fmt: skip
    for sequence in sequences:
        scheduler.add(sequence)
    line = _Line(scheduler, runner)
    num_ended = num_tokens = 0
    begin = time.perf_counter()
    while line.begin_step() or line.under_way:
        if line.is_full:
            update = line.end_step()
            if failed := [ending.error for ending in update.endings if ending.error]:
                raise RuntimeError(f"a request failed: {failed[0]}")
            num_tokens += len(update.tokens)
            num_ended += len(update.endings)
            report(num_ended, len(sequences))
    if num_ended < len(sequences):
        raise RuntimeError(f"{len(sequences) - num_ended} requests could not be seated")
    seconds = time.perf_counter() - begin
    num_prompt_tokens = sum([sequence.num_prompt_tokens for sequence in sequences])
    return {
        "requests": num_ended,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_tokens,
        "seconds": seconds,
        "output_tokens_per_second": num_tokens / seconds,
        "total_tokens_per_second": (num_prompt_tokens + num_tokens) / seconds,
        "steps": len(line.planning),
        "preemptions": scheduler.counters.num_preemptions,
        "seats": limits.max_num_seqs,
        "budget": limits.max_num_batched_tokens,
        "planning_seconds": median(line.planning) + median(line.applying),
        "launch_seconds": median(line.launching) if runner.overlaps else None,
        "host_seconds": asdict(Spread.of(line.host_seconds())) if runner.overlaps else None,
    }


class _Line:
    """The steps that are launched and not read yet: one, or two where they overlap."""

    def __init__(self, scheduler: Scheduler, runner: Measured) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._depth = 2 if runner.overlaps else 1
        self._planned_last = True
        self.under_way: deque[tuple[ScheduledBatch, Ticket]] = deque()
        self.planning: list[float] = []
        self.launching: list[float] = []
        self.reading: list[float] = []
        self.applying: list[float] = []

    @property
    def is_full(self) -> bool:
        """Whether the oldest is to be read before another one is launched."""
        return len(self.under_way) >= self._depth or not self._planned_last

    def begin_step(self) -> bool:
        """Plan the next and launch it; `False` where there is none now."""
        begin = time.perf_counter()
        batch = self._scheduler.schedule(0.0)
        self._planned_last = not batch.is_empty
        if batch.is_empty:
            return False
        self._scheduler.launched(batch)
        planned = time.perf_counter()
        self.under_way.append((batch, self._runner.launch(batch)))
        self.planning.append(planned - begin)
        self.launching.append(time.perf_counter() - planned)
        return True

    def end_step(self) -> StepUpdate:
        """Read the oldest and apply it."""
        batch, ticket = self.under_way.popleft()
        begin = time.perf_counter()
        output = self._runner.collect(ticket)
        read = time.perf_counter()
        self.reading.append(read - begin - self._runner.take_seconds().get("wait", 0.0))
        update = self._scheduler.update(batch, output, 0.0)
        self.applying.append(time.perf_counter() - read)
        return update

    def host_seconds(self) -> list[float]:
        """What each step took on this side."""
        parts = (self.planning, self.launching, self.reading, self.applying)
        return [sum(each) for each in zip(*parts, strict=True)]
