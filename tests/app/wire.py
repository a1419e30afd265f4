"""Clients that speak by hand, so that they can leave in every way there is."""

from __future__ import annotations

import json
import re
import socket
import struct
from contextlib import suppress
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import trio

from tests.app.serving import CHAT
from tests.patience import PATIENCE_SECONDS

# What a client may have sent behind a request whose answer has not come yet.
PIPELINED = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def connect(port: int, *, host: str = "127.0.0.1", buffer_bytes: int | None = None) -> trio.SocketStream:
    """A connection, with a small buffer for what comes if wanted."""
    connection = trio.socket.socket()
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    await connection.connect((host, port))
    return trio.SocketStream(connection)


class Http1Client:
    """One request over HTTP/1.1.

    Args:
        behind: bytes that go out with the request, after its end.
    """

    def __init__(self, stream: trio.SocketStream, behind: bytes = b"") -> None:
        self.stream = stream
        self.received = b""
        self._behind = behind

    async def ask(self, body: dict[str, Any], headers: dict[str, str], *, path: str = CHAT) -> None:
        """Send a request and leave the answer unread."""
        content = json.dumps(body).encode()
        fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(content), **headers}
        head = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        await self.stream.send_all(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content + self._behind)

    async def read_until(self, pattern: bytes, seconds: float = PATIENCE_SECONDS) -> None:
        """Read what comes until this is in it."""
        with trio.fail_after(seconds):
            while not re.search(pattern, self.received):
                data = await self.stream.receive_some(65536)
                assert data, self.received
                self.take(data)

    def take(self, data: bytes) -> None:
        self.received += data

    async def read_to_end(self) -> None:
        """Read until the server has ended the connection."""
        with trio.fail_after(PATIENCE_SECONDS), suppress(trio.BrokenResourceError):
            while await self.stream.receive_some(65536):
                pass

    async def half_close(self) -> None:
        """A FIN; what comes is taken in by the system."""
        await self.stream.send_eof()

    async def reset(self) -> None:
        """A RST."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.stream.aclose()


class Http2Client(Http1Client):
    """One request over HTTP/2, on stream 1.

    Args:
        window: bytes of the answer that may come before any was read.
    """

    def __init__(self, stream: trio.SocketStream, window: int = 65535) -> None:
        super().__init__(stream)
        self.connection = open_http2(window)
        self.events: list[h2.events.Event] = []

    async def ask(self, body: dict[str, Any], headers: dict[str, str], *, path: str = CHAT, stream_id: int = 1) -> None:
        names = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "localhost"}
        fields = {**names, "content-type": "application/json", **{name.lower(): headers[name] for name in headers}}
        self.connection.send_headers(stream_id, list(fields.items()))
        self.connection.send_data(stream_id, json.dumps(body).encode(), end_stream=True)
        await self.flush()

    @property
    def has_ended(self) -> bool:
        """Whether the stream, or the connection, has come to its end."""
        over = (h2.events.StreamEnded, h2.events.StreamReset, h2.events.ConnectionTerminated)
        return any(isinstance(event, over) for event in self.events)

    @property
    def status(self) -> int:
        """Of the answer; 0 where none has come."""
        heads = [dict(e.headers) for e in self.events if isinstance(e, h2.events.ResponseReceived)]
        return int(heads[0][b":status"]) if heads else 0

    def take(self, data: bytes) -> None:
        events = self.connection.receive_data(data)
        self.events += events
        self.received += b"".join([e.data or b"" for e in events if isinstance(e, h2.events.DataReceived)])

    async def read_event(self, kind: type[h2.events.Event], stream_id: int = 1) -> None:
        """Read what comes until this has come."""
        with trio.fail_after(PATIENCE_SECONDS):
            while not any(isinstance(e, kind) and getattr(e, "stream_id", 0) == stream_id for e in self.events):
                data = await self.stream.receive_some(65536)
                assert data, self.events
                self.take(data)

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def reset_stream(self) -> None:
        self.connection.reset_stream(1)
        await self.flush()

    async def go_away(self) -> None:
        self.connection.close_connection()
        await self.flush()


def conversations() -> list[bytes]:
    """What clients may be about: answers (on HTTP/2 without a window), half a question, half a head, a dashboard."""
    found = []
    for stream in (True, False):
        content = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 400, "stream": stream})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        found.append(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        connection = open_http2(window=0)
        names = (":method", ":path", ":scheme", ":authority", "content-type")
        values = ("POST", CHAT, "http", "localhost", "application/json")
        connection.send_headers(1, list(zip(names, values, strict=True)))
        connection.send_data(1, content.encode(), end_stream=True)
        found.append(connection.data_to_send())
    return [*found, found[0][:-5], b"GET /ops/events HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /hea"]


def open_http2(window: int) -> h2.connection.H2Connection:
    """The client's end of a connection.

    Args:
        window: bytes of an answer that may come before any was read.
    """
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    initial = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
    connection.local_settings = h2.settings.Settings(client=True, initial_values=initial)
    connection.initiate_connection()
    return connection


def count_tasks() -> int:
    """Trio's tasks that live now, the system's among them."""

    def below(task: trio.lowlevel.Task) -> int:
        return 1 + sum(below(child) for nursery in task.child_nurseries for child in nursery.child_tasks)

    root = trio.lowlevel.current_root_task()
    assert root is not None
    return below(root)


async def wait_for(condition: Any, seconds: float = PATIENCE_SECONDS) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.001)
