"""Plays a workload through the real scheduler with a cost model in place of a model, in virtual time.

What is decided is what the engine decides: the same `Scheduler`, told the same things in the same order. Only the
seconds are computed rather than spent, and stretches in which nothing is decided are passed in one go
(`engine/fast_forward.py`).
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import replace
from itertools import islice
from operator import sub
from typing import TYPE_CHECKING

from engine.batch import StepOutput
from engine.cost_model import StepShape, shape_of
from engine.errors import ConfigError
from engine.fast_forward import is_closed, is_steady, num_steady_steps, repeat
from engine.kv_cache import KVCache
from engine.scheduler import MAX_SKIPPED, Scheduler
from engine.sequence import SamplingParams, Sequence
from engine.simulation_result import ServedRequest, SimulationResult
from engine.step_log import StepRecord

if TYPE_CHECKING:
    from engine.batch import ScheduledBatch
    from engine.config import Limits
    from engine.cost_model import CostModel
    from engine.workload import Workload

STOP, ORDINARY = 0, 1
VOCAB_SIZE = 50_000


def simulate(
    workload: Workload,
    *,
    limits: Limits,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    cost_model: CostModel,
    num_seats: int | None = None,
    open_loop: bool = True,
    enable_prefix_caching: bool = True,
    max_waiting: int | None = None,
    declared_max_tokens: bool = True,
    record_gaps: bool = False,
    num_recorded_steps: int = 0,
    jump: bool = True,
) -> SimulationResult:
    """Serve a workload of one key. Steps are passed in one go only where none of it is background work.

    Args:
        num_seats: seats there are; `None` is `limits.max_num_seqs`.
        open_loop: requests come when the workload says; else all wait from the start.
        max_waiting: requests that may wait; the next is refused. `None` is no limit.
        declared_max_tokens: each request asks for the workload's longest answer and ends by a stop token, as clients'
            do; else it asks for exactly the length of its own.
        record_gaps: note how long each request waited for each token after its first.
        num_recorded_steps: steps to record, from the first.
        jump: pass steady stretches in one go. The result is the same without, only later.

    Raises:
        ConfigError: a number is out of range, or no policy has that name.
    """
    if min(num_blocks, block_size, max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) < 1:
        raise ConfigError(
            "A simulation needs at least one block, one token each of block and context, seat and budget."
        )
    try:
        scheduler = Scheduler(
            KVCache(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
            limits=replace(limits, num_speculative_tokens=0),  # no text, nothing to repeat
            num_seats=max(num_seats or 0, limits.max_num_seqs),
            max_model_len=max_model_len,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    simulation = _Simulation(
        workload,
        scheduler,
        cost_model,
        open_loop=open_loop,
        max_waiting=math.inf if max_waiting is None else max_waiting,
        declared_max_tokens=declared_max_tokens,
        record_gaps=record_gaps,
        num_recorded_steps=num_recorded_steps,
        jump=jump,
    )
    simulation.run()
    return simulation.result()


class _Simulation:
    """The state of one run. Time is in seconds from the start of the workload."""

    def __init__(
        self,
        workload: Workload,
        scheduler: Scheduler,
        cost_model: CostModel,
        *,
        open_loop: bool,
        max_waiting: float,
        declared_max_tokens: bool,
        record_gaps: bool,
        num_recorded_steps: int,
        jump: bool,
    ) -> None:
        self._workload = workload
        self._scheduler = scheduler
        self._cost = cost_model
        self._open_loop = open_loop
        self._max_waiting = max_waiting
        self._declared_max_tokens = declared_max_tokens
        # Sequence id to when its tokens came.
        self._token_times: dict[int, array[float]] | None = {} if record_gaps else None
        self._num_recorded_steps = num_recorded_steps
        has_background = any([item.is_background for item in workload.items])
        # Nor is a step passed over where the budget of the next depends on how long it took.
        self._jumps = jump and not has_background and not scheduler.limits.slo_admission
        # The scheduler looks at the head of its queue alone; the rest waits here, as numbers rather than tokens. Where
        # one class of work goes before the other, the head may be anywhere.
        self._window = math.inf if has_background else 2 * scheduler.limits.max_num_seqs + 2 * MAX_SKIPPED
        self._backlog: deque[int] = deque()
        self._next = 0
        self._now = 0.0
        self._num_steps = 0
        self._live: dict[int, Sequence] = {}
        self._ends_at: dict[int, int] = {}
        self._requests: list[ServedRequest] = []
        self._refused: list[int] = []
        self._failed: list[int] = []
        self._steps: list[StepRecord] = []

    def run(self) -> None:
        """Until everybody has ended."""
        scheduler = self._scheduler
        while True:
            self._arrive()
            batch = scheduler.schedule(self._now)
            if batch.is_empty:
                if not self._wait():
                    return
                continue
            shape = shape_of(batch)
            seconds = self._cost.seconds(shape)
            if self._num_steps < self._num_recorded_steps:
                self._steps.append(StepRecord.of(scheduler, batch, self._now))
            self._now += seconds
            self._num_steps += 1
            update = scheduler.update(batch, StepOutput(batch.step, self._draw(batch)), self._now)
            if self._token_times is not None:
                for sequence_id, _ in update.tokens:
                    self._token_times[sequence_id].append(self._now)
            for ending in update.endings:
                self._end(ending.sequence_id)
            if self._jumps and self._num_steps >= self._num_recorded_steps and is_steady(scheduler, batch, update):
                self._jump(batch)

    def result(self) -> SimulationResult:
        """All of it."""
        last = max([request.finished for request in self._requests], default=0.0)
        return SimulationResult(
            requests=tuple(self._requests),
            refused=tuple(self._refused),
            failed=tuple(self._failed),
            num_steps=self._num_steps,
            makespan=last,
            counters=self._scheduler.counters,
            steps=tuple(self._steps),
        )

    def _arrival(self, index: int) -> float:
        """When an item comes; never where there is none."""
        if index >= len(self._workload.items):
            return math.inf
        return self._workload.items[index].arrival_seconds if self._open_loop else 0.0

    def _arrive(self) -> None:
        """Take in who has come, and show the scheduler as many as it can look at."""
        while self._arrival(self._next) <= self._now:
            if self._workload.items[self._next].num_prompt_tokens > self._scheduler.usable_capacity:
                self._failed.append(self._next)
            elif len(self._backlog) + self._scheduler.num_waiting >= self._max_waiting:
                self._refused.append(self._next)
            else:
                self._backlog.append(self._next)
            self._next += 1
        while self._backlog and self._scheduler.num_waiting < self._window:
            self._add(self._backlog.popleft())

    def _add(self, index: int) -> None:
        item = self._workload.items[index]
        if self._scheduler.kv_cache.enable_prefix_caching:
            prompt = self._workload.prompt_token_ids(index, VOCAB_SIZE)
        else:
            prompt = (ORDINARY,) * item.num_prompt_tokens
        longest = self._workload.max_output_tokens if self._declared_max_tokens else 0
        params = SamplingParams(max_tokens=max(longest, item.num_output_tokens), stop_token_ids=frozenset((STOP,)))
        sequence = Sequence(index, f"r{index + 1}", prompt, params, self._arrival(index), background=item.is_background)
        self._scheduler.add(sequence)
        self._live[index] = sequence
        if self._token_times is not None:
            self._token_times[index] = array("d")
        self._ends_at[index] = item.num_prompt_tokens + item.num_output_tokens

    def _wait(self) -> bool:
        """Nothing can be computed now: wait for whoever comes or for the policy; `False` when all is over."""
        scheduler = self._scheduler
        opens_at = scheduler.look_again_at
        until = min(self._arrival(self._next), math.inf if opens_at is None else opens_at)
        if until == math.inf:
            if not scheduler.num_waiting:
                return False
            raise RuntimeError(f"{scheduler.num_waiting} wait and nothing moves")
        self._now = max(until, self._now)
        return True

    def _draw(self, batch: ScheduledBatch) -> tuple[int, ...]:
        """A token for each row: the stop token where the answer has its length."""
        ends_at = self._ends_at
        return tuple(
            [
                STOP if start + count + 1 == ends_at[sequence_id] else ORDINARY
                for sequence_id, start, count in zip(batch.sequence_ids, batch.starts, batch.counts, strict=True)
            ]
        )

    def _end(self, sequence_id: int) -> None:
        sequence = self._live.pop(sequence_id)
        del self._ends_at[sequence_id]
        times = array("d") if self._token_times is None else self._token_times.pop(sequence_id)
        if sequence.first_seated_time is None or sequence.first_token_time is None:
            raise RuntimeError(f"request {sequence_id} ended as {sequence.finish_reason} before its first token")
        self._requests.append(
            ServedRequest(
                item=sequence_id,
                arrival=sequence.arrival_time,
                seated=sequence.first_seated_time,
                first_token=sequence.first_token_time,
                finished=self._now,
                num_output_tokens=sequence.num_output_tokens,
                num_preemptions=sequence.num_preemptions - sequence.num_yields,
                gaps=array("d", map(sub, islice(times, 1, None), times)),
            )
        )

    def _jump(self, batch: ScheduledBatch) -> None:
        """Pass the steps up to the next in which something is decided: an ending, a lack of blocks, an arrival."""
        scheduler = self._scheduler
        arrival = self._arrival(self._next)
        if is_closed(scheduler) or scheduler.num_waiting > scheduler.limits.max_num_seqs + MAX_SKIPPED:
            arrival = math.inf  # whoever comes stands behind those that are looked at
        if arrival <= self._now:
            return
        num_steps = num_steady_steps(scheduler, self._ends_at)
        if num_steps < 1:
            return
        running, padding = scheduler.running, batch.padding
        num_rows = len(running) + len(padding)
        context = sum([len(s.token_ids) for s in running]) + sum([row.start + 1 for row in padding])
        first = self._cost.seconds(StepShape(num_rows, num_rows, num_rows, context))
        growth = len(running) * self._cost.decode_token_seconds

        def seconds(steps: int) -> float:
            return steps * first + growth * (steps * (steps - 1) // 2)

        if self._now + seconds(num_steps) >= arrival:
            low, high = 0, num_steps  # the first step that ends at or after the arrival is the last
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._now + seconds(middle) >= arrival else (middle, high)
            num_steps = high
        repeat(scheduler, batch, num_steps, ORDINARY)
        if self._token_times is not None:
            times = array("d", [self._now + seconds(step) for step in range(1, num_steps + 1)])
            for sequence in running:
                self._token_times[sequence.sequence_id].extend(times)
        self._now += seconds(num_steps)
        self._num_steps += num_steps
