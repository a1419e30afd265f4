"""What does not come to its end is seen, and what only takes long is not taken for it. In virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import FinishReason, SamplingParams
from engine.streaming import Streaming
from tests.fakes import open_fake_engine, read_deltas

if TYPE_CHECKING:
    import pytest
    from trio.testing import MockClock

    from engine.engine import Engine
    from engine.handle import Handle


def ask(engine: Engine, text: str, max_tokens: int) -> Handle:
    return engine.submit(GenerationRequest(text, TextPrompt(text), SamplingParams(max_tokens=max_tokens)))


async def assert_served(handle: Handle) -> None:
    assert [delta async for delta in read_deltas(handle)][-1].finish_reason is FinishReason.LENGTH


async def test_a_hung_step_is_seen_within_seconds(autojump_clock: MockClock) -> None:
    seconds = [0.05]
    async with open_fake_engine(step_seconds=lambda: seconds[0]) as engine:
        await assert_served(ask(engine, "so that it is known how long steps take", 40))
        seconds[0] = 100.0
        handle = ask(engine, "hangs", 1)
        await trio.sleep(2.9)
        assert engine.health().ready
        await trio.sleep(0.2)
        assert engine.health().reason == "stalled: a step has been running for 3 s"
        seconds[0] = 0.05
        await assert_served(handle)
        assert engine.health().ready


async def test_a_step_of_many_tokens_may_take_as_long_as_so_many_usual_ones(autojump_clock: MockClock) -> None:
    seconds = [0.1]
    async with open_fake_engine(step_seconds=lambda: seconds[0]) as engine:
        await assert_served(ask(engine, "x", 100))
        seconds[0] = 10.0
        handle = ask(engine, "y" * 60, 1)
        await trio.sleep(9.9)
        assert engine.health().ready
        await assert_served(handle)


async def test_the_first_steps_have_nothing_to_be_compared_with(autojump_clock: MockClock) -> None:
    async with open_fake_engine(step_seconds=18.0) as engine:
        handle = ask(engine, "y" * 60, 1)
        for _ in range(17):
            await trio.sleep(1)
            assert engine.health().ready
        await assert_served(handle)


async def test_work_that_waits_while_no_step_begins_is_seen(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def takes_nothing(_: Streaming) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Streaming, "run", takes_nothing)
    async with open_fake_engine() as engine:
        ask(engine, "question", 100)
        await trio.sleep(2)
        assert engine.health().ready
        await trio.sleep(5)
        assert (engine.health().reason or "").startswith("stalled: no step has begun for ")
