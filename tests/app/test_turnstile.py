"""Newcomers come in one by one, however many there are."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import h2.connection
import h2.events
import pytest
import trio

from app import http1, http2
from app import server as app_server
from app.http import create_app
from app.turnstile import CROWD, TOKEN_ROUNDS, Turnstile
from tests.app.serving import chat_body, open_server
from tests.app.wire import Http1Client, connect, open_http2, wait_for
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.http import Context


class Rounds(trio.abc.Instrument):
    """Counts the rounds of the event loop."""

    number = 0

    def before_io_wait(self, timeout: float) -> None:
        self.number += 1


@pytest.fixture
async def rounds() -> AsyncIterator[Rounds]:
    counter = Rounds()
    trio.lowlevel.add_instrument(counter)
    yield counter
    trio.lowlevel.remove_instrument(counter)


@pytest.mark.parametrize("is_busy", [False, True])
async def test_one_passes_in_a_round_and_in_order(is_busy: bool, rounds: Rounds) -> None:
    """While there are requests a token of theirs goes all its way between two of them."""
    turnstile = Turnstile(lambda: is_busy)
    passed: list[tuple[int, int]] = []

    async def pass_through(number: int) -> None:
        await turnstile.turn()
        passed.append((rounds.number, number))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(pass_through, number)
            await trio.lowlevel.checkpoint()  # trio begins the tasks of one round in any order
    assert [number for _, number in passed] == [*range(20)]
    apart = TOKEN_ROUNDS if is_busy else 1
    assert all(later - earlier >= apart for (earlier, _), (later, _) in pairwise(passed))
    assert passed[-1][0] - passed[0][0] <= 19 * apart + 1, "and no longer than that"


CRUMBS = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + 30 * b"1\r\na\r\n"


@pytest.mark.parametrize("protocol", ["http1", "http2"])
async def test_of_many_that_flood_one_has_a_piece_looked_at_in_a_round(
    protocol: str, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one of each: whatever else there is to be done in a round waits for one of them, and not for all."""
    looked_at: list[int] = []

    class Body(http1.Body):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            looked_at.append(rounds.number)
            super().__init__(*args, **kwargs)

    take = h2.connection.H2Connection.receive_data

    def receive_data(connection: h2.connection.H2Connection, data: bytes) -> list[h2.events.Event]:
        looked_at.append(rounds.number)
        events = take(connection, data)
        assert len(events) <= http2.MAX_TURN_FRAMES
        return events

    flood, num_looks = CRUMBS, 30
    if protocol == "http2":
        talk, num_looks = open_http2(0), 60
        for _ in range(num_looks * http2.MAX_TURN_FRAMES - 1):  # and the settings
            talk.ping(b"12345678")
        flood = talk.data_to_send()
    async with open_server() as server:
        streams = [await trio.open_tcp_stream("127.0.0.1", server.port) for _ in range(10)]
        await trio.sleep(0.05)  # all of them are waited for
        monkeypatch.setattr(http1, "Body", Body)
        monkeypatch.setattr(h2.connection.H2Connection, "receive_data", receive_data)
        for stream in streams:
            os.write(stream.socket.fileno(), flood)
        await wait_for(lambda: len(looked_at) == 10 * num_looks)
        for stream in streams:
            await stream.aclose()
    # The first piece of each is a round or two farther behind its turn than the others are.
    assert max(Counter(looked_at).values()) <= 2


async def test_of_a_crowd_one_passes_in_each_round_even_then(rounds: Rounds) -> None:
    turnstile = Turnstile(lambda: True)
    passed: list[int] = []

    async def pass_through() -> None:
        await turnstile.turn()
        passed.append(rounds.number)

    async with trio.open_nursery() as nursery:
        for _ in range(10 * CROWD):
            nursery.start_soon(pass_through)
    assert len(passed) == len(set(passed)) == 10 * CROWD
    assert passed[-1] - passed[0] <= (10 + TOKEN_ROUNDS) * CROWD


@pytest.mark.parametrize("is_busy", [False, True])
async def test_who_gives_up_lets_the_next_pass(is_busy: bool) -> None:
    """In line, or at its turn while that lasts."""
    turnstile = Turnstile(lambda: is_busy)
    scopes = [trio.CancelScope() for _ in range(10)]
    passed: list[int] = []

    async def pass_through(number: int) -> None:
        with scopes[number]:
            await turnstile.turn()
            passed.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pass_through, 0)
        await trio.lowlevel.checkpoint()
        for number in range(1, 10):
            nursery.start_soon(pass_through, number)
            if number % 2:
                scopes[number].cancel()
        await trio.lowlevel.checkpoint()
        scopes[0].cancel()
    assert sorted(passed) == ([2, 4, 6, 8] if is_busy else [0, 2, 4, 6, 8])


# While there is an answer, fewer than are a crowd.
@pytest.mark.parametrize(("num_answers", "num_at_once"), [(0, 40), (1, CROWD - 2)])
async def test_of_many_requests_that_come_at_once_one_begins_in_a_round(
    num_answers: int, num_at_once: int, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def create(context: Context) -> Any:
        app = create_app(context)

        async def note(scope: Any, *args: Any) -> None:
            if scope["type"] == "http":
                begun.append(rounds.number)
            await app(scope, *args)

        return note

    monkeypatch.setattr(app_server, "create_app", create)
    async with open_server(step_seconds=0.05) as server, AsyncExitStack() as stack:
        for _ in range(num_answers):
            client = Http1Client(await stack.enter_async_context(await connect(server.port)))
            await client.ask(chat_body(max_tokens=400, stream=True), {})
            await client.read_until(rb"data: ")
        begun.clear()
        streams = [await trio.open_tcp_stream("127.0.0.1", server.port) for _ in range(num_at_once)]
        await trio.sleep(0.1)  # all of them are waited for
        for stream in streams:
            os.write(stream.socket.fileno(), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with trio.fail_after(PATIENCE_SECONDS):
            for stream in streams:
                assert b" 200 " in await stream.receive_some(65536)
                await stream.aclose()
    assert len(begun) == len(set(begun)) == num_at_once
    apart = TOKEN_ROUNDS if num_answers else 1
    assert all(later - earlier >= apart for earlier, later in pairwise(begun))
