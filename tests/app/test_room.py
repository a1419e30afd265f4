"""Files run out: who has nothing to do makes room, who is served stays, and probes are answered all the while."""

from __future__ import annotations

import json
import re
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import h2.events
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from app import room as room_module
from app.api import requests as requests_module
from app.open_files import raise_open_files
from app.room import Room
from app.turnstile import Turnstile
from tests.app.serving import CHAT, chat_body, make_settings, open_server
from tests.app.test_processes import Process
from tests.app.test_protocols import request
from tests.app.wire import Http1Client, Http2Client, connect, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.app.serving import Server

KEY = {"Authorization": "Bearer mine"}
OPERATOR = "Authorization: Bearer operator\r\n"
SETTINGS = make_settings(security={"api_keys": ["me=mine"], "admin_token": "operator"})
NUM_USUAL, NUM_SPARE = 5, 1  # of eight files


@asynccontextmanager
async def open_narrow_server(monkeypatch: pytest.MonkeyPatch, **fake: Any) -> AsyncIterator[Server]:
    """One that has files for six connections, the last of them for probes and operators."""
    monkeypatch.setattr(room_module, "most_open_files", lambda: 8)
    monkeypatch.setattr(room_module, "count_open_files", lambda: 0)
    async with open_server(SETTINGS, **fake) as server:
        assert server.context.room.most == NUM_USUAL
        yield server


async def ask(client: Http1Client, path: str, headers: str = "") -> tuple[int, bytes]:
    """Status and head of the answer to a GET, whose body is read where it has an end."""
    client.received = b""
    await client.stream.send_all(request(path, headers=headers))
    await client.read_until(rb"\r\n\r\n")
    head = client.received.partition(b"\r\n\r\n")[0].lower()
    length = re.search(rb"content-length: (\d+)", head)
    await client.read_until(rb"(?s)\r\n\r\n.{%d}" % (0 if length is None else int(length[1])))
    return int(head.split()[1]), head


async def test_the_longest_idle_makes_room(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it has been answered, has said half a word or nothing; who spoke last is the last to go."""
    async with open_narrow_server(monkeypatch) as server, AsyncExitStack() as stack:

        async def come() -> Http1Client:
            return Http1Client(await stack.enter_async_context(await connect(server.port)))

        answered, half, silent = await come(), await come(), await come()
        over_http2 = Http2Client(await stack.enter_async_context(await connect(server.port)))
        await half.stream.send_all(b"GET /heal")
        assert (await ask(answered, "/healthz"))[0] == 200
        await over_http2.ask({}, {}, path="/tokenize")
        await over_http2.read_event(h2.events.StreamEnded)
        last = await come()
        assert (await ask(last, "/healthz"))[0] == 200
        assert (await ask(answered, "/healthz"))[0] == 200
        for victim in (half, silent, over_http2, last, answered):
            newcomer = await come()
            assert (await ask(newcomer, "/v1/models", "Authorization: Bearer mine\r\n"))[0] == 200
            await victim.read_to_end()
            assert server.context.room.num_open == NUM_USUAL
        assert server.context.room.num_closed == {"idle": 5, "full": 0}
    assert [record.message.split(", ", 1)[1] for record in caplog.records if "idle" in record.message] == [
        "ulimit -n), and all are open: for each that comes the longest idle one is closed"
    ]


async def test_where_none_is_idle_probes_and_operators_are_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_narrow_server(monkeypatch, step_seconds=0.05) as server, AsyncExitStack() as stack:

        async def come() -> trio.SocketStream:
            await trio.testing.wait_all_tasks_blocked(0.001)  # the client before knows first that its answer is over
            return await stack.enter_async_context(await connect(server.port))

        served = [Http1Client(await come()) for _ in range(NUM_USUAL)]
        for client in served:
            await client.ask(chat_body(max_tokens=400, stream=True), KEY)
            await client.read_until(rb"\r\n\r\n")
        # Who asks for an answer is told; the place is free again at once, on HTTP/2 for the next who comes.
        crowded = Http1Client(await come())
        await crowded.ask(chat_body(), KEY)
        await crowded.read_until(rb"\}\}")
        head, _, body = crowded.received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in head.lower()
        assert b"retry-after: 1" in head.lower()
        assert json.loads(body)["error"]["code"] == "busy"
        await crowded.read_to_end()
        over_http2 = Http2Client(await come())
        await over_http2.ask(chat_body(), KEY)
        await over_http2.read_event(h2.events.StreamEnded)
        assert over_http2.status == 503
        mine = "Authorization: Bearer mine\r\n"
        for path, headers, expected in (
            ("/healthz", "", 200), ("/readyz", "", 200), ("/admin/config", OPERATOR, 200), ("/metrics", OPERATOR, 200),
            ("/static/relevo.css", "", 200), ("/login", "", 200), ("/metrics", mine, 401),
            ("/v1/models", mine, 503), ("/v1/models", OPERATOR, 503), ("/docs", "", 503), ("/", mine, 503),
        ):  # fmt: skip
            prober = Http1Client(await come())
            status, head = await ask(prober, path, headers)
            assert (path, status, b"connection: close" in head) == (path, expected, True)
            await prober.read_to_end()
        # Who is no operator yet can become one, but is not waited for as long as elsewhere.
        monkeypatch.setattr(requests_module, "CROWDED_SECONDS", 0.05)
        for fields, expected in ((b"token=operator", 303), (b"token=nobody", 401), (b"token=op", 408)):
            enters = Http1Client(await come())
            form = b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: %d" % max(12, len(fields))
            await enters.stream.send_all(b"POST /login HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n%b" % (form, fields))
            await enters.read_until(rb"\r\n\r\n")
            assert enters.received.startswith(b"HTTP/1.1 %d " % expected)
            assert (b"relevo_admin=" in enters.received) == (expected == 303)
            await enters.read_to_end()
        # Who asked for an answer was refused one.
        assert server.engine.snapshot()["requests"]["rejected_by_reason"]["busy"] == 6
        # Where that place is taken for long, nobody is heard.
        watcher = Http1Client(await come())
        assert (await ask(watcher, "/ops/events", OPERATOR))[0] == 200
        turned_away = Http1Client(await come())
        await turned_away.read_until(rb"\}\}")
        assert json.loads(turned_away.received.partition(b"\r\n\r\n")[2])["error"]["code"] == "busy"
        await turned_away.read_to_end()
        # The idle ones were the one over HTTP/2, and who still owes the rest of the form.
        assert server.context.room.num_closed == {"idle": 2, "full": 1}
        assert server.context.room.num_open == NUM_USUAL + NUM_SPARE
        # None of those that are served has noticed, and with the first that leaves there is room.
        assert server.engine.num_open == NUM_USUAL
        await served[0].stream.aclose()
        await wait_for(lambda: server.context.room.num_open == NUM_USUAL)
        # What kept probes out for long is one of the usual ones now.
        assert (await ask(Http1Client(await come()), "/healthz"))[0] == 200
        await watcher.stream.aclose()
        await wait_for(lambda: server.context.room.num_open == NUM_USUAL - 1)
        served[0] = Http1Client(await come())
        await served[0].ask(chat_body(max_tokens=400, stream=True), KEY)
        await served[0].read_until(rb"\r\n\r\n")
        waits = Http1Client(await come())
        await wait_for(lambda: server.context.room.num_open == NUM_USUAL + NUM_SPARE)
        await served[0].stream.aclose()
        await wait_for(lambda: server.context.room.num_open == NUM_USUAL)
        status, head = await ask(waits, "/v1/models", mine)
        assert (status, b"connection: close" in head) == (200, False)
    told = [record.message.split(", ", 1)[1] for record in caplog.records if "there are files" in record.message]
    assert [line.partition(": ")[2] for line in told] == [
        "but for probes and operators, who comes now is told that the server is busy",
        "for each that comes the longest idle one is closed",
        "who comes now is turned away unheard",
    ]


async def test_what_has_come_and_waits_for_its_turn_is_no_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_narrow_server(monkeypatch) as server, AsyncExitStack() as stack:
        clients = [Http1Client(await stack.enter_async_context(await connect(server.port))) for _ in range(NUM_USUAL)]
        await wait_for(lambda: server.context.room.num_open == NUM_USUAL)
        waits, may_go_on, turn = trio.Event(), trio.Event(), Turnstile.turn

        async def wait(turnstile: Turnstile) -> None:
            waits.set()
            await may_go_on.wait()
            await turn(turnstile)

        monkeypatch.setattr(Turnstile, "turn", wait)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, clients[0], "/healthz")
            await waits.wait()
            await stack.enter_async_context(await connect(server.port))
            await clients[1].read_to_end()  # the longest idle of those that have said nothing
            may_go_on.set()
        assert b" 200 " in clients[0].received


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.sampled_from(["enter", "busy", "idle", "leave", "call"]), st.integers(0, 30))))
async def test_there_are_never_more_and_none_that_is_busy_is_closed(steps: list[tuple[str, int]]) -> None:
    room, open_, busy = Room(4, 2), [], set()
    for what, number in steps:
        if what == "enter":
            newcomer: Any = object()
            victim: Any = room.enter(newcomer)
            assert victim is not newcomer or len(busy) == 6
            assert victim not in busy
            open_ = [connection for connection in [*open_, newcomer] if connection is not victim]
        elif open_:
            connection = open_[number % len(open_)]
            if what == "call":
                assert connection in room
            elif what == "leave":
                room.leave(connection)
                open_.remove(connection)
                busy.discard(connection)
            else:
                room.note(connection, idle=what == "idle")
                (busy.discard if what == "idle" else busy.add)(connection)
        assert room.num_open == len(open_) <= 6
        # The last places are the last that are taken, and the first that are free.
        assert len([one for one in open_ if room.is_crowded(one)]) == max(0, len(open_) - 4)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts on limits that every system keeps")
async def test_a_crowd_that_was_refused_keeps_nobody_out(tmp_path: Path) -> None:
    """Of a process that begins with too few files to start, and may have 160: 200 clients keep what was refused."""
    raise_open_files()
    around = ("sh", "-c", 'ulimit -Sn 40; ulimit -Hn 160; exec "$@"', "sh")
    flags = ("--api-keys", "me=mine")
    process = await trio.to_thread.run_sync(lambda: Process(tmp_path, *flags, around=around))
    try:
        port = int(re.findall(r":(\d+)", str(process.client.base_url))[0])
        async with AsyncExitStack() as stack:
            with trio.fail_after(60):
                for _ in range(200):
                    client = Http1Client(await stack.enter_async_context(await connect(port)))
                    await client.ask(chat_body(), {})
                    await client.read_until(b"HTTP/1.1 401 ")
                answer = await trio.to_thread.run_sync(lambda: process.client.get("/healthz"))
                assert answer.status_code == 200
                headers = {**KEY}
                body = chat_body(max_tokens=3)
                answer = await trio.to_thread.run_sync(lambda: process.client.post(CHAT, json=body, headers=headers))
                assert answer.status_code == 200
    finally:
        await trio.to_thread.run_sync(process.end)
    grave = [line["message"] for line in process.lines if line.get("level") != "info"]
    assert len(grave) == 2, grave
    assert "fewer than 4 seats and 256 who may wait" in grave[0]
    assert "the longest idle one is closed" in grave[1]
