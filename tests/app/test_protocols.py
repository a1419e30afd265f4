"""What comes over a connection beside well-made requests, one at a time."""

from __future__ import annotations

import json
import re
from typing import Any

import h2.errors
import h2.events
import pytest
import trio

from app.api.envelope import CompletionEnvelope
from app.http1 import MAX_AHEAD_BYTES
from app.server import MAX_HEADER_BYTES
from tests.app.serving import CHAT, COMPLETIONS, Server, break_envelope, chat_body, make_settings, open_server
from tests.app.wire import Http1Client, Http2Client, connect, wait_for
from tests.patience import PATIENCE_SECONDS

KEYS: dict[str, Any] = {
    "security": {"api_keys": ["me=mine"]},
    "security_limits": {"me": {"max_concurrent": 1}},
}
UPGRADE = "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


async def talk(server: Server, *parts: bytes) -> bytes:
    """Send these one after the other and read to the end of the connection."""
    received = b""
    async with await connect(server.port) as stream:
        for part in parts:
            await stream.send_all(part)
            await trio.sleep(0.01)
        with trio.fail_after(PATIENCE_SECONDS):
            while data := await stream.receive_some(65536):
                received += data
    return received


def error_of(received: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer after which the connection has ended."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


def request(path: str, *, method: str = "GET", headers: str = "", body: bytes = b"") -> bytes:
    length = f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{length}\r\n".encode() + body


async def test_requests_that_come_together_are_answered_in_order() -> None:
    """Of a key that may have one at once: each begins when the one before it is over."""
    key = "Authorization: Bearer mine\r\n"
    bodies = [json.dumps(chat_body(text, max_tokens=3, stream=text == "b")).encode() for text in ("a", "b", "c")]
    asked = [request(CHAT, method="POST", headers=key, body=body) for body in bodies]
    last = request("/v1/models", headers=key + "Connection: close\r\n")
    async with open_server(make_settings(**KEYS)) as server:
        received = await talk(server, b"".join([*asked, last]))
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200"] * 4
    kinds = re.findall(rb'"object": ?"(chat.completion|chat.completion.chunk|list)"', received)
    assert [kinds[0], *kinds[-2:]] == [b"chat.completion", b"chat.completion", b"list"]
    assert received.index(b"[DONE]") < received.index(b'"list"')


async def test_an_upload_in_pieces_may_follow_a_request() -> None:
    body = json.dumps(chat_body("c" * 400, max_tokens=3)).encode()
    whole = request(CHAT, method="POST", headers="Connection: close\r\n", body=body)
    async with open_server() as server:
        first = request(CHAT, method="POST", body=json.dumps(chat_body(max_tokens=100)).encode())
        received = await talk(server, first + whole[:200], whole[200:300], whole[300:])
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"200"]


async def test_who_sends_too_far_ahead_loses_the_connection() -> None:
    async with open_server(step_seconds=0.005) as server:
        client = Http1Client(await connect(server.port), b"GET / HTTP/1.1\r\nA: ")
        await client.ask(chat_body(max_tokens=400), {})
        await wait_for(lambda: server.engine.num_open == 1)
        await client.stream.send_all(bytes(MAX_AHEAD_BYTES // 2))
        await trio.sleep(0.02)
        assert server.engine.num_open == 1
        await client.stream.send_all(bytes(MAX_AHEAD_BYTES))
        await wait_for(lambda: server.engine.num_open == 0)
        assert server.engine.snapshot()["requests"]["aborted_by_cause_and_phase"]["client"]
        await client.stream.aclose()


@pytest.mark.parametrize("path", ["/", "/ops/events", "/v1/chat/completions", "/nothing"])
@pytest.mark.parametrize("version", ["Sec-WebSocket-Version: 13\r\n", ""])
async def test_a_websocket_is_refused_whatever_its_address(
    path: str, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_server(make_settings(**KEYS)) as server:
        received = await talk(server, request(path, headers=UPGRADE + version))
        status, error = error_of(received)
        assert (status, error["code"]) == (400, "no_websockets")
        assert (await server.client.get("/healthz")).status_code == 200
    assert not caplog.records


async def test_over_http2_connect_is_a_method_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    async with open_server() as server:
        client = Http2Client(await connect(server.port))
        asked = {1: {":protocol": "websocket", ":path": "/ops/events", ":scheme": "http"}, 3: {}}
        for stream_id, more in asked.items():
            names = {":method": "CONNECT", ":authority": "localhost", **more}
            client.connection.config.validate_outbound_headers = False
            client.connection.send_headers(stream_id, list(names.items()), end_stream=True)
        await client.flush()
        await client.ask(chat_body(max_tokens=1), {}, stream_id=5)
        await client.read_event(h2.events.ResponseReceived, stream_id=5)
        statuses = {e.stream_id: dict(e.headers)[b":status"] for e in client.events if hasattr(e, "headers")}
        assert statuses == {1: b"405", 3: b"405", 5: b"200"}
        await client.stream.aclose()
    assert not caplog.records


async def test_an_upgrade_that_is_not_taken_up_holds_nothing() -> None:
    async with open_server(step_seconds=0.005) as server:
        client = Http1Client(await connect(server.port))
        await client.ask(chat_body(max_tokens=400), {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"})
        await wait_for(lambda: server.engine.num_open == 1)
        await client.half_close()
        await wait_for(lambda: server.engine.num_open == 0)
        await client.stream.aclose()


async def test_a_head_of_any_size_up_to_the_limit() -> None:
    async with open_server() as server:
        most = MAX_HEADER_BYTES - 200
        fits = request("/healthz", headers=f"Connection: close\r\nA: {'a' * most}\r\n")
        assert (await talk(server, fits)).startswith(b"HTTP/1.1 200")
        assert (await talk(server, fits[:9000], fits[9000:])).startswith(b"HTTP/1.1 200")
        # At once, in parts, without an end, and as many small fields.
        large = request("/healthz", headers=f"A: {'a' * MAX_HEADER_BYTES}\r\n")
        small = request("/healthz", headers="A: b\r\n" * (MAX_HEADER_BYTES // 5))
        for parts in ([large], [large[:9000], large[9000:]], [large[:-4], b"a" * 300_000], [small]):
            status, error = error_of(await talk(server, *parts))
            assert (status, error["code"]) == (431, "headers_too_large")
            assert f"{MAX_HEADER_BYTES:,}" in error["message"]


async def test_over_http2_a_head_beyond_the_limit_ends_the_connection() -> None:
    async with open_server() as server:
        for num_bytes, is_taken in ((MAX_HEADER_BYTES - 1000, True), (MAX_HEADER_BYTES, False)):
            client = Http2Client(await connect(server.port))
            await client.ask(chat_body(max_tokens=1), {"a": "a" * num_bytes})
            kind = h2.events.ResponseReceived if is_taken else h2.events.ConnectionTerminated
            await client.read_event(kind, stream_id=1 if is_taken else 0)
            await client.stream.aclose()
        assert server.engine.num_open == 0


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),  # TLS
        (b"\x00" * 1_000_000, 400),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),  # no host
        (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (request(CHAT, method="POST", headers="Transfer-Encoding: chunked\r\n") + b"no chunk\r\n", 400),
    ],
)
async def test_what_is_no_http_gets_an_answer(sent: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with open_server() as server:
        found, error = error_of(await talk(server, sent))
        assert found == status
        assert set(error) == {"message", "type", "param", "code"}
        assert (await server.client.get("/healthz")).status_code == 200
    assert not caplog.records


async def test_over_http2_a_stream_that_broke_off_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even its failure could be told."""
    break_envelope(monkeypatch, CompletionEnvelope, number=10)
    break_envelope(monkeypatch, CompletionEnvelope, "failure")
    async with open_server() as server:
        client = Http2Client(await connect(server.port))
        body = {"model": "fake", "prompt": "once", "max_tokens": 30, "stream": True}
        await client.ask(body, {}, path=COMPLETIONS)
        await client.read_event(h2.events.StreamReset)
        broken = next(event for event in client.events if isinstance(event, h2.events.StreamReset))
        assert broken.error_code == h2.errors.ErrorCodes.INTERNAL_ERROR
        await client.ask(body, {}, path=COMPLETIONS, stream_id=3)
        await client.read_event(h2.events.StreamEnded, stream_id=3)
        assert b"[DONE]" in client.received
        await client.stream.aclose()


async def test_over_http2_an_upload_in_crumbs_that_is_refused_holds_nobody_up() -> None:
    async with open_server() as server:
        client = Http2Client(await connect(server.port))
        names = {":method": "POST", ":path": "/nothing", ":scheme": "http", ":authority": "localhost"}
        client.connection.send_headers(1, list(names.items()))
        for _ in range(3000):
            client.connection.send_data(1, b"a")
        client.connection.send_data(1, b"a", end_stream=True)
        await client.flush()
        await client.ask(chat_body(max_tokens=1), {}, stream_id=3)
        await client.read_event(h2.events.StreamEnded, stream_id=3)
        await client.stream.aclose()
