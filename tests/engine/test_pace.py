"""Steps that end in time for those who are in the middle of an answer: the line, and what a scheduler makes of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from engine.config import Limits
from engine.cost_model import CostModel, Curve
from engine.pace import ENOUGH_STEPS, Pace
from engine.samples import nearest_rank
from engine.simulator import simulate
from engine.workload import WorkItem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.simulation_result import SimulationResult


def follow(pace: Pace, seconds: Callable[[float], float], *, target: float, steps: int, most: int) -> list[float]:
    """Steps as large as the pace allows, at least of 8 tokens; every fourth has less to do."""
    sizes = []
    for step in range(steps):
        sizes.append(max(8, int(min(most, pace.tokens_within(target)))))
        size = sizes[-1] if step % 4 else sizes[-1] // 2
        pace.note(size, seconds(size), target)
    return sizes


@given(
    base=st.floats(0.0, 0.05),
    per_token=st.floats(1e-5, 1e-2),
    target=st.floats(0.06, 1.0),
    first=st.integers(1, 512),
)
@example(base=0.0390625, per_token=0.00111843437586, target=0.0625, first=1)
def test_it_finds_the_largest_step_that_is_in_time(base: float, per_token: float, target: float, first: int) -> None:
    most = min(512.0, (target - base) / per_token)
    assume(most >= 16)
    pace = Pace()
    for _ in range(ENOUGH_STEPS):
        assert pace.tokens_within(target) == math.inf
        pace.note(first, base + per_token * first, target)
    sizes = follow(pace, lambda n: base + per_token * n, target=target, steps=1000, most=512)
    assert max(sizes[200:]) <= most * 1.02 + 1
    longest = base + per_token * most
    assert base + per_token * (min(sizes[800:]) + 1) >= 0.85 * longest


@given(seed=st.integers(0, 50))
def test_with_noise_nineteen_in_twenty_are_in_time_and_not_much_is_given_away(seed: int) -> None:
    draw = random.Random(seed)
    pace = Pace()

    def seconds(n: float) -> float:
        return (0.02 + 0.001 * n) * draw.uniform(0.8, 1.2)

    sizes = follow(pace, seconds, target=0.2, steps=1500, most=512)
    late = [seconds(n) > 0.2 for n in sizes[500:]]
    assert sum(late) <= 0.05 * len(late)
    assert sum(sizes[500:]) / len(late) >= 100  # of 180 that would just do without any noise


def test_one_step_that_hung_is_soon_forgotten() -> None:
    pace = Pace()
    before = follow(pace, lambda n: 0.02 + 0.001 * n, target=0.2, steps=500, most=512)[-1]
    pace.note(before, 30.0, 0.2)
    after = follow(pace, lambda n: 0.02 + 0.001 * n, target=0.2, steps=200, most=512)
    assert min(after) >= before / 2
    assert after[-1] >= 0.9 * before


# A step of 16 rows takes 23 ms, one of 128 tokens 135 ms.
COSTS = CostModel(products=Curve(((1, 0.008), (512, 0.519))), row_seconds=0.0)
TARGET = 0.06


def serve(
    *, rate: float = 40.0, number: int = 400, costs: CostModel = COSTS, record: int = 0, **limits: Any
) -> SimulationResult:
    """More than can be served: prompts of up to 256 tokens, answers of up to 64."""
    draw = random.Random(3)
    arrival, items = 0.0, []
    for _ in range(number):
        arrival += draw.expovariate(rate)
        items.append(WorkItem(arrival, draw.randint(32, 256), draw.randint(16, 64)))
    return simulate(
        Workload("mixed", tuple(items)),
        limits=replace(Limits(16, 128), **limits),
        num_blocks=2048,
        block_size=16,
        max_model_len=512,
        cost_model=costs,
        record_gaps=True,
        enable_prefix_caching=False,
        num_recorded_steps=record,
        jump=False,
    )


def serve_both(background: int = 4, *, seconds: float = 20.0, rate: float = 6.0, **limits: Any) -> SimulationResult:
    """Background answers of 200 tokens beside more interactive prompts than can be read."""
    items = [WorkItem(0.0, 16, 200, is_background=True) for _ in range(background)]
    items += [WorkItem(1.0 + number / rate, 200, 4) for number in range(int(seconds * rate))]
    return simulate(
        Workload("both", tuple(items)),
        limits=replace(Limits(16, 128), slo_admission=True, **limits),
        num_blocks=2048,
        block_size=16,
        max_model_len=512,
        cost_model=COSTS,
        record_gaps=True,
        enable_prefix_caching=False,
        jump=False,
    )


def test_background_answers_whose_gaps_are_promised_go_on_beside_interactive_prompts() -> None:
    targets = {"itl_p95_seconds": TARGET}
    plain, kept = serve_both(**targets), serve_both(background_itl_p95_seconds=TARGET, **targets)
    of_background = [[gap for one in run.requests if one.item < 4 for gap in one.gaps] for run in (plain, kept)]
    assert max(of_background[0]) > 1.0  # nothing was promised to it: it waits for the interactive
    assert nearest_rank(sorted(of_background[1]), 95) <= TARGET
    assert max(of_background[1]) <= 0.2
    assert kept.makespan <= 1.1 * plain.makespan


def test_a_small_budget_is_not_used_up_by_what_is_held_back_for_the_background() -> None:
    """Seven of eight tokens would be, and nobody interactive could begin."""
    kept = serve_both(7, rate=1.0, max_num_batched_tokens=8, background_itl_p95_seconds=TARGET)
    assert len(kept.requests) == 27


def gaps(result: SimulationResult) -> list[float]:
    return sorted([gap for request in result.requests for gap in request.gaps])


def test_under_too_much_load_the_gaps_keep_their_promise_and_little_is_lost() -> None:
    plain = serve(itl_p95_seconds=TARGET)
    paced = serve(itl_p95_seconds=TARGET, slo_admission=True)
    assert nearest_rank(gaps(plain), 75) > 2 * TARGET
    assert nearest_rank(gaps(paced), 95) <= TARGET
    in_time = [sum([gap > TARGET for gap in one.gaps]) <= 0.05 * len(one.gaps) for one in paced.requests]
    assert sum(in_time) >= 0.9 * len(in_time)
    assert paced.makespan <= 1.25 * plain.makespan


def test_the_steps_tell_the_budget_they_had() -> None:
    budgets = [step.batch.token_budget for step in serve(itl_p95_seconds=TARGET, slo_admission=True, record=100).steps]
    assert budgets[0] == 128
    assert budgets[-1] < 64
    assert all(
        [step.batch.num_tokens <= step.batch.token_budget for step in serve(slo_admission=True, record=50).steps]
    )


def test_nothing_changes_where_gaps_are_not_promised_or_steps_are_quick_enough() -> None:
    plain = serve()
    for limits in (
        {"itl_p95_seconds": TARGET},
        {"slo_admission": True},
        {"slo_admission": True, "background_itl_p95_seconds": TARGET},
        {"slo_admission": True, "itl_p95_seconds": 0.2},
    ):
        assert serve(**limits).requests == plain.requests
    fixed = serve(policy="static")
    assert serve(policy="static", slo_admission=True, itl_p95_seconds=TARGET).requests == fixed.requests


def test_a_promise_that_no_step_can_keep_does_not_stop_the_server() -> None:
    slow = replace(COSTS, engine_step_seconds=0.1)
    plain = serve(costs=slow)
    paced = serve(costs=slow, slo_admission=True, itl_p95_seconds=TARGET)
    assert len(paced.requests) == 400
    assert paced.makespan <= 3 * plain.makespan


@pytest.mark.parametrize("target", [TARGET, 0.03])
def test_while_nobody_reads_along_prompts_have_the_whole_budget(target: float) -> None:
    paced = serve(number=1, slo_admission=True, itl_p95_seconds=target)
    assert paced.requests[0].first_token == serve(number=1).requests[0].first_token
