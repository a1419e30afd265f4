"""The scheduler's rules, one at a time."""

from __future__ import annotations

import pytest

from engine.batch import StepOutput
from engine.config import Limits
from engine.scheduler import MAX_OVERTAKEN
from engine.sequence import FinishReason, SequenceStatus
from tests.engine.simulate import Simulation
from tests.fakes import EOS, expected_output


def test_the_third_request_takes_the_free_seat_between_two_steps() -> None:
    """The textbook case on two seats: A needs 2 steps, B 4, C waits with 2."""
    simulation = Simulation(max_num_seqs=2)
    a, b, c = (simulation.add(4, steps) for steps in (2, 4, 2))
    simulation.run()
    rows = [batch.sequence_ids for batch in simulation.batches]
    ids = a.sequence_id, b.sequence_id, c.sequence_id
    assert rows == [ids[:2], ids[:2], (ids[1], ids[2]), (ids[1], ids[2])]
    assert simulation.batches[2].seated[0].seat == simulation.batches[0].seated[0].seat
    assert simulation.finished_in == {ids[0]: 2, ids[1]: 4, ids[2]: 4}


def test_a_long_prompt_is_read_in_chunks_under_the_token_budget() -> None:
    simulation = Simulation(token_budget=10)
    sequence = simulation.add(25, 2)
    simulation.run()
    assert [batch.counts for batch in simulation.batches] == [(10,), (10,), (5,), (1,)]
    assert [batch.starts for batch in simulation.batches] == [(0,), (10,), (20,), (25,)]
    assert [batch.samples for batch in simulation.batches] == [(False,), (False,), (True,), (True,)]
    assert [batch.decodes for batch in simulation.batches] == [(False,), (False,), (False,), (True,)]
    assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, 2)


def test_running_sequences_come_before_waiting_ones() -> None:
    simulation = Simulation(token_budget=8)
    simulation.add(4, 10)
    simulation.step()
    simulation.add(20, 1)
    batch = simulation.step()
    assert batch.counts == (1, 7)
    assert batch.decodes == (True, False)


def test_a_budget_smaller_than_the_seats_serves_everyone_in_turn() -> None:
    simulation = Simulation(max_num_seqs=4, token_budget=64)
    for _ in range(4):
        simulation.add(3, 20)
    simulation.step()
    simulation.set_limits(4, 2)
    for _ in range(8):
        assert len(simulation.step()) == 2
    lengths = [len(tokens) for tokens in simulation.outputs.values()]
    assert max(lengths) - min(lengths) <= 1


def test_the_reason_to_wait_is_told() -> None:
    simulation = Simulation(max_num_seqs=1)
    simulation.add(4, 4)
    simulation.add(4, 4)
    simulation.step()
    assert simulation.scheduler.interactive.wait_reason == "seats"
    simulation = Simulation(token_budget=4)
    simulation.add(8, 4)
    simulation.add(4, 4)
    simulation.step()
    assert simulation.scheduler.interactive.wait_reason == "token_budget"
    simulation = Simulation(num_blocks=4)
    simulation.add(9, 4)
    simulation.add(9, 4)
    simulation.step()
    assert simulation.scheduler.interactive.wait_reason == "kv_memory"
    simulation.run()
    assert simulation.scheduler.interactive.wait_reason is None


def test_memory_pressure_takes_the_youngest_seat_and_loses_nothing() -> None:
    simulation = Simulation(num_blocks=6, block_size=4)
    old, young = simulation.add(6, 14), simulation.add(6, 14)
    simulation.run()
    assert simulation.scheduler.counters.num_preemptions > simulation.scheduler.counters.num_yields == 0
    assert old.num_preemptions == 0
    assert young.num_preemptions > 0
    assert simulation.scheduler.counters.num_recomputed_tokens > 0
    for sequence in (old, young):
        assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, 14)


def test_nothing_is_admitted_in_a_step_that_preempted_and_the_preempted_one_is_first() -> None:
    simulation = Simulation(num_blocks=6, block_size=4)
    simulation.add(6, 14)
    young = simulation.add(6, 14)
    while not simulation.scheduler.counters.num_preemptions:
        batch = simulation.step()
        late = simulation.add(1, 1) if not simulation.scheduler.waiting else None
    assert batch.preempted == (young.sequence_id,)
    assert not batch.seated
    assert young.status is SequenceStatus.PREEMPTED
    assert next(simulation.scheduler.interactive.queue.candidates()).sequence_id == young.sequence_id
    simulation.run()
    if late is not None:
        assert simulation.finished_in[late.sequence_id] > 0


def test_a_prompt_of_exactly_the_usable_capacity_gets_one_token() -> None:
    simulation = Simulation(num_blocks=8, block_size=4, max_model_len=1000)
    assert simulation.scheduler.usable_capacity == 32
    sequence = simulation.add(32, None)
    simulation.run()
    assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, 1)
    assert sequence.finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match="usable capacity 32"):
        simulation.add(33, None)


def test_a_lone_sequence_that_reaches_the_capacity_ends_with_length() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, max_model_len=40)
    sequence = simulation.add(10, 10_000)
    simulation.run()
    assert sequence.num_tokens == 41
    assert sequence.finish_reason is FinishReason.LENGTH


def test_a_huge_max_tokens_reserves_nothing() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, max_model_len=64)
    for _ in range(4):
        simulation.add(4, 10_000)
    assert len(simulation.step()) == 4


def test_lowering_the_seats_drains_and_raising_fills_them() -> None:
    simulation = Simulation(max_num_seqs=4)
    for max_tokens in (2, 3, 20, 20, 20, 20):
        simulation.add(2, max_tokens)
    simulation.step()
    simulation.set_limits(2, 64)
    running = [len(simulation.step()) for _ in range(4)]
    assert running == [4, 3, 2, 2]
    simulation.set_limits(8, 64)
    assert len(simulation.step()) == 4


@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_abort_in_every_state_frees_everything(steps_before: int) -> None:
    simulation = Simulation(token_budget=6)
    sequence = simulation.add(12, 8)
    for _ in range(steps_before):
        simulation.step()
    assert simulation.scheduler.abort(sequence.sequence_id) is sequence
    assert simulation.scheduler.abort(sequence.sequence_id) is None
    simulation.scheduler.check_integrity()
    usage = simulation.scheduler.kv_cache.usage
    assert usage.free + usage.cached == 64
    assert sequence.finish_reason is FinishReason.ABORT


def test_results_for_a_sequence_that_has_ended_are_dropped_and_counted() -> None:
    simulation = Simulation()
    gone, stays = simulation.add(4, 8), simulation.add(4, 8)
    batch = simulation.scheduler.schedule(0.0)
    output = simulation.runner.execute(batch)
    simulation.scheduler.abort(gone.sequence_id)
    update = simulation.scheduler.update(batch, output, 0.0)
    assert [sequence_id for sequence_id, _ in update.tokens] == [stays.sequence_id]
    assert not update.endings
    assert simulation.scheduler.counters.num_dropped_results == 1
    simulation.scheduler.check_integrity()


def test_a_failed_row_ends_alone() -> None:
    simulation = Simulation()
    bad, good = simulation.add(4, 3), simulation.add(4, 3)
    batch = simulation.scheduler.schedule(0.0)
    output = simulation.runner.execute(batch)
    broken = StepOutput(output.step, output.token_ids, {0: "not a number"})
    update = simulation.scheduler.update(batch, broken, 0.0)
    assert update.endings[0].error == "not a number"
    assert bad.finish_reason is FinishReason.ERROR
    simulation.apply(update, 1)
    simulation.run()
    assert simulation.outputs[good.sequence_id] == expected_output(good.prompt_token_ids, 3)


def test_a_stop_token_ends_the_answer() -> None:
    simulation = Simulation()
    sequence = simulation.add(4, 50, stop_token_ids=frozenset({EOS}))
    batch = simulation.scheduler.schedule(0.0)
    update = simulation.scheduler.update(batch, StepOutput(1, (EOS,)), 0.0)
    assert update.endings[0].reason is FinishReason.STOP
    assert sequence.is_finished


def test_a_waiting_giant_does_not_hold_up_those_that_fit() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, max_model_len=160)
    simulation.add(60, 60)
    simulation.step()
    giant, small = simulation.add(120, 2), simulation.add(5, 2)
    simulation.step()
    assert small.seat >= 0
    assert giant.seat < 0
    assert simulation.scheduler.interactive.wait_reason == "kv_memory"
    simulation.run()
    assert simulation.outputs[giant.sequence_id] == expected_output(giant.prompt_token_ids, 2)


def test_a_giant_is_not_starved_by_small_ones() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, max_model_len=160)
    for _ in range(3):
        simulation.add(20, 8)
    simulation.step()
    giant = simulation.add(140, 2)
    steps = 0
    while giant.first_seated_time is None:
        simulation.add(20, 8)
        simulation.step()
        steps += 1
        assert steps < 100
    assert giant.num_overtaken <= MAX_OVERTAKEN
    simulation.run()


def test_equal_requests_keep_the_order_of_their_arrival() -> None:
    simulation = Simulation(max_num_seqs=3, num_blocks=30, block_size=4)
    for _ in range(20):
        simulation.add(10, 12)
    simulation.run()
    first_seated = sorted(simulation.sequences.values(), key=lambda sequence: sequence.first_seated_time or 0.0)
    assert [sequence.sequence_id for sequence in first_seated] == sorted(simulation.sequences)


def test_a_long_prompt_leaves_budget_to_a_short_one() -> None:
    simulation = Simulation(token_budget=32)
    simulation.scheduler.limits = Limits(4, 32, long_prefill_token_threshold=12)
    long, short = simulation.add(60, 2), simulation.add(8, 2)
    batch = simulation.step()
    assert batch.counts == (12, 8)
    assert batch.samples == (False, True)
    simulation.run()
    for sequence in (long, short):
        assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, 2)
