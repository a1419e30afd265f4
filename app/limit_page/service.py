"""One search at a time, and only while nobody else is served: a figure measured beside users is not the server's.

What a search asks for carries a key that the server lends it. Any other request that comes in meanwhile is a user's and
ends the search, unless it was asked for beside users: then it is background work, and finds what they leave.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from app.errors import ApiError
from app.limit_page.archive import Archive
from app.limit_page.child import COMMAND, ChildError, run_child
from app.limit_page.search import ENDS, Search
from app.render import numbers
from app.render.limit import end_words
from app.render.plain import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from app.journal.journal import Journal
    from app.keys import Keyring
    from app.limit_page.kept import KeptSearches
    from app.limit_page.wish import Wish
    from engine.engine import Engine
    from engine.handle import GenerationRequest

log = logging.getLogger("relevo.limit")

# It aims at its duration; then it is given up.
LATE_SHARE, LATE_SECONDS = 0.25, 60.0
# What the search left inside is given up by it, and gone after a step.
SETTLE_SECONDS: Final = 5.0
FAILED: Final = 2
AGAIN: Final = (
    "Begin it again when they have gone, or let it run beside users, as background work: its figure is then of what "
    "they leave."
)


class _Order(NamedTuple):
    """The search, what was asked for, the address of this server, and the file that is replayed."""

    search: Search
    wish: Wish
    url: str
    trace: Path | None


class LimitSearches:
    """Looks for the limit of this server when it is asked to.

    Args:
        kept: where earlier ones lie; `None` keeps none.
        command: what looks.

    Attributes:
        search: the one that runs or was last, since the start.
        archive: those that ended.
        changed: set when there is something new to be seen; replaced each time.
    """

    def __init__(
        self,
        engine: Engine,
        keyring: Keyring,
        journal: Journal,
        kept: KeptSearches | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._engine, self._keyring, self._journal, self._command = engine, keyring, journal, command
        self.search: Search | None = None
        self.archive = Archive(kept)
        self.changed = trio.Event()
        self._send, self._orders = trio.open_memory_channel[_Order](1)
        self._has_opened = False
        self._stop = trio.Event()
        self._end = ("", "")
        self._deed = ""

    @property
    def running(self) -> Search | None:
        """The one that runs."""
        return self.search if self.search is not None and self.search.is_running else None

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._journal.wall()

    def stats(self) -> dict[str, Any]:
        """What the statistics tell of it."""
        search = self.running
        told = None if search is None else {"id": search.search_id, "who": search.who}
        return {"limit_search": told}

    def check(self, wish: Wish) -> None:
        """Raise where a search cannot begin now.

        Raises:
            ApiError: 409, one runs, or users are served; 503, the server serves nobody.
        """
        if self.running is not None:
            raise ApiError(409, "A search runs; stop it first, or wait for its end.", code="is_searching")
        health = self._engine.health()
        if not health.ready:
            message = f"Nothing can be measured: the server is not ready ({health.reason})."
            raise ApiError(503, message, code="not_ready")
        running, waiting = self._engine.num_running, self._engine.num_waiting
        if self._engine.num_open and not wish.beside_users:
            raise ApiError(
                409,
                f"Users are being served: {numbers.plural(running, 'request')} running, {waiting} waiting. A figure "
                "measured beside them is not the server's. Wait until they have gone, or look beside them, as "
                "background work.",
                param="beside_users",
                code="users_are_served",
            )

    def start(self, wish: Wish, url: str, who: str, trace: Path | None = None) -> Search:
        """Begin a search.

        Args:
            url: this server's own, for a process on this machine.
            trace: the file of the recording that is to be replayed.

        Raises:
            ApiError: as `check`.
        """
        self.check(wish)
        at = self._journal.wall()
        search_id = f"{datetime.fromtimestamp(at, UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self.search = Search(search_id, wish.model_dump(), who, self._engine.model.name, at, planned=wish.seconds)
        self._stop, self._end = trio.Event(), ("", "")
        self._send.send_nowait(_Order(self.search, wish, url, trace))
        self._journal.note("limit", f"A search for the limit begins, by {who}: {_asked(wish)}")
        self._deed = self._journal.begin_deed(f"Search for the limit: {_asked(wish)}", who)
        log.info("%s began the search for the limit %s", who, search_id)
        self.tell()
        return self.search

    def stop(self, end: str, why: str) -> None:
        """End the one that runs; nothing happens where none does, or its end was asked for already.

        Args:
            end: a key of `app.limit_page.search.ENDS`.
        """
        if self.running is not None and not self._stop.is_set():
            self._end = (end, why)
            self.running.is_stopping = True
            self._stop.set()
            self.tell()

    def tell(self) -> None:
        """Wake those who look on."""
        self.changed.set()
        self.changed = trio.Event()

    async def run(self) -> None:
        """Do what is asked for, for ever."""
        if not self._has_opened:
            self._has_opened = True
            await self.archive.open()
            self.tell()
        while True:
            order = await self._orders.receive()
            try:
                ended = await self._look(order.search, order)
            except BaseException as error:
                ended = ("failed", "It broke down; the log of the server says more.")
                if not isinstance(error, Exception):  # the server ends
                    ended = self._end if self._end[0] else ("shutdown", "The server has ended.")
                await self._finish(order.search, *ended)
                raise
            await self._finish(order.search, *ended)

    async def read(self, search_id: str) -> dict[str, Any]:
        """The object of one, which may be the one that runs; raises as `Archive.read`."""
        if self.search is not None and self.search.search_id == search_id:
            return self.search.as_json()
        return await self.archive.read(search_id)

    async def delete(self, search_id: str, who: str) -> None:
        """Forget one that has ended.

        Raises:
            ApiError: 409, it runs; else as `Archive.delete`.
        """
        if self.running is not None and self.running.search_id == search_id:
            raise ApiError(409, "That search runs; stop it first.", code="is_searching")
        last = self.search if self.search is not None and self.search.search_id == search_id else None
        try:
            await self.archive.delete(search_id)
        except ApiError as error:
            if last is None or error.status != HTTPStatus.NOT_FOUND:
                raise  # the last one is there to be seen even where there was nothing to be kept
        if self.search is last:  # another may have begun meanwhile
            self.search = None
        self._journal.begin_deed(f"Search for the limit {search_id} forgotten", who, outcome="done")
        log.info("%s had the search for the limit %s forgotten", who, search_id)
        self.tell()

    async def _finish(self, search: Search, end: str, why: str) -> None:
        """Keep what there is to be seen in it, and only then tell of its end: whoever hears of that finds it.

        Nothing but the disk's own time can be in the way of that; and whatever goes wrong, another can begin after it.
        """
        ended = search.as_ended(end, why, self._journal.wall())
        words = ENDS[end]
        try:
            told = ended.as_json()
            words = plain(end_words(told))
            if ended.has_measured:
                with trio.CancelScope(shield=True):
                    await self.archive.keep(told)
        finally:
            self._journal.note("limit", f"The search for the limit ended: {words}")
            self._journal.audit.mark_outcome(self._deed, words)
            log.info("the search for the limit %s ended: %s", search.search_id, end)
            self.search = ended
            self.tell()

    async def _look(self, search: Search, order: _Order) -> tuple[str, str]:
        """Have it done; gives how it ended and why."""
        wish, generation = order.wish, self._engine.limits.generation
        words = [*self._command, *wish.words(order.url, order.trace), "--progress-json", "-"]
        with self._lent_key(search, wish) as secret:
            files = {"--api-key=@": secret} | ({"--admin-token=@": secret} if wish.tune else {})
            files |= {"--mix=": wish.mix} if wish.mix else {}
            with trio.move_on_after(wish.seconds * (1 + LATE_SHARE) + LATE_SECONDS) as in_time:
                try:
                    take = partial(self._take, search)
                    code, said = await run_child(words, files, self._variables(), take, self._stop)
                except ChildError as error:
                    code, said = FAILED, str(error)
            if in_time.cancelled_caught:
                self._end, code, said = ("late", "It did not come to its end in time."), FAILED, ""
            if not wish.beside_users:
                with trio.move_on_after(SETTLE_SECONDS):
                    await self._engine.wait_idle()
        if not wish.tune and self._engine.limits.generation != generation:
            search.remarks.append("The settings were changed while it ran: the runs are not all of the same server.")
        if search.users and wish.beside_users:
            came = numbers.plural(search.users, "request")
            search.remarks.append(f"{came} of users came in while it ran: the figure is of what they left.")
        return self._outcome(search, code, said)

    def _variables(self) -> dict[str, str]:
        """The targets of background work, of which a recording may have some; there are no flags for them."""
        targets = asdict(self._engine.limits.slo_background)
        return {f"RELEVO_SLO_BACKGROUND_{name.upper()}": str(value or "none") for name, value in targets.items()}

    def _outcome(self, search: Search, code: int, said: str) -> tuple[str, str]:
        """How it ended and why. A result that came all the same goes before what was asked of it."""
        if search.result is not None:
            if search.limit is None:
                return "none", str(search.result["why"])
            cut = search.result.get("unfinished")
            return ("cut", f"{cut}.") if cut else ("found", "")
        if self._end[0]:
            return self._end
        return "failed", said or f"The process that looks ended with {code}."

    @contextmanager
    def _lent_key(self, search: Search, wish: Wish) -> Iterator[str]:
        """A key by which the search's requests are told from users', for as long as it runs."""
        name = f"limit-search-{search.search_id[-4:]}"
        secret = self._keyring.lend(name, is_background=wish.beside_users)

        def added(request: GenerationRequest) -> None:
            if self._keyring.is_own(request):
                return
            search.users += 1
            if not wish.beside_users:
                whose = f" of the key {request.key_name!r}" if request.key_name else ""
                after = numbers.duration(max(0.0, self._journal.wall() - search.began))
                came = f"After {after} a request{whose} came in that is not the search's: users go first."
                self.stop("users", f"{came} {AGAIN}")

        self._engine.requests.watch(added)
        try:
            yield secret
        finally:
            self._engine.requests.watch(None)
            self._keyring.take_back()

    def _take(self, search: Search, line: bytes) -> None:
        try:
            search.take(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("the search for the limit said what is not understood: %s", type(error).__name__)
        self.tell()


def _asked(wish: Wish) -> str:
    """What is looked for, in a few words."""
    tune, beside = ", better settings too" if wish.tune else "", ", beside users" if wish.beside_users else ""
    return f"{wish.workload}{tune}{beside}"
