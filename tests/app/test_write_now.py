"""Pieces of a stream that go to the socket from the engine's task: the same bytes, in order, whatever it takes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import trio
import trio.testing
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState

from app.api.anthropic_answer import MessageEnvelope
from app.api.envelope import ChatEnvelope, CompletionEnvelope, Envelope
from app.api.responses_answer import ResponseEnvelope
from app.call_scope import WRITE_NOW
from app.connections import Connection, ConnectionConfig
from app.logs import FIELDS
from app.sse import HEARTBEAT
from tests.app.serving import (
    CHAT,
    COMPLETIONS,
    ENDS,
    MESSAGES,
    RESPONSES,
    ROUTES,
    Driver,
    body_for,
    break_envelope,
    error_at_the_end,
    events,
    open_app,
    open_server,
)
from tests.bench.versus.client import EventReader
from tests.fakes import expected_output

PROMPT = "once"


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, **fields}


def text_of(stream: list[Any]) -> str:
    assert stream[-1] == "[DONE]"
    return "".join([choice["text"] for event in stream[:-1] for choice in event["choices"]])


def expected(num_tokens: int) -> str:
    return bytes(expected_output(PROMPT.encode(), num_tokens)).decode()


class Wire:
    """Both ways that bytes take to a client, in order.

    Args:
        full_at: the number of the write, from 1, that does not all go out.
    """

    def __init__(self, full_at: int = 0) -> None:
        self.seen: list[tuple[float, bytes]] = []
        self.num_written = 0
        self._full_at = full_at

    def write_now(self, data: bytes) -> bool:
        self.num_written += 1
        self.seen.append((trio.current_time(), data))
        return self.num_written != self._full_at

    async def read(self, driver: Driver) -> None:
        await driver.status()
        while data := await driver.body():
            self.seen.append((trio.current_time(), data))

    @property
    def data(self) -> str:
        return b"".join([data for _, data in self.seen]).decode()


async def drive(app: Any, wire: Wire, num_tokens: int, **fields: Any) -> None:
    driver = Driver(app, COMPLETIONS, body(num_tokens, **fields))
    driver.scope[WRITE_NOW] = wire.write_now
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.run)
        await wire.read(driver)
        driver.leave()


async def test_all_but_the_first_piece_and_the_end_is_written_at_once(autojump_clock: trio.testing.MockClock) -> None:
    wire = Wire()
    async with open_app(step_seconds=1.0) as (app, _):
        await drive(app, wire, 40)
    assert text_of(events(wire.data)) == expected(40)
    assert wire.num_written == 39
    # What was written counts: a stream that moves needs no sign of life.
    assert HEARTBEAT.decode() not in wire.data


async def test_choices_are_written_each_in_order(autojump_clock: trio.testing.MockClock) -> None:
    wire = Wire()
    async with open_app(step_seconds=1.0) as (app, _):
        await drive(app, wire, 20, n=3)
    texts = ["", "", ""]
    for event in events(wire.data)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected(20)] * 3
    assert wire.num_written > 30


async def test_what_a_full_socket_did_not_take_is_followed_at_once(autojump_clock: trio.testing.MockClock) -> None:
    wire = Wire(full_at=5)
    async with open_app(step_seconds=1.0) as (app, _):
        await drive(app, wire, 20)
    assert text_of(events(wire.data)) == expected(20)
    (stuck_at, _), (flushed_at, flush) = wire.seen[5:7]
    assert (flushed_at - stuck_at, flush) == (0.0, HEARTBEAT)
    assert wire.data.count(HEARTBEAT.decode()) == 1


ENVELOPES: dict[str, type[Envelope]] = {
    CHAT: ChatEnvelope,
    COMPLETIONS: CompletionEnvelope,
    RESPONSES: ResponseEnvelope,
    MESSAGES: MessageEnvelope,
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", ["opening", "piece", "finish", "closing"])
async def test_a_fault_while_a_stream_is_written_is_told_in_it_and_ends_it_alone(
    path: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_envelope(monkeypatch, ENVELOPES[path], method, number=3 if method == "piece" else 1)
    asked = body_for(path, PROMPT, max_tokens=30, stream=True)
    async with open_server() as server:
        answer = await server.client.post(path, json=asked)
        assert answer.status_code == 200
        assert error_at_the_end(answer.text)["message"] == "The server made a mistake; its log says more."
        assert method == "closing" or not [end for end in ENDS if end in answer.text]
        assert "secret" not in answer.text
        await server.settle()
        whole = await server.client.post(path, json=asked)
        assert [end for end in ENDS if end in whole.text]
        requests = server.engine.snapshot()["requests"]
    told = [record for record in caplog.records if record.getMessage() == "an answer failed"]
    assert [getattr(record, FIELDS)["request_id"] for record in told] == [answer.headers["x-request-id"]]
    assert "a secret" in caplog.text
    is_early = method in ("opening", "piece")
    assert requests["finished_by_reason"]["length"] == (1 if is_early else 2)
    assert set(requests["aborted_by_cause_and_phase"]) == ({"error"} if is_early else set())


async def test_what_comes_before_a_fault_has_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    break_envelope(monkeypatch, CompletionEnvelope, number=3)
    async with open_server() as server:
        *told, _ = events((await server.client.post(COMPLETIONS, json=body(30))).text)
    text = "".join([event["choices"][0]["text"] for event in told])
    assert text
    assert text != expected(30)
    assert expected(30).startswith(text)


async def test_where_not_even_the_failure_can_be_told_the_connection_breaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_envelope(monkeypatch, CompletionEnvelope, number=10)
    break_envelope(monkeypatch, CompletionEnvelope, "failure")
    async with open_server() as server:
        with pytest.raises(httpx.RemoteProtocolError):
            await server.client.post(COMPLETIONS, json=body(30))
        await server.settle()
        whole = await server.client.post(COMPLETIONS, json=body(30))
        assert text_of(events(whole.text)) == expected(30)
    assert caplog.records[0].getMessage() == "an answer failed"


async def test_over_a_socket_the_server_writes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    plain = Connection.write_now

    def write_now(self: Connection, data: bytes) -> bool:
        written.append(data)
        return plain(self, data)

    monkeypatch.setattr(Connection, "write_now", write_now)
    async with open_server() as server:
        answers = [await server.client.post(COMPLETIONS, json=body(50)) for _ in range(2)]  # one connection
        assert [text_of(events(answer.text)) for answer in answers] == [expected(50)] * 2
    assert len(written) > 50


class Pouring:
    """Writes numbered lines until the socket is full, `rounds` times; then sends one as usual."""

    def __init__(self, rounds: int) -> None:
        self.lines: list[bytes] = []
        self._rounds = rounds

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self._rounds):
            while scope[WRITE_NOW](self._line()):
                pass
            scope[WRITE_NOW](self._line())  # behind the other, which waits
            await send({"type": "http.response.body", "body": self._line(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _line(self) -> bytes:
        self.lines.append(b"%06d " % len(self.lines) + bytes(1000) + b"\n")
        return self.lines[-1]


async def test_a_rest_goes_ahead_of_what_is_sent_next() -> None:
    app = Pouring(rounds=5)
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = await trio.open_tcp_stream(*listener.getsockname())
        accepted, _ = await listener.accept()
    wrapped: Any = ASGIWrapper(app)
    state: Any = ConnectionState({})
    server: Any = trio.SocketStream(accepted)
    connection = Connection(wrapped, ConnectionConfig(), WorkerContext(None), state, server)
    reader = EventReader()
    async with client, trio.open_nursery() as nursery:
        nursery.start_soon(connection.run)
        await client.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while data := await client.receive_some(1 << 20):
            reader.feed(data)
    assert reader.body == b"".join(app.lines)


async def test_a_connection_that_is_gone_takes_nothing_and_says_nothing() -> None:
    left, right = trio.socket.socketpair()
    right.close()
    state: Any = ConnectionState({})
    app: Any = None
    stream: Any = trio.SocketStream(left)
    connection = Connection(app, ConnectionConfig(), WorkerContext(None), state, stream)
    assert not connection.write_now(b"lost")
    await stream.aclose()
    assert not connection.write_now(b"lost")
