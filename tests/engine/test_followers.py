"""Several answers to one prompt: it is computed once, its blocks are shared, and nobody shares the first one's fate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from engine.errors import ContextLengthError
from engine.handle import GenerationRequest, TextPrompt
from engine.ingress import LONG_TEXT
from engine.sequence import FinishReason, SamplingParams
from tests.engine.simulate import Simulation
from tests.fakes import FakeRunner, FakeTokenizer, expected_output, fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

    from engine.batch import ScheduledBatch
    from engine.engine import Engine
    from engine.handle import Handle

PROMPT = "a prompt of forty characters, read once."
BLOCK = 4


def submit_choices(engine: Engine, n: int, text: str = PROMPT, max_tokens: int = 6) -> list[Handle]:
    request = GenerationRequest("r", TextPrompt(text), SamplingParams(max_tokens=max_tokens))
    leader = engine.submit(request)
    choices = [replace(request, params=replace(request.params, choice_index=i)) for i in range(1, n)]
    return [leader, *[engine.submit(choice, after=leader) for choice in choices]]


async def read(handle: Handle) -> tuple[str, FinishReason | None]:
    text, reason = "", None
    async for delta in read_deltas(handle):
        text, reason = text + delta.text, delta.finish_reason
    return text, reason


def num_computed(batches: Sequence[ScheduledBatch], num_prompt_tokens: int) -> int:
    """Prompt tokens computed, over all rows."""
    return sum(
        max(0, min(start + count, num_prompt_tokens) - start)
        for batch in batches
        for start, count in zip(batch.starts, batch.counts, strict=True)
    )


def expected(text: str, num_tokens: int) -> str:
    return bytes(expected_output(text.encode(), num_tokens)).decode()


@pytest.mark.parametrize("budget", [8, 64])
async def test_the_prompt_is_computed_once(budget: int, autojump_clock: MockClock) -> None:
    runner = FakeRunner(64, BLOCK)
    async with open_fake_engine(fake_config(max_num_batched_tokens=budget), num_blocks=64, runner=runner) as engine:
        handles = submit_choices(engine, 4)
        for handle in handles:
            assert await handle.accepted() == len(PROMPT)
        assert engine.num_running + engine.num_waiting <= 4
        for handle in handles:
            assert await read(handle) == (expected(PROMPT, 6), FinishReason.LENGTH)
        # Its last block is computed by each: the last token must be, to know what follows.
        assert num_computed(runner.batches, len(PROMPT)) == len(PROMPT) + 3 * BLOCK
        tables = [dict(batch.new_blocks)[seated.seat] for batch in runner.batches for seated in batch.seated]
        assert len(tables) == 4
        assert len({table[: len(PROMPT) // BLOCK - 1] for table in tables}) == 1
        snapshot = engine.snapshot()
        assert snapshot["prefix_cache"]["hit_tokens"] == 3 * (len(PROMPT) - BLOCK)
        assert snapshot["kv"]["used"] == 0


async def test_without_the_prefix_cache_everybody_computes_at_once(autojump_clock: MockClock) -> None:
    runner = FakeRunner(128, BLOCK)
    config = fake_config(enable_prefix_caching=False, max_num_batched_tokens=256)
    async with open_fake_engine(config, num_blocks=128, runner=runner) as engine:
        for handle in submit_choices(engine, 4):
            assert (await read(handle))[0] == expected(PROMPT, 6)
        assert num_computed(runner.batches, len(PROMPT)) == 4 * len(PROMPT)
        assert len(runner.batches[1]) == 4


async def test_another_root_shares_nothing_and_waits_for_nobody(autojump_clock: MockClock) -> None:
    runner = FakeRunner(128, BLOCK)
    async with open_fake_engine(fake_config(max_num_batched_tokens=256), num_blocks=128, runner=runner) as engine:
        leader = engine.submit(GenerationRequest("r", TextPrompt(PROMPT), SamplingParams(max_tokens=2)))
        engine.submit(replace(leader.request, cache_root="other"), after=leader)
        await engine.wait_idle()
        assert num_computed(runner.batches, len(PROMPT)) == 2 * len(PROMPT)


async def test_followers_wait_where_everybody_sees_them(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_batched_tokens=8)) as engine:
        handles = submit_choices(engine, 3)
        await trio.sleep(0.035)  # the prompt takes five steps
        requests = engine.snapshot()["requests"]
        assert (requests["running"], requests["waiting"]) == (1, 2)
        assert requests["waiting_by_reason"] == {"shared_prompt": 2}
        assert engine.num_open == 3
        other = engine.submit(GenerationRequest("r", TextPrompt("someone else"), SamplingParams(max_tokens=2)))
        assert (await read(other))[0] == expected("someone else", 2)
        for handle in handles:
            assert (await read(handle))[0] == expected(PROMPT, 6)


async def test_followers_keep_their_place_in_the_queue(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=1)) as engine:
        ends: list[str] = []

        async def note(name: str, handle: Handle) -> None:
            await read(handle)
            ends.append(name)

        async with trio.open_nursery() as nursery:
            names = ["leader", "follower", "follower"]
            for name, handle in zip(names, submit_choices(engine, 3), strict=True):
                nursery.start_soon(note, name, handle)
            late = engine.submit(GenerationRequest("r", TextPrompt("later"), SamplingParams(max_tokens=2)))
            nursery.start_soon(note, "late", late)
        assert ends == ["leader", "follower", "follower", "late"]


@pytest.mark.parametrize("after", [0.0, 0.005, 0.025, 0.045, 0.075])
async def test_a_leader_that_leaves_lets_the_others_go_on(after: float, autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_batched_tokens=8)) as engine:
        leader, *followers = submit_choices(engine, 3)
        await trio.sleep(after)
        leader.abort("client")
        assert (await read(leader))[1] is FinishReason.ABORT
        for handle in followers:
            assert await read(handle) == (expected(PROMPT, 6), FinishReason.LENGTH)
        await engine.wait_idle()
        kv = engine.snapshot()["kv"]
        assert kv["free"] + kv["cached"] == kv["total"]


@pytest.mark.parametrize("after", [0.0, 0.005, 0.025, 0.075])
async def test_a_follower_that_leaves_leaves_nothing(after: float, autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_batched_tokens=8)) as engine:
        leader, follower, other = submit_choices(engine, 3)
        await trio.sleep(after)
        follower.abort("client")
        follower.abort("client")
        assert (await read(follower))[1] is FinishReason.ABORT
        for handle in (leader, other):
            assert (await read(handle))[0] == expected(PROMPT, 6)
        await engine.wait_idle()
        kv = engine.snapshot()["kv"]
        assert kv["free"] + kv["cached"] == kv["total"]


async def test_a_leader_whose_step_fails_lets_the_others_go_on(autojump_clock: MockClock) -> None:
    def break_leader(batch: ScheduledBatch) -> None:
        if batch.step > 1 and 1 in batch.sequence_ids:
            raise ArithmeticError("out of numbers")

    runner = FakeRunner(64, BLOCK, before_step=break_leader)
    async with open_fake_engine(fake_config(max_num_batched_tokens=8), num_blocks=64, runner=runner) as engine:
        leader, follower = submit_choices(engine, 2)
        assert (await read(leader))[1] is FinishReason.ERROR
        assert (await read(follower))[0] == expected(PROMPT, 6)


async def test_a_prompt_that_is_refused_is_refused_for_all(autojump_clock: MockClock) -> None:
    async with open_fake_engine(num_blocks=8) as engine:
        for handle in submit_choices(engine, 3, "x" * 100):
            with pytest.raises(ContextLengthError):
                await handle.accepted()
        assert engine.num_open == 0


async def test_a_long_text_is_tokenized_once() -> None:
    async with open_fake_engine(num_blocks=16_384, max_model_len=40_000, step_seconds=0.001) as engine:
        encode, calls = engine.tokenizer.encode, []

        def counted(text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
            calls.append(len(text))
            return encode(text, parse_control=parse_control, add_special=add_special)

        engine.tokenizer.encode = counted  # type: ignore[method-assign]
        handles = submit_choices(engine, 3, "x" * (LONG_TEXT + 1), 1)
        for handle in handles:
            assert await handle.accepted() == LONG_TEXT + 1
            handle.abort("client")
        assert calls == [LONG_TEXT + 1]


async def test_a_long_text_that_is_refused_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    encode = FakeTokenizer.encode

    def watched(self: FakeTokenizer, text: str, **flags: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **flags)

    monkeypatch.setattr(FakeTokenizer, "encode", watched)
    async with open_fake_engine(num_blocks=600, max_model_len=4096) as engine:
        for handle in submit_choices(engine, 8, "x" * 20_000):
            with pytest.raises(ContextLengthError):
                await handle.accepted()
    assert lengths.count(20_000) == 1


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
@pytest.mark.parametrize("num_blocks", [200, 14])
async def test_every_policy_serves_them_all(policy: str, num_blocks: int, autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(policy=policy), num_blocks=num_blocks) as engine:
        groups = [submit_choices(engine, 3, f"{PROMPT} {i}") for i in range(3)]
        for i, group in enumerate(groups):
            for handle in group:
                assert await read(handle) == (expected(f"{PROMPT} {i}", 6), FinishReason.LENGTH)


def test_a_fixed_batch_leaves_no_follower_behind() -> None:
    simulation = Simulation(policy="static", token_budget=200)
    leader = simulation.add(12, 3)
    for _ in range(2):
        simulation.add_prompt(leader.prompt_token_ids, leader.params, leader=leader)
    assert len(simulation.step()) == 3


def test_nobody_yields_to_one_who_could_not_sit_yet() -> None:
    """Background work runs; the interactive ones that wait are followers of one that reads its prompt."""
    simulation = Simulation(max_num_seqs=2, token_budget=4)
    simulation.add(2, 60, background=True)
    simulation.step()
    leader = simulation.add(20, 2)
    follower = simulation.add_prompt(leader.prompt_token_ids, leader.params, leader=leader)
    simulation.step()
    assert leader.seat >= 0
    while leader.first_token_time is None:
        assert follower.seat < 0
        assert simulation.scheduler.counters.num_preemptions == 0
        simulation.step()
    simulation.run()
    assert simulation.outputs[follower.sequence_id] == simulation.outputs[leader.sequence_id]
