"""The keys that were made while the server ran, in SQLite: `relevo.db` in the folder of `[server] state_dir`.

Nothing here knows of trio. One connection, used by one caller after the other (`KeyService`), so there is one writer.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from app.config_schema import KeyLimits
from app.keys import Digests, KeyRecord
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

FILE_NAME: Final = "relevo.db"
SCHEMA_VERSION: Final = 1
# Another server on the same folder may be writing.
BUSY_SECONDS: Final = 5.0
# Full, sick or not to be written to: what is there may still be read, and where nothing is, nobody has keys.
_UNWRITABLE: Final = frozenset(
    {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
)
_SCHEMA: Final = """
CREATE TABLE keys (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    key_digest BLOB NOT NULL UNIQUE,
    cookie_digest BLOB NOT NULL,
    max_concurrent INTEGER,
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    created REAL NOT NULL,
    last_used REAL,
    revoked REAL
);
CREATE UNIQUE INDEX valid_names ON keys (name) WHERE revoked IS NULL;
"""
_COLUMNS: Final = (
    "name, key_digest, cookie_digest, max_concurrent, requests_per_minute, tokens_per_minute, id, created, last_used, "
    "revoked"
)


class StateError(Exception):
    """What should be kept cannot be written; the message says why."""


class NameTakenError(StateError):
    """A valid key of that name is on the disk already: another server on the same folder has made it."""


@dataclass(frozen=True, slots=True)
class Opened:
    """What was found in a folder.

    Attributes:
        store: the open database; `None` where there is none and none can be made.
        problem: why nothing can be written there.
        records: the keys in it, the revoked too.
        version: what `KeyStore.version` said before they were read.
    """

    store: KeyStore | None
    problem: str | None
    records: Sequence[KeyRecord] = ()
    version: int = 0


class KeyStore:
    """The open database. Every call may block for as long as the disk does."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def load(self) -> list[KeyRecord]:
        """All keys, the revoked too, in the order in which they were made.

        Raises:
            StateError: they cannot be read.
        """
        with _told():
            rows = self._connection.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY id").fetchall()  # noqa: S608 - constant
        return [_record(row) for row in rows]

    def version(self) -> int:
        """Another number after another process has written."""
        with _told():
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def add(self, name: str, digests: Digests, limits: KeyLimits, now: float) -> int:
        """Keep a key.

        Returns:
            Its number, which no other key ever gets.

        Raises:
            StateError: it cannot be written, or the name is taken.
        """
        values = (name, digests.key, digests.cookie, *_limit_values(limits), now)
        with _told(), self._connection:
            try:
                cursor = self._connection.execute(
                    "INSERT INTO keys (name, key_digest, cookie_digest, max_concurrent, requests_per_minute, "
                    "tokens_per_minute, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
            except sqlite3.IntegrityError:
                raise NameTakenError(name) from None
        return int(cursor.lastrowid or 0)

    def revoke(self, key_id: int, now: float) -> None:
        """Write down that a key is refused from `now` on."""
        with _told(), self._connection:
            self._connection.execute("UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL", (now, key_id))

    def forget_revoked(self) -> None:
        """Remove every key that was revoked."""
        with _told(), self._connection:
            self._connection.execute("DELETE FROM keys WHERE revoked IS NOT NULL")

    def mark_used(self, times: Mapping[int, float]) -> None:
        """Write down when keys were last used."""
        with _told(), self._connection:
            self._connection.executemany(
                "UPDATE keys SET last_used = max(coalesce(last_used, 0), ?) WHERE id = ?",
                [(when, key_id) for key_id, when in times.items()],
            )

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong with the database is told in words."""
    try:
        yield
    except sqlite3.Error as error:
        raise StateError(str(error)) from error


def open_store(folder: Path) -> Opened:
    """Open the database of a folder; both are made where they are missing.

    Raises:
        ConfigError: there is one and it cannot be read: keys may be in it, so nobody may be let in without one.
    """
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError as error:
        return _open_as_it_is(path, (error.strerror or str(error)).lower())
    try:
        connection = _connect(path)
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF in _UNWRITABLE:
            return _open_as_it_is(path, str(error))
        raise _unreadable(path, str(error)) from None
    return _read(path, connection, None)


def has_keys(folder: Path) -> bool:
    """Whether keys are needed because some were made before.

    Raises:
        ConfigError: there may be some, and they cannot be read.
    """
    opened = open_store(folder)
    if opened.store is not None:
        opened.store.close()
    return bool(opened.records)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        if _version_of(connection, path) == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.commit()
    except BaseException:
        connection.close()
        raise
    return connection


def _open_as_it_is(path: Path, why: str) -> Opened:
    """Open for reading alone, also from a disk that nobody can write to."""
    problem = f"{path} cannot be written: {why}"
    connection = None
    try:
        if not path.is_file() or not path.stat().st_size:
            return Opened(None, problem)
        journal = path.with_name(path.name + "-wal")
        if journal.is_file() and journal.stat().st_size:  # changes that only a writer can bring in
            raise _unreadable(path, why)
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?immutable=1", uri=True, check_same_thread=False)
        if _version_of(connection, path) == 0:  # begun on a full disk: no key was ever in it
            connection.close()
            return Opened(None, problem)
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        raise _unreadable(path, str(error)) from None
    return _read(path, connection, problem)


def _read(path: Path, connection: sqlite3.Connection, problem: str | None) -> Opened:
    """The keys of an open database; it is closed where they cannot be read."""
    store = KeyStore(connection)
    try:
        version = store.version()
        return Opened(store, problem, store.load(), version)
    except StateError as error:
        store.close()
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"The API keys in {path} cannot be read ({why}); move it away, or set [server] state_dir.")


def _version_of(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise _unreadable(path, "a newer version of Relevo wrote it")
    return version


def _limit_values(limits: KeyLimits) -> tuple[int | None, int | None, int | None]:
    return limits.max_concurrent, limits.requests_per_minute, limits.tokens_per_minute


def _record(row: tuple[Any, ...]) -> KeyRecord:
    """A row as a key.

    Raises:
        StateError: something in it is not what was written there.
    """
    name, key, cookie, concurrent, requests, tokens, key_id, created, last_used, revoked = row
    times = [time for time in (created, last_used, revoked) if time is not None]
    kinds = (name, str), (key, bytes), (cookie, bytes), *[(time, float) for time in times]
    try:
        limits = KeyLimits(max_concurrent=concurrent, requests_per_minute=requests, tokens_per_minute=tokens)
    except ValidationError:
        raise StateError(f"the limits of key {key_id} are damaged") from None
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise StateError(f"key {key_id} is damaged")
    return KeyRecord(
        name, Digests(key, cookie), limits, key_id=key_id, created=created, last_used=last_used, revoked=revoked
    )
