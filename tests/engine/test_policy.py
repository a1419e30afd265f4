"""What each memory policy gives up for what."""

from __future__ import annotations

import pytest

from engine.policy import Predicted, make_admission
from engine.sequence import SamplingParams, Sequence
from tests.engine.simulate import Simulation
from tests.fakes import expected_output

POLICIES = ["on_demand", "reserve", "predicted"]


def crowd(admission: str) -> tuple[Simulation, list[Sequence]]:
    """Forty answers of 24 tokens in a pool that holds a few."""
    simulation = Simulation(max_num_seqs=12, num_blocks=40, block_size=4, max_model_len=160, admission=admission)
    sequences = [simulation.add(6 + number % 9, 24) for number in range(40)]
    simulation.run()
    return simulation, sequences


@pytest.mark.parametrize("admission", POLICIES)
def test_the_answers_are_the_same(admission: str) -> None:
    simulation, sequences = crowd(admission)
    for sequence in sequences:
        assert simulation.outputs[sequence.sequence_id] == expected_output(sequence.prompt_token_ids, 24)


def test_a_reservation_never_preempts_and_on_demand_does() -> None:
    assert crowd("reserve")[0].scheduler.counters.num_preemptions == 0
    assert crowd("on_demand")[0].scheduler.counters.num_preemptions > 0


def test_a_prediction_preempts_less_than_on_demand() -> None:
    assert (
        crowd("predicted")[0].scheduler.counters.num_preemptions
        < crowd("on_demand")[0].scheduler.counters.num_preemptions
    )


def test_a_huge_max_tokens_fills_the_pool_only_where_it_is_reserved() -> None:
    seated = {}
    for admission in POLICIES:
        simulation = Simulation(num_blocks=64, block_size=4, max_model_len=256, admission=admission)
        for _ in range(4):
            simulation.add(4, 10_000)
        seated[admission] = len(simulation.step())
    assert seated == {"on_demand": 4, "reserve": 1, "predicted": 4}


def test_the_prediction_follows_what_was_seen_lately() -> None:
    policy = Predicted()
    sequence = Sequence(1, "r", (1, 2, 3), SamplingParams(), 0.0)
    sequence.end_length = 1000
    assert policy.expected_tokens(sequence, 16) == 3 + 16
    for length in [10] * 80 + [100] * 20:
        ended = Sequence(2, "r", (1,), SamplingParams(), 0.0)
        ended.token_ids.extend(range(length))
        policy.observe(ended)
    assert policy.expected_tokens(sequence, 4) == 3 + 10
    for _ in range(600):
        policy.observe(ended)
    assert policy.expected_tokens(sequence, 4) == 3 + 100


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no admission policy 'magic'"):
        make_admission("magic")
