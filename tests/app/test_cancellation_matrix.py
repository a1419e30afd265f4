"""Who leaves, when, how and over what: in every combination nothing is left, and a neighbour notices nothing.

What is not among the combinations is so by nature:

* *A client that stops reading* shows itself by what it does not take. Until it decodes, there is nothing to take; a
  whole answer is sent when it has ended. So `decoding` stands for all phases before it, for streams, and `finished` for
  whole answers; a stream that is finished in the engine and unread is a case of its own. A small answer is not among
  them: it lies in the system's buffers, and nobody can tell that it is not read.
* *FIN from a client that does not read* on HTTP/1.1 is the same: the server waits for what it sends. A client that
  closes its socket with an unread answer sends RST.
* *RST_STREAM when the answer has ended* is no such thing: the stream is closed.
* *A client that vanishes* does so in one of two ways, whatever its phase: while something is sent to it, and while
  nothing is (`tests/app/test_vanished_clients.py`).
"""

from __future__ import annotations

import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import h2.events
import pytest
import trio
import trio.testing

from app import lifecycle as lifecycle_module
from app import server as app_server
from app.api.many import MANY_URL
from app.listening import open_listening_socket
from engine import ingress
from tests import fakes
from tests.app import serving
from tests.app.serving import CHAT, Server, chat_body, make_settings, open_server
from tests.app.wire import PIPELINED, Http1Client, Http2Client, connect, count_tasks, wait_for
from tests.fakes import expected_output
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

STEP_SECONDS = 0.002
# The victim's key has one place; it is free again when the next request of that key is answered.
SECURITY: dict[str, Any] = {
    "security": {"api_keys": ["me=mine", "neighbour=other"]},
    "security_limits": {"me": {"max_concurrent": 1}},
}
MINE = {"Authorization": "Bearer mine"}
OTHER = {"Authorization": "Bearer other"}

PHASES = ("tokenizing", "queued", "prefill", "first chunk", "decoding", "finished")
COUNTED_AS = {"tokenizing": "door", "queued": "queued", "prefill": "prefill"}


@dataclass(frozen=True)
class Way:
    """How a client leaves."""

    name: str
    open: Callable[[trio.SocketStream], Any]
    leave: Callable[[Any], Awaitable[None]]

    def __str__(self) -> str:
        return self.name


HTTP1_WAYS = (
    Way("http1-fin", Http1Client, Http1Client.half_close),
    Way("http1-rst", Http1Client, Http1Client.reset),
    Way("http1-pipelined-fin", lambda stream: Http1Client(stream, PIPELINED), Http1Client.half_close),
    Way("http1-pipelined-rst", lambda stream: Http1Client(stream, PIPELINED), Http1Client.reset),
    Way("http1-crlf-fin", lambda stream: Http1Client(stream, b"\r\n"), Http1Client.half_close),
)
HTTP2_WAYS = (
    Way("http2-fin", Http2Client, Http2Client.half_close),
    Way("http2-rst", Http2Client, Http2Client.reset),
    Way("http2-rst_stream", Http2Client, Http2Client.reset_stream),
    Way("http2-goaway", Http2Client, Http2Client.go_away),
)
WAYS = HTTP1_WAYS + HTTP2_WAYS


@asynccontextmanager
async def open_neighbour(server: Server, num_tokens: int = 60) -> AsyncIterator[None]:
    """Somebody who is served all the while, and gets what they would get alone."""
    answers = []

    async def ask() -> None:
        body = chat_body("neighbour", max_tokens=num_tokens)
        answers.append(await server.client.post(CHAT, json=body, headers=OTHER))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await wait_for(lambda: server.engine.snapshot()["requests"]["running"] == 1)
        yield
        assert not answers, "the neighbour was no neighbour"
    expected = expected_output([257, *b"neighbour", 258], num_tokens)
    assert answers[0].json()["choices"][0]["message"]["content"] == bytes(expected).decode()


def line_of(server: Server, n: int = 1) -> dict[str, Any]:
    """The last of the victim's choices, as the engine sees it; empty where it does not see all `n` of them."""
    lines = [line for line in server.engine.snapshot()["active"] if line["key"] == "me"]
    return lines[-1] if len(lines) == n else {}


def body_of(phase: str, *, stream: bool) -> dict[str, Any]:
    """What the victim asks, so that it can be met there."""
    match phase:
        case "tokenizing":
            return chat_body("slow" * 20, max_tokens=400, stream=stream)
        case "prefill":  # nothing of it is cached
            return chat_body(("x" if stream else "y") * 480, max_tokens=10, stream=stream)
        case "finished":
            return chat_body(max_tokens=3, stream=stream)
    return chat_body(max_tokens=400, stream=stream)


async def reach(phase: str, server: Server, client: Http1Client, *, stream: bool, n: int = 1) -> None:
    """Wait until the victim is there, with all its choices."""
    match phase:
        case "tokenizing":
            await wait_for(lambda: server.engine.num_open == 2)
        case "queued":
            await wait_for(lambda: line_of(server, n).get("state") == "waiting")
        case "prefill":
            await wait_for(lambda: line_of(server).get("phase") == "prefill" and line_of(server)["computed_tokens"])
        case "first chunk" if stream:
            await client.read_until(b'"content":"[^"]')
        case "first chunk":
            await wait_for(lambda: line_of(server).get("output_tokens", 0) >= 1)
        case "decoding":
            await wait_for(lambda: line_of(server, n).get("output_tokens", 0) >= 5)
        case "finished":
            await client.read_until(rb"\[DONE\]" if stream else b'"usage"')


async def has_place(server: Server) -> bool:
    """Whether the victim's key may ask again."""
    async with await connect(server.port) as stream:
        client = Http1Client(stream)
        await client.ask({"prompt": "a"}, MINE, path="/tokenize")
        await client.read_until(rb"\r\n\r\n{")
    return client.received.startswith(b"HTTP/1.1 200")


async def wait_for_place(server: Server) -> None:
    with trio.fail_after(PATIENCE_SECONDS):
        while not await has_place(server):
            await trio.sleep(0.01)


@asynccontextmanager
async def open_scene(
    *, seats: int = 2, settings: dict[str, Any] | None = None, limits: dict[str, Any] | None = None
) -> AsyncIterator[Server]:
    """A server of which nothing may be left, neither in the engine nor of tasks."""
    settings, limits = {**SECURITY, **(settings or {})}, {"max_num_seqs": seats, **(limits or {})}
    async with open_server(make_settings(**settings), limits=limits, step_seconds=STEP_SECONDS) as server:
        await trio.testing.wait_all_tasks_blocked(0.01)  # the listener's own task comes a moment after the server
        before = count_tasks()
        yield server
        await server.settle()
        await server.client.aclose()
        await wait_for(lambda: count_tasks() == before)
        assert server.engine.num_streams == 0


@pytest.mark.parametrize(
    ("phase", "way", "n"),
    [
        pytest.param(p, w, n, id=f"{p}-{w}-{n}")
        for n, phases, ways in ((1, PHASES, WAYS), (3, ("queued", "decoding"), HTTP2_WAYS))
        for p in phases
        for w in ways
        if (p, w.name) != ("finished", "http2-rst_stream")
    ],
)
async def test_who_leaves_leaves_nothing(phase: str, way: Way, n: int, slow_tokenizer: threading.Event) -> None:
    """First from a stream, then from a whole answer, with all its choices."""
    async with open_scene(seats=1 if phase == "queued" else 1 + n) as server:
        for stream in (True, False):
            slow_tokenizer.clear()
            async with open_neighbour(server):
                client = way.open(await connect(server.port))
                await client.ask(body_of(phase, stream=stream) | {"n": n}, MINE)
                await reach(phase, server, client, stream=stream, n=n)
                steps = server.engine.snapshot()["step"]["count"]
                await way.leave(client)
                if phase == "tokenizing":
                    # The text is on a thread, which nobody can stop. What the call held is free before that has ended.
                    await wait_for_place(server)
                    assert server.engine.num_open == 2
                    slow_tokenizer.set()
                await wait_for(lambda: server.engine.num_open == 1)
                if phase != "tokenizing":
                    # The event loop has turned about ten times until then, and in a turn there is one step at most.
                    assert server.engine.snapshot()["step"]["count"] - steps <= 15
                assert await has_place(server)
            await client.stream.aclose()
        requests = server.engine.snapshot()["requests"]
        if phase == "finished":
            assert requests["finished_by_reason"]["length"] == 4
            assert not requests["aborted_by_cause_and_phase"]
        else:
            assert requests["aborted_by_cause_and_phase"] == {"client": {COUNTED_AS.get(phase, "decode"): 2 * n}}


@pytest.fixture
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Texts with this word in them are tokenized until the event is set, aside, as long ones are."""
    go_on = threading.Event()
    plain = fakes.FakeTokenizer.encode

    def encode(self: fakes.FakeTokenizer, text: str, **how: Any) -> list[int]:
        if "slow" in text:
            go_on.wait(PATIENCE_SECONDS)
        return plain(self, text, **how)

    monkeypatch.setattr(fakes.FakeTokenizer, "encode", encode)
    monkeypatch.setattr(ingress, "LONG_TEXT", 50)
    yield go_on
    go_on.set()


# Every token brings more than a kilobyte with it.
LOUD = {"logprobs": True, "top_logprobs": 20}
SMALL_BUFFER_BYTES = 4096
LONG = 3600.0


@pytest.fixture
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system holds back little of what is sent."""

    def open_(host: str, port: int) -> socket.socket:
        listener = open_listening_socket(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        return listener

    monkeypatch.setattr(serving, "open_listening_socket", open_)


async def open_silent(
    server: Server, protocol: str, *, stream: bool, num_tokens: int = 400, path: str = CHAT, **fields: Any
) -> Http1Client:
    """A client that asks and then takes nothing."""
    connection = await connect(server.port, buffer_bytes=SMALL_BUFFER_BYTES)
    client = Http1Client(connection) if protocol == "http1" else Http2Client(connection, window=0)
    body = chat_body(max_tokens=num_tokens, stream=stream, **LOUD, **fields)
    await client.ask({"requests": [body]} if path == MANY_URL else body, MINE, path=path)
    return client


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize(
    ("phase", "stream", "n"),
    [("decoding", True, 1), ("decoding", True, 3), ("finished", True, 1), ("finished", False, 1)],
)
@pytest.mark.parametrize("protocol", ["http1", "http2"])
async def test_who_stops_reading_loses_seat_and_place(protocol: str, phase: str, stream: bool, n: int) -> None:
    slow_seconds = 0.05 if phase == "decoding" else LONG
    # Twice as long its connection waits for it: longer than the process may be held up until its place is asked for.
    settings = {"server": {"slow_client_seconds": 0.75}}
    async with open_scene(seats=1 + n, settings=settings, limits={"slow_client_seconds": slow_seconds}) as server:
        async with open_neighbour(server, num_tokens=150):
            num_tokens = 400 if phase == "decoding" else 30
            client = await open_silent(server, protocol, stream=stream, num_tokens=num_tokens, n=n)
            await wait_for(lambda: server.engine.num_open == 1 + n)
            await wait_for(lambda: server.engine.num_open == 1)
            assert not await has_place(server)  # half an answer is on its way
        await wait_for_place(server)
        requests = server.engine.snapshot()["requests"]
        if phase == "decoding":
            assert requests["aborted_by_cause_and_phase"] == {"slow_client": {"decode": n}}
        else:
            assert requests["finished_by_reason"]["length"] == 2
            assert not requests["aborted_by_cause_and_phase"]
        if isinstance(client, Http2Client):  # the connection goes on
            await client.read_event(h2.events.StreamReset)
            await client.ask(chat_body(max_tokens=1), MINE, stream_id=3)
            await client.read_event(h2.events.ResponseReceived, stream_id=3)
            await client.stream.aclose()
        else:
            await client.read_to_end()
        await client.stream.aclose()


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize("path", [CHAT, MANY_URL])
@pytest.mark.parametrize("protocol", ["http1", "http2"])
async def test_who_does_not_read_keeps_no_seat_beyond_the_deadline(protocol: str, path: str) -> None:
    """Though the limits for those who stop reading are far, and the answer would have come to its end."""
    settings = {"server": {"slow_client_seconds": LONG}}
    async with open_scene(settings=settings, limits={"slow_client_seconds": LONG}) as server:
        client = await open_silent(server, protocol, stream=True, path=path, timeout=200 * STEP_SECONDS)
        await wait_for(lambda: line_of(server).get("output_tokens", 0) >= 1)
        await wait_for(lambda: server.engine.num_open == 0)
        assert server.engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"timeout": {"decode": 1}}
        await client.reset()
        await wait_for_place(server)


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("way", [HTTP1_WAYS[1], *HTTP2_WAYS], ids=str)
async def test_who_leaves_with_an_answer_unread_leaves_nothing(way: Way, stream: bool) -> None:
    """Though the limits for those who stop reading are far."""
    settings = {"server": {"slow_client_seconds": LONG}}
    async with open_scene(settings=settings, limits={"slow_client_seconds": LONG}) as server:
        client = await open_silent(server, way.name.partition("-")[0], stream=stream, num_tokens=30)
        await wait_for(lambda: server.engine.snapshot()["requests"]["finished_by_reason"]["length"] == 1)
        assert not await has_place(server)
        await way.leave(client)
        await wait_for_place(server)
        await client.stream.aclose()


@pytest.mark.usefixtures("_small_buffers")
async def test_who_does_not_read_holds_up_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_server, "GRACEFUL_SECONDS", 0.2)
    monkeypatch.setattr(lifecycle_module, "FAREWELL_SECONDS", LONG)
    settings = make_settings(server={"slow_client_seconds": LONG})
    limits = {"max_num_seqs": 4, "slow_client_seconds": LONG}
    async with open_server(settings, limits=limits) as server:
        clients = [
            await open_silent(server, protocol, stream=stream, num_tokens=50)
            for protocol in ("http1", "http2")
            for stream in (True, False)
        ]
        await wait_for(lambda: server.engine.snapshot()["requests"]["finished_by_reason"]["length"] == 4)
        lifecycle = server.context.lifecycle
        with trio.fail_after(PATIENCE_SECONDS):
            await lifecycle.drain(server.engine, server.context.telemetry, LONG)
            await lifecycle.finished.wait()
        for client in clients:
            await client.stream.aclose()
