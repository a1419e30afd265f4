"""A whole engine whose steps are launched before the last one is read: the same answers, and faults cost nobody."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from engine.block_pool import BlockPool
from engine.grammar.spec import GrammarSpec
from engine.handle import GenerationRequest, TextPrompt, TokensPrompt
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, SamplingParams
from engine.stats import Stats
from tests.engine import tiny_engine
from tests.fake_device import LAUNCH_SECONDS, STEP_SECONDS, FakeDevice, opens
from tests.fakes import EOS, OneOf, Poison, expected_output, fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from engine.batch import ScheduledBatch
    from engine.engine import Engine
    from engine.handle import Handle
    from engine.outbox import Delta

NUM_BLOCKS = 256
# Behind its last token a constraint lets nothing come.
ENDS_ITSELF = {"stop_token_ids": frozenset({EOS}), "end_token_ids": frozenset({EOS})}
OPTIONS = (b"the first of all answers", b"the second one", b"no")


def ask(text: str, max_tokens: int | None = 12, *, stop: tuple[str, ...] = (), **params: Any) -> GenerationRequest:
    return GenerationRequest(text, TextPrompt(text), SamplingParams(max_tokens=max_tokens, **params), stop)


@asynccontextmanager
async def open_device_engine(device: FakeDevice, **limits: Any) -> AsyncIterator[Engine]:
    config = fake_config(**{"max_num_seqs": 16, **limits})
    blocks = len(device._memory)
    async with open_fake_engine(config, num_blocks=blocks, runner=device, stepper=opens(device)) as engine:
        yield engine


async def read(handle: Handle) -> list[Delta]:
    return [delta async for delta in read_deltas(handle)]


async def assert_right(handle: Handle) -> None:
    """The answer is what it would have been alone, to its end."""
    max_tokens = handle.request.params.max_tokens or 0
    deltas = await read(handle)
    expected = expected_output(handle.request.request_id.encode(), max_tokens)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected
    assert (deltas[-1].finish_reason, deltas[-1].error) == (FinishReason.LENGTH, None)


async def assert_sound(engine: Engine) -> None:
    """The next request is served, and nothing is left of those before."""
    await assert_right(engine.submit(replace(ask("the next one"), ignore_eos=True)))
    with trio.fail_after(10):
        await engine.wait_idle()
        await trio.sleep(5)  # for what is computed behind a stop token; and all is held against each other
        await assert_right(engine.submit(replace(ask("another"), ignore_eos=True)))
    snapshot = engine.snapshot()
    assert snapshot["kv"]["free"] + snapshot["kv"]["cached"] == snapshot["kv"]["total"]
    assert snapshot["faults"]["integrity_violations"] == 0
    assert engine.num_streams == 0
    assert engine.health().ready


def once(error: Exception, *, after: int = 0) -> Callable[..., None]:
    """A call that raises the time after `after` others, and no more."""
    left = [after]

    def hook(*_: object, **__: object) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error

    return hook


async def test_a_device_is_never_idle_between_two_steps(autojump_clock: MockClock) -> None:
    device = FakeDevice(NUM_BLOCKS, 4)
    async with open_device_engine(device) as engine:
        began = trio.current_time()
        await assert_right(engine.submit(ask("question", 20)))
        assert trio.current_time() - began == pytest.approx(LAUNCH_SECONDS + 20 * STEP_SECONDS)
        assert device.depths == [1] + [2] * 19
        seconds = engine.snapshot()["step"]
        assert seconds["count"] == 20
        assert seconds["seconds_p50"] == pytest.approx(STEP_SECONDS, abs=1e-4)
        await assert_sound(engine)


async def test_who_waits_for_nothing_is_computed_one_step_at_a_time(autojump_clock: MockClock) -> None:
    """Under fixed batches, and where drafts are checked."""
    for limits in ({"policy": "static"}, {"num_speculative_tokens": 3}):
        device = FakeDevice(NUM_BLOCKS, 4)
        async with open_device_engine(device, **limits) as engine:
            await assert_right(engine.submit(ask("question")))
            assert {*device.depths} == {1}
            await assert_sound(engine)


async def test_a_change_of_policy_waits_for_what_is_under_way(autojump_clock: MockClock) -> None:
    device = FakeDevice(NUM_BLOCKS, 4, end_after=lambda _: 11)
    async with open_device_engine(device) as engine:
        for policy in ("static", "continuous", "dynamic", "continuous"):
            handles = [engine.submit(ask(f"{policy} {i}", 8 + i, stop_token_ids=frozenset({EOS}))) for i in range(6)]
            await trio.sleep(0.03)
            await engine.set_limits({"policy": policy})
            for handle in handles:
                deltas = await read(handle)
                assert deltas[-1].error is None
                assert sum(len(delta.token_ids) for delta in deltas) == min(handle.request.params.max_tokens or 0, 12)
        assert engine.snapshot()["faults"]["failed_steps"] == 0
        await assert_sound(engine)


async def test_drafts_that_are_switched_on_wait_for_what_is_under_way(autojump_clock: MockClock) -> None:
    device = FakeDevice(NUM_BLOCKS, 4)
    async with open_device_engine(device) as engine:
        handle = engine.submit(ask("question", 60))
        for drafts in (3, 0, 2, 0):
            await trio.sleep(0.055)
            await engine.set_limits({"num_speculative_tokens": drafts})
        await assert_right(handle)
        assert {*device.depths} == {1, 2}
        assert engine.snapshot()["faults"]["failed_steps"] == 0


async def test_a_step_that_does_not_come_back_is_noticed(autojump_clock: MockClock) -> None:
    device = FakeDevice(NUM_BLOCKS, 4)
    async with open_device_engine(device) as engine:
        await assert_right(engine.submit(ask("question", 40)))
        device.step_seconds = 60.0
        late = engine.submit(ask("late", 3))
        await trio.sleep(10)
        assert engine.health().reason == "stalled: a step has been running for 10 s"
        await assert_right(late)
        await trio.sleep(1)
        assert engine.health().ready


async def test_the_end_of_the_engine_waits_for_every_step_that_was_launched(autojump_clock: MockClock) -> None:
    device = FakeDevice(NUM_BLOCKS, 4)
    async with open_device_engine(device) as engine:
        engine.submit(ask("question", 400))
        await trio.sleep(0.055)
        assert device.num_under_way == 1  # behind the one that is waited for
    assert device.num_under_way == 0


@pytest.mark.parametrize("after", [0, 1, 4, 9])
@pytest.mark.parametrize("hook", ["before_launch", "before_step"])
async def test_a_step_that_fails_once_costs_nobody_anything(autojump_clock: MockClock, hook: str, after: int) -> None:
    """Where it is launched, or where it is computed with the next one launched behind it."""
    hooks: dict[str, Any] = {hook: once(ArithmeticError("a cosmic ray"), after=after)}
    device = FakeDevice(NUM_BLOCKS, 4, **hooks)
    async with open_device_engine(device) as engine:
        handles = [engine.submit(ask(f"question {i}", 8 + i)) for i in range(6)]
        for handle in handles:
            await assert_right(handle)
        assert engine.snapshot()["faults"] == {"failed_steps": 1, "integrity_violations": 0}
        assert 2 in device.depths
        await assert_sound(engine)


async def test_who_sat_down_in_a_step_that_was_lost_is_told_so(autojump_clock: MockClock) -> None:
    device = FakeDevice(NUM_BLOCKS, 4, before_step=once(ArithmeticError("a cosmic ray")))
    async with open_device_engine(device) as engine:
        usage = (await read(engine.submit(ask("question"))))[-1].usage
        assert usage is not None
        assert (usage.timing.queue_seconds, usage.timing.preemptions) == (0.0, 1)
        assert usage.timing.prefill_seconds == pytest.approx(2 * LAUNCH_SECONDS + 3 * STEP_SECONDS)


@pytest.mark.parametrize("hook", ["before_launch", "before_step"])
async def test_a_poisonous_request_fails_alone(autojump_clock: MockClock, hook: str) -> None:
    hooks: dict[str, Any] = {hook: Poison()}
    async with open_device_engine(FakeDevice(NUM_BLOCKS, 4, **hooks)) as engine:
        good = [engine.submit(ask(f"question {i}", 30)) for i in range(5)]
        await trio.sleep(0.05)
        bad = engine.submit(ask("poison"))
        assert (await read(bad))[-1].finish_reason is FinishReason.ERROR
        for handle in good:
            await assert_right(handle)
        assert engine.snapshot()["requests"]["finished_by_reason"]["error"] == 1
        await assert_sound(engine)


async def test_poison_that_shows_only_while_answering_fails_alone(autojump_clock: MockClock) -> None:
    bad: set[int] = set()

    def hook(batch: ScheduledBatch) -> None:
        bad.update(s.sequence_id for s in batch.seated if bytes(s.token_ids).startswith(b"poison"))
        rows = zip(batch.sequence_ids, batch.starts, batch.counts, strict=True)
        if any(i in bad and count == 1 and start > 10 and start % 3 == 0 for i, start, count in rows):
            raise ArithmeticError("at every third place")

    async with open_device_engine(FakeDevice(NUM_BLOCKS, 4, before_step=hook)) as engine:
        poison, good = engine.submit(ask("poison", 200)), engine.submit(ask("good", 200))
        assert (await read(poison))[-1].finish_reason is FinishReason.ERROR
        await assert_right(good)
        await assert_sound(engine)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "schedule"),
        (Scheduler, "launched"),
        (Scheduler, "update"),
        (KVCache, "remember"),
        (BlockPool, "free"),
        (Stats, "record_step"),
    ],
)
@pytest.mark.parametrize("after", [0, 2, 5])
async def test_a_fault_in_planning_or_applying_costs_nobody_anything(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int
) -> None:
    original, hook = getattr(owner, name), once(KeyError("a slip"), after=after)

    def slips(*args: Any, **kwargs: Any) -> Any:
        hook()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slips)
    async with open_device_engine(FakeDevice(NUM_BLOCKS, 4), max_num_seqs=4) as engine:
        handles = [engine.submit(ask(f"question {i}", 5 + i)) for i in range(6)]
        for handle in handles:
            await assert_right(handle)
        await assert_sound(engine)
        assert engine.snapshot()["faults"]["failed_steps"] == 1


async def test_what_is_told_of_a_life_adds_up_where_rows_wait_or_lose_their_seats(autojump_clock: MockClock) -> None:
    device = FakeDevice(20, 4)
    async with open_device_engine(device, max_num_seqs=4) as engine:
        yielding = [engine.submit(replace(ask(f"background {i}", 20), background=True)) for i in range(4)]
        await trio.sleep(0.1)
        bound = ask("bound", None, constraint=OneOf((b"a longer one of all answers",), forces=False), **ENDS_ITSELF)
        requests = [*[ask(f"{i}", 30) for i in range(4)], bound]
        for handle in [*[engine.submit(request) for request in requests], *yielding]:
            await read(handle)
        await engine.wait_idle()
        await trio.sleep(1)
        assert engine.snapshot()["preemptions"] > 0
        for line in engine.requests.finished():
            life = engine.requests.life(line["number"])
            assert life is not None
            # The budget is enough to read a prompt, or what was lost, in one step, and that draws a token too.
            num_reads = sum(span["phase"] in ("prefill", "recompute") for span in life["spans"])
            decoded = sum(span["tokens"] for span in life["spans"] if span["phase"] == "decode")
            assert decoded + num_reads == life["output_tokens"]


async def test_a_real_model_answers_the_same(autojump_clock: MockClock) -> None:
    """With noise, penalties and grammars, and where some lose their seats with a step under way."""
    grammar = GrammarSpec("regex", "[a-z]{20,60}", "grammar", plain=True)
    requests = [
        GenerationRequest(
            f"r{seed}",
            TokensPrompt((5, 6, 7 + seed)),
            SamplingParams(
                seed=seed,
                max_tokens=40 + seed,
                num_logprobs=2 if seed % 2 else None,
                repetition_penalty=1.3 if seed % 4 == 1 else 1.0,
                stop_token_ids=frozenset({5 + seed, 30 + seed}),
            ),
            grammar=grammar if seed % 3 == 0 else None,
        )
        for seed in range(12)
    ]
    told = []
    for overlaps in (False, True):
        options: dict[str, Any] = {"num_blocks": 40, "num_speculative_tokens": 0}
        async with tiny_engine.open_tiny_engine(overlaps=overlaps, **options) as engine:
            told.append(await tiny_engine.answer_all(engine, requests))
            snapshot = engine.snapshot()
            assert snapshot["preemptions"] > 0
            assert snapshot["faults"] == {"failed_steps": 0, "integrity_violations": 0}
    assert told[0] == told[1]
    assert {answer.reason for answer in told[0]} == {FinishReason.STOP, FinishReason.LENGTH}


REQUEST = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 30),
        "min_tokens": st.sampled_from([0, 0, 5]),
        "stop": st.sampled_from([(), ("e",), ("a", "no more", "th")]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({EOS}), frozenset({EOS, 97, 110})]),
        "num_logprobs": st.sampled_from([None, None, 2]),
        "constraint": st.sampled_from([None, None, OneOf(OPTIONS), OneOf(OPTIONS, forces=False)]),
    }
).map(lambda request: request | ENDS_ITSELF if request["constraint"] else request)


@given(
    requests=st.lists(st.tuples(REQUEST, st.integers(0, 100)), min_size=1, max_size=8),
    aborts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 200)), max_size=2),
    changes=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from(
            [{"max_num_seqs": 2}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 5}, {"policy": "static"},
             {"policy": "continuous"}, {"enable_prefix_caching": False}, {"num_speculative_tokens": 2}]
        )), max_size=3,
    ),
    num_blocks=st.integers(20, 60),
    failing_step=st.one_of(st.none(), st.integers(0, 30)),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_everybody_is_told_the_same_as_without(
    requests: list[tuple[dict[str, Any], int]],
    aborts: list[tuple[int, int]],
    changes: list[tuple[int, dict[str, Any]]],
    num_blocks: int,
    failing_step: int | None,
) -> None:
    """Texts, tokens, log-probabilities and endings, whoever comes and leaves, whatever changes or fails meanwhile."""
    told: list[dict[int, Any]] = []

    async def main(*, at_once: bool) -> None:
        fault = None if failing_step is None or at_once else once(ArithmeticError("once"), after=failing_step)
        device = FakeDevice(
            num_blocks, 4, end_after=lambda prompt: 3 + sum(prompt) % 20, before_step=fault, at_once=at_once
        )
        answers: dict[int, Any] = {}
        told.append(answers)

        async def run(index: int, request: dict[str, Any], when: int) -> None:
            await trio.sleep(when / 1000)
            handles[index] = handle = engine.submit(ask(f"question {index}", **request))
            deltas = await read(handle)
            tokens = [token_id for delta in deltas for token_id in delta.token_ids]
            logprobs = [entry for delta in deltas for entry in delta.logprobs]
            usage = deltas[-1].usage
            assert usage is not None
            text = "".join(delta.text for delta in deltas)
            answers[index] = text, tokens, logprobs, deltas[-1].finish_reason, usage.completion_tokens

        async def at(when: int, do: Callable[[], Any]) -> None:
            await trio.sleep(when / 1000)
            await do()

        async def abort(index: int) -> None:
            if index in handles:
                handles[index].abort("client")

        handles: dict[int, Handle] = {}
        async with open_device_engine(device, max_num_seqs=4) as engine:
            async with trio.open_nursery() as nursery:
                for index, (request, when) in enumerate(requests):
                    nursery.start_soon(run, index, request, when)
                for index, when in aborts:
                    nursery.start_soon(at, when, lambda index=index: abort(index))
                for when, change in changes:
                    nursery.start_soon(at, when, lambda change=change: engine.set_limits(change))
            await engine.set_limits({"max_num_batched_tokens": 64, "policy": "continuous"})
            await assert_sound(engine)

    for at_once in (True, False):

        async def run_main(at_once: bool = at_once) -> None:
            await main(at_once=at_once)

        trio.run(run_main, clock=MockClock(autojump_threshold=0))
    simple, ahead = told
    for index, answer in simple.items():
        if FinishReason.ABORT in (answer[3], ahead[index][3]):
            shorter = min(len(answer[1]), len(ahead[index][1]))
            assert answer[1][:shorter] == ahead[index][1][:shorter]
        else:
            assert answer == ahead[index]
