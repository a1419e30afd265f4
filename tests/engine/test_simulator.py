"""The simulator: known cases, the same with and without jumps, and flat under a long queue."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config import Limits
from engine.cost_model import CostModel, Curve
from engine.errors import ConfigError
from engine.simulator import simulate
from engine.workload import WorkItem, Workload, generate

ONE_SECOND = CostModel(products=Curve(((1, 1.0),)))
# No two sums of these meet by chance.
UNEVEN = CostModel(
    products=Curve(((1, 0.0137), (8, 0.0191), (64, 0.0913))),
    head=Curve(((1, 0.00217), (16, 0.00391))),
    decode_token_seconds=3.17e-6,
    prefill_pair_seconds=1.13e-7,
    prefill_context_seconds=7.3e-7,
    row_seconds=1.7e-5,
    engine_step_seconds=1.1e-4,
    engine_row_seconds=2.3e-5,
)


def workload_of(*items: tuple[float, int, int]) -> Workload:
    made = tuple(WorkItem(*item) for item in items)
    return Workload("made up", made, max_output_tokens=max(item.num_output_tokens for item in made))


def play(workload: Workload, **changes: Any) -> Any:
    own = Limits.__dataclass_fields__.keys() - {"max_waiting"}  # the simulator has one of its own: that may be none
    limits = {key: changes.pop(key) for key in list(changes) if key in own}
    arguments: dict[str, Any] = {
        "limits": Limits(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **limits}),
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 200,
        "cost_model": UNEVEN,
        **changes,
    }
    return simulate(workload, **arguments)


def test_the_textbook_case() -> None:
    """A needs 2 steps, B 4, C waits with 2: fixed batches seat C in step 5, continuous ones in step 3."""
    workload = workload_of((0.0, 1, 2), (0.0, 1, 4), (0.0, 1, 2))
    for policy, seated, finished in (("static", 4.0, 6.0), ("static_dropped", 4.0, 6.0), ("continuous", 2.0, 4.0)):
        result = play(workload, max_num_seqs=2, policy=policy, cost_model=ONE_SECOND, open_loop=False)
        (last,) = [request for request in result.requests if request.item == 2]
        assert (last.seated, last.finished) == (seated, finished)
        assert result.num_steps == finished
        assert result.makespan == finished
    assert result.counters.num_padding_rows == 0
    assert play(workload, max_num_seqs=2, policy="static", open_loop=False).counters.num_padding_rows == 2


def test_dynamic_batching_waits_for_company() -> None:
    workload = workload_of((0.0, 1, 1), (0.3, 1, 1), (10.0, 1, 1))
    result = play(
        workload,
        policy="dynamic",
        dynamic_preferred_size=3,
        dynamic_max_queue_delay_seconds=0.5,
        cost_model=ONE_SECOND,
    )
    assert [request.seated for request in result.requests] == [0.5, 0.5, 10.5]


def test_times_of_one_request() -> None:
    """Three prompts tokens a step, then one token a step; each step takes a second."""
    (request,) = play(workload_of((5.0, 7, 3)), max_num_batched_tokens=3, cost_model=ONE_SECOND).requests
    assert (request.arrival, request.seated, request.first_token, request.finished) == (5.0, 5.0, 8.0, 10.0)
    assert (request.num_output_tokens, request.num_preemptions) == (3, 0)


def test_every_gap_between_tokens_is_noted() -> None:
    """A long prompt is read beside the first request's answer: each of its three whole chunks makes a gap long."""
    workload = workload_of((0.0, 1, 30), (0.1, 100, 1))
    first, second = sorted(play(workload, record_gaps=True).requests)
    assert (len(first.gaps), len(second.gaps)) == (29, 0)
    assert sum(gap > 0.03 for gap in first.gaps) == 3
    assert sum(first.gaps) == pytest.approx(first.finished - first.first_token)
    assert len(sorted(play(workload).requests)[0].gaps) == 0


def test_background_work_waits_for_the_interactive() -> None:
    """One seat: who came later, but not in the background, goes first; the one that sits gives it its seat."""
    items = ((0.0, 1, 4, True), (0.5, 1, 1, True), (0.5, 1, 2, False))
    made = tuple(WorkItem(at, prompt, answer, (), background) for at, prompt, answer, background in items)
    workload = Workload("made up", made, max_output_tokens=4)
    result = play(workload, max_num_seqs=1, cost_model=ONE_SECOND, record_gaps=True)
    finished = {request.item: request.finished for request in result.requests}
    assert finished[2] < finished[0] < finished[1]
    assert result == play(workload, max_num_seqs=1, cost_model=ONE_SECOND, record_gaps=True, jump=False)


def test_an_answer_ends_where_the_capacity_does() -> None:
    (request,) = play(workload_of((0.0, 10, 50)), max_model_len=20).requests
    assert request.num_output_tokens == 11


def test_what_never_fits_and_what_finds_the_queue_full_is_told() -> None:
    workload = workload_of((0.0, 201, 1), *[(0.0, 4, 5)] * 7)
    result = play(workload, max_num_seqs=1, max_waiting=3)
    assert result.failed == (0,)
    assert result.refused == (4, 5, 6, 7)
    assert sorted(request.item for request in result.requests) == [1, 2, 3]


def test_the_first_steps_are_recorded() -> None:
    workload = workload_of((0.0, 40, 2), (0.0, 1, 3))
    result = play(workload, policy="static", num_recorded_steps=3, cost_model=ONE_SECOND, open_loop=False)
    assert [step.as_json()["rows"] for step in result.steps] == [
        [(0, "r1", "prefill", 32), (1, "r2", "idle", 0)],
        [(0, "r1", "idle", 0), (1, "r2", "padding", 32)],
        [(0, "r1", "prefill", 8), (1, "r2", "prefill", 1)],
    ]
    assert [(step.batch.step, step.time) for step in result.steps] == [(1, 0.0), (2, 1.0), (3, 2.0)]


def test_reserving_what_clients_ask_for_wastes_more_than_reserving_what_they_get() -> None:
    workload = workload_of(*[(0.0, 4, 5)] * 8, (0.0, 4, 60))
    asked = play(workload, admission="reserve", num_blocks=20)
    got = play(workload, admission="reserve", num_blocks=20, declared_max_tokens=False)
    on_demand = play(workload, num_blocks=20)
    assert asked.kv_waste > 0.5 > got.kv_waste
    assert on_demand.kv_waste < 0.5
    assert asked.makespan > got.makespan


ITEMS = st.lists(st.tuples(st.floats(0.0, 0.4), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    ITEMS,
    st.sampled_from(["continuous", "static", "static_dropped", "dynamic"]),
    st.sampled_from(["on_demand", "reserve", "predicted"]),
    st.integers(1, 6),
    st.sampled_from([1, 3, 8, 40]),
    st.sampled_from([30, 40, 200]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.booleans(),
)
@example([(0.0, 40, 60)] * 12, "continuous", "on_demand", 6, 8, 30, True, False, None, True)
@example(
    [(0.0, 1, 1), (0.0, 1, 1), (0.0, 45, 39), (0.0, 2, 36)], "static", "on_demand", 4, 3, 30, False, False, None, False
)
def test_jumping_gives_what_single_steps_give(
    gaps: list[tuple[float, int, int]],
    policy: str,
    admission: str,
    seats: int,
    budget: int,
    num_blocks: int,
    caching: bool,
    open_loop: bool,
    max_waiting: int | None,
    declared: bool,
) -> None:
    now, items = 0.0, []
    for gap, prompt, answer in gaps:
        now += gap
        items.append((now, prompt, answer))
    run = {
        "policy": policy,
        "admission": admission,
        "max_num_seqs": seats,
        "max_num_batched_tokens": budget,
        "num_blocks": num_blocks,
        "enable_prefix_caching": caching,
        "open_loop": open_loop,
        "max_waiting": max_waiting,
        "declared_max_tokens": declared,
        "record_gaps": True,
    }
    jumped, single = (play(workload_of(*items), jump=jump, **run) for jump in (True, False))
    assert jumped.num_steps == single.num_steps
    assert jumped.counters == single.counters
    assert (jumped.refused, jumped.failed) == (single.refused, single.failed)
    assert len(jumped.requests) + len(jumped.refused) + len(jumped.failed) == len(items)
    for mine, other in zip(jumped.requests, single.requests, strict=True):
        assert tuple(mine[:-1]) == pytest.approx(tuple(other[:-1]), rel=1e-9, abs=1e-9)
        assert list(mine.gaps) == pytest.approx(list(other.gaps), rel=1e-9, abs=1e-9)


def test_prompts_with_common_beginnings_jump_too() -> None:
    items = tuple(WorkItem(0.05 * i, 30, 20, (0, 1, i % 3)) for i in range(40))
    workload = Workload("made up", items, prefix_block_tokens=10, max_output_tokens=20)
    jumped, single = (play(workload, jump=jump, num_blocks=40) for jump in (True, False))
    assert jumped.counters == single.counters
    assert jumped.counters.num_hit_tokens > 0
    assert jumped.makespan == pytest.approx(single.makespan)


def test_a_queue_of_all_requests_does_not_make_a_step_slower() -> None:
    """Twenty times the requests, all at once, take about twenty times as long."""

    def seconds(num: int) -> float:
        workload = workload_of(*[(0.0, 20, 10)] * num)
        begin = time.process_time()
        play(workload, open_loop=False, enable_prefix_caching=False)
        return time.process_time() - begin

    few, many = min(seconds(300) for _ in range(3)), seconds(6000)
    assert many < 20 * few * 2


def test_policies_stand_in_the_order_that_the_lengths_allow() -> None:
    workload = generate("azure-conversation", 300, seed=1, factor=8)
    results = {
        policy: play(
            workload,
            policy=policy,
            open_loop=False,
            num_blocks=4000,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            max_model_len=2048,
        ).output_tokens_per_second
        for policy in ("continuous", "static_dropped", "static")
    }
    assert results["continuous"] > results["static_dropped"] > results["static"]


def test_bad_arguments_are_refused() -> None:
    workload = workload_of((0.0, 1, 1))
    with pytest.raises(ConfigError, match="at least one block"):
        play(workload, num_blocks=0)
    with pytest.raises(ConfigError, match="no batching policy"):
        play(workload, policy="fair")


def test_an_empty_workload_takes_no_time() -> None:
    result = play(replace(workload_of((0.0, 1, 1)), items=()))
    assert (result.num_steps, result.makespan, result.output_tokens_per_second, result.kv_waste) == (0, 0.0, 0.0, 0.0)
    assert result.useful_row_share == 1.0


def test_the_simulator_needs_only_the_standard_library() -> None:
    code = "import sys, engine.simulator; print({'torch', 'trio', 'numpy'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_a_simulation_has_no_drafts() -> None:
    """Its tokens are all the same and would all be drafted."""
    workload = workload_of((0.0, 9, 30), (0.1, 7, 30))
    result = play(workload, num_speculative_tokens=7, jump=False)
    assert result.counters.num_draft_tokens == 0
    assert result == play(workload, jump=False)
