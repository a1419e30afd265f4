"""HTTP/1.1 as hypercorn speaks it, mended."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request
from hypercorn.protocol.h11 import STREAM_ID, H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from app.api.errors import ErrorAnswer

if TYPE_CHECKING:
    from app.connections import ConnectionConfig

# What may come behind a request before it is answered.
MAX_AHEAD_BYTES: Final = 1 << 16
# Taking a field apart takes microseconds, in which nobody else is served.
MAX_FIELDS: Final = 200
_END_OF_HEAD: Final = re.compile(rb"\n\r?\n")
_PRIOR_KNOWLEDGE: Final = b"PRI * HTTP/2.0\r\n\r\n"


@dataclass(frozen=True)
class Over(Event):
    """The last answer of the connection was sent, perhaps while its client is still sending."""


class Http1(H11Protocol):
    """HTTP/1.1 that hears its client to the end.

    *It reads on while a request is answered.* Hypercorn's own stops reading at the first byte behind a request, be it
    the end of a line, and learns neither that the client left nor that its connection broke. Here such bytes wait for
    their turn. Who sends more than `MAX_AHEAD_BYTES` of them loses the connection.

    *It stays HTTP.* Nobody here speaks WebSocket, and HTTP/2 is spoken by prior knowledge, from the first byte on.
    Whatever else a request would like its connection to become, it is answered as what it is.

    *Nobody can take a request for two*: what tells its length in two ways is refused, whichever of them a proxy
    before the server believes.

    *A body is asked for by whoever reads it.* Hypercorn's own tells a client that waits with its body (`Expect:
    100-continue`) to send it before anybody has looked at the head; here a refusal comes instead.

    *An answer reaches its client*, also one that is still sending a body which nobody reads: what comes behind the last
    answer of a connection is heard for a moment, and thrown away.

    *What is too large is refused before it is taken apart.* The parser looks at the size of a head that comes in parts,
    and takes one that comes at once for what it is.

    *A body in crumbs holds up itself*: of what was read at once each piece but the first takes its turn (`Turnstile`).

    *Its errors have a shape*, also those of bytes that are no HTTP.
    """

    # There is no other kind of connection here (hypercorn has one for WebSocket).
    connection: h11.Connection
    config: ConnectionConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = trio.Lock()
        self._is_over = False

    @property
    def holds_body_back(self) -> bool:
        """Whether the client waits to be asked for the body."""
        return self.connection.they_are_waiting_for_100_continue

    async def ask_for_body(self) -> None:
        """Have the client send the body, where it waits for that."""
        if self.holds_body_back:
            await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))

    async def handle(self, event: Event) -> None:
        """Take in what has come, unless that is behind the last answer."""
        if not (self._is_over and isinstance(event, RawData)):
            await super().handle(event)

    async def resume(self) -> None:
        """Go on with what came behind a request that is over."""
        if self.connection.their_state is h11.IDLE:
            await self._handle_events()

    async def _handle_events(self) -> None:
        """Take in what has come; one task at a time, so that each part of a request follows the one before it."""
        async with self._turn:
            is_first = True
            while True:
                if self._is_head_too_large():
                    await self._refuse(431)
                    return
                try:
                    event = self.connection.next_event()
                except h11.RemoteProtocolError as error:
                    await self._refuse(error.error_status_hint)
                    return
                if isinstance(event, h11.Request):
                    if not await self._begin(event):
                        return
                elif event is h11.PAUSED:
                    if len(self.connection.trailing_data[0]) > MAX_AHEAD_BYTES:
                        await self.send(Closed())
                    return
                elif isinstance(event, h11.Data):
                    if not is_first:
                        await self.config.turnstile.turn()
                    is_first = False
                    if self.stream is None:
                        return  # its answer has ended
                    await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
                elif self.stream is not None and isinstance(event, h11.EndOfMessage):
                    await self.stream.handle(EndBody(stream_id=STREAM_ID))
                else:
                    return

    async def _begin(self, request: h11.Request) -> bool:
        """Start a call; false where there is none, because the connection ends.

        Raises:
            H2ProtocolAssumedError: it is HTTP/2.
        """
        self.keep_alive_requests += 1
        if request.http_version not in (b"1.0", b"1.1"):
            if self.keep_alive_requests == 1 and (request.method, request.target) == (b"PRI", b"*"):
                raise H2ProtocolAssumedError(_PRIOR_KNOWLEDGE + self.connection.trailing_data[0])
            await self._refuse(505, is_head=request.method == b"HEAD")
            return False
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
            await self._refuse(400, is_head=request.method == b"HEAD")
            return False
        await self.send(Updated(idle=False))
        self.stream = HTTPStream(
            self.app, self.config, self.context, self.task_group, self.ssl, self.client, self.server, self.stream_send,
            STREAM_ID,
        )  # fmt: skip
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode(),  # names of methods know small and capital letters
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        return True

    def _is_head_too_large(self) -> bool:
        """Whether the head that comes next is, if all of it is there; else it is not taken apart yet."""
        if self.connection.their_state is not h11.IDLE:
            return False
        data, _ = self.connection.trailing_data
        end = _END_OF_HEAD.search(data)
        if end is None:
            return False
        most = self.config.h11_max_incomplete_size
        return end.end() > most or data.count(b"\n", 0, end.end()) > MAX_FIELDS

    async def _refuse(self, status: int, *, is_head: bool = False) -> None:
        """Answer what cannot be read, unless an answer has begun; then there is nothing more to hear or to say."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(self._describe(status).body).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                *self.config.response_headers("h11"),
            ]
            await self._send_h11_event(h11.Response(status_code=status, headers=headers))
            if not is_head:
                await self._send_h11_event(h11.Data(body))
            await self._send_h11_event(h11.EndOfMessage())
            await self._close_stream()
            self._end()
        else:
            await self.send(Closed())

    async def _maybe_recycle(self) -> None:
        """An answer has ended: on to the next request, unless the body of this one is still being sent."""
        has_answered = self.connection.our_state in (h11.DONE, h11.MUST_CLOSE)
        if not (has_answered and self.connection.their_state is h11.SEND_BODY):
            await super()._maybe_recycle()
            return
        await self._close_stream()
        self._end()

    def _end(self) -> None:
        """Have the connection closed as soon as its client has read the last answer; the call is over before."""
        self._is_over = True
        self.task_group.spawn(self._close_later)

    async def _close_later(self) -> None:
        await self.send(Over())
        await self.send(Closed())

    def _describe(self, status: int) -> ErrorAnswer:
        match status:
            case 431:
                most = self.config.h11_max_incomplete_size
                message = f"The request's address and headers are more than {most:,} bytes or {MAX_FIELDS} lines."
                return ErrorAnswer(status, message, code="headers_too_large")
            case 501:
                return ErrorAnswer(status, "The request's transfer encoding is not known here.", code="not_implemented")
            case 505:
                return ErrorAnswer(status, "This server speaks HTTP/1.1 and HTTP/2.", code="http_version")
        return ErrorAnswer(status, "What came is no HTTP request, or a broken one.", code="bad_request")
