"""Connections whose client has stopped reading: they hold what they have for a while, and not for ever."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import h2.errors
import h2.events
import pytest
import trio
import trio.testing
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from app.connections import (
    MAX_PIECE_BYTES,
    Connection,
    ConnectionConfig,
    use_connections,
)
from app.room import CROWDED_SECONDS, Room
from app.server import IDLE_SECONDS
from tests.app.wire import open_http2

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
STALL_SECONDS = 5.0


class _Socket:
    """What a connection asks its socket for."""

    family = trio.socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    getsockname = getpeername


def open_connection(app: Any) -> tuple[Connection, trio.StapledStream[Any, Any]]:
    """A connection to `app`, and its client's end; what one sends waits until the other takes it."""
    client, server = trio.testing.lockstep_stream_pair()
    server.socket = _Socket()  # type: ignore[attr-defined]
    use_connections()
    config = ConnectionConfig()
    config.stall_seconds = STALL_SECONDS
    config.keep_alive_timeout = IDLE_SECONDS
    state: Any = ConnectionState({})
    wrapped: Any = ASGIWrapper(app)
    stream: Any = server
    return Connection(wrapped, config, WorkerContext(None), state, stream), client


class App:
    """Answers with a megabyte or so many bytes, in one piece or in many."""

    def __init__(self, num_pieces: int, num_bytes: int = 1 << 20) -> None:
        self._num_pieces = num_pieces
        self._num_bytes = num_bytes
        self.ended_at: float | None = None

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self._num_pieces):
                piece = bytes(self._num_bytes // self._num_pieces)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.ended_at = trio.current_time()


@pytest.mark.parametrize("num_pieces", [1, 64])
@pytest.mark.parametrize("reads", [0, 100_000])
async def test_who_stops_reading_loses_the_connection(
    num_pieces: int, reads: int, autojump_clock: trio.testing.MockClock
) -> None:
    app = App(num_pieces)
    connection, client = open_connection(app)
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            await client.send_all(REQUEST)
            num_read = 0
            while num_read < reads:
                num_read += len(await client.receive_some(1000))
            stopped = trio.current_time()
    assert app.ended_at == pytest.approx(stopped + STALL_SECONDS)


async def test_who_reads_slowly_gets_everything(autojump_clock: trio.testing.MockClock) -> None:
    app = App(1)
    connection, client = open_connection(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        await client.send_all(REQUEST)
        num_read = 0
        while data := await client.receive_some(MAX_PIECE_BYTES // 2):
            num_read += len(data)
            await trio.sleep(STALL_SECONDS / 3)
    assert num_read > 1 << 20
    assert app.ended_at is not None
    assert app.ended_at > 2 * STALL_SECONDS


class Http2Client:
    """The client's end of a connection over HTTP/2.

    Args:
        window: bytes that may come before any was read.
    """

    def __init__(self, pipe: trio.StapledStream[Any, Any], window: int) -> None:
        self.connection = open_http2(window)
        self._pipe = pipe

    def ask(self, stream_id: int) -> None:
        names = (":method", ":path", ":scheme", ":authority")
        self.connection.send_headers(
            stream_id, list(zip(names, ("GET", "/", "http", "localhost"), strict=True)), end_stream=True
        )

    async def flush(self) -> None:
        await self._pipe.send_all(self.connection.data_to_send())

    async def receive(self) -> list[h2.events.Event]:
        """What comes next; nothing when the connection has ended."""
        data = await self._pipe.receive_some(65536)
        return self.connection.receive_data(data) if data else []

    async def until_closed(self) -> None:
        with trio.fail_after(2 * IDLE_SECONDS):
            while await self.receive():
                pass


@pytest.mark.parametrize("num_pieces", [1, 64])
@pytest.mark.parametrize("window", [0, 65535])
async def test_on_http2_who_stops_reading_loses_the_stream_alone(
    num_pieces: int, window: int, autojump_clock: trio.testing.MockClock
) -> None:
    app = App(num_pieces)
    connection, pipe = open_connection(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        client = Http2Client(pipe, window)
        client.ask(1)
        await client.flush()
        reset = None
        with trio.fail_after(100):
            while reset is None:
                events = await client.receive()
                reset = next((event for event in events if isinstance(event, h2.events.StreamReset)), None)
        assert (reset.stream_id, reset.error_code) == (1, h2.errors.ErrorCodes.CANCEL)
        assert trio.current_time() == pytest.approx(STALL_SECONDS)
        # The connection stays, until it has been idle for long.
        await client.until_closed()
        assert trio.current_time() == pytest.approx(STALL_SECONDS + IDLE_SECONDS)
    assert app.ended_at == pytest.approx(STALL_SECONDS)


async def test_who_has_one_of_the_last_places_is_waited_for_less_long(autojump_clock: trio.testing.MockClock) -> None:
    app = App(1)
    connection, pipe = open_connection(app)
    connection.config.room = Room(0, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        client = Http2Client(pipe, 0)
        client.ask(1)
        await client.flush()
        while not any(isinstance(event, h2.events.StreamReset) for event in await client.receive()):
            pass
        assert trio.current_time() == pytest.approx(CROWDED_SECONDS)
        await pipe.aclose()
    assert app.ended_at == pytest.approx(CROWDED_SECONDS)


async def test_on_http2_who_reads_slowly_gets_everything(autojump_clock: trio.testing.MockClock) -> None:
    app = App(1)
    connection, pipe = open_connection(app)
    num_read = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        client = Http2Client(pipe, MAX_PIECE_BYTES - 1)
        client.ask(1)
        await client.flush()
        ended = False
        while not ended:
            for event in await client.receive():
                ended = ended or isinstance(event, h2.events.StreamEnded)
                if isinstance(event, h2.events.DataReceived):
                    num_read += len(event.data or b"")
                    await trio.sleep(STALL_SECONDS / 10)
                    client.connection.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                    await client.flush()
        await pipe.aclose()
    assert num_read == 1 << 20
    assert app.ended_at is not None
    assert app.ended_at > 4 * STALL_SECONDS


@pytest.mark.parametrize("how", ["preface", "reset", "head"])
async def test_who_says_nothing_for_long_loses_the_connection(how: str, autojump_clock: trio.testing.MockClock) -> None:
    """However slowly the head of a request comes, and however the last stream has ended."""
    app = App(1)
    connection, pipe = open_connection(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        if how == "head":
            await pipe.send_all(b"GET / HTTP/1.1\r\n")
            with suppress(trio.BrokenResourceError):
                while trio.current_time() < 2 * IDLE_SECONDS:
                    await pipe.send_all(b"a: b\r\n")
                    await trio.sleep(1)
        else:
            client = Http2Client(pipe, 0)
            if how == "reset":
                client.ask(1)
                client.connection.reset_stream(1)
            await client.flush()
            await client.until_closed()
    assert trio.current_time() == pytest.approx(IDLE_SECONDS, abs=1)
