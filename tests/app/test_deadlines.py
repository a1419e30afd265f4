"""A deadline holds for who reads the answer and for who does not, to the moment and on every route."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from app.api.deadlines import Deadlines, DeadlineWatch
from app.api.many import MANY_URL
from engine.handle import GenerationRequest, Handle, TextPrompt
from engine.sequence import FinishReason, SamplingParams
from tests.app.serving import CHAT, COMPLETIONS, Driver, chat_body, open_app
from tests.fakes import fake_config, open_fake_engine

if TYPE_CHECKING:
    from engine.engine import Engine

FAR = 3600.0
LIMITS = {"slow_client_seconds": FAR}
ASKED = {
    "chat": (CHAT, chat_body(max_tokens=400, stream=True, timeout=20)),
    "choices": (CHAT, chat_body(max_tokens=400, stream=True, timeout=20, n=3)),
    "completion": (COMPLETIONS, {"prompt": "hello", "max_tokens": 400, "stream": True, "timeout": 20}),
    "many": (MANY_URL, {"requests": [chat_body(max_tokens=400, timeout=seconds) for seconds in (20, 300)]}),
}


def aborted(engine: Engine) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = engine.snapshot()["requests"]["aborted_by_cause_and_phase"]
    return found


@pytest.mark.parametrize("kind", ASKED)
async def test_who_does_not_read_has_no_seat_beyond_the_deadline(
    kind: str, autojump_clock: trio.testing.MockClock
) -> None:
    path, body = ASKED[kind]
    async with open_app(limits=LIMITS, step_seconds=1.0) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, path, body)
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        await trio.sleep(19.5)
        assert context.engine.num_open == {"choices": 3, "many": 2}.get(kind, 1)
        await trio.sleep(2)
        assert context.engine.num_open == (kind == "many")
        assert aborted(context.engine) == {"timeout": {"decode": 3 if kind == "choices" else 1}}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", [CHAT, MANY_URL])
async def test_who_does_not_read_waits_no_longer_for_a_seat(path: str, autojump_clock: trio.testing.MockClock) -> None:
    body = chat_body(max_tokens=400, stream=True, queue_timeout=5)
    limits = {**LIMITS, "max_num_seqs": 1}
    async with open_app(limits=limits, step_seconds=1.0) as (app, context), trio.open_nursery() as nursery:
        # The first has its seat in time: that deadline is not for it.
        for _ in range(2):
            driver = Driver(app, path, {"requests": [body]} if path == MANY_URL else body)
            nursery.start_soon(driver.run)
            assert await driver.status() == 200
            await trio.sleep(1)
        await trio.sleep(3)
        assert context.engine.num_open == 2
        await trio.sleep(4)  # a step, and who is taken in between two of them
        assert context.engine.num_open == 1
        assert aborted(context.engine) == {"queue_timeout": {"queued": 1}}
        nursery.cancel_scope.cancel()


def make_handle(number: int) -> Handle:
    return Handle(GenerationRequest(str(number), TextPrompt("")), number, trio.current_time())


async def test_the_sooner_deadline_comes_first_whoever_came_first(autojump_clock: trio.testing.MockClock) -> None:
    watch, began, ended = DeadlineWatch(), trio.current_time(), []

    def note(number: int) -> None:
        ended.append((number, trio.current_time() - began))

    handles = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        for number, seconds in enumerate([30.0, 10.0, 20.0, -1.0, 10.0]):
            handle = make_handle(number)
            handles.append(handle)
            handle.watch(partial(note, number))
            watch.add(Deadlines(began + seconds, began + FAR), [handle])
        assert ended == [(3, 0.0)], "whose time was over before"
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert ended[1:] == [(1, 10.0), (4, 10.0), (2, 20.0), (0, 30.0)]


async def test_what_nobody_else_keeps_is_not_kept_here() -> None:
    watch, known = DeadlineWatch(), list[weakref.ref[Any]]()
    for number in range(100):
        handle = make_handle(number)
        known.append(weakref.ref(handle))
        watch.add(Deadlines(trio.current_time() + FAR, trio.current_time() + FAR), [handle])
    del handle
    gc.collect()
    assert [look for look in known if look() is not None] == []


async def test_a_choice_that_waits_may_go_on_waiting_where_another_of_its_answer_has_sat_and_ended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    watch, began = DeadlineWatch(), trio.current_time()
    config = fake_config(max_num_seqs=1)
    async with open_fake_engine(config, step_seconds=1.0) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        first, _, second = (
            engine.submit(GenerationRequest(name, TextPrompt("a"), SamplingParams(max_tokens=length)))
            for name, length in [("first", 2), ("other", 15), ("second", 2)]
        )
        watch.add(Deadlines(began + 60.0, began + 5.0), [first, second])
        while (delta := await second.take()).finish_reason is None:
            pass
        assert first.outbox.last is not None
        assert delta.finish_reason is FinishReason.LENGTH
        nursery.cancel_scope.cancel()
