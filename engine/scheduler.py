"""Decides, anew for every step, which sequences compute how many tokens (iteration-level scheduling, Orca).

There is no prefill phase and no decode phase. A sequence knows `num_tokens` tokens, of which `num_computed_tokens`
are in the cache; every step, under one token budget, each is given some tokens to catch up: first those that run,
then those that wait. Reading a prompt in chunks and computing again after a preemption are the same case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import StepUpdate
from engine.batching import Moment, make_batching
from engine.counters import Counters
from engine.drafting import add_drafts
from engine.members import Members
from engine.outcomes import Outcomes
from engine.pace import Pace, held_back, longest_gap
from engine.plan import Plan
from engine.policy import Outlook, make_admission
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.work_class import find_way

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from engine.batch import ScheduledBatch, StepOutput
    from engine.config import Limits
    from engine.kv_cache import KVCache, Prefix
    from engine.work_class import WorkClass

# How many that do not fit are passed over in one step, and how often one of them in its life.
MAX_SKIPPED = 8
MAX_OVERTAKEN = 16


class Scheduler:
    """Waiting and running sequences, and the plan of each step. Pure: no clock, no tensors, no tasks.

    Args:
        kv_cache: the blocks.
        limits: seats, token budget and policies at the start.
        num_seats: the highest `max_num_seqs` there can ever be.
        max_model_len: context length of the model, in tokens.
        may_draft: whether what else a step computes changes no token; else drafts would.

    Raises:
        ValueError: there is no policy of that name.
    """

    def __init__(
        self, kv_cache: KVCache, *, limits: Limits, num_seats: int, max_model_len: int, may_draft: bool = True
    ) -> None:
        self.kv_cache = kv_cache
        self.limits = limits
        self.batching = make_batching(limits.policy)
        self._in_force = (limits.policy, limits.admission)
        # The limits name other policies: they hold as soon as nobody sits under those in force.
        self.is_switching = False
        self.is_ending = False  # nobody comes any more
        self.usable_capacity = min(max_model_len, kv_cache.num_tokens)
        self.outlook = Outlook(make_admission(limits.admission), kv_cache, self.usable_capacity)
        self.counters = Counters()
        self._members = Members(num_seats)
        self.interactive, self.background = self.classes = self._members.classes
        self._live = self._members.live
        self.aside = self._members.aside
        self._outcomes = Outcomes(self._live, kv_cache, self.outlook, self.counters, self._finish)
        self._may_draft = may_draft
        self._pace = Pace()
        self._step = 0
        self._updated = 0.0

    @property
    def running(self) -> list[Sequence]:
        """Everybody who sits (`Members.running`)."""
        return self._members.running

    @property
    def num_running(self) -> int:
        """Seats that are taken by those who run."""
        return self._members.num_running

    @property
    def waiting(self) -> list[Sequence]:
        """Everybody who waits for a seat (`Members.waiting`)."""
        return self._members.waiting

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat."""
        return self._members.num_waiting

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Every live sequence, in the order of arrival."""
        return self._live.values()

    def request_ids(self, sequence_ids: Iterable[int]) -> tuple[str, ...]:
        """Names of live sequences."""
        return tuple([self._live[sequence_id].request_id for sequence_id in sequence_ids])

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
        self._members.join(sequence)

    def abort(self, sequence_id: int, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a sequence in whatever state it is and free what it holds; `None` if it has ended already."""
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            self._finish(sequence, reason)
        return sequence

    def set_limits(self, limits: Limits) -> None:
        """Take other limits from the next step on; another policy when those who run have ended under the old one."""
        self.is_switching = (limits.policy, limits.admission) != self._in_force
        self.limits = limits

    @property
    def look_again_at(self) -> float | None:
        """When an empty batch can be followed by another one although nobody came: seconds on the engine's clock."""
        return self.batching.opens_at if self.num_waiting else None

    def schedule(self, now: float) -> ScheduledBatch:
        """Plan the next step.

        An empty batch means that nothing runs and nobody may sit down yet, or that what is under way must be known
        first.
        """
        plan = Plan(self._step + 1, self.limits)
        if self._outcomes.is_any_under_way and self._lacks_blocks():
            return plan.freeze()
        if not self.num_running:
            self._begin_batches()
        if not self.batching.forms_batches:
            plan.keep_within(self._pace.budget(self.limits, self.classes))
        self.batching.pad(plan, self.num_running)
        self._make_way(plan)
        held = 0 if self.batching.forms_batches else held_back(self.limits, self.classes, plan.tokens_left)
        plan.tokens_left -= held
        for work in self.classes:
            plan.tokens_left += held * (work is self.background)
            self._continue_running(work, plan)
            self._admit_waiting(work, plan, now)
        if self._may_draft and not self.batching.forms_batches:
            add_drafts(plan, self._live)
        if plan.rows or plan.padding:
            self._step = plan.step
        return plan.freeze()

    @property
    def may_overlap(self) -> bool:
        """Whether a step can be planned before it is known what the one before it has drawn."""
        drafts = self._may_draft and self.limits.num_speculative_tokens
        return not drafts and not self.batching.forms_batches

    def launched(self, batch: ScheduledBatch) -> None:
        """The step that was planned last is under way: the next is planned from where it will have come.

        What came of each of them is to be told (`update`) in their order.

        Raises:
            ValueError: it has drafts.
        """
        self._outcomes.launch(batch)

    def update(
        self, batch: ScheduledBatch, output: StepOutput, now: float, into: StepUpdate | None = None
    ) -> StepUpdate:
        """Apply what a step gave back; results for sequences that have ended meanwhile are dropped and counted.

        `into` is filled row by row: whoever gives one knows what was applied even where this raises.
        """
        update = StepUpdate.empty() if into is None else into
        self._outcomes.apply(batch, output, now, update)
        if any(batch.decodes) and (target := longest_gap(self.limits, self.classes)):
            self._pace.note(batch.num_tokens, now - self._updated, target)
        self._updated = now
        return update

    def admit_only(self, sequence_ids: Collection[int] | None) -> list[int]:
        """Let nobody wait or sit but these, whoever comes; `None` lets everybody. Gives those who lose their seat."""
        others = [s for s in self.running if sequence_ids is not None and s.sequence_id not in sequence_ids]
        for sequence in others:
            self._throw_out(sequence)
        self._members.admit_only(sequence_ids)
        return [sequence.sequence_id for sequence in others]

    def begin_anew(self, update: StepUpdate) -> list[int]:
        """Make all anew from the live sequences alone: everybody waits, nothing is cached. Gives who loses a seat.

        Whoever was at its end when something broke is added to `update`.
        """
        self._outcomes.begin_anew()  # first: a queue counts the tokens of those that wait in it
        lost = self._members.begin_anew()
        self.kv_cache.begin_anew(self._live.values())
        self._begin_batches()
        for sequence in [s for s in self._live.values() if s.num_output_tokens]:
            self._outcomes.end_if_due(sequence, update)
        return [sequence.sequence_id for sequence in lost]

    def check_integrity(self) -> None:
        """Compare blocks, seats and queues with each other; raises `RuntimeError` where they contradict each other."""
        self._outcomes.check_integrity()
        self.kv_cache.check_integrity(self._live.values())
        self._members.check_integrity()

    def check_sums(self) -> None:
        """The part of `check_integrity` that is cheap enough for a server that is never idle."""
        self.kv_cache.pool.check_sums(sum([len(sequence.block_ids) for sequence in self.running]))
        self._members.check_sums()

    def _begin_batches(self) -> None:
        """Nobody runs: seats that were kept are free, and new policies can begin."""
        self._members.seats.free_kept()
        self.batching.end()
        if self.is_switching:
            self.batching = make_batching(self.limits.policy)
            self.outlook.admission = make_admission(self.limits.admission)
            self._in_force = (self.limits.policy, self.limits.admission)
            self.is_switching = False

    def _lacks_blocks(self) -> bool:
        """Whether one who sits would lose its seat for blocks, maybe to one that ends with the token under way."""
        num_available = self.kv_cache.pool.num_available
        if num_available >= self.num_running:
            return False
        return sum([sequence.num_tokens > sequence.room for sequence in self.running]) > num_available

    def _make_way(self, plan: Plan) -> None:
        """Let one who sits yield its seat to one with a better right; it waits at the front of its own key's line."""
        if self.batching.forms_batches or self.is_switching or not self.outlook.admission.may_preempt:
            return
        num_seats = self.limits.max_num_seqs
        way = find_way(self.interactive, self.background, num_seats)
        if way is None or not self.outlook.could_sit(way.waiter, self.running, way.givers):
            return
        if self.num_running < num_seats and self.outlook.could_sit(way.waiter, self.running, []):
            return
        victim = way.givers[0]
        self._preempt(victim, plan)
        victim.num_yields += 1
        self.counters.num_yields += 1
        self.classes[victim.background].queue.put_back_own(victim)

    def _continue_running(self, work: WorkClass, plan: Plan) -> None:
        running = work.running
        if plan.tokens_left < len(running):
            # Not everyone gets a token: those who have waited longest go first, so that nobody starves.
            order = sorted(running, key=lambda sequence: sequence.last_step)
        elif plan.is_paced:
            # Nor is a prompt that is read before them in the list to take what those in the middle of an answer need.
            order = sorted(running, key=lambda sequence: sequence.num_tokens - sequence.num_computed_tokens > 1)
        else:
            order = list(running)
        step, decode = plan.step, plan.rows.append
        for sequence in order:
            if plan.tokens_left == 0:
                break
            seat, start = sequence.seat, sequence.num_computed_tokens
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
            if (
                num_tokens <= sequence.room
                and num_tokens - start == 1
                and start >= sequence.num_prompt_tokens
                and seat >= 0
            ):
                # What nearly every row is nearly every time, without a call.
                decode((seat, sequence.sequence_id, start, 1, True, True))
                plan.tokens_left -= 1
                sequence.last_step = step
                continue
            if seat < 0 or num_tokens == start:
                continue  # lost its seat to an earlier one in this very pass; or waits for a token under way
            new_blocks = () if num_tokens <= sequence.room else self._make_room(sequence, plan)
            if new_blocks is not None:
                plan.add(sequence, num_tokens - start, new_blocks)

    def _make_room(self, sequence: Sequence, plan: Plan) -> tuple[int, ...] | None:
        """Blocks for all known tokens; if there are none, the youngest give theirs, at worst the sequence itself."""
        while True:
            new_blocks = self.kv_cache.allocate(sequence, sequence.num_tokens)
            if new_blocks is not None:
                return new_blocks
            victim = next(other for other in reversed(self.running) if other.last_step != plan.step)
            self._preempt(victim, plan)
            plan.is_short_of_memory = True
            self.classes[victim.background].queue.put_back(victim)
            if victim is sequence:
                return None

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self._throw_out(sequence)
        self.counters.num_preemptions += 1
        plan.preempted.append(sequence.sequence_id)

    def _throw_out(self, sequence: Sequence) -> None:
        """Take seat and blocks away; it will be computed again from its tokens (recompute, vLLM)."""
        self._outcomes.void(sequence)
        self._vacate(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_tokens_thrown_away = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1

    def _admit_waiting(self, work: WorkClass, plan: Plan, now: float) -> None:
        """Fill free seats in the order of the queue.

        Where memory is short for one, a few behind it that fit may overtake it: a waiting giant must not hold up the
        small ones. Nobody is overtaken more than `MAX_OVERTAKEN` times, and one that was preempted never.
        """
        work.wait_reason, work.too_large_now = None, frozenset()
        if not work.queue:
            return
        num_open, work.wait_reason = self._num_open(work, plan, now)
        if num_open == 0:
            return
        newcomers: list[Sequence] = []
        skipped: list[Sequence] = []
        promised = sum([self.outlook.promised_blocks(other) for other in self.running])
        for sequence in work.queue.candidates(self.limits.max_num_seqs, with_followers=self.batching.forms_batches):
            if len(newcomers) >= num_open:
                work.wait_reason = self.batching.closed_reason
                break
            if plan.tokens_left == 0 and not self.batching.forms_batches:
                work.wait_reason = "token_budget"
                break
            prefix = self.kv_cache.find_prefix(sequence)
            if self.num_running and not self.kv_cache.fits(self.outlook.expected_blocks(sequence), prefix, promised):
                work.wait_reason = "kv_memory"
                skipped.append(sequence)
                if len(skipped) > MAX_SKIPPED or sequence.status is SequenceStatus.PREEMPTED:
                    break
            elif any(other.num_overtaken >= MAX_OVERTAKEN for other in skipped):
                break
            else:
                self._seat(sequence, prefix, plan, now)
                newcomers.append(sequence)
                promised += self.outlook.promised_blocks(sequence)
                for other in (*skipped, *(self.interactive.queue if work is self.background else ())):
                    other.num_overtaken += 1
        self.batching.admit(newcomers)
        work.too_large_now = frozenset([sequence.sequence_id for sequence in skipped])

    def _num_open(self, work: WorkClass, plan: Plan, now: float) -> tuple[int, str | None]:
        """Newcomers of a class that may sit down in this step, and why none may."""
        if plan.is_short_of_memory:
            # Whoever lost its seat must not take it back from under those it was lost to.
            return 0, "kv_memory"
        if self.is_switching:
            return 0, "switching"
        if work is self.background and (plan.preempted or not self.interactive.lets_others_pass(MAX_OVERTAKEN)):
            return 0, self.interactive.wait_reason or "kv_memory"
        is_last = self.is_ending or self.limits.draining
        num_open = max(0, self.batching.num_open(Moment(work.queue, self.num_running, self.limits, now, is_last)))
        return num_open, None if num_open else self.batching.closed_reason

    def _seat(self, sequence: Sequence, prefix: Prefix, plan: Plan, now: float) -> None:
        self._members.sit_down(sequence)
        new_blocks = self.kv_cache.seat(sequence, prefix)
        if new_blocks is None:
            raise RuntimeError(f"sequence {sequence.sequence_id} was seated without room for its tokens")
        self.counters.count_seated(sequence, now)
        self.classes[sequence.background].fairness.seated(sequence)
        plan.seat(sequence, new_blocks)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.drop_pending()
        if sequence.seat >= 0:
            reserved = self.kv_cache.blocks_for(self.outlook.admission.reserved_tokens(sequence))
            num_slots = max(len(sequence.block_ids), reserved) * self.kv_cache.block_size
            self.counters.count_slots(num_slots, sequence.num_computed_tokens)
            self._vacate(sequence, keeps_seat=self.batching.keeps_seat(sequence))
        else:
            self._members.stop_waiting(sequence)
        del self._live[sequence.sequence_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _vacate(self, sequence: Sequence, *, keeps_seat: bool = False) -> None:
        self.kv_cache.release(sequence)
        sequence.lookup = None
        self._members.stand_up(sequence, keeps_seat=keeps_seat)
