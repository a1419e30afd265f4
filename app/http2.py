"""HTTP/2 as hypercorn speaks it, mended."""

from __future__ import annotations

import math
import string
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import h2.settings
import trio
from h2.errors import ErrorCodes
from h2.events import RequestReceived, StreamReset
from h2.exceptions import ProtocolError
from h2.frame_buffer import FrameBuffer
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.utils import filter_pseudo_headers
from priority.priority import MissingStreamError

from app.limits import Bucket

if TYPE_CHECKING:
    from h2._typing import Buffer
    from h2.events import Event
    from hypercorn.events import Event as ConnectionEvent
    from hypercorn.protocol.events import Event as StreamEvent
    from hyperframe.frame import Frame

    from app.connections import ConnectionConfig
    from app.unread import Unread

# What waits for a reader on one stream; a piece more than that, while it is being handed over.
MAX_UNSENT_BYTES: Final = 1 << 16
# Looked at in one go: each takes tens of microseconds, however few bytes it has.
MAX_TURN_FRAMES: Final = 16
# Requests of one connection that may be taken back before they were answered. Each has cost what it costs, and
# those that are taken back do not count against the streams that a connection may have at once.
MAX_TAKEN_BACK_A_MINUTE: Final = 1000
# What a stream's call holds beside the bytes: 29 KiB. It counts where the client takes nothing for so long.
CALL_BYTES: Final = 1 << 15
SLOW_SECONDS: Final = 1.0
_LENGTH_BYTES, _HEAD_BYTES = 3, 9


class Http2(H2Protocol):
    """HTTP/2 whose streams hold nothing that their client does not want.

    *A stream ends when its client has stopped reading.* Hypercorn's own waits for ever for a window that does not open,
    and with it the call, also when stream and connection have long gone. Here every wait ends with the stream, and a
    stream that takes no piece for `stall_seconds` is reset. So is the one that has taken nothing for longest, of all
    connections, where too much waits (`Unread`).

    *A stream that broke off is reset*, where hypercorn's own leaves its client waiting for the rest.

    *A refusal ends no connection.* To hypercorn's own, the rest of an upload that was answered already is data of a
    stream that it does not know; at that, it ends the connection, and with it the other streams.

    *A connection without streams is idle*, however its streams ended.

    *A connection that floods holds up itself*: its frames take turns (`Turnstile`) with whatever else comes in, and
    requests that are taken back at once, again and again, end it.

    Attributes:
        stall_seconds: as the connection, which knows how much room there is, had it when the last call came.
    """

    config: ConnectionConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams = _Streams()
        self.stream_buffers: dict[int, Unsent] = {}  # type: ignore[assignment]
        # As hypercorn's, without its offer of WebSocket.
        codes, most = h2.settings.SettingCodes, self.config.h2_max_header_list_size
        initial = {
            codes.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
            codes.MAX_HEADER_LIST_SIZE: most,
        }
        self.connection.local_settings = h2.settings.Settings(client=False, initial_values=initial)
        self.connection.decoder.max_header_list_size = most
        self._frames = _Frames(server=True)
        self._frames.max_frame_size = self.connection.incoming_buffer.max_frame_size
        self.connection.incoming_buffer = self._frames
        self.stall_seconds = self.config.stall_seconds
        self._may_take_back = Bucket(MAX_TAKEN_BACK_A_MINUTE, trio.current_time())

    def give_up(self) -> None:
        """End every wait for the client. Never waits itself."""
        for stream_id in list(self.stream_buffers):
            self._forget(stream_id)

    async def handle(self, event: ConnectionEvent) -> None:
        """Take in what has come."""
        if not isinstance(event, RawData):
            self.give_up()
            await super().handle(event)
            return
        await super().handle(event)
        while self._frames.is_cut and not self.closed:
            await self.config.turnstile.turn()
            await super().handle(RawData(b""))

    async def stream_send(self, event: StreamEvent) -> None:
        """Pass on a part of an answer."""
        try:
            match event:
                case Response():
                    if event.stream_id in self.stream_buffers:
                        self.stream_buffers[event.stream_id].has_begun = True
                    await super().stream_send(event)
                case Body():
                    await self._send_body(event.stream_id, event.data)
                case EndBody():
                    await self._end_body(event.stream_id)
                case StreamClosed():
                    unsent = self.stream_buffers.get(event.stream_id)
                    if unsent is not None and not unsent.is_complete:
                        await self._reset(event.stream_id, ErrorCodes.INTERNAL_ERROR)
                    await super().stream_send(event)
                case _:
                    await super().stream_send(event)
        except trio.TooSlowError:
            await self._reset(event.stream_id, ErrorCodes.CANCEL)

    async def _send_body(self, stream_id: int, data: bytes) -> None:
        for start in range(0, len(data), MAX_UNSENT_BYTES):
            unsent = self.stream_buffers.get(stream_id)
            if unsent is None:
                return  # its client is gone
            end = start + MAX_UNSENT_BYTES
            unsent.put(data[start:end], max(0, len(data) - end))
            await self._wake(stream_id)
            with trio.fail_after(self.stall_seconds):
                await unsent.wait_until(MAX_UNSENT_BYTES)

    async def _end_body(self, stream_id: int) -> None:
        unsent = self.stream_buffers.get(stream_id)
        if unsent is not None:
            unsent.complete()
            await self._wake(stream_id)
            with trio.fail_after(self.stall_seconds):
                await unsent.wait_closed()

    async def _wake(self, stream_id: int) -> None:
        """Have the sending task look at a stream."""
        self.priority.unblock(stream_id)
        await self.has_data.set()

    async def _send_data(self, stream_id: int) -> None:
        """Send what a stream may send now; called by the sending task alone."""
        unsent, is_over = self.stream_buffers[stream_id], False
        try:
            window = self.connection.local_flow_control_window(stream_id)
            data = unsent.take(max(0, min(window, self.connection.max_outbound_frame_size)))
            is_over = unsent.is_complete and unsent.num_bytes == 0
            if data or is_over:
                self.connection.send_data(stream_id, data, end_stream=is_over)
            else:
                self.priority.block(stream_id)
        except ProtocolError:  # stream or connection is closed
            is_over = True
        await self._flush()
        if is_over:
            self._forget(stream_id)

    async def _close_stream(self, stream_id: int) -> None:
        await super()._close_stream(stream_id)
        unsent = self.stream_buffers.get(stream_id)
        if unsent is not None and not unsent.is_complete:
            self._forget(stream_id)

    async def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        """End a stream before its answer has ended."""
        self._forget(stream_id)
        with suppress(ProtocolError):  # it is closed already
            self.connection.reset_stream(stream_id, code)
        await self._flush()
        await self._close_stream(stream_id)
        await self.send(Updated(idle=self.idle))

    def _forget(self, stream_id: int) -> None:
        """Nothing more is sent on a stream; whoever waits for that goes on."""
        unsent = self.stream_buffers.pop(stream_id, None)
        if unsent is not None:
            unsent.close()
            with suppress(MissingStreamError):
                self.priority.remove_stream(stream_id)

    async def _handle_events(self, events: list[Event]) -> None:
        resets = [event.stream_id for event in events if isinstance(event, StreamReset)]
        if resets:
            fresh = {event.stream_id for event in events if isinstance(event, RequestReceived)}
            taken_back = [i for i in resets if i in fresh or not self._has_begun(i)]
            self._may_take_back.take(len(taken_back), trio.current_time())
            for stream_id in resets:
                self._forget(stream_id)
            if self._may_take_back.level(trio.current_time()) < 0:
                self.connection.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
                await self._flush()
                await self.send(Closed())
                return
            # Nobody is called for what is over before it was looked at; while the server ends, it could not be reset.
            over = fresh & {*resets}
            events = [e for e in events if not (isinstance(e, RequestReceived) and e.stream_id in over)]
        await super()._handle_events(events)
        if resets:
            await self.send(Updated(idle=self.idle))

    def _has_begun(self, stream_id: int) -> bool:
        """Whether an answer has begun on a stream, or is over."""
        unsent = self.stream_buffers.get(stream_id)
        return unsent is None or unsent.has_begun

    async def _priority_updated(self, event: object) -> None:
        """Streams take turns; RFC 9113 has given up clients' wishes about that."""

    async def _create_stream(self, request: RequestReceived) -> None:
        """Start a call. Nobody here is a proxy or speaks WebSocket: CONNECT is a method like any other."""
        stream_id, given = request.stream_id, dict(request.headers)
        self.streams[stream_id] = stream = HTTPStream(
            self.app, self.config, self.context, self.task_group, self.ssl, self.client, self.server, self.stream_send,
            stream_id,
        )  # fmt: skip
        self.stream_buffers[stream_id] = Unsent(self.config.unread)
        self.priority.insert_stream(stream_id)
        self.priority.block(stream_id)
        await stream.handle(
            Request(
                stream_id=stream_id,
                headers=filter_pseudo_headers(request.headers),
                http_version="2",
                method=given[b":method"].decode("latin-1"),
                raw_path=quote(given.get(b":path", b"/"), safe=string.printable).encode(),
                state=self.connection_state,
            )
        )


class Unsent:
    """What one stream has still to send; its client shows that it is there by taking it.

    Args:
        unread: told of all of it.

    Attributes:
        has_begun: the answer's head is being sent, or was.
        is_complete: nothing will be added.
    """

    def __init__(self, unread: Unread) -> None:
        self._unread = unread
        self._data = bytearray()
        self._taken = trio.Event()
        self._closed = trio.Event()
        self._num_behind = 0
        self._waits_since = math.inf
        self._is_given_up = False
        self.has_begun = False
        self.is_complete = False

    @property
    def num_bytes(self) -> int:
        """How much it is."""
        return len(self._data)

    def put(self, data: bytes, num_behind: int = 0) -> None:
        """Add to it.

        Args:
            num_behind: bytes that will be added next and are there already.

        Raises:
            trio.TooSlowError: it was given up.
        """
        self._check()
        if not self._data:
            self._waits_since = trio.current_time()
        self._data += data
        self._num_behind = num_behind
        self._note()

    def take(self, max_bytes: int) -> bytes:
        """Take so much from the beginning, or what there is."""
        data = bytes(self._data[:max_bytes])
        if data:
            del self._data[:max_bytes]
            self._waits_since = trio.current_time()
            self._note(has_taken=True)
        self._taken.set()
        self._taken = trio.Event()
        return data

    def complete(self) -> None:
        """Nothing will be added. Raises as `put` does."""
        self._check()
        self.is_complete = True

    async def wait_until(self, num_bytes: int) -> None:
        """Wait until no more than this is left, or nothing more will be sent. Raises as `put` does."""
        while self.num_bytes > num_bytes and not self._closed.is_set():
            await self._taken.wait()
        self._check()

    async def wait_closed(self) -> None:
        """Wait until all was sent, or nothing more will be. Raises as `put` does."""
        with trio.move_on_at(self._waits_since + SLOW_SECONDS):
            await self._closed.wait()
        if not self._closed.is_set():
            self._note()
        await self._closed.wait()
        self._check()

    def give_up(self) -> None:
        """The room is needed: let whoever adds to it know that the reader is too slow."""
        self._is_given_up = True
        self.is_complete = False  # what is lost now is no end
        self._data.clear()
        self.close()

    def close(self) -> None:
        """Nothing more is sent."""
        self._closed.set()
        self._taken.set()
        self._num_behind = 0
        self._unread.note(self.give_up, 0)

    def _note(self, *, has_taken: bool = False) -> None:
        """Tell how much waits."""
        num_bytes = self.num_bytes + self._num_behind
        is_slow = trio.current_time() - self._waits_since >= SLOW_SECONDS
        held = num_bytes + CALL_BYTES if num_bytes and is_slow else num_bytes
        self._unread.note(self.give_up, held, has_taken=has_taken)

    def _check(self) -> None:
        if self._is_given_up:
            raise trio.TooSlowError


class _Frames(FrameBuffer):
    """Gives out a few frames whenever something is added, and keeps the others for the next time.

    It refuses a frame that is too long by its head; h2's own would first take in all of it, up to 16 MiB.
    """

    _num_left = MAX_TURN_FRAMES

    @property
    def is_cut(self) -> bool:
        """Whether there may be more than was given out."""
        return not self._num_left and len(self._data) >= _HEAD_BYTES

    def add_data(self, data: Buffer) -> None:
        super().add_data(data)
        self._num_left = MAX_TURN_FRAMES

    def __next__(self) -> Frame:
        if len(self._data) >= _HEAD_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:_LENGTH_BYTES], "big"))
        if not self._num_left:
            raise StopIteration
        self._num_left -= 1
        return super().__next__()


class _NoStream:
    """Takes what is still sent to a stream that was answered."""

    async def handle(self, _event: object) -> None:
        """Throw it away."""


class _Streams(dict[int, Any]):
    def __missing__(self, _stream_id: int) -> _NoStream:
        return _NoStream()
