"""No page and no export holds the event loop: what it takes of the loop's thread, step by step, is measured.

Time of the thread, not of the clock: what else the machine does is not counted.
"""

from __future__ import annotations

import gc
import math
import time
import urllib.request
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.abc import Instrument

from app.audit import AuditEntry, timestamp
from app.effects import make_side
from app.journal.journal import open_journal
from tests.app.serving import COMPLETIONS, Server, make_settings, open_server
from tests.app.test_journal import row
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MAX_SECONDS = 0.010
SEATS, STEPS, SECONDS, CHANGES = 64, 240, 6000, 1000
T0 = 1_700_000_040


class LongestTurn(Instrument):
    """The longest time that a task had the loop for itself."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = math.inf  # it begins in the middle of a turn

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seconds = max(self.seconds, time.thread_time() - self._began)


@pytest.fixture
def _no_collection() -> Any:
    """The tests' own objects are not the server's to look through."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def change(number: int, side: dict[str, Any]) -> AuditEntry:
    effect = {"window_seconds": 300, "before": side, "after": side}
    values = {"max_num_seqs": (8, 4)} if number % 2 else {"max_num_seqs": (4, 8)}
    when = timestamp(T0 + 400 * number)
    return AuditEntry(number + 1, when, "me", values, "a reason", effective={"max_num_seqs": 4}, effect=effect)


@asynccontextmanager
async def full_server(folder: Path) -> AsyncIterator[Server]:
    """A server that has seen as much as it keeps, or enough of it to be felt."""
    limits = {"max_num_seqs": SEATS, "capacity_num_seqs": SEATS, "max_num_batched_tokens": 4 * SEATS,
              "capacity_num_batched_tokens": 4 * SEATS, "keep_request_texts": True}  # fmt: skip
    async with open_journal(folder) as journal:
        for second in range(SECONDS):
            journal.put_row(row(T0 + second, output_tokens=61, waiting=3.1, ttft_p50=0.12345, ttft_p95=0.25))
            if second % 3000 == 2999:
                await journal.flush()
        settings = make_settings(server={"keep_request_texts": True})
        fake: dict[str, Any] = {"num_blocks": 64 * SEATS + 64, "answer": lambda _: b"a" * STEPS, "step_seconds": 0.0}
        async with open_server(settings, journal=journal, limits=limits, **fake) as server:
            for num_tokens in (1, 1, 1, STEPS):  # more requests than are remembered
                body = {"prompt": ["a"] * SEATS, "max_tokens": num_tokens}
                assert (await server.client.post(COMPLETIONS, json=body)).status_code == 200
            await server.settle()
            side = make_side(server.engine.experience(300), journal.recent(300))
            for number in range(CHANGES):
                journal.audit.add(change(number, side))
            yield server


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        body: bytes = answer.read()
    return body


@pytest.mark.long
@pytest.mark.usefixtures("_no_collection")
async def test_no_page_holds_the_event_loop(tmp_path: Path) -> None:
    span = f"from={T0}&to={T0 + SECONDS}"
    paths = {
        "/ops/state": 100, "/ops": 50_000, "/ops/table?to=300": 30_000, "/docs": 10_000, "/": 1000,
        "/ops/stats.json": 500_000, "/ops/table.json?steps=240&to=999": 500_000, "/ops/requests": 50_000,
        "/ops/requests.json": 10_000, f"/ops/requests/{4 * SEATS}?tokens=1": 10_000, "/admin": 30_000,
        f"/ops/requests/{4 * SEATS}.json?tokens=1": 1000, "/admin/audit": 500_000, "/admin/keys": 50,
        f"/ops/history?{span}": 8000, f"/ops/history.json?{span}&points=4000": 200_000,
        f"/ops/history.csv?{span}": 500_000,
    }  # fmt: skip
    held: dict[str, float] = {}
    async with full_server(tmp_path) as server:
        for path, size in paths.items():
            tries = []
            for _ in range(4):  # the first compiles templates and fills caches
                turn = LongestTurn()
                trio.lowlevel.add_instrument(turn)
                body = await trio.to_thread.run_sync(read, server.url + path)
                trio.lowlevel.remove_instrument(turn)
                tries.append(turn.seconds)
                assert len(body) > size, path
            held[path] = min(tries)
    assert not {path: seconds for path, seconds in held.items() if seconds > MAX_SECONDS}
