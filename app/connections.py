"""Hypercorn's connections, mended."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import hypercorn.protocol
import hypercorn.trio.run
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer

from app.api.errors import describe
from app.call_scope import CROWDED, UPLOAD, WRITE_NOW
from app.http1 import Http1, Over
from app.http2 import Http2
from app.room import CROWDED_SECONDS, Room, no_room
from app.turnstile import Turnstile
from app.unread import Unread

if TYPE_CHECKING:
    from hypercorn.events import Event

log = logging.getLogger("relevo.http")

# A piece of an answer; a reader shows that it is there by taking one.
MAX_PIECE_BYTES: Final = 1 << 16
# For a client that is still sending when the last answer was sent, to read it.
FAREWELL_SECONDS: Final = 3.0


class ConnectionConfig(Config):
    """Hypercorn's settings, and what is ours.

    Attributes:
        stall_seconds: a client that does not take one piece of an answer for so long has its connection closed, or on
            HTTP/2 its stream.
        connections: those that are open.
        room: for how many there is room.
        turnstile: for the bytes of requests, and for the calls they become.
        unread: answers that wait for their readers.
    """

    stall_seconds: float = 60.0

    def __init__(
        self, room: Room | None = None, unread: Unread | None = None, turnstile: Turnstile | None = None
    ) -> None:
        super().__init__()
        self.connections: set[Connection] = set()
        self.room = Room() if room is None else room
        self.turnstile = Turnstile() if turnstile is None else turnstile
        self.unread = Unread() if unread is None else unread


class Connection(TCPServer):
    """A connection whose end is nobody else's.

    *It ends when its client has closed it.* Hypercorn's own would wait for its idle timeout first and hold socket and
    tasks for that long: a thousand clients that make one request each would use up the process's file descriptors.

    *It ends alone.* Closing and sending may meet on the socket, when a client hangs up in the middle of an upload that
    is being refused. Hypercorn lets that error out, and with it the whole server.

    *It ends when its client has stopped reading.* Hypercorn's own would wait for ever, and with it the call, whose API
    key would be short of a place, and the end of the server. It ends sooner where too much waits to be read (`Unread`).

    *It leaves for another* (`Room`) where files run out and it has nothing to do. Nothing of hypercorn's does. What has
    come and waits for its turn is something to do.

    *It takes its turn* with what comes in (`Turnstile`), before it is taken apart and again before it is answered.

    *It takes a piece of a streamed answer at once* (`write_now`), on HTTP/1.1. On the usual way such a piece, a token,
    passes nine functions, two cancel scopes and a lock between the answer and the socket.
    """

    config: ConnectionConfig

    _unsent = b""

    def __init__(self, app: Any, *args: Any) -> None:
        super().__init__(partial(self._call, app), *args)
        self._gone = trio.Event()

    async def _call(self, app: Any, scope: Any, *args: Any) -> None:
        scope[CROWDED] = self.config.room.is_crowded(self)
        if isinstance(self.protocol.protocol, Http2):
            self.protocol.protocol.stall_seconds = self.stall_seconds
        elif scope["http_version"] == "1.1":
            scope[WRITE_NOW] = self.write_now
            scope[UPLOAD] = self.protocol.protocol
        try:
            await self.config.turnstile.turn()
            await app(scope, *args)
        finally:
            if isinstance(self.protocol.protocol, Http1):
                # Not before: until now the call has held its key's place, which the next one may need.
                await self.protocol.protocol.resume()

    @property
    def stall_seconds(self) -> float:
        """How long its client may let a piece of an answer wait."""
        most = self.config.stall_seconds
        return min(most, CROWDED_SECONDS) if self.config.room.is_crowded(self) else most

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
        victim = self.config.room.enter(self)
        if victim is self:
            self._turn_away()
            return
        self.config.connections.add(self)
        try:
            if victim is not None:
                await victim.cut()
            await super().run()
        except* Exception as errors:
            log.warning("a connection broke down", exc_info=errors)
        finally:
            self.config.connections.discard(self)
            self.config.room.leave(self)
            self._give_up()

    def _turn_away(self) -> None:
        """Say what fits into the system's buffer; the connection is closed at once, and its file is free."""
        with suppress(OSError):
            os.write(self.stream.socket.fileno(), _turned_away())

    async def cut(self) -> None:
        """End it now, and whatever waits for its client."""
        self._give_up()
        await trio.aclose_forcefully(self.stream)

    def _give_up(self) -> None:
        """Let nothing wait for its client any more."""
        wrapper = getattr(self, "protocol", None)  # not yet where it was accepted a moment ago
        if wrapper is not None and isinstance(wrapper.protocol, Http2):
            wrapper.protocol.give_up()

    async def protocol_send(self, event: Event) -> None:
        """Send; a socket that another task is closing at this moment is as good as closed."""
        try:
            if isinstance(event, RawData):
                await self._send(event.data)
            elif isinstance(event, Over):
                self.config.room.note(self, idle=True)
                await self._hear_rest()
            else:
                if isinstance(event, Updated):
                    self.config.room.note(self, idle=event.idle)
                elif isinstance(event, Closed):  # its client knows before the last of its tasks has ended
                    self.config.room.leave(self)
                await super().protocol_send(event)
        except trio.BusyResourceError:
            await self.protocol.handle(Closed())

    async def _send(self, data: bytes) -> None:
        """As hypercorn's own, but that it does not wait for ever, and that no call is ended while it waits its turn.

        On HTTP/2 it would take bytes along that the other streams cannot do without.
        """
        with trio.CancelScope(shield=True):
            if await self._send_pieces(data):
                return
        await self.protocol.handle(Closed())

    async def _send_pieces(self, data: bytes) -> bool:
        """Send behind what is being sent; false where the connection is at its end."""
        async with self.send_lock:
            data, self._unsent = self._unsent + data, b""
            try:
                for start in range(0, len(data), MAX_PIECE_BYTES):
                    if not await self._send_piece(data[start : start + MAX_PIECE_BYTES], len(data) - start):
                        await trio.aclose_forcefully(self.stream)
                        return False
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
        return True

    async def _send_piece(self, piece: bytes, num_left: int) -> bool:
        """Send one of what is left to send; false where its client does not take it in time."""
        with trio.move_on_after(self.stall_seconds) as scope:
            self.config.unread.note(scope.cancel, num_left)
            try:
                await self.stream.send_all(piece)
            finally:
                self.config.unread.note(scope.cancel, 0)
        return not scope.cancelled_caught

    async def _hear_rest(self) -> None:
        """Read on for a moment: a connection that is closed on unread bytes takes the answer from its client."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(FAREWELL_SECONDS):
            await self.stream.send_eof()
            await self._gone.wait()

    async def _read_data(self) -> None:
        """As hypercorn's own, but for the turn and without its `read_timeout`, which on trio ends healthy streams."""
        data: bytes | bytearray = b"?"
        while data:
            try:
                data = await self.stream.receive_some(MAX_RECV)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                break
            if self not in self.config.room:
                break  # another had its place while this was on its way
            with self.config.room.hearing(self):
                await self.config.turnstile.turn()
                await self.protocol.handle(RawData(bytes(data)))
        await self.protocol.handle(Closed())
        self._gone.set()
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        if not self._gone.is_set():  # the end of an answer may start it again
            await super()._idle_timeout()


def _turned_away() -> bytes:
    """What who finds no place is told, without having been heard."""
    answer = describe(no_room())
    body = json.dumps(answer.body)
    fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", **answer.headers}
    head = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
    return f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n{head}\r\n{body}".encode()


def use_connections() -> None:
    """Have hypercorn make these; it offers no other way to say so."""
    hypercorn.trio.run.TCPServer = Connection  # type: ignore[attr-defined, assignment]
    hypercorn.protocol.H11Protocol = Http1  # type: ignore[attr-defined]
    hypercorn.protocol.H2Protocol = Http2  # type: ignore[attr-defined]
