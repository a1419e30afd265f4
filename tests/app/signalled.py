"""Servers that are told to end at a random moment, each in a process of its own. Prints what became of them as JSON.

They are forked from one process that has imported everything, and serve the fake model, which takes a moment to load.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import trio

import app.cli
import app.cli.serve
import app.server
import app.start
from tests.app.wire import conversations
from tests.fakes import fake_config, open_fake_engine
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.engine import Engine

LOAD_SECONDS, MOMENTS_SECONDS = 0.2, 0.5
DRAIN_SECONDS, GRACEFUL_SECONDS = 0.2, 0.3
NUM_AT_ONCE = 4


@asynccontextmanager
async def open_engine(_config: object) -> AsyncIterator[Engine]:
    """Instead of the real one."""
    await trio.sleep(LOAD_SECONDS)
    async with open_fake_engine(fake_config(), step_seconds=0.005) as engine_:
        yield engine_


def serve(folder: Path) -> int:
    sys.modules["engine.startup"] = ModuleType("engine.startup")  # torch, which takes seconds to come in
    app.start.open_engine = open_engine  # type: ignore[assignment]
    app.cli.serve.with_model = lambda settings: settings  # type: ignore[assignment]
    app.server.GRACEFUL_SECONDS = GRACEFUL_SECONDS  # type: ignore[misc]
    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    limits = ["--drain-timeout-seconds", str(DRAIN_SECONDS)]
    return app.cli.main(["serve", "--port", "0", "--state-dir", str(folder), *limits])


def told_to_end(number: int) -> dict[str, Any]:
    """Start a server, let clients come, tell it to end."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        pid = os.fork()
        if pid == 0:
            os._exit(serve(Path(name)))
        # Half of them counted from where it begins to load, half from where it serves.
        word = rng.choice(["Loading", "ready"])
        wait_until(lambda: log.exists() and word in log.read_text())
        moment, began = rng.uniform(0, MOMENTS_SECONDS), time.monotonic()
        clients: list[socket.socket] = []
        while time.monotonic() - began < moment:
            time.sleep(0.01)
            ready = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
            if ready is not None and len(clients) < 30:
                clients.append(socket.create_connection(("127.0.0.1", int(ready[1]))))
                clients[-1].sendall(rng.choice(conversations()))
        os.kill(pid, signal.SIGTERM)
        status: list[int] = []

        def has_ended() -> bool:
            found, code = os.waitpid(pid, os.WNOHANG)
            status.extend([code] if found else [])
            return bool(found)

        wait_until(has_ended)
        return {
            "moment": moment,
            "clients": len(clients),
            "code": os.waitstatus_to_exitcode(status[0]) if status else None,
            "log": log.read_text(),
        }


def wait_until(condition: Any) -> None:
    """Wait until it holds or the limit has come."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(NUM_AT_ONCE) as pool:
        json.dump(pool.map(told_to_end, range(int(sys.argv[1])), chunksize=1), sys.stdout)
