"""What is not read is bounded for all together: who has taken nothing for longest goes first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import h2.errors
import h2.events
import trio
from hypothesis import given
from hypothesis import strategies as st

from app.unread import CALL_BYTES, SPARE_PARTS, Unread
from tests.app.test_stalled_readers import REQUEST, App, Http2Client, open_connection

if TYPE_CHECKING:
    from trio.testing import MockClock


@given(
    most=st.integers(0, 5 * CALL_BYTES),
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2 * CALL_BYTES), st.booleans()), max_size=60),
)
def test_there_is_never_more_and_who_waits_longest_goes(most: int, moves: list[tuple[int, int, bool]]) -> None:
    unread = Unread(most)
    waiting: list[tuple[int, int]] = []  # who, and with how much; the longest first
    given_up: Counter[int] = Counter()
    functions = [lambda number=number: given_up.update([number]) for number in range(7)]
    for who, num_bytes, has_taken in moves:
        place = next((place for place, (other, _) in enumerate(waiting) if other == who), len(waiting))
        waiting[place : place + 1] = []
        if num_bytes:
            waiting.insert(len(waiting) if has_taken else place, (who, num_bytes + CALL_BYTES))
        expected: Counter[int] = Counter()
        room = most if sum([held for _, held in waiting]) <= most else most - most // SPARE_PARTS
        while sum([held for _, held in waiting]) > room:
            expected[waiting.pop(0)[0]] += 1
        given_up.clear()
        unread.note(functions[who], num_bytes, has_taken=has_taken)
        assert given_up == expected
        assert unread.num_bytes == sum([held for _, held in waiting]) <= most


def resets(events: list[h2.events.Event]) -> list[tuple[int, int]]:
    return [(e.stream_id, e.error_code) for e in events if isinstance(e, h2.events.StreamReset)]


async def test_on_http2_the_stream_that_waits_longest_is_reset(autojump_clock: MockClock) -> None:
    """Also where nothing more would have been added to what it has to send, which is no end of an answer."""
    for num_bytes in (100, 1 << 20):
        app = App(1, num_bytes)
        connection, pipe = open_connection(app)
        # For two of them, and to tell the third that it goes.
        unread = connection.config.unread = Unread(3 * (num_bytes + CALL_BYTES) - 50)
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            client, events = Http2Client(pipe, 0), []
            for stream_id in (1, 3, 5):
                client.ask(stream_id)
                await client.flush()
                while not any(isinstance(e, h2.events.ResponseReceived) and e.stream_id == stream_id for e in events):
                    events += await client.receive()
            while not resets(events):
                events += await client.receive()
            assert resets(events) == [(1, h2.errors.ErrorCodes.CANCEL)]
            assert trio.current_time() == begin  # nobody has waited for anything
            assert unread.num_bytes > 0
            assert not any(isinstance(e, h2.events.StreamEnded) for e in events)
            await pipe.aclose()
        assert unread.num_bytes == 0


async def test_on_http1_the_connection_that_waits_longest_is_closed(autojump_clock: MockClock) -> None:
    pairs = [open_connection(App(1)) for _ in range(3)]
    unread = Unread(2 * ((1 << 20) + 2 * CALL_BYTES))  # for two of them, and some pieces of a few bytes
    ended: list[int] = []

    async def run(number: int) -> None:
        await pairs[number][0].run()
        ended.append(number)

    async with trio.open_nursery() as nursery:
        for number, (connection, client) in enumerate(pairs):
            connection.config.unread = unread
            nursery.start_soon(run, number)
            await client.send_all(REQUEST)
            received = b""
            while b"\r\n\r\n" not in received:
                received += await client.receive_some(1000)
            await client.receive_some(1)
        begin = trio.current_time()
        while not ended:
            await trio.lowlevel.checkpoint()
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        assert ended == [0]
        assert trio.current_time() == begin
        for _, client in pairs:
            await client.aclose()
    assert unread.num_bytes == 0
