"""Fixed batches and continuous ones: who sits when, what is padded, and that the answers are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from engine.batching import make_batching
from engine.sequence import FinishReason
from tests.engine.simulate import Simulation
from tests.engine.test_engine import answer, ask, read
from tests.fake_checkpoint import make_checkpoint, make_runner
from tests.fakes import FakeRunner, expected_output, fake_config, open_fake_engine

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.batch import ScheduledBatch
    from engine.sequence import Sequence

POLICIES = ["continuous", "static", "static_dropped", "dynamic"]
ADMISSIONS = ["on_demand", "reserve", "predicted"]


def textbook(policy: str) -> Simulation:
    """Two seats. A needs two steps, B four, C waits with two."""
    simulation = Simulation(max_num_seqs=2, policy=policy)
    for max_tokens in (2, 4, 2):
        simulation.add(1, max_tokens)
    simulation.run()
    return simulation


@pytest.mark.parametrize("policy", ["static", "static_dropped"])
def test_in_a_fixed_batch_c_waits_for_b(policy: str) -> None:
    simulation = textbook(policy)
    assert [batch.sequence_ids for batch in simulation.batches] == [(1, 2), (1, 2), (2,), (2,), (3,), (3,)]
    assert simulation.finished_in == {1: 2, 2: 4, 3: 6}


def test_in_a_continuous_batch_c_takes_the_seat_of_a() -> None:
    simulation = textbook("continuous")
    assert [batch.sequence_ids for batch in simulation.batches] == [(1, 2), (1, 2), (2, 3), (2, 3)]
    assert simulation.batches[2].seats == (1, 0)
    assert simulation.finished_in == {1: 2, 2: 4, 3: 4}


def test_the_rows_of_members_that_have_ended_are_computed_until_the_batch_is_over() -> None:
    kept, dropped = textbook("static"), textbook("static_dropped")
    assert [len(batch.padding) for batch in kept.batches] == [0, 0, 1, 1, 0, 0]
    assert {(row.seat, row.count, row.request_id, row.samples) for row in kept.batches[2].padding} == {
        (0, 1, "r1", True)
    }
    assert kept.scheduler.counters.num_padding_rows == 2
    assert (kept.scheduler.counters.num_useful_rows, kept.scheduler.counters.num_rows) == (8, 10)
    assert dropped.scheduler.counters.num_padding_rows == 0
    assert (dropped.scheduler.counters.num_useful_rows, dropped.scheduler.counters.num_rows) == (8, 8)


def test_prompts_are_padded_to_the_longest_of_the_batch() -> None:
    simulation = Simulation(max_num_seqs=3, token_budget=16, policy="static")
    for length in (5, 20, 9):
        simulation.add(length, 4)
    simulation.run()
    of_prompts = [row for batch in simulation.batches for row in batch.padding if not row.samples]
    padded = {seat: sum(row.count for row in of_prompts if row.seat == seat) for seat in range(3)}
    assert padded == {0: 15, 1: 0, 2: 11}
    for seat in (0, 2):  # each token of it once, one after the other
        ends = [(row.start, row.start + row.count) for row in of_prompts if row.seat == seat]
        assert [start for start, _ in ends] == [0, *[end for _, end in ends[:-1]]]
    # The whole batch sits down in its first step, although there are tokens for one prompt only.
    assert [seated.seat for seated in simulation.batches[0].seated] == [0, 1, 2]


def test_a_budget_below_the_seats_still_brings_everybody_to_an_end() -> None:
    simulation = Simulation(max_num_seqs=8, token_budget=2, policy="static")
    for max_tokens in range(1, 17):
        simulation.add(3, max_tokens)
    simulation.run()
    assert len(simulation.finished_in) == 16


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("cached", [True, False])
def test_every_pair_of_policies_gives_the_same_answers(policy: str, admission: str, cached: bool) -> None:
    simulation = Simulation(
        max_num_seqs=6,
        token_budget=24,
        num_blocks=40,
        max_model_len=160,
        policy=policy,
        admission=admission,
        enable_prefix_caching=cached,
    )
    wanted: list[tuple[Sequence, int]] = []
    for number in range(30):
        wanted.append((simulation.add(1 + (number % 5) * 9, 1 + number * 7 % 30), 1 + number * 7 % 30))
    simulation.run()
    for sequence, length in wanted:
        assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, length)
    assert not (admission == "reserve" and simulation.scheduler.counters.num_preemptions)


@pytest.mark.parametrize(
    ("admission", "most"),
    [("on_demand", 0.25), ("reserve", 1.0), ("predicted", 0.25)],
)
def test_memory_is_wasted_where_it_is_reserved(admission: str, most: float) -> None:
    """Answers end long before the `max_tokens` that clients ask for; a block holds four tokens."""
    simulation = Simulation(max_num_seqs=4, num_blocks=64, block_size=4, max_model_len=256, admission=admission)
    for number in range(12):
        sequence = simulation.add(10, 100)
        sequence.stop_token_ids = frozenset({expected_output(sequence.prompt_token_ids, 8 + number % 3)[-1]})
    simulation.run()
    counters = simulation.scheduler.counters
    waste = counters.num_unwritten_slots / counters.num_set_aside_slots
    assert 0 < waste <= most
    assert (waste > 0.7) == (admission == "reserve")


def test_a_switch_drains_first() -> None:
    simulation = Simulation(max_num_seqs=2)
    for max_tokens in (3, 6, 2, 2):
        simulation.add(1, max_tokens)
    simulation.step()
    simulation.set_limits(2, 64, policy="static")
    batches = [simulation.step() for _ in range(5)]
    assert [batch.sequence_ids for batch in batches] == [(1, 2), (1, 2), (2,), (2,), (2,)]
    assert simulation.scheduler.interactive.wait_reason == "switching"
    assert simulation.step().sequence_ids == (3, 4)
    assert simulation.scheduler.batching.closed_reason == "policy"
    simulation.run()
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in simulation.sequences.values())


def test_whoever_waits_is_told_why() -> None:
    simulation = Simulation(max_num_seqs=2, policy="static")
    for max_tokens in (1, 3, 2):
        simulation.add(1, max_tokens)
    simulation.step()
    simulation.step()
    assert simulation.scheduler.interactive.wait_reason == "policy"


async def test_dynamic_waits_for_company_and_not_longer_than_it_may(autojump_clock: MockClock) -> None:
    config = fake_config(policy="dynamic", dynamic_preferred_size=3, dynamic_max_queue_delay_seconds=5.0)
    async with open_fake_engine(config, step_seconds=0.01) as engine:
        begin = autojump_clock.current_time()
        alone = engine.submit(ask("alone", 2))
        assert (await read(alone))[0] == answer("alone", 2)
        assert autojump_clock.current_time() - begin == pytest.approx(5.02)
        begin = autojump_clock.current_time()
        for handle in [engine.submit(ask(f"number {index}", 2)) for index in range(3)]:
            await read(handle)
        assert autojump_clock.current_time() - begin == pytest.approx(0.02)
        first, second = engine.submit(ask("first", 2)), engine.submit(ask("second", 2))
        await first.accepted()
        first.abort("client")
        await read(second)
        await engine.wait_idle()


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("is_ending", [True, False], ids=["the server ends", "an operator drains it"])
async def test_dynamic_waits_for_nobody_where_nobody_can_come(
    is_ending: bool, num_before: int, autojump_clock: MockClock
) -> None:
    config = fake_config(policy="dynamic", dynamic_preferred_size=3, dynamic_max_queue_delay_seconds=50.0)
    async with open_fake_engine(config, step_seconds=0.01) as engine:
        handles = [engine.submit(ask(f"number {index}", 200)) for index in range(num_before)]
        await trio.sleep(0.5)
        handles += [engine.submit(ask(f"late {index}", 2)) for index in range(2)]
        await trio.sleep(0.5)
        assert (engine.num_running, engine.num_waiting) == (num_before, 2)
        begin = autojump_clock.current_time()
        if is_ending:
            engine.drain(30.0)
            engine.drain(30.0)
        else:
            await engine.set_limits({"draining": True})
        for handle in handles:
            text = f"{handle.request.prompt.text}"  # type: ignore[union-attr]
            assert (await read(handle))[0] == answer(text, handle.request.params.max_tokens or 0)
        assert autojump_clock.current_time() - begin < (2.0 if num_before else 0.1)
        await engine.wait_idle()


async def test_dynamic_rests_when_everybody_left_before_the_delay(autojump_clock: MockClock) -> None:
    steps: list[ScheduledBatch] = []
    config = fake_config(policy="dynamic", dynamic_preferred_size=3, dynamic_max_queue_delay_seconds=5.0)
    runner = FakeRunner(64, config.block_size, before_step=steps.append)
    async with open_fake_engine(config, num_blocks=64, runner=runner) as engine:
        handle = engine.submit(ask("leaves", 2))
        await handle.accepted()
        handle.abort("client")
        await engine.wait_idle()
        # With virtual time a task that spins would let no second pass.
        with trio.fail_after(100):
            await trio.sleep(50)
        assert not steps
        assert (await read(engine.submit(ask("comes", 2))))[0] == answer("comes", 2)


def test_a_switch_that_is_taken_back_drains_nobody() -> None:
    simulation = Simulation(max_num_seqs=2)
    for max_tokens in (9, 2, 2):
        simulation.add(1, max_tokens)
    simulation.step()
    simulation.set_limits(2, 64, policy="static")
    simulation.set_limits(2, 64, policy="continuous")
    simulation.step()
    assert simulation.step().sequence_ids == (1, 3)


async def test_a_live_switch_waits_for_those_who_run_and_loses_nobody(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=2)) as engine:
        handles = [engine.submit(ask(f"number {index}", 5 + index)) for index in range(9)]
        for policy in ("static", "dynamic", "continuous"):
            await handles[0].take()
            limits = await engine.set_limits({"policy": policy})
            assert limits.policy == policy
        for index, handle in enumerate(handles[1:], start=1):
            assert (await read(handle))[0] == answer(f"number {index}", 5 + index)
        with pytest.raises(ValueError, match="no batching policy 'magic'"):
            await engine.set_limits({"policy": "magic"})
        assert engine.limits.policy == "continuous"


@pytest.mark.parametrize("token_budget", [5, 64])
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_pair_of_policies_changes_a_token_of_the_model(policy: str, admission: str, token_budget: int) -> None:
    """In float32, greedy and drawn: padding is computed beside the rows, and written where nobody reads."""
    checkpoint = make_checkpoint()
    simulation = Simulation(
        max_num_seqs=4,
        token_budget=token_budget,
        num_blocks=24,
        max_model_len=96,
        num_seats=4,
        policy=policy,
        admission=admission,
        enable_prefix_caching=token_budget != 5,
        runner=make_runner(checkpoint, num_blocks=24),
    )
    alone = Simulation(max_num_seqs=1, num_blocks=24, max_model_len=96, runner=make_runner(checkpoint, num_blocks=24))
    for each in (simulation, alone):
        for number in range(12):
            temperature = 0.0 if number % 3 else 0.8
            each.add(1 + number * 11 % 30, 1 + number * 5 % 30, temperature=temperature, seed=number)
        each.run()
    assert simulation.outputs == alone.outputs


def test_an_unknown_policy_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="continuous, static, static_dropped, dynamic"):
        make_batching("magic")
