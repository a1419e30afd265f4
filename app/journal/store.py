"""The file: `history.db` in the folder of `[server] state_dir`, beside the keys but never in their way.

Keys that cannot be read stop a start. What is kept here may be lost, so a damaged file is set aside and begun anew.
Nothing here knows of trio; every call may block for as long as the disk does. One process writes, which is held by a
lock on a file of its own (closing any handle of the database itself would drop SQLite's locks on it).
"""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, Final

from app.audit import AuditEntry, timestamp
from app.journal.events import Event
from app.journal.rows import COLUMNS, merging

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from app.journal.rows import Row

log = logging.getLogger("relevo.history")

FILE_NAME: Final = "history.db"
LOCK_NAME: Final = "history.lock"
DAMAGED_NAME: Final = "history.db.damaged"
BUSY_SECONDS: Final = 2.0
SECOND, MINUTE = 1, 60
# So many rows are kept of each span: a day and 31 days without gaps. Counted, because a clock that was set wrong once
# must not empty the file.
KEPT_ROWS: Final = {SECOND: 86_400, MINUTE: 44_640}
KEPT_ENTRIES: Final = 10_000
KEPT_EVENTS: Final = 10_000
LOADED: Final = 1000
_DAMAGED: Final = frozenset({
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_SCHEMA,
})  # fmt: skip
HISTORY: Final = f"""
CREATE TABLE {{name}} (
    span INTEGER NOT NULL, {", ".join(f"{name} REAL" for name in COLUMNS)}, PRIMARY KEY (span, time)
) WITHOUT ROWID;
"""
# One script a version; a file of version n lacks all but the first n.
MIGRATIONS: list[str] = [
    HISTORY.format(name="history")
    + """
    CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, generation INTEGER NOT NULL,
        time TEXT NOT NULL, who TEXT NOT NULL, changes TEXT NOT NULL, reason TEXT, expires TEXT, reverted TEXT,
        effective TEXT NOT NULL
    );
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, time REAL NOT NULL,
        text TEXT NOT NULL, "end" REAL, amount INTEGER, running INTEGER NOT NULL, waiting INTEGER NOT NULL
    );
    CREATE INDEX events_by_time ON events (time);
    """,
    "ALTER TABLE audit ADD COLUMN effect TEXT;",
    "ALTER TABLE audit ADD COLUMN deed TEXT; ALTER TABLE audit ADD COLUMN outcome TEXT;",
]
EVENT_COLUMNS: Final = 'id, kind, time, text, "end", amount, running, waiting'
# Each is kept for itself: recordings made and deleted push no change of the settings out.
ENTRY_KINDS: Final = ("deed IS NULL", "deed IS NOT NULL")
_ENTRY_COLUMNS: Final = (
    "id, generation, time, who, changes, reason, expires, reverted, effective, effect, deed, outcome"
)


class StoreError(Exception):
    """The disk does not take or give what it should; the message says why."""


class DamagedError(StoreError):
    """What lies there is not what was written."""


@dataclass
class Batch:
    """What is to be written.

    Attributes:
        rows: of seconds, oldest first.
        entries, events: by their ids; written anew where they are known.
    """

    rows: list[Row] = field(default_factory=list)
    entries: dict[str, AuditEntry] = field(default_factory=dict)
    events: dict[str, Event] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.entries or self.events)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found at the start: the last changes and deeds, and the last events."""

    entries: Sequence[AuditEntry] = ()
    events: Sequence[Event] = ()


class Store:
    """The open file."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[str]) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        self._inode = path.stat().st_ino

    @property
    def is_there(self) -> bool:
        """Whether the file still lies where it was opened; somebody may have moved it away."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def load(self) -> Loaded:
        """The newest of what is kept.

        Raises:
            StoreError: it cannot be read.
        """
        with told():
            execute = self._connection.execute
            newest = " UNION ALL ".join(
                f"SELECT * FROM (SELECT number FROM audit WHERE {kind} ORDER BY number DESC LIMIT {LOADED})"  # noqa: S608
                for kind in ENTRY_KINDS
            )
            entries = execute(
                f"SELECT {_ENTRY_COLUMNS} FROM audit WHERE number IN ({newest}) ORDER BY number"  # noqa: S608
            ).fetchall()
            events = execute(f"SELECT {EVENT_COLUMNS} FROM events ORDER BY number DESC LIMIT {LOADED}").fetchall()  # noqa: S608
        try:
            changes = [_entry(row) for row in entries]
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise DamagedError(f"a change is not what was written: {error}") from None
        return Loaded(changes, [make_event(row) for row in reversed(events)])

    def newest(self) -> float:
        """The time of the last second that is kept, in seconds since the epoch; 0 where there is none.

        Raises:
            StoreError: it cannot be read.
        """
        with told():
            (time,) = self._connection.execute("SELECT max(time) FROM history WHERE span = 1").fetchone()
        return time or 0.0

    def write(self, batch: Batch) -> None:
        """Write all of it or nothing.

        Raises:
            StoreError: it cannot be written.
        """
        with told(), self._connection as connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO history VALUES (1, {', '.join('?' * len(COLUMNS))})",  # noqa: S608
                batch.rows,
            )
            for start, end in _touched_minutes(batch.rows):
                # Made anew from its seconds each time, so that the current minute is there too, and no crash loses one.
                connection.execute(
                    f"INSERT OR REPLACE INTO history SELECT {MINUTE}, * FROM "  # noqa: S608
                    f"({merging('history', str(start))} WHERE span = 1 AND time >= {start} AND time < {end})"
                )
            connection.executemany(
                f"INSERT INTO audit ({_ENTRY_COLUMNS}) VALUES ({', '.join('?' * 12)}) "  # noqa: S608
                "ON CONFLICT (id) DO UPDATE SET reverted = excluded.reverted, effect = excluded.effect, "
                "outcome = excluded.outcome",
                [_entry_values(entry) for entry in batch.entries.values()],
            )
            connection.executemany(
                f"INSERT INTO events ({EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "  # noqa: S608
                'ON CONFLICT (id) DO UPDATE SET text = excluded.text, "end" = excluded."end", amount = excluded.amount',
                [tuple(map(_storable, asdict(event).values())) for event in batch.events.values()],
            )

    def prune(self, now: float) -> None:
        """Let go of what is too old; the file does not shrink, what comes next takes the room.

        Args:
            now: seconds since the epoch. What is later is of a clock that was ahead, and does not push out what is not.

        Raises:
            StoreError: it cannot be written.
        """
        with told(), self._connection as connection:
            for span, kept in KEPT_ROWS.items():
                for side in ("time <= ?3", "time > ?3"):
                    connection.execute(
                        f"DELETE FROM history WHERE span = ?1 AND {side} AND time <= (SELECT time FROM history "  # noqa: S608
                        f"WHERE span = ?1 AND {side} ORDER BY time DESC LIMIT 1 OFFSET ?2)",
                        (span, kept, now),
                    )
            for kind in ENTRY_KINDS:
                connection.execute(
                    f"DELETE FROM audit WHERE {kind} AND number <= (SELECT number FROM audit WHERE {kind} "  # noqa: S608
                    f"ORDER BY number DESC LIMIT 1 OFFSET {KEPT_ENTRIES})"
                )
            connection.execute(f"DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - {KEPT_EVENTS}")  # noqa: S608

    def close(self) -> None:
        """Let go of the file and of the lock."""
        with closing(self._lock), closing(self._connection):
            pass


def open_store(folder: Path) -> Store:
    """Open the file of a folder, both made where they are missing, and bring it to this version.

    Raises:
        DamagedError: what lies there cannot be used; `set_aside` makes room for another.
        StoreError: there is none and none can be made, another server has it, or a newer version wrote it.
    """
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        (folder / LOCK_NAME).touch(mode=0o600)
        lock = (folder / LOCK_NAME).open("a")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"{path} belongs to another server that runs; give each a [server] state_dir") from None
        with told():
            connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
        try:
            with told():
                _prepare(connection, path)
            return Store(path, connection, lock)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        lock.close()
        raise


def set_aside(folder: Path) -> Path:
    """Move a damaged file away; the one that was set aside before it is gone.

    Raises:
        StoreError: it cannot be moved.
    """
    path = folder / FILE_NAME
    aside = folder / DAMAGED_NAME
    try:
        path.replace(aside)
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path} is damaged and cannot be moved away: {error.strerror}") from None
    return aside


@contextmanager
def told() -> Iterator[None]:
    """What goes wrong with the database is told in words, and whether it is the file's fault."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        raise (DamagedError if code in _DAMAGED else StoreError)(str(error)) from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    # A crash of the process loses nothing; one of the machine may lose what came last, and never damages the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA journal_size_limit = 4194304")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(f"a newer version of Relevo wrote {path}; move it away, or set [server] state_dir")
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        # A script commits what is open before it begins, so it carries its own transaction.
        connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;")


def _touched_minutes(rows: Sequence[Row]) -> list[tuple[int, int]]:
    starts = {int(row[0] or 0) // MINUTE * MINUTE for row in rows}
    return [(start, start + MINUTE) for start in sorted(starts)]


def _storable(value: Any) -> Any:
    """JSON can bring halves of surrogate pairs, which no database takes."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _entry_values(entry: AuditEntry) -> tuple[Any, ...]:
    changes, effective = json.dumps(entry.changes), json.dumps(dict(entry.effective))
    effect = None if entry.effect is None else json.dumps(dict(entry.effect))
    values = (
        entry.entry_id, entry.generation, entry.time, entry.who, changes, entry.reason, entry.expires, entry.reverted,
        effective, effect, entry.deed, entry.outcome,
    )  # fmt: skip
    return tuple(map(_storable, values))


def _entry(row: tuple[Any, ...]) -> AuditEntry:
    """A row as a change; raises `ValueError` or its like where something is not what was written there."""
    entry_id, generation, time, who, changes, reason, expires, reverted, effective, effect, deed, outcome = row
    for moment in (time, expires, reverted):
        if moment is not None:
            datetime.fromisoformat(moment)
    pairs = {name: (old, new) for name, (old, new) in json.loads(changes).items()}
    known = dict(json.loads(effective))
    met = None if effect is None else dict(json.loads(effect))
    return AuditEntry(int(generation), time, who, pairs, reason, expires, reverted, known, entry_id, met, deed, outcome)


def make_event(row: tuple[Any, ...]) -> Event:
    """A row of `EVENT_COLUMNS` as an event.

    Raises:
        DamagedError: its times are none.
    """
    event = Event(*row)
    try:
        for moment in (event.time, event.end):
            if moment is not None:
                timestamp(moment)
    except (ValueError, TypeError, OverflowError) as error:
        raise DamagedError(f"an event is not what was written: {error}") from None
    return event
