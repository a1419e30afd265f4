"""What is refused before it was read: the connection goes on behind it, or says that it ends."""

from __future__ import annotations

import json
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
import trio
import trio.testing

from app import guard
from app.guard import LINGER_SECONDS, Guard
from tests.app.serving import CHAT, Driver, chat_body, make_settings, open_app, open_server
from tests.patience import PATIENCE_SECONDS

BODY = json.dumps(chat_body(max_tokens=1)).encode()
SECURITY: dict[str, Any] = {
    "security": {"api_keys": ["me=secret", "spent=other"]},
    "security_limits": {"spent": {"requests_per_minute": 1}},
}
KEY, SPENT = {"Authorization": "Bearer secret"}, {"Authorization": "Bearer other"}
REFUSED: list[tuple[int, str, str, dict[str, str]]] = [
    (401, "POST", CHAT, {}),
    (403, "POST", CHAT, KEY | {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}),
    (404, "POST", "/nothing", KEY),
    (405, "PUT", CHAT, KEY),
    (415, "POST", CHAT, KEY | {"Content-Type": "text/plain"}),
    (429, "POST", CHAT, SPENT),
    (429, "POST", "/chat/many", SPENT),
    (400, "POST", "http://[::1/x", {}),  # before there is a request to handle
    (400, "POST", "?x", {}),
]


def head_of(method: str, path: str, headers: dict[str, str], length: int = len(BODY)) -> bytes:
    fields = {"Host": "localhost", "Content-Type": "application/json", **headers, "Content-Length": str(length)}
    lines = [f"{method} {path} HTTP/1.1", *[f"{name}: {value}" for name, value in fields.items()]]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_answer(stream: trio.SocketStream) -> tuple[int, bytes]:
    """Status and head of an answer that says how long it is, read to its end."""
    received = b""
    with trio.fail_after(PATIENCE_SECONDS):
        while b"\r\n\r\n" not in received:
            received += await stream.receive_some(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        missing = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) - len(body)
        while missing > 0:
            missing -= len(await stream.receive_some(65536))
    return int(head[9:12]), head.lower()


async def test_behind_a_refusal_the_connection_takes_the_next_request() -> None:
    """The body comes a moment after the head, as most clients send it."""
    async with open_server(make_settings(**SECURITY)) as server:
        await server.client.post(CHAT, json=chat_body(max_tokens=1), headers=SPENT)
        for wanted, method, path, headers in REFUSED:
            async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
                await stream.send_all(head_of(method, path, headers))
                await trio.sleep(0.02)
                await stream.send_all(BODY)
                status, head = await read_answer(stream)
                assert status == wanted, head
                assert b"connection: close" not in head
                await stream.send_all(head_of("POST", CHAT, KEY) + BODY)
                assert (await read_answer(stream))[0] == 200, (wanted, path)


async def test_where_the_body_does_not_end_the_refusal_says_that_the_connection_does(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_app() as (app, _):
        for path in ("/nothing", "http://[::1/x"):
            driver = Driver(app, path, {}, more_body=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(driver.run)
                before = trio.current_time()
                start = await driver.sent.receive()
                assert trio.current_time() - before == pytest.approx(LINGER_SECONDS, abs=0.1)
                assert (b"connection", b"close") in start["headers"]
                while await driver.body():
                    pass


@pytest.fixture
def _lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits until no more of a body comes does so for very long."""
    monkeypatch.setattr(guard, "LINGER_SECONDS", 10 * PATIENCE_SECONDS)


@pytest.mark.parametrize("sent", [b"", b"x" * 50_000, b"x" * 3_000_000], ids=["nothing", "a piece", "much"])
@pytest.mark.usefixtures("_lingers")
async def test_what_is_longer_than_a_body_may_be_is_refused_by_its_head(sent: bytes) -> None:
    """At once, whatever of it comes, and the answer reaches who is still sending."""
    async with open_server() as server, await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        with trio.fail_after(PATIENCE_SECONDS):
            await stream.send_all(head_of("POST", CHAT, {}, length=1 << 30) + sent)
            status, head = await read_answer(stream)
            assert (status, b"connection: close" in head) == (413, True)
            assert await stream.receive_some(1) == b""
            await stream.send_all(b"x")  # nothing was reset


WAITING = {"Expect": "100-continue"}


@pytest.mark.parametrize(("wanted", "method", "path", "headers"), [*REFUSED, (413, "POST", CHAT, KEY)])
@pytest.mark.usefixtures("_lingers")
async def test_who_waits_with_the_body_is_refused_without_it(
    wanted: int, method: str, path: str, headers: dict[str, str]
) -> None:
    async with open_server(make_settings(**SECURITY)) as server:
        await server.client.post(CHAT, json=chat_body(max_tokens=1), headers=SPENT)
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            length = 1 << 30 if wanted == 413 else len(BODY)
            with trio.fail_after(PATIENCE_SECONDS):
                await stream.send_all(head_of(method, path, headers | WAITING, length))
                status, head = await read_answer(stream)
                assert (status, b"connection: close" in head) == (wanted, True)
                assert await stream.receive_some(1) == b""


@pytest.mark.usefixtures("_lingers")
async def test_who_waits_with_the_body_is_asked_for_it_by_who_reads_it() -> None:
    async with open_server() as server, await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
        with trio.fail_after(PATIENCE_SECONDS):
            for _ in range(2):
                await stream.send_all(head_of("POST", CHAT, WAITING))
                assert await stream.receive_some(65536) == b"HTTP/1.1 100 \r\n\r\n"
                await stream.send_all(BODY)
                assert (await read_answer(stream))[0] == 200
            # Who does not wait after all is not asked.
            await stream.send_all(head_of("POST", CHAT, WAITING) + BODY)
            assert (await read_answer(stream))[0] == 200


async def test_the_body_of_what_is_refused_is_not_kept(autojump_clock: trio.testing.MockClock) -> None:
    kept: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, receive)
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()

    async def read(receive: Any) -> None:
        while True:
            kept.append((await receive())["body"])

    driver = Driver(Guard(app), CHAT, {"a": 1}, more_body=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.run)
        await trio.sleep(0.1)
        driver.send_rest(b"x" * 100)
        assert await driver.status() == 401
        while await driver.body():
            pass
    assert not any(kept[1:])


async def test_on_http2_the_rest_of_what_was_refused_ends_no_connection() -> None:
    async with open_server() as server:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        connection.initiate_connection()
        socket = await trio.open_tcp_stream("127.0.0.1", server.port)
        answered: dict[int, bytes] = {}

        def ask(stream_id: int, path: str, **more: str) -> None:
            names = (":method", ":path", ":scheme", ":authority", "content-type")
            values = ("POST", path, "http", "localhost", "application/json")
            fields = dict(zip(names, values, strict=True)) | {name.replace("_", "-"): more[name] for name in more}
            connection.send_headers(stream_id, list(fields.items()))

        async def until_ended(stream_id: int) -> None:
            await socket.send_all(connection.data_to_send())
            ended = False
            with trio.fail_after(PATIENCE_SECONDS):
                while not ended:
                    data = await socket.receive_some(65536)
                    assert data, "the connection was closed"
                    for event in connection.receive_data(data):
                        if isinstance(event, h2.events.ResponseReceived):
                            answered[event.stream_id] = dict(event.headers)[b":status"]
                        ended = ended or (isinstance(event, h2.events.StreamEnded) and event.stream_id == stream_id)

        ask(1, "/nothing")
        await until_ended(1)
        connection.send_data(1, BODY)
        connection.send_data(1, BODY, end_stream=True)
        ask(3, CHAT)
        connection.send_data(3, BODY, end_stream=True)
        await until_ended(3)
        ask(5, CHAT, content_length=str(1 << 30), expect="100-continue")
        await until_ended(5)
        assert answered == {1: b"404", 3: b"200", 5: b"413"}
        await socket.aclose()
