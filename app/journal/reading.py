"""Reading the history: any span of time in as many points as are wanted, from the disk and from what is on its way.

Each call opens the file anew, to read only: readers and the writer never wait for each other.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from app.journal.rows import COLUMNS, merging
from app.journal.store import EVENT_COLUMNS, HISTORY, MINUTE, SECOND, make_event, told

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from app.journal.events import Event
    from app.journal.rows import Row

# Steps between two points, in seconds, so that their borders lie where clocks have theirs.
STEPS: Final = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the history.

    Attributes:
        start, end: seconds since the epoch, both included.
        points: no more than so many rows.
        step: seconds of each; `None` is the shortest that keeps to `points`.
    """

    start: int
    end: int
    points: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows with the columns of `rows.COLUMNS`, oldest first, none where nothing was measured; `step` seconds each."""

    step: int
    rows: Sequence[Row]


def choose_step(start: int, end: int, points: int) -> int:
    """The shortest step that needs no more than `points` points, of which there are two at least."""
    days = -(-(end - start) // (STEPS[-1] * (points - 1)))
    return next((step for step in STEPS if end // step - start // step < points), STEPS[-1] * days)


def read_rows(path: Path | None, unwritten: Sequence[Row], question: Question) -> Answer:
    """Answer a question.

    Args:
        path: the file; `None` where there is none.
        unwritten: rows of seconds that may not have come to the disk yet.

    Raises:
        StoreError: the file cannot be read.
    """
    with told(), closing(_open(path)) as connection:
        connection.execute("BEGIN")  # what is found below is of one moment
        _add_unwritten(connection, unwritten)
        step = question.step or choose_step(question.start, question.end, question.points)
        gone = _seconds_are_gone(connection, question.start)
        span = MINUTE if step >= MINUTE or gone else SECOND
        step = max(step, span)
        # Where single seconds are no longer kept, a minute is the least that can be told.
        start = question.start // span * span if gone else question.start
        first, last = start // step * step, question.end
        begun: list[Row] = []
        if first < start:
            begun, first = _begun_row(connection, span, step, start, last), first + step
        # The point that the oldest unwritten row belongs to, and those behind it.
        (oldest,) = connection.execute("SELECT min(time) FROM temp.unwritten WHERE time >= ?", (first,)).fetchone()
        border = last + 1 if oldest is None else min(last + 1, int(oldest) // step * step)
        begins = "SELECT min(time) FROM history WHERE span = ? AND time >= ?"
        (found,) = connection.execute(begins, (span, first)).fetchone()
        first = border if found is None else min(border, int(found) // step * step)
        reach = first + step * question.points
        rows = _written_rows(connection, span, step, first, min(border, reach))
        if border <= last and border < reach:
            rows += _mixed_rows(connection, span, step, border, last)
        return Answer(step, [*begun, *rows][: question.points])


def _begun_row(connection: sqlite3.Connection, span: int, step: int, start: int, end: int) -> list[Row]:
    """The point within which `start` lies, of what comes from there on; of a minute that began before, the seconds."""
    kept = "SELECT * FROM main.history WHERE span"
    rows = f"({kept} = 1 AND time >= ?1 AND time < min(?2, ?4) UNION ALL {kept} = ?3 AND time >= ?2 AND time < ?4 "
    rows += "UNION ALL SELECT * FROM temp.unwritten WHERE time >= ?1 AND time < ?4)"
    whole, border = -(-start // span) * span, min((start // step + 1) * step, end + 1)
    statement = merging(rows, "?5") + " GROUP BY 1"
    return connection.execute(statement, (start, whole, span, border, start // step * step)).fetchall()


def _written_rows(connection: sqlite3.Connection, span: int, step: int, start: int, end: int) -> list[Row]:
    """Points of what is on the disk, from `start` to before `end`; each is a look into the index, nothing is sorted."""
    connection.execute("CREATE TEMP TABLE points (start INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO points VALUES (?)", ((at,) for at in range(start, end, step)))
    statement = merging("points CROSS JOIN main.history", "start")
    statement += " WHERE span = ?1 AND time >= start AND time < min(start + ?2, ?3) GROUP BY start ORDER BY start"
    return connection.execute(statement, (span, step, end)).fetchall()


def _mixed_rows(connection: sqlite3.Connection, span: int, step: int, start: int, end: int) -> list[Row]:
    """Points of what is on the disk and what is not yet, from `start` to `end`."""
    both = "(SELECT * FROM main.history WHERE span = ?1 UNION ALL SELECT * FROM temp.unwritten)"
    statement = merging(both, "cast(time / ?2 AS INTEGER) * ?2")
    statement += " WHERE time >= ?3 AND time <= ?4 GROUP BY 1 ORDER BY 1"
    return connection.execute(statement, (span, step, start, end)).fetchall()


def read_events(path: Path, start: float, end: float, number: int) -> list[Event]:
    """The last `number` events that began within a span of time, oldest first.

    Raises:
        StoreError: the file cannot be read.
    """
    with told(), closing(_open(path)) as connection:
        found = connection.execute(
            f"SELECT {EVENT_COLUMNS} FROM events WHERE time >= ? AND time <= ? ORDER BY time DESC LIMIT ?",  # noqa: S608
            (start, end, number),
        ).fetchall()
    return [make_event(row) for row in reversed(found)]


def _open(path: Path | None) -> sqlite3.Connection:
    if path is None:
        connection = sqlite3.connect(":memory:")
        connection.executescript(HISTORY.format(name="history"))
        return connection
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)


def _add_unwritten(connection: sqlite3.Connection, rows: Iterable[Row]) -> None:
    connection.execute(HISTORY.format(name="temp.unwritten").strip().rstrip(";"))
    marks = ", ".join("?" * len(COLUMNS))
    connection.executemany(f"INSERT OR REPLACE INTO temp.unwritten VALUES (1, {marks})", rows)  # noqa: S608
    # They may have been written since they were handed over.
    connection.execute(
        "DELETE FROM temp.unwritten WHERE time IN (SELECT time FROM main.history WHERE span = 1 AND time >= "
        "(SELECT min(time) FROM temp.unwritten))"
    )


def _seconds_are_gone(connection: sqlite3.Connection, start: int) -> bool:
    """Whether single seconds are no longer kept of a time of which there are minutes."""
    oldest = "SELECT min(time) FROM history WHERE span = ?"
    (second,), (minute,) = (connection.execute(oldest, (span,)).fetchone() for span in (SECOND, MINUTE))
    return minute is not None and second is not None and start < second - MINUTE and minute < second - MINUTE
