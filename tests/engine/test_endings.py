"""Ends of requests, and beginnings, with faults in what is counted and written down of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio

from engine.ingress import Ingress
from engine.request_log import RequestLog
from engine.sequence import FinishReason, Sequence
from engine.stats import Stats
from engine.waiting import WaitingQueue
from tests.engine.test_faults import ask, assert_right, assert_sound, assert_wrong, faults_of, once
from tests.engine.test_followers import PROMPT, expected, read, submit_choices
from tests.fakes import open_fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trio.testing import MockClock

    from engine.handle import Handle
    from engine.request_log import RequestRecord


@pytest.mark.parametrize(
    ("owner", "name"), [(Stats, "record_finish"), (RequestLog, "close")], ids=["not counted", "not written down"]
)
async def test_an_end_that_cannot_be_told_frees_the_place_all_the_same(
    owner: type, name: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[tuple[str, str | None]] = []

    def note(handle: Handle, record: RequestRecord | None) -> None:
        closed.append((handle.request_id, None if record is None else record.reason))

    async with open_fake_engine() as engine:
        engine.on_closed = note
        break_once(monkeypatch, owner, name)
        first, second = engine.submit(ask("first", 5)), engine.submit(ask("second"))
        await assert_right(first)
        await assert_right(second)
        with trio.fail_after(10):
            await engine.wait_idle()
        assert closed == [("first", "length" if owner is Stats else None), ("second", "length")]
        await assert_sound(engine)


async def test_a_leader_that_cannot_be_written_down_lets_the_others_go_on(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake_engine() as engine:
        break_once(monkeypatch, RequestLog, "open")
        leader, *followers = submit_choices(engine, 3)
        await assert_wrong(leader, "could not be scheduled")
        with trio.fail_after(10):
            for handle in followers:
                assert await read(handle) == (expected(PROMPT, 6), FinishReason.LENGTH)
        await assert_sound(engine)
        assert faults_of(engine)["failed_steps"] == 0


async def test_one_that_waits_for_nobody_there_is_fails_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Ingress._leader

    def stray(self: Ingress, handle: Handle) -> Sequence | None:
        """The leader of one of them is in no queue, and has not ended."""
        if handle.request_id == "lost":
            return Sequence(10_000, "nobody", (1,), handle.request.params, 0.0)
        return leader(self, handle)

    monkeypatch.setattr(Ingress, "_leader", stray)
    async with open_fake_engine() as engine:
        lost = engine.submit(ask("lost"))
        with trio.fail_after(10):
            await assert_wrong(lost, "could not be scheduled")
        await assert_sound(engine)
        assert faults_of(engine)["failed_steps"] == 0


async def test_where_those_who_wait_are_in_no_queue_the_state_is_made_anew(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates, blind = WaitingQueue.candidates, [True]

    def blinded(self: WaitingQueue, *args: Any, **options: Any) -> Iterator[Sequence]:
        return iter(()) if blind else candidates(self, *args, **options)

    def mend(self: WaitingQueue, *args: Any) -> None:
        blind.clear()
        begin(self, *args)

    begin = WaitingQueue.__init__
    async with open_fake_engine() as engine:
        monkeypatch.setattr(WaitingQueue, "candidates", blinded)
        monkeypatch.setattr(WaitingQueue, "__init__", mend)
        with trio.fail_after(10):
            await assert_right(engine.submit(ask("seen by nobody")))
        assert faults_of(engine)["integrity_violations"] == 1
        await assert_sound(engine)


def break_once(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Let one call of a method fail."""
    method: Callable[..., Any] = getattr(owner, name)
    hook = once(ArithmeticError("out of numbers"))

    def broken(*args: Any, **options: Any) -> Any:
        hook()
        return method(*args, **options)

    monkeypatch.setattr(owner, name, broken)
