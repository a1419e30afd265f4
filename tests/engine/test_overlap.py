"""Steps that are planned before what the one before them drew is known: the same answers, one step earlier."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StepOutput
from engine.sequence import FinishReason, SamplingParams
from tests.engine.simulate import Simulation
from tests.fake_device import FakeDevice
from tests.fakes import EOS, OneOf, expected_output

# Behind its last token a constraint lets nothing come.
ENDS_ITSELF = {"stop_token_ids": frozenset({EOS}), "end_token_ids": frozenset({EOS})}
OPTIONS = (b"the first of all answers", b"the second one", b"no")


def simulate(*, at_once: bool = False, num_blocks: int = 64, **changes: Any) -> Simulation:
    runner = FakeDevice(num_blocks, 4, clock=lambda: 0.0, at_once=at_once, **changes.pop("fake", {}))
    return Simulation(num_blocks=num_blocks, runner=runner, **changes)


def test_a_step_is_planned_from_a_token_that_nobody_knows() -> None:
    simulation = simulate()
    sequence = simulation.add(5, max_tokens=6)
    first, second = simulation.step(), simulation.step()
    assert (first.starts, first.counts) == ((0,), (5,))
    assert (second.starts, second.counts, second.samples, second.decodes) == ((5,), (1,), (True,), (True,))
    assert (sequence.num_tokens, sequence.num_output_tokens, sequence.num_pending_tokens) == (7, 1, 1)
    simulation.run()
    assert simulation.outputs[1] == expected_output(sequence.prompt_token_ids, 6)
    assert simulation.runner.depths == [1, 2, 2, 2, 2, 2]  # type: ignore[attr-defined]


def test_an_answer_that_ends_by_its_length_has_no_step_too_many() -> None:
    simulation = simulate()
    for max_tokens in (1, 2, 7):
        simulation.add(3, max_tokens)
    simulation.run()
    assert Counter(sequence_id for batch in simulation.batches for sequence_id in batch.sequence_ids) == {
        1: 1, 2: 2, 3: 7,
    }  # fmt: skip
    assert simulation.scheduler.counters.num_dropped_results == 0


def test_a_stop_token_shows_one_step_late_and_what_was_computed_behind_it_is_dropped() -> None:
    simulation = simulate(fake={"end_after": lambda _: 4})
    sequence = simulation.add(5, max_tokens=20, stop_token_ids=frozenset({EOS}))
    simulation.run()
    assert simulation.outputs[1] == [*expected_output(sequence.prompt_token_ids, 4), EOS]
    assert sequence.finish_reason is FinishReason.STOP
    counters = simulation.scheduler.counters
    assert (counters.num_dropped_results, counters.num_useful_rows, counters.num_rows) == (1, 5, 6)
    assert (counters.num_set_aside_slots, counters.num_unwritten_slots) == (12, 12 - sequence.num_tokens + 1)


def test_the_seat_of_one_that_stopped_is_another_s_while_its_last_row_is_computed() -> None:
    simulation = simulate(max_num_seqs=1, num_blocks=4, enable_prefix_caching=False, fake={"end_after": lambda _: 3})
    sequences = [simulation.add(5 + i, max_tokens=9, stop_token_ids=frozenset({EOS})) for i in range(3)]
    simulation.run()
    for sequence in sequences:
        assert simulation.outputs[sequence.sequence_id] == [*expected_output(sequence.prompt_token_ids, 3), EOS]
    assert simulation.scheduler.counters.num_dropped_results == 3


def test_a_row_under_a_constraint_waits_for_its_token_and_nobody_waits_for_it() -> None:
    simulation = simulate()
    bound = simulation.add(4, None, constraint=OneOf((b"no",), forces=False), stop_token_ids=frozenset({EOS}))
    free = simulation.add(4, max_tokens=12)
    simulation.run()
    assert simulation.outputs[bound.sequence_id] == [*b"no", EOS]
    steps = {s: [batch.step for batch in simulation.batches if s in batch.sequence_ids] for s in (1, 2)}
    assert steps[free.sequence_id] == list(range(1, 13))
    assert steps[bound.sequence_id] == [1, 3, 5]


def test_what_is_known_too_late_enters_no_cache() -> None:
    """A block is remembered when its last token is known and was computed, not when that is planned."""
    simulation = simulate(token_budget=8)
    first = simulation.add_prompt(tuple(range(16)), SamplingParams(max_tokens=4))
    simulation.step()
    assert first.num_computed_tokens == 8
    assert first.num_remembered_blocks == 0
    simulation.step()
    assert (first.num_computed_tokens, first.num_remembered_blocks) == (16, 2)
    assert simulation.scheduler.counters.num_prompt_tokens == 8
    simulation.run()
    assert first.num_remembered_blocks == 0  # given back
    assert simulation.scheduler.kv_cache.usage.cached == 4


def test_a_sequence_that_loses_its_seat_draws_what_was_under_way_again() -> None:
    simulation = simulate(max_num_seqs=1)
    given_up = simulation.add(5, max_tokens=8, background=True)
    for _ in range(3):
        simulation.step()
    asks = simulation.add(5, max_tokens=3)
    simulation.step()
    assert given_up.num_preemptions == 1
    assert (given_up.num_pending_tokens, given_up.num_computed_tokens) == (0, 0)
    simulation.run()
    assert simulation.scheduler.counters.num_dropped_results == 1
    for sequence in (given_up, asks):
        expected = expected_output(sequence.prompt_token_ids, sequence.params.max_tokens or 0)
        assert simulation.outputs[sequence.sequence_id] == expected


def test_a_row_that_fails_ends_alone_whatever_is_computed_behind_it() -> None:
    simulation = simulate()
    bad, good = simulation.add(5, max_tokens=8), simulation.add(5, max_tokens=8)
    batches, tickets = [], []
    for _ in range(2):
        batches.append(simulation.scheduler.schedule(0.0))
        simulation.scheduler.launched(batches[-1])
        tickets.append(simulation.runner.launch(batches[-1]))
    broken = replace(simulation.runner.collect(tickets[0]), failures={0: "not a number"})
    simulation.update(batches[0], broken)
    assert bad.finish_reason is FinishReason.ERROR
    simulation.update(batches[1], simulation.runner.collect(tickets[1]))
    assert simulation.scheduler.counters.num_dropped_results == 1
    simulation.run()
    assert simulation.outputs[bad.sequence_id] == []
    assert simulation.outputs[good.sequence_id] == expected_output(good.prompt_token_ids, 8)


def test_nobody_loses_a_seat_for_blocks_that_are_about_to_be_given_back() -> None:
    """Two fill the pool, and the second needs a block when the last token of the first is under way."""
    simulation = simulate(num_blocks=6, enable_prefix_caching=False)
    first, second = simulation.add(6, max_tokens=7), simulation.add(6, max_tokens=12)
    for _ in range(7):
        simulation.step()
    assert simulation.scheduler.kv_cache.usage.used == 6
    assert simulation.step().is_empty
    assert first.is_finished
    assert simulation.step().sequence_ids == (second.sequence_id,)
    simulation.run()
    assert simulation.scheduler.counters.num_preemptions == 0


def test_steps_come_back_in_their_order_and_have_no_drafts() -> None:
    simulation = simulate()
    simulation.add(5, max_tokens=8)
    scheduler = simulation.scheduler
    batches = []
    for _ in range(2):
        batches.append(scheduler.schedule(0.0))
        scheduler.launched(batches[-1])
    with pytest.raises(RuntimeError, match="step 2 came back before step 1"):
        scheduler.update(batches[1], StepOutput(2, (97,)), 0.0)
    drafting = simulate(at_once=True, num_speculative_tokens=3, fake={"answer": lambda _: [97] * 30})
    drafting.add(5, max_tokens=30)
    while not drafting.step().drafts:
        assert not drafting.scheduler.may_overlap
    with pytest.raises(ValueError, match="has drafts"):
        drafting.scheduler.launched(drafting.batches[-1])


def test_a_token_that_is_waited_for_in_vain_is_noticed() -> None:
    simulation = simulate()
    sequence = simulation.add(5, max_tokens=8)
    simulation.step()
    for pending, computed in ((2, 5), (1, 7)):
        sequence.num_pending_tokens, sequence.num_computed_tokens = pending, computed
        with pytest.raises(RuntimeError, match=r"\[1\] wait for tokens that are not under way"):
            simulation.scheduler.check_integrity()


REQUEST = st.fixed_dictionaries(
    {
        "num_prompt_tokens": st.integers(1, 30),
        "max_tokens": st.one_of(st.none(), st.integers(1, 30)),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({EOS}), frozenset({EOS, 97, 110})]),
        "num_logprobs": st.sampled_from([None, None, 2]),
        "constraint": st.sampled_from([None, None, OneOf(OPTIONS), OneOf(OPTIONS, forces=False)]),
        "background": st.booleans(),
        "key_name": st.sampled_from(["", "a"]),
    }
).map(lambda request: request | ENDS_ITSELF if request["constraint"] else request)


@given(
    requests=st.lists(st.tuples(REQUEST, st.integers(0, 12)), min_size=1, max_size=12),
    aborts=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 40)), max_size=3),
    max_num_seqs=st.integers(1, 6),
    token_budget=st.integers(1, 40),
    num_blocks=st.integers(8, 30),
    admission=st.sampled_from(["on_demand", "reserve", "predicted"]),
    enable_prefix_caching=st.booleans(),
    switch=st.sampled_from([None, "static", "dynamic"]),
)
@settings(max_examples=60)
def test_everybody_is_told_the_same_as_without(
    requests: list[tuple[dict[str, Any], int]], aborts: list[tuple[int, int]], switch: str | None, **limits: Any
) -> None:
    """Tokens, log-probabilities and endings, whoever comes, leaves, is preempted or waits meanwhile."""
    both = []
    for at_once in (True, False):
        simulation = simulate(at_once=at_once, fake={"end_after": lambda prompt: 3 + sum(prompt) % 20}, **limits)
        for step in range(60):
            for request, when in requests:
                if when == step:
                    simulation.add(**request)
            for sequence_id, when in aborts:
                if when == step:
                    simulation.scheduler.abort(sequence_id)
            if step == 20 and switch is not None:
                now = simulation.scheduler.limits
                simulation.set_limits(now.max_num_seqs, now.max_num_batched_tokens, policy=switch)
            simulation.step()
        simulation.run()
        both.append(simulation)
    simple, ahead = both
    for sequence_id, sequence in simple.sequences.items():
        other = ahead.sequences[sequence_id]
        told, told_ahead = simple.outputs[sequence_id], ahead.outputs[sequence_id]
        if FinishReason.ABORT in (sequence.finish_reason, other.finish_reason):
            shorter = min(len(told), len(told_ahead))
            assert told[:shorter] == told_ahead[:shorter]
            continue
        assert told == told_ahead
        assert simple.logprobs.get(sequence_id) == ahead.logprobs.get(sequence_id)
        assert (sequence.finish_reason, sequence.num_tokens) == (other.finish_reason, other.num_tokens)
        assert other.num_pending_tokens == 0
    usage = ahead.scheduler.kv_cache.usage
    assert usage.free + usage.cached == usage.total
