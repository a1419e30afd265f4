"""Connections that ask for two readings, for much work, or for what they take back at once: they harm themselves."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h2.errors
import h2.events
import hyperframe.frame as frames
import pytest
import trio

from app import guard, http2
from app.http1 import MAX_FIELDS
from tests.app.raw_cases import Talk
from tests.app.serving import CHAT, chat_body, open_server
from tests.app.test_loop_held import LongestTurn
from tests.app.test_protocols import error_of, request, talk
from tests.app.wire import Http2Client, connect

if TYPE_CHECKING:
    from collections.abc import Callable

INNER = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
MAX_TURN_SECONDS = 0.03  # frames and fields of one read of 64 KiB took up to 0.18 s
HEALTHZ = [(":method", "GET"), (":path", "/healthz"), (":scheme", "http"), (":authority", "localhost")]


@pytest.mark.parametrize(
    ("version", "fields", "status"),
    [
        ("1.1", "Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("1.1", "Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
        ("1.1", "Transfer-Encoding: CHUNKED\r\nContent-Length: 5", 400),
        ("1.0", "Transfer-Encoding: chunked", 400),
        ("1.1", "Content-Length: 5\r\nContent-Length: 6", 400),
        ("1.1", "Content-Length: 5, 6", 400),
        ("1.1", "Content-Length: +5", 400),
        ("1.1", "Content-Length: -5", 400),
        ("1.1", "Content-Length : 5", 400),
        ("1.1", "Transfer-Encoding: xchunked", 501),
        ("1.1", "Transfer-Encoding: chunked, identity", 501),
        ("1.1", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 501),
        ("1.1", "Transfer-Encoding:\x0bchunked", 400),
    ],
)
async def test_what_could_be_two_requests_is_none(version: str, fields: str, status: int) -> None:
    async with open_server() as server:
        head = f"POST /tokenize HTTP/{version}\r\nHost: localhost\r\n{fields}\r\n\r\n".encode()
        for body in (b"0\r\n\r\n", b"hello"):
            received = await talk(server, head + body + INNER)
            assert received.count(b"HTTP/1.1 ") == 1
            assert error_of(received)[0] == status


@pytest.mark.parametrize(
    ("line", "status"), [("HEAD / HTTP/9.9", 505), ("HEAD / HTTP/1.0\r\nTransfer-Encoding: chunked", 400)]
)
async def test_a_refusal_to_head_has_no_body(line: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with open_server() as server:
        received = await talk(server, f"{line}\r\nHost: localhost\r\n\r\n".encode())
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert not body
    assert not caplog.records


async def test_a_method_in_small_letters_is_answered_whole(caplog: pytest.LogCaptureFixture) -> None:
    async with open_server() as server:
        received = await talk(server, b"head /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"
    assert not caplog.records


async def test_fields_are_counted_before_they_are_taken_apart() -> None:
    async with open_server() as server:
        fits = request("/healthz", headers="a:\r\n" * (MAX_FIELDS - 4) + "Connection: close\r\n")
        assert (await talk(server, fits)).startswith(b"HTTP/1.1 200 ")
        for number in (MAX_FIELDS + 1, 7000):
            status, error = error_of(await talk(server, request("/healthz", headers="a:\r\n" * number)))
            assert (status, error["code"]) == (431, "headers_too_large")


def filled(add: Callable[[Talk, int], None]) -> bytes:
    """As many frames as are read at once."""
    flood, number = Talk(), 0
    while len(flood.data) < 1 << 16:
        number += 1
        add(flood, number)
    return bytes(flood.data)


def take_back(flood: Talk, number: int) -> None:
    flood.headers(2 * number - 1, HEALTHZ)
    flood.add(frames.RstStreamFrame(2 * number - 1, error_code=8))


def crumb(flood: Talk, number: int) -> None:
    if number == 1:
        flood.headers(1, [(":method", "POST"), (":path", "/tokenize"), *HEALTHZ[2:]], ends=False)
    flood.add(frames.DataFrame(1, b""))


FLOODS: dict[str, bytes] = {
    "taken back": filled(take_back),
    "settings": filled(lambda flood, number: flood.add(frames.SettingsFrame(0, settings={4: number}))),
    "pings": filled(lambda flood, _: flood.add(frames.PingFrame(0, b"12345678"))),
    "windows": filled(lambda flood, _: flood.add(frames.WindowUpdateFrame(0, window_increment=1))),
    "crumbs": filled(crumb),
    "unknown": filled(lambda flood, _: flood.raw(0xEE, 0, 0, b"")),
    "fields": request("/healthz", headers="a:\r\n" * 16_000),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_does_not_hold_the_event_loop(kind: str) -> None:
    async with open_server() as server:
        assert (await server.client.get("/healthz")).status_code == 200
        async with await connect(server.port) as stream:
            turn = LongestTurn()
            gc.collect()
            gc.freeze()  # the tests' own objects are not the server's to look through
            trio.lowlevel.add_instrument(turn)
            try:
                await stream.send_all(FLOODS[kind])
                with trio.move_on_after(0.5), suppress(trio.BrokenResourceError):
                    while await stream.receive_some(65536):
                        pass
            finally:
                trio.lowlevel.remove_instrument(turn)
                gc.unfreeze()
        assert turn.seconds < MAX_TURN_SECONDS
        assert (await server.client.get("/healthz")).status_code == 200


async def test_an_answer_may_end_between_two_crumbs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "LINGER_SECONDS", 0.001)
    head = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with open_server() as server:
        assert error_of(await talk(server, head + 5000 * b"1\r\na\r\n"))[0] == 405
    assert not caplog.records


async def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    async with open_server() as server, await connect(server.port) as stream:
        client = Http2Client(stream)
        await client.flush()
        await stream.send_all(((1 << 24) - 1).to_bytes(3, "big") + b"\0\0" + (1).to_bytes(4, "big"))
        await client.read_event(h2.events.ConnectionTerminated, 0)
        assert client.events[-1].error_code == h2.errors.ErrorCodes.FRAME_SIZE_ERROR


async def ask_and_reset(client: Http2Client, stream_id: int, *, stream: bool) -> None:
    await client.ask(chat_body(max_tokens=400, stream=stream), {}, path=CHAT, stream_id=stream_id)
    if stream:
        await client.read_event(h2.events.ResponseReceived, stream_id)
    client.connection.reset_stream(stream_id)
    await client.flush()


async def test_who_takes_everything_back_at_once_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not so who leaves a stream that has begun, however often."""
    monkeypatch.setattr(http2, "MAX_TAKEN_BACK_A_MINUTE", 5)
    async with open_server() as server:
        async with await connect(server.port) as stream:
            client = Http2Client(stream)
            for number in range(10):
                await ask_and_reset(client, 2 * number + 1, stream=True)
            for number in range(10, 15):
                await ask_and_reset(client, 2 * number + 1, stream=False)
            await client.ask(chat_body(max_tokens=1), {}, stream_id=101)
            await client.read_event(h2.events.StreamEnded, 101)
            for number in (60,):
                await ask_and_reset(client, 2 * number + 1, stream=False)
            await client.read_event(h2.events.ConnectionTerminated, 0)
            assert client.events[-1].error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
        await server.settle()


async def test_nobody_is_called_for_what_is_over_before_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the server ends, when it resets what comes."""
    called: list[int] = []

    class Stream(http2.HTTPStream):
        async def handle(self, event: Any) -> None:
            called.append(self.stream_id)
            await super().handle(event)

    monkeypatch.setattr(http2, "HTTPStream", Stream)
    async with open_server() as server, await connect(server.port) as stream:
        client = Http2Client(stream)
        await client.ask(chat_body(max_tokens=400, stream=True), {})
        await client.read_event(h2.events.ResponseReceived)
        for stream_id in (3, 5):
            client.connection.send_headers(stream_id, HEALTHZ, end_stream=True)
            client.connection.reset_stream(stream_id)
            await client.flush()
            server.context.lifecycle.stopped.set()
            await trio.sleep(0.05)
        await client.reset_stream()
        await server.settle()
    assert set(called) == {1}
    assert not caplog.records
