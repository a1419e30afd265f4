"""Makes and revokes API keys while the server runs: in memory for the next request, on disk for the next start."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from app.errors import ApiError
from app.key_store import NameTakenError, StateError, open_store
from app.keys import Digests, Keyring, make_secret

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from pathlib import Path

    from app.config import Settings
    from app.config_schema import KeyLimits
    from app.key_store import KeyStore, Opened
    from app.keys import KeyRecord

log = logging.getLogger("relevo.keys")

# Times of use are written this often, and so soon is seen what another server on the same folder has changed.
SYNC_SECONDS: Final = 5.0
MAX_KEYS: Final = 1000


class KeyService:
    """The one that changes the keys.

    What blocks happens on a worker thread, one thing after the other. A call of a thread is not abandoned when its
    client leaves, and memory is changed right after it without waiting: what is on disk holds. Only revoking goes the
    other way round: it holds in memory at once, and goes to the disk with whatever is written next.

    Attributes:
        keyring: what the gate looks at.
        problem: why keys can be neither made nor revoked for good; `None` where they can.
    """

    def __init__(self, keyring: Keyring, opened: Opened | None = None) -> None:
        self.keyring = keyring
        self.problem = "no folder was opened for them" if opened is None else opened.problem
        self._store = None if opened is None else opened.store
        self._written: dict[int, float] = {}
        self._unwritten_revocations: dict[int, float] = {}
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._version = 0 if opened is None else opened.version
        if opened is not None:
            self.keyring.set_made(opened.records)

    @property
    def unwritten(self) -> list[int]:
        """Numbers of keys whose revocation is in memory alone: a restart would make them valid again."""
        return sorted(self._unwritten_revocations)

    async def make(self, name: str, limits: KeyLimits) -> tuple[KeyRecord, str]:
        """Make a key that is valid from now on.

        Returns:
            What is kept of it, and the key itself, which is not.

        Raises:
            ApiError: the name is taken, there are too many, or it cannot be kept.
        """
        store = self._writable()
        if self.keyring.get(name) is not None:
            raise _name_taken(name)
        if len(self.keyring) >= MAX_KEYS:
            message = f"There are {MAX_KEYS} keys, which is as many as are kept; forget those that were revoked."
            raise ApiError(409, message, code="too_many_keys")
        secret = make_secret()
        try:
            await self._change(store, partial(store.add, name, Digests.of(secret), limits, time.time()))
        except NameTakenError:
            raise _name_taken(name) from None
        except StateError as error:
            raise _not_written(error) from None
        record = self.keyring.get(name)
        if record is None:
            raise ApiError(409, f"Another server has just revoked the key {name!r}.", param="name", code="name_taken")
        return record, secret

    async def revoke(self, key_id: int) -> None:
        """Refuse a key from now on.

        Raises:
            ApiError: there is none of that number; or that cannot be written down yet, but it is refused all the same.
        """
        record = next((record for record in self.keyring if record.key_id == key_id), None)
        if record is None or self._store is None:
            raise ApiError(404, f"There is no key {key_id} that was made here.", code="key_not_found")
        if record.revoked is None:
            now = time.time()
            self.keyring.revoke(key_id, now)
            self._unwritten_revocations[key_id] = now
        store = self._writable("The key is refused until this server ends. ")
        try:
            await self._change(store)
        except StateError as error:
            message = (
                f"The key is refused from now on, but that is not written down yet: {error}. It is tried again every "
                f"{SYNC_SECONDS:g} s; a restart before that makes the key valid again."
            )
            raise ApiError(503, message, code="state_unwritable") from None

    async def forget_revoked(self) -> None:
        """Remove what was revoked; if no key is left then, the server is open to its machine again.

        Raises:
            ApiError: that cannot be written down.
        """
        store = self._writable()
        try:
            await self._change(store, store.forget_revoked)
        except StateError as error:
            raise _not_written(error) from None

    async def run(self) -> None:
        """Keep memory and disk the same, for ever; what goes wrong is told once, until something else does."""
        told: str | None = None
        while self._store is not None:
            await trio.sleep(SYNC_SECONDS)
            try:
                await self.sync(self._store)
            except StateError as error:
                if str(error) != told:
                    log.warning("the API keys on disk cannot be kept up to date, which is tried again: %s", error)
                told = str(error)
            else:
                if told is not None:
                    log.warning("the API keys on disk are kept up to date again")
                told = None

    async def sync(self, store: KeyStore) -> None:
        """Write down what was not yet: keys that were revoked, and when they were used. Take over what others wrote.

        Raises:
            StateError: the disk does not answer.
        """
        times, revoked = self._unwritten_times(), self._unwritten_revocations.copy()

        def exchange() -> tuple[int, list[KeyRecord]] | None:
            if self.problem is None:
                _write(store, revoked, times)
            version = store.version()
            return None if version == self._version else (version, store.load())

        news = await trio.to_thread.run_sync(exchange, limiter=self._one_at_a_time)
        if self.problem is None:
            self._forget_written(revoked)
        self._written |= times
        if news is not None:
            self._version, records = news
            self.keyring.set_made(records)

    def close(self) -> None:
        """Write down what was not yet, and let go of the disk."""
        if self._store is None:
            return
        try:
            if self.problem is None:
                _write(self._store, self._unwritten_revocations, self._unwritten_times())
                self._unwritten_revocations.clear()
        except StateError as error:
            log.warning("when the API keys were last used could not be written down: %s", error)
        if self._unwritten_revocations:
            log.error("API keys that were revoked are valid again from the next start on: %s", self.unwritten)
        self._store.close()

    def _unwritten_times(self) -> dict[int, float]:
        times = {r.key_id: r.last_used for r in self.keyring if r.key_id is not None and r.last_used is not None}
        return {key_id: when for key_id, when in times.items() if self._written.get(key_id) != when}

    def _forget_written(self, revoked: Mapping[int, float]) -> None:
        for key_id in revoked:
            self._unwritten_revocations.pop(key_id, None)

    def _writable(self, before: str = "") -> KeyStore:
        if self._store is None or self.problem is not None:
            raise ApiError(503, f"{before}Nothing can be kept: {self.problem}.", code="state_unwritable")
        return self._store

    async def _change(self, store: KeyStore, change: Callable[[], object] | None = None) -> None:
        """Write down what was revoked and then, where one is given, a change.

        Raises:
            StateError: the disk does not take it, or a name is taken.
        """
        revoked = self._unwritten_revocations.copy()

        def work() -> list[KeyRecord]:
            _write(store, revoked)
            if change is not None:
                change()
            return store.load()

        records = await trio.to_thread.run_sync(work, limiter=self._one_at_a_time)
        self._forget_written(revoked)
        self.keyring.set_made(records)


def _write(store: KeyStore, revoked: Mapping[int, float], times: Mapping[int, float] | None = None) -> None:
    for key_id, when in revoked.items():
        store.revoke(key_id, when)
    if times:
        store.mark_used(times)


def _not_written(error: StateError) -> ApiError:
    return ApiError(503, f"It could not be written down: {error}.", code="state_unwritable")


def _name_taken(name: str) -> ApiError:
    return ApiError(409, f"There is a key called {name!r} already.", param="name", code="name_taken")


@asynccontextmanager
async def open_keys(settings: Settings, folder: Path) -> AsyncIterator[KeyService]:
    """The keys of the configuration and those of a folder; the caller runs the service.

    Raises:
        ConfigError: the folder's keys cannot be read.
    """
    opened = await trio.to_thread.run_sync(open_store, folder)
    service = KeyService(Keyring(settings), opened)
    if service.problem is not None:
        log.warning("keys cannot be made at /admin/keys: %s", service.problem)
    try:
        yield service
    finally:
        service.close()
