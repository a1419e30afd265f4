"""Clients whose machine is gone: nothing comes from there any more, no data, no acknowledgement, no end."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import trio
import trio.testing

from app import listening
from tests.app.serving import chat_body, make_settings, open_server
from tests.app.wire import Http1Client, Http2Client, count_tasks, wait_for
from tests.fakes import expected_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLONE_NEWNET = 0x40000000
NEAR, FAR = "10.213.77.1", "10.213.77.2"
# As `listening` has them, but shorter.
IDLE_SECONDS, INTERVAL_SECONDS, PROBES, USER_TIMEOUT_SECONDS = 1, 1, 2, 3
# At 20 ms each it is served for twice as long as the others take to be noticed.
NEIGHBOUR_TOKENS = 600
ROOM: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 1024}
KEY = {"Authorization": "Bearer mine"}


class FarSide:
    """Another network, joined to this one by a cable. A thread lives there; its sockets do, too."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._near, self._far = f"rl{os.getpid()}n", f"rl{os.getpid()}f"

    def open(self) -> None:
        there = self._there(self._enter)
        run("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far)
        run("ip", "link", "set", self._far, "netns", str(there))
        run("ip", "addr", "add", f"{NEAR}/30", "dev", self._near)
        run("ip", "link", "set", self._near, "up")
        self._there(run, "ip", "addr", "add", f"{FAR}/30", "dev", self._far)
        self._there(run, "ip", "link", "set", self._far, "up")
        hardware = json.loads(self._there(run, "ip", "-json", "link", "show", self._far))[0]["address"]
        # Otherwise this side would learn that nobody answers there.
        run("ip", "neigh", "replace", FAR, "lladdr", hardware, "dev", self._near, "nud", "permanent")

    def close(self) -> None:
        subprocess.run(["ip", "link", "del", self._near], capture_output=True, check=False)
        self._thread.shutdown()

    async def connect(self, port: int) -> trio.SocketStream:
        connection = trio.socket.from_stdlib_socket(self._there(socket.socket))
        await connection.connect((NEAR, port))
        return trio.SocketStream(connection)

    def vanish(self) -> None:
        """What is sent there from now on is neither taken nor refused."""
        self._there(run, "ip", "addr", "flush", "dev", self._far)

    def _there(self, do: Callable[..., Any], *args: str) -> Any:
        return self._thread.submit(do, *args).result()

    def _enter(self) -> int:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        return threading.get_native_id()


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def do_without(why: str) -> NoReturn:
    """Skip the test, unless somebody said that this machine can make networks."""
    if os.environ.get("REQUIRE_NETWORKS") == "1":
        pytest.fail(f"REQUIRE_NETWORKS=1, but {why}")
    pytest.skip(f"{why} (REQUIRE_NETWORKS=1 makes that a failure)")


@contextmanager
def open_far_side() -> Iterator[FarSide]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        do_without("it takes root and iproute2 on Linux")
    far_side = FarSide()
    try:
        try:
            far_side.open()
        except (OSError, subprocess.CalledProcessError) as error:
            do_without(f"there is no network of its own: {error}")
        yield far_side
    finally:
        far_side.close()


@pytest.mark.long
async def test_who_vanishes_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While something is sent to them (streams that decode) and while nothing is (the others, and whole answers)."""
    monkeypatch.setattr(listening, "KEEPALIVE_IDLE_SECONDS", IDLE_SECONDS)
    monkeypatch.setattr(listening, "KEEPALIVE_INTERVAL_SECONDS", INTERVAL_SECONDS)
    monkeypatch.setattr(listening, "KEEPALIVE_PROBES", PROBES)
    monkeypatch.setattr(listening, "USER_TIMEOUT_SECONDS", USER_TIMEOUT_SECONDS)
    with open_far_side() as far_side:
        settings = make_settings(security={"api_keys": ["me=mine"]})
        async with open_server(
            settings, host="0.0.0.0", limits={"max_num_seqs": 5}, step_seconds=0.02, **ROOM
        ) as server:
            await trio.testing.wait_all_tasks_blocked(0.01)
            before = count_tasks()
            local = await trio.open_tcp_stream("127.0.0.1", server.port)
            neighbour = Http1Client(local)
            await neighbour.ask(chat_body("neighbour", max_tokens=NEIGHBOUR_TOKENS), KEY)
            kinds = [(client, stream) for client in (Http1Client, Http2Client) for stream in (True, False)]
            clients = []
            for state in ("running", "waiting"):
                for kind, stream in kinds:
                    clients.append(kind(await far_side.connect(server.port)))
                    await clients[-1].ask(chat_body(max_tokens=450, stream=stream), KEY)
                number = {"running": 5, "waiting": 4}[state]
                await wait_for(lambda s=state, n=number: server.engine.snapshot()["requests"][s] == n)
            idle = [kind(await far_side.connect(server.port)) for kind, _ in kinds]
            far_side.vanish()
            # Who waited gets a seat of those that were noticed; what it is sent then has its own time.
            await wait_for(lambda: server.engine.num_open <= 5, USER_TIMEOUT_SECONDS + 2)
            await wait_for(lambda: server.engine.num_open == 1, USER_TIMEOUT_SECONDS + 2)
            aborted = server.engine.snapshot()["requests"]["aborted_by_cause_and_phase"]
            assert list(aborted) == ["client"]
            assert sum(aborted["client"].values()) == len(clients)
            await neighbour.read_until(b'"usage"')
            expected = bytes(expected_output([257, *b"neighbour", 258], NEIGHBOUR_TOKENS))
            assert b'"content": "' + expected in neighbour.received
            await local.aclose()
            await server.settle()
            await wait_for(lambda: count_tasks() == before)
            for client in (*clients, *idle):
                await client.reset()


def test_how_long_a_vanished_client_goes_unnoticed() -> None:
    """Half a minute, whether something is sent to it or not."""
    with listening.open_listening_socket("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle = getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE
            options = (idle, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            first, interval, probes = [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            assert first + interval * probes == 30
            assert probes >= 3
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; there it counts for the probes as well
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
