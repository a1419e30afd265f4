"""Decides, anew for every step, which sequences compute how many tokens (iteration-level scheduling, Orca).

There is no prefill phase and no decode phase. A sequence knows `num_tokens` tokens, of which `num_computed_tokens`
are in the cache; every step, under one token budget, each is given some tokens to catch up: first those that run,
then those that wait. Reading a prompt in chunks and computing again after a preemption are the same case.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from engine.batch import ScheduledBatch, Seated
from engine.plan import Plan
from engine.policy import OnDemand
from engine.sequence import FinishReason, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.batch import StepOutput
    from engine.config import Limits
    from engine.kv_cache import KVCache
    from engine.policy import AdmissionPolicy


# How many that do not fit are passed over in one step, and how often one of them in its life.
MAX_SKIPPED = 8
MAX_OVERTAKEN = 16


class Ending(NamedTuple):
    """A sequence ended; `error` is one line of cause where it failed."""

    sequence_id: int
    reason: FinishReason
    error: str | None = None


class StepUpdate(NamedTuple):
    """What a step meant: `(sequence_id, token_id)` for each that got a token, then those that ended."""

    tokens: list[tuple[int, int]]
    endings: list[Ending]


class Scheduler:
    """Waiting and running sequences, and the plan of each step. Pure: no clock, no tensors, no tasks.

    Args:
        kv_cache: the blocks.
        limits: seats and token budget at the start.
        num_seats: the highest `max_num_seqs` there can ever be.
        max_model_len: context length of the model, in tokens.
        admission: how much memory a newcomer must find.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        limits: Limits,
        num_seats: int,
        max_model_len: int,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.admission: AdmissionPolicy = admission or OnDemand()
        self.limits = limits
        self.num_seats = num_seats
        self.usable_capacity = min(max_model_len, kv_cache.num_tokens)
        self.running: list[Sequence] = []
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        # Why the queue does not move; those in `too_large_now` wait for memory whatever it says.
        self.wait_reason: str | None = None
        self.too_large_now: tuple[int, ...] = ()
        self.num_waiting_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_prompt_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_dropped_results = 0
        self.num_rows = 0
        self.num_useful_rows = 0
        self._live: dict[int, Sequence] = {}
        self._free_seats = list(range(num_seats - 1, -1, -1))
        self._step = 0

    def request_ids(self, sequence_ids: Iterable[int]) -> tuple[str, ...]:
        """Names of live sequences."""
        return tuple([self._live[sequence_id].request_id for sequence_id in sequence_ids])

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Every live sequence, in the order of arrival."""
        return self._live.values()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            ValueError: it can never fit; whoever took it in should have refused it.
        """
        if not 0 < sequence.num_prompt_tokens <= self.usable_capacity:
            raise ValueError(f"{sequence.num_prompt_tokens} prompt tokens, usable capacity {self.usable_capacity}")
        # The last token needs no place in the cache: nothing is computed from it.
        longest = self.usable_capacity + 1
        max_tokens = sequence.params.max_tokens
        sequence.end_length = longest if max_tokens is None else min(longest, sequence.num_prompt_tokens + max_tokens)
        self._live[sequence.sequence_id] = sequence
        self._wait(sequence, first=False)

    def abort(self, sequence_id: int, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a sequence in whatever state it is and free what it holds; `None` if it has ended already."""
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, reason)
        return sequence

    def schedule(self, now: float) -> ScheduledBatch:
        """Plan the next step. An empty batch means that nothing waits or runs."""
        plan = Plan(self._step + 1, self.limits)
        self._continue_running(plan)
        if plan.preempted:
            # Whoever lost its seat must not take it back from under those it was lost to.
            self.wait_reason, self.too_large_now = "kv_memory", ()
        else:
            self._admit_waiting(plan, now)
        if plan.rows:
            self._step = plan.step
        return plan.freeze()

    def update(self, batch: ScheduledBatch, output: StepOutput, now: float) -> StepUpdate:
        """Apply what a step gave back; results for sequences that have ended meanwhile are dropped and counted."""
        update = StepUpdate([], [])
        live, failures = self._live, output.failures
        num_dropped = 0
        columns = zip(batch.sequence_ids, batch.starts, batch.counts, batch.samples, output.token_ids, strict=True)
        for row, (sequence_id, start, count, samples, token_id) in enumerate(columns):
            sequence = live.get(sequence_id)
            if sequence is None or sequence.num_computed_tokens != start:
                num_dropped += 1
                continue
            if failures and row in failures:
                self._end(sequence, FinishReason.ERROR, update, failures[row])
                continue
            sequence.num_computed_tokens = end = start + count
            if end >= sequence.next_full:
                self.kv_cache.remember(sequence)
            if sequence.first_token_time is None:
                self._count_prompt(sequence)
                if samples:
                    sequence.first_token_time = now
            if samples:
                sequence.token_ids.append(token_id)
                update.tokens.append((sequence_id, token_id))
                if token_id in sequence.stop_token_ids or len(sequence.token_ids) >= sequence.end_length:
                    self._end_if_due(sequence, token_id, update)
        self.num_dropped_results += num_dropped
        self.num_rows += len(batch.seats)
        self.num_useful_rows += len(batch.seats) - num_dropped
        return update

    def fail(self, batch: ScheduledBatch, error: str) -> StepUpdate:
        """End every sequence of a batch whose step failed."""
        update = StepUpdate([], [])
        for sequence_id in batch.sequence_ids:
            sequence = self._live.get(sequence_id)
            if sequence is not None:
                self._end(sequence, FinishReason.ERROR, update, error)
        return update

    def check_integrity(self) -> None:
        """Compare blocks, seats and queues with each other.

        Raises:
            RuntimeError: they contradict each other.
        """
        self.kv_cache.check_integrity(self._live.values())
        seats = [sequence.seat for sequence in self.running]
        if sorted(seats + self._free_seats) != list(range(self.num_seats)):
            raise RuntimeError(f"seats taken {sorted(seats)} and free {sorted(self._free_seats)} do not add up")
        if len(self.running) + len(self.waiting) != len(self._live):
            raise RuntimeError(f"{len(self._live)} live sequences, {len(self.running)} run, {len(self.waiting)} wait")
        if self.num_waiting_tokens != sum(sequence.num_tokens for sequence in self.waiting.values()):
            raise RuntimeError(f"{self.num_waiting_tokens} waiting tokens do not match the queue")
        if not self.running and self.kv_cache.usage.used:
            raise RuntimeError(f"{self.kv_cache.usage.used} blocks are used and nothing runs")

    def _count_prompt(self, sequence: Sequence) -> None:
        """Count what was read of a prompt for the first time."""
        read = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if read > sequence.num_prompt_tokens_read:
            self.num_prompt_tokens += read - sequence.num_prompt_tokens_read
            sequence.num_prompt_tokens_read = read

    def _continue_running(self, plan: Plan) -> None:
        running, block_size = self.running, self.kv_cache.block_size
        if plan.tokens_left < len(running):
            # Not everyone gets a token: those who have waited longest go first, so that nobody starves.
            order = sorted(running, key=lambda sequence: sequence.last_step)
        else:
            order = list(running)
        for sequence in order:
            if plan.tokens_left == 0:
                break
            if sequence.seat < 0:
                continue  # lost its seat to an earlier one in this very pass
            num_tokens = len(sequence.token_ids)
            fits = num_tokens <= len(sequence.block_ids) * block_size
            new_blocks = () if fits else self._make_room(sequence, plan)
            if new_blocks is not None:
                plan.add(sequence, num_tokens - sequence.num_computed_tokens, new_blocks)

    def _make_room(self, sequence: Sequence, plan: Plan) -> tuple[int, ...] | None:
        """Blocks for all known tokens; if there are none, the youngest give theirs, at worst the sequence itself."""
        while True:
            new_blocks = self.kv_cache.allocate(sequence, len(sequence.token_ids))
            if new_blocks is not None:
                return new_blocks
            victim = next(other for other in reversed(self.running) if other.last_step != plan.step)
            self._preempt(victim, plan)
            if victim is sequence:
                return None

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        """Take seat and blocks away; it will be computed again from its tokens (recompute, vLLM)."""
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_tokens_thrown_away = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(sequence.sequence_id)
        self._wait(sequence, first=True)

    def _admit_waiting(self, plan: Plan, now: float) -> None:
        """Fill free seats in the order of the queue.

        Where memory is short for one, a few behind it that fit may overtake it: a waiting giant must not hold up the
        small ones. Nobody is overtaken more than `MAX_OVERTAKEN` times, and one that was preempted never.
        """
        self.wait_reason = None
        self.too_large_now = ()
        skipped: list[Sequence] = []
        promised: int | None = None  # blocks; looked at only where somebody waits
        free_seats = self.limits.max_num_seqs - len(self.running)
        for sequence in list(islice(self.waiting.values(), max(0, free_seats) + MAX_SKIPPED + 1)):
            if len(self.running) >= self.limits.max_num_seqs:
                self.wait_reason = "seats"
                break
            if plan.tokens_left == 0:
                self.wait_reason = "token_budget"
                break
            prefix = self.kv_cache.find_prefix(sequence)
            if promised is None:
                promised = sum([self._promised_blocks(other) for other in self.running])
            if self.running and not self.kv_cache.fits(self._expected_blocks(sequence), prefix, promised):
                self.wait_reason = "kv_memory"
                skipped.append(sequence)
                if len(skipped) > MAX_SKIPPED or sequence.status is SequenceStatus.PREEMPTED:
                    break
            elif any(other.num_overtaken >= MAX_OVERTAKEN for other in skipped):
                break
            else:
                self._seat(sequence, prefix, plan, now)
                promised += self._promised_blocks(sequence)
                for other in skipped:
                    other.num_overtaken += 1
        self.too_large_now = tuple([sequence.sequence_id for sequence in skipped])

    def _expected_blocks(self, sequence: Sequence) -> int:
        """Blocks that the policy wants for a sequence, those it has included."""
        expected = self.admission.expected_tokens(sequence, self.kv_cache.block_size)
        return self.kv_cache.blocks_for(min(expected, self.usable_capacity))

    def _promised_blocks(self, sequence: Sequence) -> int:
        """Blocks that the policy wants for a running sequence beyond those it has."""
        return max(0, self._expected_blocks(sequence) - len(sequence.block_ids))

    def _seat(self, sequence: Sequence, prefix: list[int], plan: Plan, now: float) -> None:
        del self.waiting[sequence.sequence_id]
        self.num_waiting_tokens -= sequence.num_tokens
        sequence.status = SequenceStatus.RUNNING
        sequence.seat = self._free_seats.pop()
        self.running.append(sequence)
        new_blocks = self.kv_cache.seat(sequence, prefix)
        if new_blocks is None:
            raise RuntimeError(f"sequence {sequence.sequence_id} was seated without room for its tokens")
        self._count_hits(sequence, now)
        plan.seated.append(
            Seated(
                seat=sequence.seat,
                sequence_id=sequence.sequence_id,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=sequence.params,
                num_cached_tokens=sequence.num_computed_tokens,
            )
        )
        plan.add(sequence, sequence.num_tokens - sequence.num_computed_tokens, new_blocks)

    def _count_hits(self, sequence: Sequence, now: float) -> None:
        """Count what the cache saved a newcomer of its prompt, or one that returns of what it had lost."""
        hits = sequence.num_computed_tokens
        if sequence.first_seated_time is None:
            sequence.first_seated_time = now
            sequence.num_cached_tokens = hits
            sequence.num_prompt_tokens_read = hits
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += hits
            self.num_prompt_tokens += hits
        else:
            self.num_recomputed_tokens += max(0, sequence.num_tokens_thrown_away - hits)
        sequence.num_tokens_thrown_away = 0

    def _wait(self, sequence: Sequence, *, first: bool) -> None:
        self.waiting[sequence.sequence_id] = sequence
        self.num_waiting_tokens += sequence.num_tokens
        if first:
            self.waiting.move_to_end(sequence.sequence_id, last=False)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.seat >= 0:
            self.running.remove(sequence)
            self._vacate(sequence)
        else:
            del self.waiting[sequence.sequence_id]
            self.num_waiting_tokens -= sequence.num_tokens
        del self._live[sequence.sequence_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _end_if_due(self, sequence: Sequence, token_id: int, update: StepUpdate) -> None:
        """A stop token came, or the longest length is reached; before `min_tokens` a stop token ends nothing."""
        if token_id in sequence.stop_token_ids and sequence.num_output_tokens > sequence.params.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.token_ids) >= sequence.end_length:
            reason = FinishReason.LENGTH
        else:
            return
        self.admission.observe(sequence)
        self._end(sequence, reason, update)

    def _end(self, sequence: Sequence, reason: FinishReason, update: StepUpdate, error: str | None = None) -> None:
        self._finish(sequence, reason)
        update.endings.append(Ending(sequence.sequence_id, reason, error))

    def _vacate(self, sequence: Sequence) -> None:
        self.kv_cache.release(sequence)
        self._free_seats.append(sequence.seat)
        self._free_seats.sort(reverse=True)  # the lowest free seat is taken first
        sequence.seat = -1
