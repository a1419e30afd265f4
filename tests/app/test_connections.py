"""Clients that leave, stall or stay: whatever they do, the seat is free within a step."""

from __future__ import annotations

import gc
import json
import random
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
import trio
import trio.testing

from app import server as app_server
from app.api.generation import HEARTBEAT_SECONDS
from app.api.requests import BODY_TIMEOUT_SECONDS
from app.connections import Connection, ConnectionConfig
from app.http import create_app
from tests import fakes
from tests.app.serving import CHAT, COMPLETIONS, Driver, Server, chat_body, events, make_settings, open_app, open_server
from tests.app.wire import count_tasks, wait_for
from tests.fakes import expected_output
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from app.http import Context
    from engine.engine import Engine
    from engine.handle import GenerationRequest, Handle


def is_clean(engine: Engine) -> bool:
    kv = engine.snapshot()["kv"]
    return engine.num_open == 0 and kv["used"] == 0 and kv["free"] + kv["cached"] == kv["total"]


async def open_request(server: Server, body: dict[str, Any], *, path: str = CHAT) -> trio.SocketStream:
    """Send a request by hand and leave the answer unread."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    stream = await trio.open_tcp_stream("127.0.0.1", server.port)
    await stream.send_all(head.encode() + content)
    return stream


@pytest.mark.parametrize("stream", [True, False])
async def test_on_http2_the_other_streams_of_the_connection_go_on(stream: bool) -> None:
    async with open_server(step_seconds=0.005) as server:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        connection.initiate_connection()
        socket = await trio.open_tcp_stream("127.0.0.1", server.port)
        for stream_id, max_tokens in ((1, 400), (3, 30)):
            content = json.dumps(chat_body(max_tokens=max_tokens, stream=stream)).encode()
            connection.send_headers(
                stream_id,
                [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "localhost"),
                 ("content-type", "application/json")],
            )  # fmt: skip
            connection.send_data(stream_id, content, end_stream=True)
        await socket.send_all(connection.data_to_send())
        await wait_for(lambda: server.engine.snapshot()["requests"]["running"] == 2)
        connection.reset_stream(1)
        await socket.send_all(connection.data_to_send())
        received, ended = b"", False
        with trio.fail_after(PATIENCE_SECONDS):
            while not ended:
                for event in connection.receive_data(await socket.receive_some(65536)):
                    if isinstance(event, h2.events.DataReceived) and event.stream_id == 3:
                        received += event.data or b""
                    ended = ended or (isinstance(event, h2.events.StreamEnded) and event.stream_id == 3)
        assert b"[DONE]" in received if stream else b'"finish_reason": "length"' in received
        await wait_for(lambda: is_clean(server.engine))
        assert server.engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"client": {"decode": 1}}
        await socket.aclose()


async def test_a_connection_that_its_client_closed_is_gone_at_once() -> None:
    """Not when it would have been idle for long: until then it would hold a file descriptor."""
    async with open_server() as server:
        await trio.testing.wait_all_tasks_blocked(0.05)  # the listener's own task comes a moment after the server
        before = count_tasks()
        for path in ("/healthz", "/v1/models"):
            for _ in range(5):
                async with httpx.AsyncClient(base_url=server.url) as client:
                    assert (await client.get(path)).status_code == 200
        await (await open_request(server, chat_body(max_tokens=5))).aclose()
        await trio.testing.wait_all_tasks_blocked(0.05)
        await wait_for(lambda: count_tasks() == before)


async def test_clients_that_hang_up_in_the_middle_of_a_refused_upload_end_alone() -> None:
    """The refusal, the end of the upload and the end of the connection meet in every order."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: evil.com\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"

    async def hang_up(port: int, number: int) -> None:
        for turn in range(10):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.send_all(head.encode())
            await trio.sleep(0.003 * ((number + turn) % 4))
            if turn % 2:
                await stream.send_eof()
            await stream.aclose()

    async with open_server() as server:
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(hang_up, server.port, number)
            await trio.sleep(0.1)
        assert (await server.client.get("/healthz")).status_code == 200


async def test_whatever_a_connection_raises_ends_that_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def break_down(connection: Connection) -> None:
        raise trio.BusyResourceError("in use")

    async with open_server() as server:
        monkeypatch.setattr(Connection, "_read_data", break_down)
        async with httpx.AsyncClient(base_url=server.url) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/healthz")
        monkeypatch.undo()
        assert (await server.client.get("/healthz")).status_code == 200


async def test_a_connection_that_was_accepted_a_moment_ago_can_be_cut() -> None:
    stream, client = trio.testing.memory_stream_pair()
    connection = Connection(None, ConnectionConfig(), None, None, stream)
    await connection.cut()
    with pytest.raises(trio.ClosedResourceError):
        await connection.stream.receive_some(1)
    with pytest.raises(trio.BrokenResourceError):
        await client.send_all(b"x")


async def test_a_call_that_fails_behind_its_answer_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what its client has sent ahead nor anybody else."""

    def create(context: Context) -> Any:
        app = create_app(context)

        async def fail_at_the_end(scope: Any, *args: Any) -> None:
            await app(scope, *args)
            raise RuntimeError("a slip")

        return fail_at_the_end

    monkeypatch.setattr(app_server, "create_app", create)
    async with open_server() as server:
        stream, received = await trio.open_tcp_stream("127.0.0.1", server.port), b""
        await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        with trio.fail_after(PATIENCE_SECONDS):
            while received.count(b"alive") < 3:
                received += await stream.receive_some(65536)
        await stream.aclose()


async def test_the_end_of_an_answer_closes_a_connection_that_asked_for_it() -> None:
    """nginx speaks HTTP/1.0 to its upstreams by default: the end of the connection is the end of the stream."""
    async with open_server() as server:
        content = json.dumps(chat_body(max_tokens=2, stream=True)).encode()
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        head = f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        await stream.send_all(head.encode() + content)
        received = b""
        with trio.fail_after(PATIENCE_SECONDS):
            while chunk := await stream.receive_some(65536):
                received += chunk
        assert received.rstrip().endswith(b"data: [DONE]")
        await stream.aclose()


async def test_leaving_between_the_head_and_the_body_leaks_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app() as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(max_tokens=400, stream=True))
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        assert context.engine.num_open == 1
        driver.leave()
        await trio.sleep(0.05)
        assert is_clean(context.engine)


async def test_the_head_leaves_at_acceptance_and_silence_is_filled_with_comments(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_app(limits={"max_num_seqs": 1}, step_seconds=5.0) as (app, _), trio.open_nursery() as nursery:
        first = Driver(app, CHAT, chat_body(max_tokens=20, stream=True, timeout=1000))
        nursery.start_soon(first.run)
        assert await first.status() == 200
        waiting = Driver(app, CHAT, chat_body(max_tokens=1, stream=True, timeout=1000))
        nursery.start_soon(waiting.run)
        assert await waiting.status() == 200  # though it has no seat yet
        before = trio.current_time()
        assert b'"role":"assistant"' in await waiting.body()
        for _ in range(3):
            assert (await waiting.body()).startswith(b":")
        assert trio.current_time() - before == pytest.approx(3 * HEARTBEAT_SECONDS, abs=0.1)
        assert HEARTBEAT_SECONDS <= 15
        first.leave()
        while chunk := await waiting.body():
            last = chunk
        assert last.endswith(b"data: [DONE]\n\n")


async def test_a_model_that_says_nothing_visible_is_no_silence(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control tokens stand for no text: a minute of them sends nothing but heartbeats, and those in time."""
    monkeypatch.setattr(fakes, "next_token", lambda _: fakes.EOS)
    async with open_app(step_seconds=2.0) as (app, _), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(max_tokens=30, stream=True, ignore_eos=True))
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        heard, received = [trio.current_time()], []
        while chunk := await driver.body():
            heard.append(trio.current_time())
            received.append(chunk)
        assert max(after - before for before, after in pairwise(heard)) <= HEARTBEAT_SECONDS
        assert sum(chunk.startswith(b":") for chunk in received) >= 5
        assert received[-1].endswith(b"data: [DONE]\n\n")


async def test_text_that_comes_during_a_heartbeat_is_not_lost(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=HEARTBEAT_SECONDS * 1.5) as (app, _), trio.open_nursery() as nursery:
        driver = Driver(app, COMPLETIONS, {"prompt": "hello", "max_tokens": 6, "stream": True, "timeout": 1e6})
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        received = b""
        while (chunk := await driver.body()) or b"[DONE]" not in received:
            received += chunk
        *chunks, done = events(received.decode())
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == bytes(expected_output(b"hello", 6)).decode()
        assert done == "[DONE]"
        assert received.count(b": still here") >= 5


async def test_a_reader_that_stops_reading_gives_up_its_seat(autojump_clock: trio.testing.MockClock) -> None:
    limits = {"slow_client_seconds": 3.0}
    async with open_app(limits=limits, step_seconds=0.05) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(max_tokens=400, stream=True))
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        await driver.body()
        await trio.sleep(5)
        assert is_clean(context.engine)
        assert context.engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"slow_client": {"decode": 1}}
        received = b""
        while chunk := await driver.body():
            received += chunk
        assert b'"error"' in received
        assert b"[DONE]" not in received


async def test_the_servers_own_deadline_holds_for_streams(autojump_clock: trio.testing.MockClock) -> None:
    settings = make_settings(server={"request_timeout_seconds": 20})
    async with open_app(settings, step_seconds=1.0) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(max_tokens=400, stream=True, timeout=900))
        nursery.start_soon(driver.run)
        before = trio.current_time()
        assert await driver.status() == 200
        received = b""
        while chunk := await driver.body():
            received += chunk
        assert trio.current_time() - before == pytest.approx(20, abs=1.5)
        assert events(received.decode())[-1]["error"]["code"] == "timeout"
        await trio.sleep(2)
        assert is_clean(context.engine)


async def test_a_body_that_never_ends_is_408(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app() as (app, _), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(), more_body=True)
        nursery.start_soon(driver.run)
        before = trio.current_time()
        assert await driver.status() == 408
        assert trio.current_time() - before == pytest.approx(BODY_TIMEOUT_SECONDS, abs=0.1)
        assert json.loads(await driver.body() + await driver.body())["error"]["type"] == "timeout_error"


KINDS = ("valid", "valid", "tiny", "long", "aborted")


async def ask_at_random(server: Server, index: int, client: httpx.AsyncClient) -> None:
    """One of 200 requests: a valid one, an over-long one, one that is given up, or one of a few tokens."""
    rng = random.Random(index)
    kind = rng.choice(KINDS)
    stream = rng.random() < 0.5
    length = rng.randrange(2000, 3000) if kind == "long" else rng.randrange(1, 100)
    max_tokens = {"tiny": rng.choice([1, 2])}.get(kind, rng.randrange(3, 40))
    body = chat_body(
        "x" * length, max_tokens=max_tokens, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    if kind == "aborted":
        connection = await open_request(server, body | {"max_tokens": 400})
        await trio.sleep(rng.random() * 0.05)
        await connection.aclose()
        return
    response = await client.post(CHAT, json=body)
    if kind == "long":
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        return
    assert response.status_code == 200
    expected = bytes(expected_output([257, *b"x" * length, 258], max_tokens)).decode()
    if stream:
        *chunks, usage, done = events(response.text)
        assert done == "[DONE]"
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == expected
    else:
        usage = response.json()
        assert usage["choices"][0]["finish_reason"] == "length"
        assert usage["choices"][0]["message"]["content"] == expected
    assert usage["usage"]["completion_tokens"] == max_tokens


# Whoever keeps something of a request keeps some of these. Logs of the last steps, seconds and requests vary.
KEPT = (
    "app.",
    "engine.",
    "hypercorn.",
    "quart.",
    "h11.",
    "trio.SocketStream",
    "trio.lowlevel.Task",
    "builtins.coroutine",
)
LOGGED = {
    "engine.step_log.StepRecord",
    "engine.batch.ScheduledBatch",
    "engine.timeline.Column",
    "engine.request_log.Span",
}


async def ask_200(server: Server) -> Counter[str]:
    """200 requests, 40 at a time, until nothing is left of them; the objects that then live, by their type."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
        limiter = trio.CapacityLimiter(40)

        async def ask(index: int) -> None:
            async with limiter:
                await ask_at_random(server, index, client)

        with trio.fail_after(2 * PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                for index in range(200):
                    nursery.start_soon(ask, index)
    await server.settle()
    await wait_for(lambda: server.engine.num_streams == 0 and server.context.room.num_open == 0)
    gc.collect()
    types = [type(thing) for thing in gc.get_objects()]
    names = Counter([f"{type_.__module__}.{type_.__qualname__}" for type_ in types])
    return Counter({name: n for name, n in names.items() if name.startswith(KEPT) and name not in LOGGED})


@pytest.mark.long
@pytest.mark.parametrize("num_blocks", [256, 48])
async def test_200_random_requests_end_right_and_leave_nothing(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fake model keeps its first batches, and with them what was asked; how many that are is chance.
    monkeypatch.setattr(fakes, "MAX_BATCHES", 0)
    async with open_server(num_blocks=num_blocks, step_seconds=0.0005) as server:
        submitted = 0
        submit = server.engine.submit

        def count(request: GenerationRequest, after: Handle | None = None) -> Handle:
            nonlocal submitted
            submitted += 1
            return submit(request, after)

        monkeypatch.setattr(server.engine, "submit", count)
        rounds = [await ask_200(server) for _ in range(3)]
        requests = server.engine.snapshot()["requests"]
        assert requests["running"] == requests["waiting"] == server.engine.num_open == 0
        # Each one that came in ended once; those that were cut off may have left before they were read.
        finished, rejected = requests["finished_by_reason"], requests["rejected_by_reason"]
        aborted = requests["aborted_by_cause_and_phase"]["client"]
        kinds = Counter(random.Random(index).choice(KINDS) for index in range(200))
        assert finished["stop"] == finished["error"] == 0
        assert finished["length"] == 3 * (kinds["valid"] + kinds["tiny"])
        assert sum(rejected.values()) == rejected["context_length_exceeded"] == 3 * kinds["long"]
        assert finished["abort"] + aborted.get("door", 0) == sum(aborted.values())
        assert sum(finished.values()) + sum(rejected.values()) + aborted.get("door", 0) == submitted
        assert submitted > 3 * (200 - kinds["aborted"])
        # 40 of each 200 are given up; who looks after deadlines keeps up to sixteen of those that have ended.
        assert {name: more for name, more in (rounds[2] - rounds[1]).items() if more >= 20} == {}
        assert rounds[2]["engine.engine.Engine"] == 1
        if num_blocks == 48:
            assert server.engine.snapshot()["preemptions"] > 0
