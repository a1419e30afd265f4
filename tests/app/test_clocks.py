"""The clock on the wall is set ahead and back, by hours and by years: nothing that is served, counted or kept minds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.journal.journal import Journal
from tests.app.keyed import asks, id_of, make, serve
from tests.app.serving import CHAT, COMPLETIONS, chat_body, events, make_settings, open_app, open_server
from tests.fakes import expected_output

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

YEAR = 365 * 86_400.0
JUMPS = (3600.0, -7200.0, 10 * YEAR, -20 * YEAR)


class Wall:
    """What `time.time` says: the truth and `offset` seconds."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._truth = time.time

    def __call__(self) -> float:
        return self._truth() + self.offset


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    monkeypatch.setattr(time, "time", wall)
    return wall


async def test_streams_queue_and_deadlines_do_not_look_at_it(wall: Wall) -> None:
    """One stream runs and one waits, each with a deadline, while the clock is set again and again."""
    async with open_server(limits={"max_num_seqs": 1}) as server, trio.open_nursery() as nursery:
        found: dict[str, list[Any]] = {}

        async def ask(prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 200, "stream": True, "timeout": 9}
            found[prompt] = events((await server.client.post(COMPLETIONS, json=body)).text)

        for prompt in ("runs", "waits"):
            nursery.start_soon(ask, prompt)
        number = 0
        while len(found) < 2:
            wall.offset = JUMPS[number % len(JUMPS)]
            number += 1
            await trio.sleep(0.01)
        for prompt, (*chunks, done) in found.items():
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert (text, done) == (bytes(expected_output(prompt.encode(), 200)).decode(), "[DONE]")
        assert number > len(JUMPS)
        latency = (await server.stats())["latency"]
        assert 0 <= latency["queue"]["p99"] <= latency["e2e"]["p99"] < 9


@pytest.mark.parametrize("jump", JUMPS)
async def test_a_rate_is_no_larger_for_it(wall: Wall, jump: float) -> None:
    limits = {"security": {"api_keys": ["me=mine"]}, "security_limits": {"me": {"requests_per_minute": 2}}}
    async with open_server(make_settings(**limits)) as server:
        statuses = []
        for _ in range(4):
            answer = await server.client.post(CHAT, json=chat_body(max_tokens=1), headers={"X-Api-Key": "mine"})
            statuses.append(answer.status_code)
            wall.offset += jump
        assert statuses == [200, 200, 429, 429]
        assert 1 <= int(answer.headers["Retry-After"]) <= 30


@pytest.mark.parametrize("jump", JUMPS)
async def test_keys_hold_and_revoked_ones_do_not(wall: Wall, jump: float, tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        kept, gone = [await make(server, name) for name in ("kept", "gone")]
        wall.offset = jump
        await server.context.keys.revoke(await id_of(server, "gone"))
        for offset in (jump, 0.0, -jump):
            wall.offset = offset
            for key, status in ((kept, 200), (gone, 401)):
                assert await asks(server, key) == status
    async with serve(tmp_path) as server:
        assert (await asks(server, kept), await asks(server, gone)) == (200, 401)


@pytest.mark.parametrize("jump", JUMPS)
async def test_a_temporary_change_ends_in_its_time(wall: Wall, jump: float, autojump_clock: MockClock) -> None:
    async with open_app() as (_, context):
        await context.live.apply({"max_num_seqs": 2, "ttl_seconds": 60}, who="me")
        wall.offset = jump
        await trio.sleep(59)
        assert context.engine.limits.max_num_seqs == 2
        await trio.sleep(2)
        assert context.engine.limits.max_num_seqs == 4
        assert [entry.who for entry in context.journal.audit.entries] == ["me", "ttl"]


@pytest.mark.parametrize("jump", JUMPS)
async def test_the_history_loses_no_second(wall: Wall, jump: float, autojump_clock: MockClock) -> None:
    """Every second is a row of its own; where two would have the same name, they are told apart or lie apart."""
    journal = Journal(wall=lambda: wall.offset + trio.current_time() + 2e9)
    async with open_app(journal=journal) as (_, context), trio.open_nursery() as nursery:
        nursery.start_soon(context.telemetry.run)
        for _ in range(4):
            await trio.sleep(10)
            wall.offset += jump
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
        rows = context.journal.recent(600)
        seconds = [row[0] for row in rows]
        assert 49 <= len(rows) <= 51
        assert len(set(seconds)) == len(seconds)
        assert sum(float(row[1] or 0) for row in rows) == pytest.approx(50, abs=1)
