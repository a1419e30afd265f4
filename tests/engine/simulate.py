"""Drives a bare scheduler over the fake runner, without tasks or clock: one call, one step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from engine.batch import StepUpdate
from engine.config import Limits
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from tests.fakes import FakeRunner

if TYPE_CHECKING:
    from engine.batch import ScheduledBatch, StepOutput, TokenLogprobs
    from engine.stepper import Runner


class Simulation:
    """A scheduler and a fake runner, stepped by hand; every step is checked for the invariants.

    Where the runner overlaps, each step is planned and launched before what came of the one before it is read.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        token_budget: int = 64,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        num_seats: int = 16,
        runner: Runner | None = None,
        enable_prefix_caching: bool = True,
        **limits: Any,
    ) -> None:
        self.scheduler = Scheduler(
            KVCache(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
            limits=Limits(max_num_seqs, token_budget, **limits),
            num_seats=num_seats,
            max_model_len=max_model_len,
        )
        self.runner: Runner = runner or FakeRunner(num_blocks, block_size)
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.finished_in: dict[int, int] = {}
        self.batches: list[ScheduledBatch] = []
        self._flight: deque[tuple[ScheduledBatch, Any]] = deque()
        self._ids = count(1)

    def set_limits(self, max_num_seqs: int, token_budget: int, **limits: Any) -> None:
        now = self.scheduler.limits
        self.scheduler.set_limits(
            replace(now, max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget, **limits)
        )

    def add(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        *,
        key_name: str = "",
        background: bool = False,
        priority: int = 0,
        **params: Any,
    ) -> Sequence:
        prompt = tuple((len(self.sequences) * 7 + i * 3) % 256 for i in range(num_prompt_tokens))
        asked = {"key_name": key_name, "background": background, "priority": priority}
        return self.add_prompt(prompt, SamplingParams(max_tokens=max_tokens, **params), **asked)

    def add_prompt(self, prompt: tuple[int, ...], params: SamplingParams, **asked: Any) -> Sequence:
        sequence_id = next(self._ids)
        sequence = Sequence(sequence_id, f"r{sequence_id}", prompt, params, arrival_time=0.0, **asked)
        self.scheduler.add(sequence)
        self.sequences[sequence_id] = sequence
        self.outputs[sequence_id] = []
        return sequence

    def step(self) -> ScheduledBatch:
        overlaps = self.runner.overlaps and self.scheduler.may_overlap
        if not overlaps:
            self.land()
        batch = self.scheduler.schedule(float(len(self.batches)))
        self.check_writes(batch)
        if overlaps:
            if not batch.is_empty:
                self.scheduler.launched(batch)
                self._flight.append((batch, self.runner.launch(batch)))
            self.land(0 if batch.is_empty else 1)
        elif not batch.is_empty:
            self.update(batch, self.runner.execute(batch))
        self.scheduler.check_integrity()
        # Whoever loses its seat does so for somebody else.
        assert not set(batch.preempted) & {seated.sequence_id for seated in batch.seated}
        assert batch.num_tokens + batch.num_padding_tokens <= batch.token_budget
        self.batches.append(batch)
        return batch

    def check_writes(self, batch: ScheduledBatch) -> None:
        """Nothing is ever written into a block that two sequences refer to."""
        ref_counts, size = self.scheduler.kv_cache.pool.ref_counts, self.scheduler.kv_cache.block_size
        columns = zip(batch.sequence_ids, batch.starts, batch.counts, strict=True)
        for row, (sequence_id, start, length) in enumerate(columns):
            end = start + length + len(batch.drafts.get(row, ()))
            written = self.sequences[sequence_id].block_ids[start // size : (end - 1) // size + 1]
            assert [ref_counts[block_id] for block_id in written] == [1] * len(written)

    def land(self, num_left: int = 0) -> None:
        """Read what came of the steps under way, but for the last ones."""
        while len(self._flight) > num_left:
            batch, ticket = self._flight.popleft()
            self.update(batch, self.runner.collect(ticket))

    def begin_anew(self) -> None:
        """As after a step that failed; what is under way is forgotten."""
        update = StepUpdate.empty()
        self._flight.clear()
        self.scheduler.begin_anew(update)
        assert update == StepUpdate.empty()
        self.runner.reset()

    def update(self, batch: ScheduledBatch, output: StepOutput) -> None:
        self.apply(self.scheduler.update(batch, output, float(len(self.batches))), batch.step)

    def apply(self, update: StepUpdate, step: int) -> None:
        for sequence_id, token_id in update.tokens:
            self.outputs[sequence_id].append(token_id)
        for sequence_id, entries in update.logprobs.items():
            self.logprobs.setdefault(sequence_id, []).extend(entries)
        for ending in update.endings:
            self.finished_in[ending.sequence_id] = step

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing waits or runs."""
        for _ in range(max_steps):
            if not self.scheduler.running and not self.scheduler.waiting:
                self.land()  # rows behind the stop token of the last
                return
            self.step()
        raise AssertionError(f"still not done after {max_steps} steps")
