"""The actor that keeps what outlives the process.

Whoever has something to keep hands it over and goes on: `put_…` never waits. It is written in batches, by one thread at
a time. What cannot be written waits in memory, bounded, and is tried again; the server never waits for the disk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from app.audit import AuditLog, make_id, timestamp
from app.journal.events import MAX_EVENTS, Event, EventLog, describe_change
from app.journal.reading import Answer, read_events, read_rows
from app.journal.store import Batch, DamagedError, Loaded, StoreError, open_store, set_aside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from app.audit import AuditEntry
    from app.journal.reading import Question
    from app.journal.rows import Row
    from app.journal.store import Store

log = logging.getLogger("relevo.history")

T = TypeVar("T")

FLUSH_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 10.0
PRUNE_SECONDS: Final = 300.0
# A disk that takes longer is said to hang; the end of the process waits no longer for it either.
SLOW_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 1.0  # for whoever wants to know whether something is written
READ_SECONDS: Final = 3.0  # then whoever asked is told what memory has
CLOSE_SECONDS: Final = 3.0
MAX_UNWRITTEN_ROWS: Final = 3600
RECENT_ROWS: Final = 600
MAX_READERS: Final = 2
# How a deed ended of which an earlier process has not told it.
LEFT_OPEN: Final = "the server ended before it did"


class Journal:
    """What is kept, and the only way to it.

    Args:
        folder: where the file is; `None` keeps everything in memory alone.
        wall: seconds since the epoch.

    Attributes:
        audit: the changes of the settings and other deeds.
        events: the last events.
        num_failures: times that the disk did not take what it should.
        num_dropped_rows: seconds of the history that were lost because it did not for too long.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        wall: Callable[[], float] = time.time,
        open_: Callable[[Path], Store] = open_store,
    ) -> None:
        self._folder = folder
        self._open = open_
        self.wall = wall
        self.audit = AuditLog(keep=self._keep_entry)
        self.events = EventLog()
        self.num_failures = 0
        self.num_dropped_rows = 0
        self.running, self.waiting = 0, 0
        self._problem: str | None = None if folder is not None else "no folder was opened for it"
        self._read_problem: str | None = None
        self._store: Store | None = None
        self._rows: deque[Row] = deque()
        self._recent: deque[Row] = deque(maxlen=RECENT_ROWS)
        self._waiting = Batch()
        self._in_flight = Batch()
        self._writing_since: float | None = None
        self._pruned = -PRUNE_SECONDS
        self._wake = trio.Event()
        self._tried = trio.Event()
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._readers = trio.CapacityLimiter(MAX_READERS)
        self._rememberers = trio.CapacityLimiter(1)  # those who read from memory alone, whatever the disk does

    @property
    def problem(self) -> str | None:
        """Why the disk cannot be written or read just now; `None` where all is well."""
        since = self._writing_since
        if since is not None and trio.current_time() - since > SLOW_SECONDS:
            return f"the disk has not answered for {trio.current_time() - since:.0f} s"
        return self._problem or self._read_problem

    @property
    def num_unwritten_changes(self) -> int:
        """Changes of the settings that are in memory alone."""
        return len(self._waiting.entries.keys() | self._in_flight.entries.keys())

    def stats(self) -> dict[str, Any]:
        """How it is with the history, for `/ops/stats.json`."""
        return {
            "problem": self.problem,
            "write_failures": self.num_failures,
            "dropped_rows": self.num_dropped_rows,
            "unwritten_rows": len(self._rows) + len(self._in_flight.rows),
        }

    def put_row(self, row: Row) -> None:
        """Keep a second."""
        self._recent.append(row)
        self._rows.append(row)
        self._bound()

    def recent(self, seconds: int) -> list[Row]:
        """The rows of the last `seconds`, at most `RECENT_ROWS` of this process; whatever disk and wall clock do."""
        rows: list[Row] = []
        left = float(seconds)
        for row in reversed(self._recent):
            left -= float(row[1] or 0)
            if left < -0.5:
                break
            rows.append(row)
        return rows[::-1]

    def put_event(self, event: Event) -> None:
        """Keep an event, or what is known of it now."""
        self.events.put(event)
        self._waiting.events[event.event_id] = event
        self._bound()
        self._wake.set()

    def note(self, kind: str, text: str) -> None:
        """Keep an event of this moment."""
        self.put_event(Event(make_id(), kind, self.wall(), text, running=self.running, waiting=self.waiting))

    def begin_deed(self, deed: str, who: str, outcome: str | None = None) -> str:
        """Write down what somebody does that is no change of the settings; gives the id of its entry.

        Args:
            outcome: of what is done at once.
        """
        return self.audit.add_deed(deed, who, timestamp(self.wall()), outcome)

    def _keep_entry(self, entry: AuditEntry) -> None:
        known = entry.entry_id in self._waiting.entries or entry.reverted is not None or entry.effect is not None
        self._waiting.entries[entry.entry_id] = entry
        self._bound()
        self._wake.set()
        if not known and entry.changes:
            self.note("revert" if entry.who == "ttl" else "config", describe_change(entry))

    async def load(self) -> Loaded:
        """Open the file and read what earlier processes left; if it cannot be opened, `run` tells, and no more."""
        if self._folder is None:
            return Loaded()
        try:
            loaded = await trio.to_thread.run_sync(self._open_and_load, limiter=self._one_at_a_time)
        except StoreError as error:
            self.num_failures += 1
            self._problem = str(error)
            return Loaded()
        self.audit = AuditLog(loaded.entries, self._keep_entry)
        for entry in loaded.entries:
            if entry.deed is not None and entry.outcome is None:
                self.audit.mark_outcome(entry.entry_id, LEFT_OPEN)
        self.events = EventLog(loaded.events)
        return loaded

    async def run(self) -> None:
        """Write what there is, for ever."""
        if self._folder is not None and self._problem is not None:
            self._warn()  # only now, for a server that does not come up keeps no history
        while True:
            with trio.move_on_after(FLUSH_SECONDS):
                await self._wake.wait()
            self._wake = trio.Event()
            if not await self.flush() and self._folder is not None:
                await trio.sleep(RETRY_SECONDS)

    async def flush(self) -> bool:
        """Write what there is now.

        Returns:
            Whether it is written.
        """
        if self._folder is None:
            return False
        batch = self._take()
        self._writing_since = trio.current_time()
        try:
            await trio.to_thread.run_sync(
                partial(self._write, batch), limiter=self._one_at_a_time, abandon_on_cancel=True
            )
        except StoreError as error:
            self._give_back(batch)
            await self._cope(error, self._store)
            return False
        except trio.Cancelled:
            self._give_back(batch)  # perhaps it is written all the same; writing it twice changes nothing
            raise
        finally:
            self._writing_since = None
            self._tried.set()
            self._tried = trio.Event()
        self._in_flight = Batch()
        if self._problem is not None:
            log.warning("the history is written again")
        self._problem = None
        return True

    async def settle(self) -> None:
        """Wait until no change is in memory alone; not for long, and not at all for a disk that takes nothing."""
        with trio.move_on_after(SETTLE_SECONDS):
            while self.num_unwritten_changes and self.problem is None:
                await self._tried.wait()

    async def ask(self, question: Question) -> Answer:
        """The history of a span of time, with what has not come to the disk yet; where that fails, only the latter."""
        return await self.ask_for(question, lambda answer: answer)

    async def ask_for(self, question: Question, make: Callable[[Answer], T]) -> T:
        """What `make` makes of that, on the reader's thread: the event loop is not held by it."""
        rows, store = [*self._in_flight.rows, *self._rows], self._store
        if store is not None:
            try:
                return await self._read(lambda: make(read_rows(store.path, rows, question)))
            except StoreError as error:
                await self._could_not_read(error, store)
        return await trio.to_thread.run_sync(
            lambda: make(read_rows(None, rows, question)), limiter=self._rememberers, abandon_on_cancel=True
        )

    async def _read(self, work: Callable[[], T]) -> T:
        """Run on a reader's thread, which is left to itself where the disk does not answer in time.

        Raises:
            StoreError: it does not, or says that it cannot.
        """
        with trio.move_on_after(READ_SECONDS):
            found = await trio.to_thread.run_sync(work, limiter=self._readers, abandon_on_cancel=True)
            self._read_problem = None
            return found
        raise StoreError(f"the disk has not answered for {READ_SECONDS:g} s")

    async def ask_events(self, start: float, end: float, number: int) -> list[Event]:
        """The last `number` events of a span of time, oldest first."""
        kept, store = {}, self._store
        if store is not None:
            try:
                found = await self._read(partial(read_events, store.path, start, end, number))
                kept = {event.event_id: event for event in found}
            except StoreError as error:
                await self._could_not_read(error, store)
        kept |= {event.event_id: event for event in self.events if start <= event.time <= end}
        return sorted(kept.values(), key=lambda event: event.time)[-number:]

    async def close(self) -> None:
        """Write the last and let go of the file; a disk that does not answer is not waited for."""
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS) as scope:
            await self.flush()
            if self._store is not None:
                await trio.to_thread.run_sync(self._store.close, limiter=self._one_at_a_time, abandon_on_cancel=True)
        if scope.cancelled_caught:
            log.warning("the last of the history could not be written: the disk does not answer")

    def _bound(self) -> None:
        while len(self._rows) > MAX_UNWRITTEN_ROWS:
            self._rows.popleft()
            self.num_dropped_rows += 1
        for kept in (self._waiting.entries, self._waiting.events):
            while len(kept) > MAX_EVENTS:
                del kept[next(iter(kept))]

    def _take(self) -> Batch:
        self._waiting.rows, self._rows = [*self._rows], deque()
        self._in_flight, self._waiting = self._waiting, Batch()
        return self._in_flight

    def _give_back(self, batch: Batch) -> None:
        self._in_flight = Batch()
        self._rows.extendleft(reversed(batch.rows))
        self._waiting.entries = batch.entries | self._waiting.entries
        self._waiting.events = batch.events | self._waiting.events
        self._bound()

    def _write(self, batch: Batch) -> None:
        """On a worker thread."""
        if self._store is not None and not self._store.is_there:
            self._store.close()
            self._store = None
        if self._store is None:
            assert self._folder is not None
            self._store = self._open(self._folder)
            # Until now another server may have kept it: its seconds are not written over by those of waiting for it.
            newest = self._store.newest()
            batch.rows = [row for row in batch.rows if float(row[0] or 0) > newest]
        if batch:
            self._store.write(batch)
        newest = float(batch.rows[-1][0] or 0) if batch.rows else self._pruned
        if abs(newest - self._pruned) >= PRUNE_SECONDS:
            self._store.prune(newest)
            self._pruned = newest

    def _open_and_load(self) -> Loaded:
        """On a worker thread."""
        assert self._folder is not None
        for _ in range(2):
            try:
                self._store = self._open(self._folder)
                return self._store.load()
            except DamagedError as error:
                self._set_aside(error, self._store)
        raise StoreError("a new file could not be begun")

    async def _could_not_read(self, error: StoreError, store: Store) -> None:
        """What is read again is no failure to write; a damaged file is one of both."""
        if isinstance(error, DamagedError):
            await self._cope(error, store)
        elif self._read_problem is None:
            log.warning("the history cannot be read: %s", error)
        self._read_problem = str(error)

    async def _cope(self, error: StoreError, store: Store | None) -> None:
        """Begin a damaged file anew, with the changes and events that memory holds; of anything else only tell."""
        if isinstance(error, DamagedError):
            try:
                await trio.to_thread.run_sync(self._set_aside, error, store, limiter=self._one_at_a_time)
            except StoreError as failure:
                error = failure
            else:
                self._waiting.entries = {entry.entry_id: entry for entry in self.audit.entries} | self._waiting.entries
                self._waiting.events = {event.event_id: event for event in self.events} | self._waiting.events
                self._wake.set()
        self._failed(error)

    def _set_aside(self, error: DamagedError, store: Store | None) -> None:
        """On a worker thread. Nothing is done where somebody else has done it."""
        assert self._folder is not None
        if self._store is not store:
            return
        if self._store is not None:
            self._store.close()
            self._store = None
        log.warning("the history is damaged (%s) and begun anew; it was moved to %s", error, set_aside(self._folder))

    def _failed(self, error: StoreError) -> None:
        self.num_failures += 1
        is_new = self._problem is None
        self._problem = str(error)
        if is_new:
            self._warn()

    def _warn(self) -> None:
        log.warning("the history cannot be written, which is tried again: %s", self._problem)


@asynccontextmanager
async def open_journal(folder: Path) -> AsyncIterator[Journal]:
    """The journal of a folder; the caller runs it."""
    journal = Journal(folder)
    await journal.load()
    newest = journal.events.latest(1)
    unsaid = " after an end that was not told of" if newest and newest[0].kind != "stop" else ""
    journal.note("start", f"The server starts{unsaid}")
    try:
        yield journal
    finally:
        journal.note("stop", "The server has ended")
        await journal.close()
