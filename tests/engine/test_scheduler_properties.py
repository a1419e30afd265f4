"""Whatever is asked of it, in whatever order: the invariants hold after every step and every answer is right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.scheduler import MAX_OVERTAKEN
from engine.sequence import FinishReason, SamplingParams, Sequence
from tests.engine.simulate import Simulation
from tests.fake_device import FakeDevice
from tests.fakes import expected_output

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_EMPTY_STEPS = 2
POLICIES = ["continuous", "static", "static_dropped", "dynamic"]
ADMISSIONS = ["on_demand", "reserve", "predicted"]


def refrain(prompt: Iterable[int], num_tokens: int = 120) -> list[int]:
    """An answer that says the same again and again, but for a slip now and then: drafts are right for a while."""
    letters = expected_output(prompt, num_tokens)
    return [letters[i] if i % 11 == 10 else letters[i % 4] for i in range(num_tokens)]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, limits and steps at random over pools small enough to preempt."""

    @initialize(
        max_num_seqs=st.integers(1, 8),
        token_budget=st.integers(1, 40),
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4, 16]),
        max_model_len=st.integers(4, 100),
        enable_prefix_caching=st.booleans(),
        policy=st.sampled_from(POLICIES),
        admission=st.sampled_from(ADMISSIONS),
        delay=st.sampled_from([0.0, 0.5, 1.0]),
        drafts=st.sampled_from([0, 1, 3, 7]),
        overlaps=st.booleans(),
    )
    def start(
        self,
        max_num_seqs: int,
        token_budget: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        policy: str,
        admission: str,
        delay: float,
        drafts: int,
        overlaps: bool,
    ) -> None:
        if overlaps:  # as long as no rule changes it
            policy, drafts = "continuous", 0
        answer = refrain if drafts else None
        self.simulation = Simulation(
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            num_seats=8,
            runner=FakeDevice(num_blocks, block_size, answer=answer, clock=lambda: 0.0, at_once=not overlaps),
            num_speculative_tokens=drafts,
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
            admission=admission,
            dynamic_max_queue_delay_seconds=delay,
        )
        self.never_preempts = admission == "reserve"
        self.was_broken = False
        self.expected = refrain if drafts else expected_output
        self.empty_steps = 0

    @rule(
        length=st.integers(1, 60),
        max_tokens=st.one_of(st.none(), st.integers(1, 40)),
        key_name=st.sampled_from(["", "a", "b"]),
        background=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def add(self, length: int, max_tokens: int | None, key_name: str, background: bool, priority: int) -> None:
        length = min(length, self.simulation.scheduler.usable_capacity)
        self.simulation.add(length, max_tokens, key_name=key_name, background=background, priority=priority)

    @rule(
        family=st.integers(0, 2), length=st.integers(1, 60), max_tokens=st.integers(1, 20), root=st.sampled_from("ab")
    )
    def add_relative(self, family: int, length: int, max_tokens: int, root: str) -> None:
        """Prompts that begin alike, so that one finds the other's blocks."""
        length = min(length, self.simulation.scheduler.usable_capacity)
        prompt = tuple((family + i) % 256 for i in range(length))
        self.simulation.add_prompt(prompt, SamplingParams(max_tokens=max_tokens), cache_root=root)

    @rule(data=st.data(), max_tokens=st.integers(1, 20))
    def add_follower(self, data: st.DataObject, max_tokens: int) -> None:
        """Another answer to a prompt that somebody has asked before, whatever has become of that one."""
        if self.simulation.sequences:
            leader = self.simulation.sequences[data.draw(st.sampled_from(sorted(self.simulation.sequences)))]
            self.simulation.add_prompt(
                leader.prompt_token_ids,
                SamplingParams(max_tokens=max_tokens),
                key_name=leader.key_name,
                background=leader.background,
                priority=leader.priority,
                cache_root=leader.cache_root,
                leader=leader,
            )

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.simulation.sequences:
            sequence_id = data.draw(st.sampled_from(sorted(self.simulation.sequences)))
            self.simulation.scheduler.abort(sequence_id)
            self.simulation.scheduler.check_integrity()

    @rule(max_num_seqs=st.integers(1, 8), token_budget=st.integers(1, 40))
    def limit(self, max_num_seqs: int, token_budget: int) -> None:
        self.simulation.set_limits(max_num_seqs, token_budget)

    @rule(drafts=st.integers(0, 7))
    def draft(self, drafts: int) -> None:
        limits = self.simulation.scheduler.limits
        self.simulation.set_limits(limits.max_num_seqs, limits.max_num_batched_tokens, num_speculative_tokens=drafts)

    @rule(policy=st.sampled_from(POLICIES), admission=st.sampled_from(ADMISSIONS))
    def switch(self, policy: str, admission: str) -> None:
        limits = self.simulation.scheduler.limits
        self.never_preempts = self.never_preempts and admission == "reserve"
        self.simulation.set_limits(
            limits.max_num_seqs, limits.max_num_batched_tokens, policy=policy, admission=admission
        )

    @rule(broken=st.booleans())
    def begin_anew(self, broken: bool) -> None:
        """As after a step that failed; it does not matter what has become of blocks, seats and queues."""
        scheduler = self.simulation.scheduler
        if broken:
            scheduler.kv_cache.pool.allocate(1)
            for sequence in scheduler.running[:2]:
                sequence.block_ids.append(0)
        self.simulation.begin_anew()
        scheduler.check_integrity()
        self.was_broken = True

    @rule(data=st.data())
    def admit_only(self, data: st.DataObject) -> None:
        """Some are tried and pass, while the others do not even wait."""
        scheduler = self.simulation.scheduler
        live = [sequence.sequence_id for sequence in scheduler.sequences]
        if not live:
            return
        chosen = data.draw(st.sets(st.sampled_from(live)))
        scheduler.admit_only(chosen)
        scheduler.check_integrity()
        for _ in range(3):
            assert {*self.simulation.step().sequence_ids} <= chosen
        scheduler.admit_only(None)
        scheduler.check_integrity()
        self.was_broken = True

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            waited = bool(self.simulation.scheduler.waiting or self.simulation.scheduler.running)
            batch = self.simulation.step()
            self.empty_steps = self.empty_steps + 1 if waited and batch.is_empty else 0
            assert self.empty_steps <= MAX_EMPTY_STEPS

    @invariant()
    def nobody_is_overtaken_without_bound(self) -> None:
        if not hasattr(self, "simulation") or self.was_broken:
            return
        seated = [sequence for sequence in self.simulation.sequences.values() if sequence.first_seated_time is not None]
        for sequence in self.simulation.scheduler.waiting:
            if sequence.first_seated_time is None and sequence.leader is None:
                passed = [s for s in seated if s.sequence_id > sequence.sequence_id and line_of(s) == line_of(sequence)]
                assert len(passed) <= MAX_OVERTAKEN

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.run()
        assert not (self.never_preempts and simulation.scheduler.counters.num_preemptions)
        usage = simulation.scheduler.kv_cache.usage
        assert usage.free + usage.cached == usage.total
        for sequence in simulation.sequences.values():
            output = simulation.outputs[sequence.sequence_id]
            assert output == self.expected(sequence.prompt_token_ids, len(output))
            if sequence.finish_reason is FinishReason.LENGTH:
                room = simulation.scheduler.usable_capacity - sequence.num_prompt_tokens + 1
                assert len(output) == min(sequence.params.max_tokens or room, room)


def line_of(sequence: Sequence) -> tuple[bool, str, int]:
    """Those of one line are served in the order in which they came."""
    return sequence.background, sequence.key_name, sequence.priority


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=100, max_size=100), st.integers(4, 64))
def test_sustained_overload_never_wedges(requests: list[tuple[int, int]], token_budget: int) -> None:
    """A hundred requests at many times the pool: all end, none twice, nobody is thrown out without bound."""
    simulation = Simulation(max_num_seqs=8, token_budget=token_budget, num_blocks=30, block_size=4)
    for length, max_tokens in requests:
        simulation.add(length, max_tokens)
    simulation.run()
    assert len(simulation.finished_in) == 100
    assert max(sequence.num_preemptions for sequence in simulation.sequences.values()) <= 20
