"""What outlives the process, on disks that are well and on disks that are not."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from app import audit as audit_module
from app.audit import AuditEntry, AuditLog, make_id, timestamp
from app.journal import journal as journal_module
from app.journal import store as store_module
from app.journal.events import Event
from app.journal.journal import LEFT_OPEN, MAX_UNWRITTEN_ROWS, Journal, open_journal
from app.journal.reading import Question, choose_step, read_rows
from app.journal.rows import COLUMNS, COUNTS, LEVELS, PEAKS, PERCENTILES
from app.journal.series import make_series, mean
from app.journal.store import DAMAGED_NAME, FILE_NAME, Batch, Store, StoreError, open_store
from app.render.events import event_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trio.testing import MockClock

T0 = 1_700_000_040  # a full minute


def row(time: int, **values: float | None) -> tuple[float | int | None, ...]:
    known: dict[str, float | int | None] = {
        "time": time, "seconds": 1.0, **dict.fromkeys(COUNTS, 0), **dict.fromkeys((*LEVELS, *PEAKS), 0.0),
        **dict.fromkeys(PERCENTILES), "generation": 0,
    }  # fmt: skip
    return tuple((known | values)[name] for name in COLUMNS)


def named(found: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(COLUMNS, found, strict=True))


def change(seats: int, generation: int, **more: Any) -> AuditEntry:
    fields = {"effective": {"max_num_seqs": seats}, **more}
    return AuditEntry(generation, timestamp(T0), "me", {"max_num_seqs": (4, seats)}, **fields)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()


def test_seconds_become_minutes_by_the_rules(store: Store) -> None:
    rows = [
        row(
            T0 + n, requests=1, output_tokens=10, waiting=float(n), waiting_max=float(n),
            ttft_p95=n / 10 if n else None, attainment_ttft=None if n < 30 else 0.5, generation=n // 40,
        )
        for n in range(60)
    ]  # fmt: skip
    for start in range(0, 60, 7):  # a minute is written in pieces, and made anew with each
        store.write(Batch(rows=rows[start : start + 7]))
    answer = read_rows(store.path, [], Question(T0, T0 + 59, 10, step=60))
    minute = named(answer.rows[0])
    assert (len(answer.rows), minute["time"], minute["seconds"]) == (1, T0, 60)
    assert (minute["requests"], minute["output_tokens"]) == (60, 600)
    assert (minute["waiting"], minute["waiting_max"]) == (pytest.approx(29.5), 59)
    assert (minute["ttft_p95"], minute["ttft_p50"]) == (5.9, None)
    assert minute["attainment_ttft"] == 0.5, "a level counts for the time it is known"
    assert minute["generation"] == 1


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 400), min_size=1, max_size=80), st.integers(2, 50), st.data())
def test_each_second_is_in_one_point_and_no_point_outside_of_what_was_asked(
    seconds: set[int], points: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, 300))
    end = data.draw(st.integers(start + 10, 420))
    rows = [row(T0 + n, output_tokens=n + 1, running=float(n % 5), running_max=float(n % 5)) for n in sorted(seconds)]
    question = Question(T0 + start, T0 + end, points)
    step = choose_step(question.start, question.end, points)
    whole = read_rows(None, rows, question)
    wanted = [r for r in rows if question.start <= int(r[0] or 0) <= question.end]
    assert sum(named(r)["output_tokens"] for r in whole.rows) == sum(named(r)["output_tokens"] for r in wanted)
    assert len(whole.rows) <= points
    assert [r[0] for r in whole.rows] == sorted({int(r[0] or 0) // step * step for r in wanted})


@pytest.mark.parametrize("written", [0, 900, 1000])
@pytest.mark.parametrize(("step", "start"), [(1, 17), (10, 17), (60, 17), (60, 60), (300, 317), (300, 340)])
def test_nothing_is_counted_of_before_the_start(tmp_path: Path, written: int, step: int, start: int) -> None:
    rows = [row(T0 + n, output_tokens=1) for n in range(1000)]
    store = open_store(tmp_path)
    store.write(Batch(rows=rows[:written]))
    answer = read_rows(store.path, rows[written:], Question(T0 + start, T0 + 999, 2000, step))
    assert sum(named(r)["output_tokens"] for r in answer.rows) == 1000 - start
    assert [r[0] for r in answer.rows] == sorted({(T0 + n) // step * step for n in range(start, 1000)})
    store.close()


def test_a_mean_is_of_the_time_and_not_of_the_points() -> None:
    rows = [row(T0, seconds=3600.0, output_tokens=360_000, waiting=5.0), row(T0 + 3600, seconds=20.0, waiting=None)]
    assert mean(rows, "output_tokens_per_second") == pytest.approx(360_000 / 3620)
    assert mean(rows, "waiting") == 5.0, "over the time for which it is known"
    assert mean(rows, "ttft_p95_seconds") is None


@pytest.mark.parametrize("split", [0, 1, 30, 61, 200])
def test_rows_on_the_disk_and_on_the_way_are_read_as_one(tmp_path: Path, split: int) -> None:
    rows = [row(T0 + n, output_tokens=1, waiting=2.0) for n in range(200) if not 70 <= n < 110]
    store = open_store(tmp_path)
    store.write(Batch(rows=rows[:split]))
    for step in (1, 10, 60):
        question = Question(T0, T0 + 199, 1000, step)
        # What is handed over may have been written meanwhile.
        mixed = read_rows(store.path, rows[max(0, split - 20) :], question)
        whole = read_rows(None, rows, question)
        shown = [{**named(r), "span": None} for r in mixed.rows]
        assert shown == [{**named(r), "span": None} for r in whole.rows]
        assert sum(r["output_tokens"] for r in shown) == 160
    store.close()


def test_a_time_when_the_server_was_down_is_a_gap() -> None:
    rows = [row(T0 + n, output_tokens=5) for n in (*range(10), 11, 12, *range(300, 310))]
    series = make_series(read_rows(None, rows, Question(T0, T0 + 400, 1000)))
    nulls = [n for n, value in enumerate(series["output_tokens_per_second"]) if value is None]
    assert nulls == [12], "a single second that has no row is none"
    assert series["time"][11:14] == [T0 + 12, T0 + 13, T0 + 300]


@given(st.integers(0, 2**31), st.integers(10, 366 * 86_400), st.integers(2, 4000))
def test_no_span_needs_more_points_than_are_wanted(start: int, length: int, points: int) -> None:
    step = choose_step(start, start + length, points)
    assert (start + length) // step - start // step < points


def test_old_rows_go_and_those_of_a_clock_set_wrong_do_not_take_the_others_along(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEPT_ROWS", {1: 100, 60: 5})
    monkeypatch.setattr(store_module, "KEPT_ENTRIES", 3)
    store.write(Batch(rows=[row(T0 + n) for n in range(400)]))
    store.write(Batch(rows=[row(2_500_000_000)], entries={e.entry_id: e for e in (change(n, n) for n in range(5))}))
    store.prune(T0 + 400.0)
    with closing(sqlite3.connect(store.path)) as database:
        counts = dict(database.execute("SELECT span, count(*) FROM history GROUP BY span").fetchall())
        assert counts == {1: 101, 60: 6}, "what comes after the clock's error is not pushed out by it"
        assert database.execute("SELECT max(time) FROM history WHERE time < 2e9").fetchone() == (T0 + 399,)
    assert [entry.generation for entry in store.load().entries] == [2, 3, 4]


def deed(number: int) -> AuditEntry:
    return AuditEntry(1, timestamp(T0), "me", {}, effective={"max_num_seqs": 1}, deed=str(number), outcome="done")


@given(st.lists(st.booleans(), max_size=30))
def test_of_changes_and_of_deeds_each_the_last_are_kept_in_their_order(are_deeds: list[bool]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_module, "MAX_ENTRIES", 5)
        entries = [deed(n) if is_deed else change(n, n) for n, is_deed in enumerate(are_deeds)]
        log = AuditLog()
        for entry in entries:
            log.add(entry)
        last = [[e for e in entries if (e.deed is None) is kind][-5:] for kind in (False, True)]
        assert [*log.entries] == [e for e in entries if e in last[0] or e in last[1]]
        assert AuditLog(entries).entries == log.entries


async def test_recordings_push_no_change_out_of_the_history_nor_off_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "LOADED", 3)
    monkeypatch.setattr(store_module, "KEPT_ENTRIES", 6)
    async with open_journal(tmp_path) as journal:
        journal.audit.add(change(8, 1))
        for number in range(20):
            journal.audit.add(deed(number))
        journal.put_row(row(T0))  # with the first of which what is old goes
    async with open_journal(tmp_path) as journal:
        assert [entry.deed for entry in journal.audit.entries] == [None, "17", "18", "19"]
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        assert database.execute("SELECT count(deed), count(*) FROM audit").fetchone() == (6, 7)


def test_what_the_file_holds_can_be_read_while_it_is_written(store: Store) -> None:
    store.write(Batch(rows=[row(T0)]))
    with closing(sqlite3.connect(f"{store.path.as_uri()}?mode=ro", uri=True)) as other:
        assert other.execute("SELECT count(*) FROM history").fetchone() == (2,)
        store.write(Batch(rows=[row(T0 + 1)]))
        assert other.execute("SELECT count(*) FROM history").fetchone() == (3,)
    assert oct(store.path.stat().st_mode & 0o777) == "0o600"


def test_a_file_of_an_older_version_is_brought_to_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_store(tmp_path)
    first.write(Batch(rows=[row(T0, output_tokens=7)]))
    first.close()
    monkeypatch.setattr(store_module, "MIGRATIONS", [*store_module.MIGRATIONS, "CREATE TABLE notes (text TEXT);"])
    second = open_store(tmp_path)
    second.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(store_module.MIGRATIONS),)
        assert database.execute("SELECT count(*) FROM notes").fetchone() == (0,)
        assert database.execute("SELECT output_tokens FROM history WHERE span = 1").fetchone() == (7,)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="a newer version"):
        open_store(tmp_path)


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(tmp_path).close()
    script = "CREATE TABLE notes (text TEXT); CREATE TABLE audit (x);"
    monkeypatch.setattr(store_module, "MIGRATIONS", [*store_module.MIGRATIONS, script])
    with pytest.raises(StoreError):
        open_store(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(store_module.MIGRATIONS) - 1,)
        assert not database.execute("SELECT name FROM sqlite_master WHERE name = 'notes'").fetchall()


async def test_a_deed_and_its_end_outlive_the_process_and_one_without_an_end_is_given_one(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as journal:
        journal.audit.add(change(8, 1))
        done, _ = journal.begin_deed("A search", "me"), journal.begin_deed("A recording \ud800", "you")
        await journal.flush()
        journal.audit.mark_outcome(done, "it was found")
    async with open_journal(tmp_path) as journal:
        _, search, recording = journal.audit.entries
        assert (search.generation, search.who, search.deed, search.outcome) == (1, "me", "A search", "it was found")
        assert (recording.deed, recording.outcome) == ("A recording ?", LEFT_OPEN)
        assert recording.effective == {"max_num_seqs": 8}, "what held then"
        assert "A search" not in " ".join(event.text for event in journal.events)
    async with open_journal(tmp_path) as journal:
        assert journal.audit.entries[-1].outcome == LEFT_OPEN


async def test_changes_and_events_outlive_the_process(tmp_path: Path) -> None:
    hostile = "<img src=x>\ud800\0'; DROP TABLE audit; --"
    async with open_journal(tmp_path) as journal:
        journal.audit.add(change(8, 1, reason=hostile, expires=timestamp(T0 + 600)))
        journal.audit.mark_reverted(journal.audit.entries[0].entry_id, timestamp(T0 + 100))
        journal.put_row(row(T0, output_tokens=3))
    async with open_journal(tmp_path) as journal:
        (entry,) = journal.audit.entries
        assert (entry.generation, entry.who, entry.changes) == (1, "me", {"max_num_seqs": (4, 8)})
        assert entry.reason == hostile.replace("\ud800", "?")
        assert (entry.expires, entry.reverted) == (timestamp(T0 + 600), timestamp(T0 + 100))
        assert entry.effective == {"max_num_seqs": 8}
        assert [event.kind for event in journal.events] == ["start", "config", "stop", "start"]
        assert "Seats 4 → 8, by me: <img" in [event.text for event in journal.events][1]
        answer = await journal.ask(Question(T0 - 5, T0 + 5, 100))
        assert [named(r)["output_tokens"] for r in answer.rows] == [3]


async def test_a_process_that_was_killed_is_told_of_at_the_next_start(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    await journal.load()
    journal.note("start", "The server starts")
    assert await journal.flush()
    assert journal._store is not None
    journal._store.close()  # and no word of an end
    async with open_journal(tmp_path) as journal:
        assert journal.events.latest(1)[0].text == "The server starts after an end that was not told of"


async def test_an_event_that_goes_on_is_one_on_the_disk(tmp_path: Path) -> None:
    event = Event(make_id(), "rejections", float(T0), "5 requests refused", amount=5, running=4, waiting=256)
    async with open_journal(tmp_path) as journal:
        journal.put_event(event)
        await journal.flush()
        journal.put_event(replace(event, text="90 requests refused", amount=90, end=T0 + 70.0))
    async with open_journal(tmp_path) as journal:
        (found,) = await journal.ask_events(T0 - 1, T0 + 1, 10)
        assert (found.text, found.amount, found.end, found.waiting) == ("90 requests refused", 90, T0 + 70.0, 256)


async def test_a_second_server_on_the_folder_runs_says_so_and_takes_over(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as first:
        second = Journal(tmp_path)
        await second.load()
        assert "belongs to another server" in str(second.problem)
        for n in range(10):
            second.put_row(row(T0 + n, output_tokens=9))
        assert not await second.flush()
        assert [named(r)["output_tokens"] for r in (await second.ask(Question(T0, T0 + 9, 99))).rows] == [9] * 10
        assert (await first.ask(Question(T0, T0 + 9, 99))).rows == []
        assert first.problem is None
        for n in range(8):
            first.put_row(row(T0 + n, output_tokens=30))
    assert await second.flush()
    assert second.problem is None
    await second.close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        kept = database.execute("SELECT output_tokens FROM history WHERE span = 1").fetchall()
        assert kept == [(30,)] * 8 + [(9,)] * 2, "what the first one served is not written over"


async def test_a_server_that_does_not_come_up_says_nothing_of_its_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_journal(tmp_path):
        async with open_journal(tmp_path):
            pass
        assert caplog.messages == []
        async with open_journal(tmp_path) as second, trio.open_nursery() as nursery:
            nursery.start_soon(second.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        [told] = caplog.messages
        assert "belongs to another server" in told


class SickStore(Store):
    """A store on a disk that does what it is told to."""

    sickness: list[Exception]

    def write(self, batch: Batch) -> None:
        if self.sickness:
            with store_module.told():
                raise self.sickness[0]
        super().write(batch)


def sick(error: Exception | None) -> tuple[Any, list[Exception]]:
    """What opens such a store, and what it suffers from until that is removed."""
    sickness: list[Exception] = [] if error is None else [error]

    def open_(folder: Path) -> Store:
        store = open_store(folder)
        store.__class__ = SickStore
        store.sickness = sickness  # type: ignore[attr-defined]
        return store

    return open_, sickness


def sqlite_error(code: int, text: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    "error",
    [sqlite_error(sqlite3.SQLITE_FULL, "database or disk is full"), sqlite_error(sqlite3.SQLITE_BUSY, "is locked")],
    ids=["full", "locked"],
)
async def test_what_a_sick_disk_does_not_take_waits_bounded_is_told_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    open_, sickness = sick(error)
    journal = Journal(tmp_path, open_=open_)
    await journal.load()
    with caplog.at_level(logging.WARNING):
        for n in range(MAX_UNWRITTEN_ROWS + 50):
            journal.put_row(row(T0 + n, output_tokens=1))
        journal.audit.add(change(8, 1))
        for _ in range(3):
            assert not await journal.flush()
    assert caplog.text.count("cannot be written") == 1
    assert journal.stats() == {
        "problem": str(error), "write_failures": 3, "dropped_rows": 50, "unwritten_rows": MAX_UNWRITTEN_ROWS,
    }  # fmt: skip
    assert len((await journal.ask(Question(T0, T0 + 9999, 20_000, step=1))).rows) == MAX_UNWRITTEN_ROWS
    sickness.clear()
    with caplog.at_level(logging.WARNING):
        assert await journal.flush()
    assert "written again" in caplog.text
    assert journal.problem is None
    await journal.close()
    async with open_journal(tmp_path) as after:
        assert [entry.generation for entry in after.audit.entries] == [1]
        assert len((await after.ask(Question(T0, T0 + 9999, 20_000, step=1))).rows) == MAX_UNWRITTEN_ROWS


@pytest.mark.parametrize("content", [b"this is no database, " * 500, b"SQLite format 3\0x"])
async def test_a_damaged_file_is_set_aside_at_the_start(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        async with open_journal(tmp_path) as journal:
            assert journal.problem is None
            assert journal.audit.entries == ()
    assert "begun anew" in caplog.text
    assert (tmp_path / DAMAGED_NAME).read_bytes() == content
    async with open_journal(tmp_path) as journal:
        assert [event.kind for event in journal.events] == ["start", "stop", "start"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE audit SET changes = '[1'", "UPDATE audit SET time = 'yesterday'", "UPDATE events SET time = 'then'",
        "UPDATE events SET time = 9e999", "UPDATE audit SET effective = '7'", "DROP TABLE events",
        "UPDATE audit SET who = CAST(x'ff' AS TEXT)",
    ],
)  # fmt: skip
async def test_a_file_in_which_something_is_not_what_was_written_is_set_aside(tmp_path: Path, damage: str) -> None:
    async with open_journal(tmp_path) as journal:
        journal.audit.add(change(8, 1))
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        database.execute(damage)
    async with open_journal(tmp_path) as journal:
        assert (journal.problem, journal.audit.entries) == (None, ())
    assert (tmp_path / DAMAGED_NAME).exists()


async def test_damage_while_it_runs_costs_the_rows_and_not_the_changes(tmp_path: Path) -> None:
    open_, sickness = sick(None)
    journal = Journal(tmp_path, open_=open_)
    await journal.load()
    journal.audit.add(change(8, 1))
    assert await journal.flush()
    sickness.append(sqlite_error(sqlite3.SQLITE_CORRUPT, "database disk image is malformed"))
    journal.put_row(row(T0))
    assert not await journal.flush()
    sickness.clear()
    assert await journal.flush()
    assert (journal.problem, journal.num_failures) == (None, 1)
    await journal.close()
    assert (tmp_path / DAMAGED_NAME).exists()
    async with open_journal(tmp_path) as after:
        assert [entry.generation for entry in after.audit.entries] == [1]
        assert len((await after.ask(Question(T0, T0 + 9, 99))).rows) == 1


async def test_damage_that_only_readers_meet_is_met_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    await journal.load()
    journal.put_row(row(T0))
    assert await journal.flush()
    journal.put_row(row(T0 + 1))
    real = read_rows

    def read(path: Path | None, *rest: Any) -> Any:
        if path is not None:
            with store_module.told():
                raise sqlite_error(sqlite3.SQLITE_CORRUPT, "database disk image is malformed")
        return real(path, *rest)

    monkeypatch.setattr(journal_module, "read_rows", read)
    answers = []
    async with trio.open_nursery() as nursery:
        for _ in range(3):

            async def ask() -> None:
                answers.append(await journal.ask(Question(T0, T0 + 9, 99)))

            nursery.start_soon(ask)
    assert [len(answer.rows) for answer in answers] == [1, 1, 1], "what is in memory is shown all the same"
    assert "malformed" in caplog.text
    assert caplog.text.count("begun anew") == 1
    assert await journal.flush()
    await journal.close()


async def test_a_disk_that_cannot_be_read_is_told_of_and_is_no_failure_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, broken = read_rows, [True]

    def read(path: Path | None, *rest: Any) -> Any:
        if path is not None and broken:
            raise StoreError("disk I/O error")
        return real(path, *rest)

    monkeypatch.setattr(journal_module, "read_rows", read)
    async with open_journal(tmp_path) as journal:
        for _ in range(2):
            await journal.ask(Question(T0, T0 + 9, 99))
            assert await journal.flush()
            assert (journal.problem, journal.num_failures) == ("disk I/O error", 0)
        broken.clear()
        await journal.ask(Question(T0, T0 + 9, 99))
        assert journal.problem is None
    assert caplog.text.count("cannot be read: disk I/O error") == 1


def test_an_unknown_kind_of_event_is_shown_as_it_is() -> None:
    (shown,) = event_rows([Event("id", "eclipse", float(T0), "it got dark")])
    assert (shown["title"], shown["level"]) == ("eclipse", "")


async def test_what_was_lately_does_not_depend_on_the_clock_on_the_wall() -> None:
    journal = Journal()
    for n in range(100):
        journal.put_row(row(T0 + n - (3600 if n >= 70 else 0), output_tokens=n))
    assert [named(r)["output_tokens"] for r in journal.recent(60)] == list(range(40, 100))
    assert len(journal.recent(600)) == 100


async def test_a_file_that_was_taken_away_is_begun_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    await journal.load()
    journal.put_row(row(T0))
    assert await journal.flush()
    for ending in ("", "-wal", "-shm"):
        (tmp_path / f"{FILE_NAME}{ending}").unlink()
    journal.put_row(row(T0 + 1, output_tokens=4))
    assert await journal.flush()
    assert [named(r)["output_tokens"] for r in (await journal.ask(Question(T0, T0 + 9, 99))).rows] == [4]
    await journal.close()


async def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with open_journal(tmp_path / "file" / "state") as journal:
        assert "cannot be written: not a directory" in str(journal.problem)
        journal.audit.add(change(8, 1))
        assert len(journal.audit.entries) == 1


async def test_a_disk_that_hangs_is_told_of_and_not_waited_for(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call of the thread is stood in for by a wait without end, as virtual time knows no threads."""

    async def hang(*_: Any, **__: Any) -> None:
        await trio.sleep_forever()

    journal = Journal(tmp_path)
    async with trio.open_nursery() as nursery:
        monkeypatch.setattr("app.journal.journal.trio.to_thread.run_sync", hang)
        nursery.start_soon(journal.run)
        for second in range(60):
            journal.put_row(row(T0 + second))
            await trio.sleep(1)
        assert "the disk has not answered for" in str(journal.problem)
        nursery.cancel_scope.cancel()
    began = trio.current_time()
    await journal.close()
    assert trio.current_time() - began <= 3.1
    assert len(journal._rows) == 60


async def test_writing_is_done_in_batches(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    async def inline(function: Any, *arguments: Any, **_: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr("app.journal.journal.trio.to_thread.run_sync", inline)
    monkeypatch.setattr(Store, "write", lambda self, batch: written.append(len(batch.rows)))
    journal = Journal(tmp_path)
    await journal.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(journal.run)
        await trio.sleep(0.5)
        for second in range(30):
            journal.put_row(row(T0 + second))
            await trio.sleep(1)
        assert written == [5] * 6
        journal.note("drain", "at once")
        await trio.sleep(0.1)
        assert len(written) == 7
        nursery.cancel_scope.cancel()
    await journal.close()


def test_an_event_as_json_has_what_a_program_needs() -> None:
    event = Event("id", "rejections", float(T0), "text", amount=3, running=1, waiting=2)
    assert json.loads(json.dumps(event.as_json())) == {
        "kind": "rejections", "title": "Refusals", "level": "warn",
        "time": "2023-11-14T22:14:00.000Z", "text": "text", "end": None, "amount": 3,
        "running": 1, "waiting": 2,
    }  # fmt: skip
