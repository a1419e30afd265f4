"""How the server starts, drains and ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import trio
import trio.testing

from app.lifecycle import FAREWELL_SECONDS, Lifecycle, LoopLag
from app.listening import open_listening_socket
from app.server import banner, run_http
from engine.errors import ConfigError, RelevoError
from tests.app.serving import CHAT, Driver, chat_body, events, open_app, open_server
from tests.fakes import FakeRunner, open_fake_engine
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = textwrap.dedent(
    """
    import sys, trio
    from app.listening import open_listening_socket
    from app.server import serve_engine
    from tests.app.serving import make_settings
    from tests.fakes import fake_config, open_fake_engine

    async def main() -> None:
        settings = make_settings(server={"drain_timeout_seconds": float(sys.argv[1])})
        with open_listening_socket("127.0.0.1", 0) as listener:
            async with open_fake_engine(fake_config(), step_seconds=0.01) as engine:
                await serve_engine(settings, engine, listener)

    trio.run(main)
    """
)


# The same, of which the event loop hangs on a signal; the kernel hands SIGTERM to another thread then, as it does where
# an earlier signal has not come to the main thread yet.
HUNG = PROGRAM.replace("import sys, trio", "import signal, sys, time, trio\nfrom app import services").replace(
    "\ntrio.run(main)",
    textwrap.dedent(
        """
        async def hang() -> None:
            with trio.open_signal_receiver(signal.SIGUSR1) as signals:
                async for _ in signals:
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                    time.sleep(600)

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(main)
                nursery.start_soon(hang)

        services.LOOK_SECONDS = 0.05
        trio.run(both)
        """
    ),
)


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-c", getattr(request, "param", PROGRAM), "10"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        url = next(word for line in running.stderr for word in line.split() if word.startswith("http://"))
        yield running, url
        running.kill()


@pytest.mark.slow
async def test_a_signal_lets_what_runs_finish_and_refuses_the_rest(process: tuple[subprocess.Popen[str], str]) -> None:
    running, url = process
    texts: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client, trio.open_nursery() as nursery:

        async def stream() -> None:
            texts.append((await client.post(CHAT, json=chat_body(max_tokens=80, stream=True))).text)

        nursery.start_soon(stream)
        while (await client.get("/load")).json()["server_load"] == 0:
            await trio.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        while (await client.get("/readyz")).status_code == 200:
            await trio.sleep(0.01)
        assert (await client.get("/healthz")).status_code == 200
        refused = await client.post(CHAT, json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert events(texts[0])[-1] == "[DONE]"
    assert await trio.to_thread.run_sync(partial(running.wait, PATIENCE_SECONDS)) == 0


@pytest.mark.slow
async def test_a_second_signal_ends_it_now(process: tuple[subprocess.Popen[str], str]) -> None:
    running, url = process
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as client, trio.open_nursery() as nursery:

        async def stream() -> None:
            with pytest.raises(httpx.TransportError):
                await client.post(CHAT, json=chat_body(max_tokens=400, stream=True))

        nursery.start_soon(stream)
        while (await client.get("/load")).json()["server_load"] == 0:
            await trio.sleep(0.01)
        running.send_signal(signal.SIGINT)
        while (await client.get("/readyz")).status_code == 200:
            await trio.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert await trio.to_thread.run_sync(partial(running.wait, PATIENCE_SECONDS)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("process", [HUNG], indirect=True)
def test_an_event_loop_that_hangs_is_told_of_and_ended_by_a_second_signal(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    running, _ = process
    assert running.stderr is not None
    running.send_signal(signal.SIGUSR1)
    told = iter(running.stderr)
    assert any("the event loop has hung" in line for line in told)
    assert any("in hang" in line for line in told)
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)
    assert running.wait(PATIENCE_SECONDS) == 1
    assert any("second signal, leaving now" in line for line in told)


class Watchers:
    closed = False

    def close(self) -> None:
        self.closed = True


async def test_an_idle_server_drains_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine() as engine:
        lifecycle, watchers = Lifecycle(), Watchers()
        before = trio.current_time()
        await lifecycle.drain(engine, watchers, 30)
        assert trio.current_time() - before < 0.1
        assert lifecycle.stopped.is_set()
        assert watchers.closed


async def test_what_does_not_end_in_time_is_told_so(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=0.5) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, CHAT, chat_body(max_tokens=400, stream=True))
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        nursery.start_soon(context.lifecycle.drain, context.engine, context.telemetry, 10.0)
        before = trio.current_time()
        received = b""
        while chunk := await driver.body():
            received += chunk
        assert 9.9 < trio.current_time() - before < 10 + FAREWELL_SECONDS
        error = events(received.decode())[-1]["error"]
        assert (error["code"], error["message"]) == ("draining", "The answer was cut because the server is stopping.")
        assert b"[DONE]" not in received
        await context.lifecycle.stopped.wait()
        assert context.engine.num_open == 0


async def test_dashboards_are_let_go() -> None:
    async with open_server() as server, server.client.stream("GET", "/ops/events") as response:
        await server.context.lifecycle.drain(server.engine, server.context.telemetry, 1.0)
        received = "".join([text async for text in response.aiter_text()])
        assert "event: bye" in received


async def test_a_late_loop_is_seen(autojump_clock: trio.testing.MockClock) -> None:
    lag = LoopLag()
    assert lag.seconds == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lag.run)
        await trio.sleep(0.2)
        autojump_clock.jump(0.4)  # somebody held the loop
        await trio.sleep(0.2)
        assert 0.3 < lag.seconds < 0.5
        await trio.sleep(5)
        assert lag.seconds < 0.01
        nursery.cancel_scope.cancel()


def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RelevoError, match=f"Port {port} on 127.0.0.1 is taken"):
            open_listening_socket("127.0.0.1", port)


async def test_a_port_that_is_taken_between_bind_and_listen_is_the_same_line() -> None:
    async with open_server() as server:
        with open_listening_socket("127.0.0.1", 0) as ours:
            port = ours.getsockname()[1]
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
                other.listen()
                with pytest.raises(RelevoError, match="is taken"):
                    await run_http(server.context, ours)


def test_an_unknown_host_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        open_listening_socket("no.such.host.invalid", 8000)


async def test_the_banner_says_what_a_person_wants_to_know() -> None:
    async with open_fake_engine() as engine:
        with open_listening_socket("127.0.0.1", 0) as listener:
            text = banner(engine, listener)
            assert engine.snapshot()["device"] == "cpu"
            port = listener.getsockname()[1]
    for fact in (
        "fake",
        "float32",
        "cpu: as configured",
        "512 tokens",
        "4 of at most 16",
        "64 tokens",
        "256 blocks",
        f"http://127.0.0.1:{port}",
    ):
        assert fact in text


async def test_a_crash_of_the_engine_ends_the_server() -> None:
    def before_step(batch: object) -> None:
        raise RuntimeError("broken for good")

    async def serve_until_it_breaks() -> None:
        async with open_server(runner=FakeRunner(256, 4, before_step=before_step)) as server:
            told = await server.client.post(CHAT, json=chat_body())
            assert (told.status_code, told.json()["error"]["code"]) == (500, "engine_error")
            await trio.sleep(5)

    with pytest.raises(BaseExceptionGroup) as caught:
        await serve_until_it_breaks()
    assert caught.group_contains(RelevoError, match="the engine's own request failed too")
