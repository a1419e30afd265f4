"""The history for readers who take their time, and from disks that do not answer."""

from __future__ import annotations

import csv
import io
import threading
import time
from typing import TYPE_CHECKING

import pytest
import trio

from app.journal import journal as journal_module
from app.journal.journal import MAX_READERS, open_journal
from app.journal.reading import Question, read_rows
from tests.app.serving import COMPLETIONS, Driver, make_settings, open_app, open_server
from tests.app.test_journal import T0, row
from tests.fakes import expected_output
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from app.journal.reading import Answer
    from app.journal.rows import Row


async def test_a_long_csv_comes_to_its_end_however_slowly_it_is_read() -> None:
    async with open_app() as (app, context):
        app.config["RESPONSE_TIMEOUT"] = 0.05
        now = int(time.time())
        for second in range(now - 3000, now):
            context.journal.put_row(row(second, output_tokens=1))
        driver = Driver(app, "/ops/history.csv", {}, method="GET")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.run)
            assert await driver.status() == 200
            received = b""
            while piece := await driver.body():
                received += piece
                await trio.sleep(0.1)
    assert len(list(csv.DictReader(io.StringIO(received.decode())))) == 3000


@pytest.fixture
def hung_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reading from the disk waits for the event; what memory has can be read."""
    answers = threading.Event()

    def read(path: Path | None, unwritten: list[Row], question: Question) -> Answer:
        if path is not None:
            answers.wait(2 * PATIENCE_SECONDS)
        return read_rows(path, unwritten, question)

    monkeypatch.setattr(journal_module, "read_rows", read)
    yield answers
    answers.set()


async def test_a_disk_that_does_not_answer_is_left_and_told(
    tmp_path: Path, hung_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "READ_SECONDS", 0.05)
    async with open_journal(tmp_path) as journal:
        journal.put_row(row(T0))
        await journal.flush()
        journal.put_row(row(T0 + 1))
        found = []

        async def ask() -> None:
            found.append(await journal.ask(Question(T0, T0 + 10, 100)))

        with trio.fail_after(PATIENCE_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(3 * MAX_READERS):
                    nursery.start_soon(ask)
        assert [[r[0] for r in answer.rows] for answer in found] == [[T0 + 1]] * (3 * MAX_READERS), "what memory has"
        assert "has not answered" in (journal.problem or "")
        monkeypatch.setattr(journal_module, "READ_SECONDS", PATIENCE_SECONDS)
        hung_disk.set()
        answer = await journal.ask(Question(T0, T0 + 10, 100))
        assert [r[0] for r in answer.rows] == [T0, T0 + 1]


async def test_who_leaves_does_not_wait_for_the_disk(
    tmp_path: Path, hung_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "READ_SECONDS", 10 * PATIENCE_SECONDS)
    async with open_journal(tmp_path) as journal:
        journal.put_row(row(T0))
        await journal.flush()
        with trio.fail_after(PATIENCE_SECONDS), trio.move_on_after(0.05) as scope:
            await journal.ask(Question(T0, T0 + 10, 100))
        assert scope.cancelled_caught


async def test_readers_that_hang_hold_nobody_else(
    tmp_path: Path, hung_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: the history is told from memory, the live pages and the answers as ever, and the server ends."""
    monkeypatch.setattr(journal_module, "READ_SECONDS", 0.05)
    with trio.fail_after(PATIENCE_SECONDS):
        async with open_journal(tmp_path) as journal, open_server(journal=journal) as server:
            journal.put_row(row(T0))
            await journal.flush()
            statuses: list[int] = []

            async def ask(path: str) -> None:
                statuses.append((await server.client.get(path)).status_code)

            async with trio.open_nursery() as nursery:
                for _ in range(2 * MAX_READERS):
                    for path in ("/ops/history", "/ops/history.json", "/ops", "/ops/stats.json", "/admin", "/readyz"):
                        nursery.start_soon(ask, path)
                body = {"prompt": "a", "max_tokens": 20}
                answer = await server.client.post(COMPLETIONS, json=body)
            assert answer.json()["choices"][0]["text"] == bytes(expected_output(b"a", 20)).decode()
            assert statuses == [200] * 12 * MAX_READERS
            assert "has not answered" in (await server.stats())["history"]["problem"]


async def test_the_state_alone_is_small_and_the_operators() -> None:
    async with open_server(make_settings(security={"admin_token": "t"})) as server:
        assert (await server.client.get("/ops/state")).status_code == 401
        answer = await server.client.get("/ops/state", headers={"Authorization": "Bearer t"})
    assert "ready" in answer.text
    assert "<html" not in answer.text
    assert len(answer.content) < 1000
