"""What is not read is bounded for all together: who has taken nothing for longest goes first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import h2.errors
import h2.events
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from app.http2 import CALL_BYTES, SLOW_SECONDS, Unsent
from app.unread import SPARE_PARTS, Unread
from tests.app.serving import open_server
from tests.app.test_metrics import scrape
from tests.app.test_protocols import request
from tests.app.test_stalled_readers import REQUEST, App, Http2Client, open_connection
from tests.app.wire import connect, wait_for
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from trio.testing import MockClock


@given(
    most=st.integers(0, 500),
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 200), st.booleans()), max_size=60),
)
def test_there_is_never_more_and_who_waits_longest_goes(most: int, moves: list[tuple[int, int, bool]]) -> None:
    unread = Unread(most)
    waiting: dict[int, int] = {}  # who, and with how much; the longest first
    given_up: Counter[int] = Counter()
    functions = [lambda number=number: given_up.update([number]) for number in range(7)]
    for who, num_bytes, has_taken in moves:
        before = waiting.get(who, 0)
        if has_taken or not num_bytes:
            waiting.pop(who, None)
        if num_bytes:
            waiting[who] = num_bytes
        expected: Counter[int] = Counter()
        if num_bytes > before and sum(waiting.values()) > most:
            for other in [other for other in waiting if other != who]:
                if sum(waiting.values()) > most - most // SPARE_PARTS:
                    del waiting[other]
                    expected[other] += 1
        given_up.clear()
        before = unread.num_given_up
        unread.note(functions[who], num_bytes, has_taken=has_taken)
        assert given_up == expected
        assert unread.num_given_up - before == given_up.total()
        assert unread.num_bytes == sum(waiting.values())
        assert unread.num_bytes <= most or len(waiting) == 1, "who came last keeps it"


async def test_however_many_are_given_up_at_once_they_make_no_room_for_each_other() -> None:
    unread = Unread(1 << 20)
    small = [Unsent(unread) for _ in range(5000)]
    for unsent in small:
        unsent.put(b"x" * 100)
    large = Unsent(unread)
    large.put(b"x", 2 << 20)
    assert unread.num_bytes == (2 << 20) + 1
    with pytest.raises(trio.TooSlowError):
        small[-1].put(b"x")
    large.put(b"x", 0)
    assert unread.num_bytes == 2


async def test_a_burst_of_short_answers_is_no_crowd_of_slow_readers(autojump_clock: MockClock) -> None:
    unread = Unread(10 * CALL_BYTES)
    answers = [Unsent(unread) for _ in range(20)]
    for unsent in answers:
        unsent.put(b"x" * 100)
        unsent.complete()
    for unsent in answers:
        assert unsent.take(1000) == b"x" * 100
    assert unread.num_bytes == 0


def resets(events: list[h2.events.Event]) -> list[tuple[int, int]]:
    return [(e.stream_id, e.error_code) for e in events if isinstance(e, h2.events.StreamReset)]


async def test_on_http2_the_stream_that_waits_longest_is_reset(autojump_clock: MockClock) -> None:
    """Also where nothing more would have been added to what it has to send, which is no end of an answer."""
    for num_bytes in (100, 1 << 20):
        app = App(1, num_bytes)
        connection, pipe = open_connection(app)
        # For two of them, and to tell the third that it goes.
        held = num_bytes if num_bytes > CALL_BYTES else num_bytes + CALL_BYTES
        unread = connection.config.unread = Unread(3 * held - 50)
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            client, events = Http2Client(pipe, 0), []
            for stream_id in (1, 3, 5):
                await trio.sleep(0.1)
                client.ask(stream_id)
                await client.flush()
                while not any(isinstance(e, h2.events.ResponseReceived) and e.stream_id == stream_id for e in events):
                    events += await client.receive()
            while not resets(events):
                events += await client.receive()
            assert resets(events) == [(1, h2.errors.ErrorCodes.CANCEL)]
            # Long answers are too much by themselves, with short ones it is what their calls hold.
            waited = 0.3 + (SLOW_SECONDS if num_bytes < CALL_BYTES else 0)
            assert trio.current_time() == pytest.approx(begin + waited)
            assert unread.num_bytes > 0
            assert not any(isinstance(e, h2.events.StreamEnded) for e in events)
            await pipe.aclose()
        assert unread.num_bytes == 0


async def test_on_http1_the_connection_that_waits_longest_is_closed(autojump_clock: MockClock) -> None:
    pairs = [open_connection(App(1)) for _ in range(3)]
    unread = Unread(2 * (1 << 20) + (1 << 16))  # for two of them, and some pieces of a few bytes
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


async def test_operators_see_what_waits_and_what_was_given_up() -> None:
    async with open_server() as server, await connect(server.port, buffer_bytes=4096) as stream:
        unread = server.context.unread
        _, samples = await scrape(server)
        assert samples["relevo:unread_answers_given_up_total", frozenset()] == 0
        await stream.send_all(200 * request("/openapi.json"))
        await wait_for(lambda: unread.num_bytes > 0)
        unread.max_bytes = 1
        with trio.fail_after(PATIENCE_SECONDS):
            while unread.num_given_up == 0:  # by what the next answer has to send, or the one after
                _, samples = await scrape(server)
                assert samples["relevo:unread_answers_given_up_total", frozenset()] == 0
        unread.max_bytes = 1 << 20
        _, samples = await scrape(server)
        assert samples["relevo:unread_answers_given_up_total", frozenset()] == 1
        assert samples["relevo:unread_bytes", frozenset()] == 0
