"""`relevo compare` over a fake engine in virtual time: figures, choices, and what the policies are known to do."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.compare.command import compare_policies
from app.compare.lengths import Costs, Lengths, bound_of
from app.compare.load import Source, choose, lengths_of
from app.compare.measure import StepWatch, make_requests, run_policy
from app.compare.options import Options
from app.compare.page import page_of
from app.compare.rounds import compare_on, config_for
from app.compare.runs import POLICIES
from app.compare.words import lines_of
from engine.errors import ConfigError, EngineError
from engine.scripted_runner import ScriptedRunner
from engine.workload import WorkItem, Workload
from tests.fakes import FakeRunner, fake_config, open_fake_engine

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from trio.testing import MockClock

    from app.compare.rounds import Compared
    from engine.batch import ScheduledBatch
    from engine.config import EngineConfig
    from engine.engine import Engine

NUM_BLOCKS, STEP_SECONDS = 2048, 0.05
CONFIG = fake_config(max_num_seqs=4, max_num_batched_tokens=32, block_size=16)


def open_(
    config: EngineConfig,
    watch: StepWatch,
    *,
    step_seconds: float = STEP_SECONDS,
    max_model_len: int = 512,
    **changes: Any,
) -> AbstractAsyncContextManager[Engine]:
    runner = ScriptedRunner(FakeRunner(NUM_BLOCKS, config.block_size, **changes), watch)
    return open_fake_engine(
        config,
        num_blocks=NUM_BLOCKS,
        max_model_len=max_model_len,
        step_seconds=step_seconds,
        runner=runner,
        name="fake",
    )


async def compared(
    config: EngineConfig = CONFIG, *, open_: Any = open_, **asked: Any
) -> tuple[dict[str, Any], Compared, list[str]]:
    options, said = Options(**asked), []
    source = Source(options, max_requests=options.requests or 60)
    result, runs = await compare_policies(
        config,
        source,
        options,
        open_=open_,
        machine=lambda _, device: {"processor": f"a fake {device.name}"},
        echo=said.append,
    )
    return result, runs, said


def workload_of(*lengths: tuple[int, int], arrivals: tuple[float, ...] | None = None) -> Workload:
    times = arrivals or (0.0,) * len(lengths)
    items = tuple(WorkItem(time, prompt, answer) for time, (prompt, answer) in zip(times, lengths, strict=True))
    return Workload("by hand", items, max_output_tokens=max(answer for _, answer in lengths))


async def run_by_hand(
    workload: Workload, policy: str, *, config: EngineConfig = CONFIG, open_loop: bool = False, **changes: Any
) -> Any:
    watch = StepWatch()
    async with open_(config_for(config, max_requests=100), watch, **changes) as engine:
        requests = make_requests(engine, workload, salt=1, open_loop=open_loop)
        return await run_policy(engine, watch, requests, policy=policy)


async def test_the_textbook_case(autojump_clock: MockClock) -> None:
    """Two seats; A needs 2 steps, B 4, C waits with 2. Fixed batch: C runs in steps 5 and 6. Continuous: 3 and 4."""
    config = replace(CONFIG, max_num_seqs=2)
    workload = workload_of((3, 2), (3, 4), (3, 2))
    finished = {}
    for policy in POLICIES:
        run = await run_by_hand(workload, policy, config=config)
        finished[policy] = [round(answer.finished / STEP_SECONDS) for answer in run.answers]
        assert run.counts.padded_rows == (2 if policy in ("static", "dynamic") else 0), policy
    assert finished["static"] == finished["static_dropped"] == [2, 4, 6]
    assert finished["continuous"] == [2, 4, 4]


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_backlog_is_whole_before_the_first_step_however_short_steps_are(
    autojump_clock: MockClock, policy: str
) -> None:
    config = replace(CONFIG, dynamic_max_queue_delay_seconds=30.0)
    with trio.fail_after(20):  # nor is the delay of dynamic batching waited for
        run = await run_by_hand(workload_of(*[(3, 2)] * 8), policy, config=config, step_seconds=1e-5)
    assert run.counts.steps == 4
    assert [len(step["rows"]) for step in run.table] == [4, 4, 4, 4]
    assert run.seconds == pytest.approx(4e-5)


async def test_an_engine_that_does_not_stay_busy_while_a_backlog_gathers_is_told(autojump_clock: MockClock) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run_by_hand(workload_of(*[(3, 2)] * 60), "static", step_seconds=0.0, max_model_len=8)
    assert caught.group_contains(EngineError, match="fewer --requests")


async def test_every_figure_of_the_contract_is_there_and_they_belong_together(autojump_clock: MockClock) -> None:
    result, runs, said = await compared(duration=120, price_per_hour=3.6)
    assert list(result["policies"]) == list(POLICIES)
    json.dumps(result)
    for figures in result["policies"].values():
        speed = figures["output_tokens_per_second"]
        assert figures["cost_per_1000_output_tokens"] == pytest.approx(1 / speed)
        assert speed / figures["requests_per_second"] == pytest.approx(result["workload"]["mean_output_tokens"])
        assert figures["ttft_p50_seconds"] <= figures["ttft_p95_seconds"] <= figures["e2e_p95_seconds"]
        assert figures["samples"] == result["workload"]["requests"] * result["rounds"]
        assert 0 <= figures["kv_waste"] < 1
        assert figures["preemptions"] == figures["recomputed_tokens"] == 0
    static, continuous = result["policies"]["static"], result["policies"]["continuous"]
    assert static["steps"] == result["policies"]["dynamic"]["steps"]  # a backlog: the same batches
    assert continuous["padded_rows"] == continuous["padding_tokens"] == 0
    assert continuous["useful_row_share"] == 1
    assert static["useful_row_share"] < 1
    ratio = result["ratio"]["continuous_over_static"]
    assert 1 < ratio["min"] <= ratio["median"] <= ratio["max"]
    assert result["ratio_in_steps"]["continuous_over_static"]["median"] == static["steps"] / continuous["steps"]
    assert 0 < result["share_of_bound"]["continuous_over_static_in_steps"] <= 1
    assert result["seconds"] <= 120
    assert result["rounds"] >= 2
    assert len(said) == 1
    assert all(sum(a.num_output_tokens for a in run.answers) == runs.runs[0].output_tokens for run in runs.runs)


async def test_what_was_asked_for_is_run_and_rounds_go_there_and_back(autojump_clock: MockClock) -> None:
    result, runs, _ = await compared(requests=6, factor=40.0, repeats=3, workload="azure-code", seed=5)
    assert [run.policy for run in runs.runs] == [*POLICIES, *reversed(POLICIES), *POLICIES]
    assert result["workload"]["requests"] == 6
    assert result["workload"]["factor"] == 40.0
    assert result["rounds"] == 3
    assert result["command"] == (
        "relevo compare --workload azure-code --requests 6 --factor 40 --seats 4 --seed 5 --repeats 3"
    )
    assert "A p95 wants 300 answers; these rest on 18." in result["remarks"]
    assert any(remark.startswith("KV waste is understated for the fixed batches") for remark in result["remarks"])


@pytest.mark.parametrize("step_seconds", [0.1, 0.4, 1.6])
async def test_two_rounds_fit_into_the_time_on_a_slow_machine_too(
    autojump_clock: MockClock, step_seconds: float
) -> None:
    result, _, said = await compared(open_=partial(open_, step_seconds=step_seconds))
    assert "2 rounds or more" in said[0]
    assert result["rounds"] >= 2
    assert result["seconds"] <= Options().duration


async def test_where_two_rounds_cannot_fit_one_is_run_and_announced(autojump_clock: MockClock) -> None:
    result, _, said = await compared(open_=partial(open_, step_seconds=8.0))
    assert "1 round or more through four policies" in said[0]
    assert result["rounds"] == 1
    assert "One round only: nothing is known of the spread." in result["remarks"]


def test_short_of_time_lengths_are_divided_by_more_and_fewer_are_taken() -> None:
    costs, options = Costs(prompt_token=0.002, step=0.2), Options()
    source = Source(options, max_requests=2000)
    chosen = {
        seconds: choose(source, options, costs, seats=16, seconds=seconds, max_model_len=8192)
        for seconds in (60.0, 400.0, 4000.0, 40_000.0)
    }
    factors = [choice.workload.factor for choice in chosen.values()]
    assert factors == sorted(factors, reverse=True)
    assert len(set(factors)) > 2
    for seconds, choice in chosen.items():
        assert len(choice.workload.items) % 16 == 0
        assert len(choice.workload.items) >= 5 * 16 or choice.workload.factor == 64
        assert choice.seconds <= seconds
    given = Options(requests=48, factor=8.0)
    choice = choose(Source(given, max_requests=48), given, costs, seats=16, seconds=1.0, max_model_len=8192)
    assert (len(choice.workload.items), choice.workload.factor) == (48, 8.0)
    assert choice.seconds > 1


def test_where_few_come_in_the_time_shorter_ones_are_no_help() -> None:
    costs, options = Costs(prompt_token=0.0001, step=0.001), Options(rate=0.5)
    source = Source(options, max_requests=2000)
    choice = choose(source, options, costs, seats=16, seconds=400.0, max_model_len=8192)
    assert choice.workload.factor == source.least_factor(8192)
    assert len(choice.workload.items) == 25


async def test_in_an_open_loop_latency_counts_from_when_a_request_was_due(autojump_clock: MockClock) -> None:
    arrivals = (0.0, 0.02, 0.5)
    run = await run_by_hand(workload_of((3, 2), (3, 1), (3, 1), arrivals=arrivals), "continuous", open_loop=True)
    assert [answer.scheduled for answer in run.answers] == pytest.approx(arrivals)
    # The second comes in the middle of a step and is computed in the next one.
    assert [answer.ttft for answer in run.answers] == pytest.approx([0.05, 0.08, 0.05])
    assert run.seconds == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"requests": 12, "factor": 20.0, "repeats": 1}, None),
        ({"requests": 12, "repeats": 1, "duration": 0.5}, "--requests 12 and --repeats 1 go before it"),
        ({"requests": 12, "duration": 0.5}, "--requests 12 goes before it"),
        ({"duration": 0.5}, "the least that tells anything takes so long"),
    ],
)
async def test_it_is_said_what_takes_longer_than_it_should(
    autojump_clock: MockClock, asked: dict[str, Any], why: str | None
) -> None:
    _, _, said = await compared(**asked)
    if why:
        assert said[0].endswith(f", and not the 0.5 s of --duration: {why}.")
    else:
        assert "--duration" not in said[0]


async def test_a_rate_is_kept_and_said(autojump_clock: MockClock) -> None:
    result, _, _ = await compared(requests=12, factor=64.0, repeats=1, rate=2.0)
    assert result["workload"]["arrivals"] == "open loop"
    assert result["policies"]["continuous"]["seconds"] > 4
    assert result["policies"]["continuous"]["dispatch_lag_p99_seconds"] < 0.001
    assert "--rate 2" in result["command"]
    assert "2 a second" in page_of(result, [])


@pytest.mark.parametrize(("rate", "keeps_up"), [(1.0, True), (20.0, False)])
async def test_who_keeps_up_is_told_from_who_does_not(autojump_clock: MockClock, rate: float, keeps_up: bool) -> None:
    """What the last answers take after the last arrival makes no run a slow one."""
    result, _, _ = await compared(requests=16, factor=8.0, repeats=1, rate=rate)
    behind = [remark for remark in result["remarks"] if remark.startswith("Not kept up")]
    assert ("continuous" in "".join(behind)) is not keeps_up
    if keeps_up:
        assert result["policies"]["continuous"]["requests_per_second"] < 0.9 * rate


async def test_the_line_to_repeat_it_loses_no_digit(autojump_clock: MockClock) -> None:
    result, _, _ = await compared(requests=4, factor=40.123456789, repeats=1, rate=1234.56789, price_per_hour=0.1)
    assert "--factor 40.123456789 --seats 4 --seed 0 --rate 1234.56789 --price-per-hour 0.1" in result["command"]


async def test_a_trace_with_few_requests_gives_what_it_has(autojump_clock: MockClock, tmp_path: Path) -> None:
    trace = tmp_path / "<img src=x>.csv"
    lines = [f"{i},{100 + i},{20 + i % 7}\n" for i in range(10)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    result, runs, _ = await compared(trace=trace, factor=2.0)
    assert result["workload"]["requests"] == 10
    assert result["workload"]["name"] == trace.name
    page = page_of(result, runs.runs)
    assert "<img" not in page
    assert "&lt;img src=x&gt;.csv" in page


async def test_the_page_needs_nothing_else_and_shows_three_tables(autojump_clock: MockClock) -> None:
    result, runs, _ = await compared(requests=12, repeats=2)
    page = page_of(result, runs.runs)
    assert page.count('<svg class="steps"') == 3
    assert "src=" not in page
    assert "http" not in page
    assert "wasted" in page
    assert result["command"].split(" --")[-1] in page
    lines = lines_of(result)
    assert any(line.startswith("continuous over static ") for line in lines)


async def test_more_seats_than_memory_is_one_clear_line(autojump_clock: MockClock) -> None:
    options = Options()
    source = Source(options, max_requests=400)
    watch, config = StepWatch(), config_for(replace(CONFIG, max_num_seqs=64), max_requests=400)
    runner = ScriptedRunner(FakeRunner(8, 16), watch)
    async with open_fake_engine(config, num_blocks=8, max_model_len=64, runner=runner) as engine:
        with pytest.raises(ConfigError, match="64 seats need a KV block each"):
            await compare_on(engine, watch, source, options)


async def test_an_answer_that_fails_ends_the_comparison(autojump_clock: MockClock) -> None:
    def fail(batch: ScheduledBatch) -> None:
        rows = zip(batch.sequence_ids, batch.starts, strict=True)
        if any(sequence_id % 2 and start > 4 for sequence_id, start in rows):
            raise RuntimeError("broken")

    with pytest.raises(ExceptionGroup) as caught:
        await run_by_hand(workload_of((3, 9), (3, 9)), "continuous", before_step=fail)
    assert caught.group_contains(EngineError, match="failed")


async def test_short_of_memory_it_preempts_and_says_so(autojump_clock: MockClock) -> None:
    config, watch = config_for(replace(CONFIG, enable_prefix_caching=False), max_requests=100), StepWatch()
    runner = ScriptedRunner(FakeRunner(8, 16), watch)
    workload = workload_of(*[(20, 60)] * 8)
    async with open_fake_engine(config, num_blocks=8, max_model_len=128, runner=runner) as engine:
        requests = make_requests(engine, workload, salt=1, open_loop=False)
        run = await run_policy(engine, watch, requests, policy="continuous")
    assert run.counts.preemptions > 0
    assert run.counts.recomputed_tokens > 0
    assert run.output_tokens == 8 * 60


def test_the_bound_of_the_textbook_case() -> None:
    bound = bound_of(Lengths([3, 3, 3], [2, 4, 2]), seats=2, token_budget=100)
    assert bound.continuous_over_static == 4 / 3  # of the whole batch
    assert bound.continuous_over_static_with_tail == 6 / 4
    assert bound.padded_prompts == 1
    # A prompt takes a step, and the first token comes with it: 4 + 2 steps; 8 tokens on 2 seats take 4.
    assert bound.continuous_over_static_with_prompts == 6 / 4


def test_a_last_batch_of_few_does_not_weigh_as_much_as_a_whole_one() -> None:
    lengths = Lengths([*range(1, 17), 1], [*range(1, 17), 1])
    bound, whole = (bound_of(part, seats=16, token_budget=100) for part in (lengths, lengths.first(16)))
    assert bound.continuous_over_static == whole.continuous_over_static == 16 / 8.5
    assert bound.padded_prompts == whole.padded_prompts == 16 / 8.5
    few = bound_of(lengths.first(3), seats=16, token_budget=100)
    assert few.continuous_over_static == 3 / 2


def test_a_thousand_conversations_have_the_published_bound() -> None:
    options = Options()
    workload = Source(options, max_requests=20_000).take(16 * 1200, 1.0, 1 << 20)
    bound = bound_of(lengths_of(workload), seats=16, token_budget=2048)
    assert bound.continuous_over_static == pytest.approx(2.41, abs=0.08)
    assert bound.padded_prompts == pytest.approx(3.29, abs=0.1)
