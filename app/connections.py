"""Hypercorn's connections, mended."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import hypercorn.protocol
import hypercorn.trio.run
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.trio.tcp_server import TCPServer

from app.call_scope import WRITE_NOW

if TYPE_CHECKING:
    from hypercorn.events import Event

log = logging.getLogger("relevo.http")

# A piece of an answer; a reader shows that it is there by taking one.
MAX_PIECE_BYTES: Final = 1 << 16


class ConnectionConfig(Config):
    """Hypercorn's settings, and one of ours.

    Attributes:
        stall_seconds: a client that does not take one piece of an answer for so long has its connection closed.
    """

    stall_seconds: float = 60.0


class Connection(TCPServer):
    """A connection whose end is nobody else's.

    *It ends when its client has closed it.* Hypercorn's own would wait for its idle timeout first and hold socket and
    tasks for that long: a thousand clients that make one request each would use up the process's file descriptors.

    *It ends alone.* Closing and sending may meet on the socket, when a client hangs up in the middle of an upload that
    is being refused. Hypercorn lets that error out, and with it the whole server.

    *It ends when its client has stopped reading.* Hypercorn's own would wait for ever, and with it the call, whose API
    key would be short of a place.

    *It takes a piece of a streamed answer at once* (`write_now`), on HTTP/1.1. On the usual way such a piece, a token,
    passes nine functions, two cancel scopes and a lock between the answer and the socket.
    """

    config: ConnectionConfig

    _gone = False
    _unsent = b""

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(partial(self._call, app), *args)

    async def _call(self, app: Any, scope: Any, *args: Any) -> None:
        if scope["type"] == "http" and scope["http_version"] == "1.1":
            scope[WRITE_NOW] = self.write_now
        await app(scope, *args)

    def write_now(self, data: bytes) -> bool:
        """Send a chunk of the body of an answer that has begun, is chunked and has not ended. Never waits.

        Returns:
            Whether all was sent. What was not goes ahead of whatever is sent next; until then nothing more is sent.
        """
        data = b"%b%x\r\n%b\r\n" % (self._unsent, len(data), data)
        sent = 0
        if not self.send_lock.locked():
            with suppress(OSError):  # full, or closed: who sends the rest will find out
                sent = os.write(self.stream.socket.fileno(), data)
        self._unsent = data[sent:]
        return not self._unsent

    async def run(self) -> None:
        """Serve the connection; whatever goes wrong with it, the server goes on."""
        try:
            await super().run()
        except* Exception as errors:
            log.warning("a connection broke down", exc_info=errors)

    async def protocol_send(self, event: Event) -> None:
        """Send; a socket that another task is closing at this moment is as good as closed."""
        try:
            if isinstance(event, RawData):
                await self._send(event.data)
            else:
                await super().protocol_send(event)
        except trio.BusyResourceError:
            await self.protocol.handle(Closed())

    async def _send(self, data: bytes) -> None:
        """As hypercorn's own, but that it does not wait for ever."""
        async with self.send_lock:
            data, self._unsent = self._unsent + data, b""
            try:
                for start in range(0, len(data), MAX_PIECE_BYTES):
                    with trio.CancelScope(shield=True), trio.fail_after(self.config.stall_seconds):
                        await self.stream.send_all(data[start : start + MAX_PIECE_BYTES])
                return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except trio.TooSlowError:
                await trio.aclose_forcefully(self.stream)
        await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        await super()._read_data()
        self._gone = True
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        if not self._gone:  # the end of an answer may start it again
            await super()._idle_timeout()


class _NoStream:
    """Takes what is still sent to a stream that was answered."""

    async def handle(self, _event: object) -> None:
        """Throw it away."""


class _Streams(dict[int, Any]):
    def __missing__(self, _stream_id: int) -> _NoStream:
        return _NoStream()


class Http2(H2Protocol):
    """HTTP/2 that outlives a refusal.

    To hypercorn's own, the rest of an upload that was answered already is data of a stream that it does not know; at
    that, it ends the connection, and with it the other streams.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams = _Streams()


def use_connections() -> None:
    """Have hypercorn make these; it offers no other way to say so."""
    hypercorn.trio.run.TCPServer = Connection  # type: ignore[attr-defined, assignment]
    hypercorn.protocol.H2Protocol = Http2  # type: ignore[attr-defined]
