"""Connections whose client has stopped reading: they hold what they have for a while, and not for ever."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from app.connections import MAX_PIECE_BYTES, Connection, ConnectionConfig

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
    config = ConnectionConfig()
    config.stall_seconds = STALL_SECONDS
    state: Any = ConnectionState({})
    wrapped: Any = ASGIWrapper(app)
    stream: Any = server
    return Connection(wrapped, config, WorkerContext(None), state, stream), client


class App:
    """Answers with a megabyte, in one piece or in many."""

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self.ended_at: float | None = None

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self._num_pieces):
                piece = bytes((1 << 20) // self._num_pieces)
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
