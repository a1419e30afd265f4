"""Room for connections: each is a file of the process, and of those the system gives only so many."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

from app.open_files import count_open_files, most_open_files
from engine.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.connections import Connection

log = logging.getLogger("relevo.http")

# Of the files that are not open yet: for what is no connection (history, keys, recordings, processes of our own), and
# for all but the API where all others are taken.
MOST_KEPT_FOR_FILES: Final = 64
MOST_SPARE: Final = 16
# That somebody with one of the last places is waited for: the next who comes may be a probe.
CROWDED_SECONDS: Final = 3.0
RETRY_SECONDS: Final = 1
TOLD_EVERY_SECONDS: Final = 3600.0
_CLOSED: Final = "all are open: for each that comes the longest idle one is closed"
_CROWDED: Final = "none of them is idle: but for probes and operators, who comes now is told that the server is busy"
_FULL: Final = "none of the last ones is idle either: who comes now is turned away unheard"


class Room:
    """Says which connections may stay. None is kept waiting for a file, and none that is served is closed.

    *The longest idle makes room.* A client may keep its connection for its next request, until somebody else needs the
    place. Who connects and says nothing is idle, too; not so who has said something that waits for its turn.

    *Where none is idle* a few more are let in, which are *crowded*: probes are answered there, operators, the login and
    files. Who wants the API or the chat is told that the server is busy. As soon as one of the others leaves, one of
    these has its place.

    *Where those are taken, too,* and none of them is idle, who comes is turned away unheard.

    Args:
        most: connections that may be open.
        spare: how many more may be, for probes and operators above all.

    Attributes:
        num_closed: connections that were, by why: `idle`, or `full` for those turned away unheard.
    """

    def __init__(self, most: float = math.inf, spare: int = 0) -> None:
        self.most = most
        self._usual = _Places(most)
        self._spare = _Places(spare)
        self._hearing: set[Connection] = set()
        self._told: dict[str, float] = {}
        self.num_closed: Counter[str] = Counter(idle=0, full=0)

    @classmethod
    def of_process(cls) -> Room:
        """What there are files for, beside those that are open."""
        num_free = max(0, most_open_files() - count_open_files())
        spare = max(1, min(MOST_SPARE, num_free // 8))
        return cls(max(1, num_free - min(MOST_KEPT_FOR_FILES, num_free // 4) - spare), spare)

    @property
    def num_open(self) -> int:
        """Connections that are open."""
        return len(self._usual.taken) + len(self._spare.taken)

    def enter(self, newcomer: Connection) -> Connection | None:
        """Give a connection a place.

        Returns:
            The one that is to be closed for it: another, or itself; `None` where there was room.
        """
        for places, otherwise in ((self._usual, _CROWDED), (self._spare, _FULL)):
            if len(places.taken) < places.most:
                places.take(newcomer)
                return None
            victim = places.take_longest_idle(self._hearing)
            if victim is not None:
                places.take(newcomer)
                self.num_closed["idle"] += 1
                self._tell(_CLOSED)
                return victim
            self._tell(otherwise)
        self.num_closed["full"] += 1
        return newcomer

    def leave(self, connection: Connection) -> None:
        """It is closed."""
        self._usual.leave(connection)
        self._spare.leave(connection)
        if self._spare.taken and len(self._usual.taken) < self._usual.most:
            self._usual.take_over(self._spare)

    def __contains__(self, connection: object) -> bool:
        """Whether it has a place, and has not lost it to another."""
        return connection in self._usual.taken or connection in self._spare.taken

    def note(self, connection: Connection, *, idle: bool) -> None:
        """Whether a connection has nothing to do, from now on."""
        for places in (self._usual, self._spare):
            if connection in places.taken:
                places.idle.pop(connection, None)
                if idle:
                    places.idle[connection] = None

    @contextmanager
    def hearing(self, connection: Connection) -> Iterator[None]:
        """It has said something that is being heard, and may turn out to be a request."""
        self._hearing.add(connection)
        try:
            yield
        finally:
            self._hearing.remove(connection)

    def is_crowded(self, connection: Connection) -> bool:
        """Whether it has one of the spare places."""
        return connection in self._spare.taken

    def _tell(self, what: str) -> None:
        now = trio.current_time()
        if now >= self._told.get(what, -math.inf) + TOLD_EVERY_SECONDS:
            self._told[what] = now
            log.warning("there are files for %g connections (LimitNOFILE, ulimit -n), and %s", self.most, what)


def no_room() -> BusyError:
    """What somebody is told who got one of the last places, or none."""
    message = "Too many connections are open; try again in a moment."
    return BusyError(message, retry_after_seconds=RETRY_SECONDS)


class _Places:
    """Some of the places, and who has them. Who is idle stands in the order in which they became so."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.taken: set[Connection] = set()
        self.idle: OrderedDict[Connection, None] = OrderedDict()

    def take(self, newcomer: Connection) -> None:
        """It has not said anything yet."""
        self.taken.add(newcomer)
        self.idle[newcomer] = None

    def take_longest_idle(self, besides: set[Connection]) -> Connection | None:
        """Free the place of who has been idle for longest, but for some."""
        connection = next((each for each in self.idle if each not in besides), None)
        if connection is not None:
            self.leave(connection)
        return connection

    def take_over(self, others: _Places) -> None:
        """Give a place to one of those who have another kind: to one that is busy, where there is one."""
        busy = others.taken - others.idle.keys()
        connection = next(iter(busy or others.idle))
        others.leave(connection)
        self.taken.add(connection)
        if not busy:
            self.idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Free its place, where it has one here."""
        self.taken.discard(connection)
        self.idle.pop(connection, None)
