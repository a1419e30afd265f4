"""Writes down how long requests are and when they come, while an operator wants it.

Whoever tells of a request goes on at once: lines wait in memory, bounded, and are written in batches by one thread at a
time. A disk that is full or does not answer ends the recording, and never a request.
"""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from app.errors import ApiError
from app.recording.folder import count_kept, is_name, list_kept, make_file
from app.recording.recording import Recording
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from app.endings import Ending
    from app.journal.journal import Journal
    from app.recording.folder import Kept
    from engine.handle import GenerationRequest, Handle

log = logging.getLogger("relevo.recording")

T = TypeVar("T")

FOLDER: Final = "recordings"
MAX_REQUESTS: Final = 100_000
MAX_RECORDINGS: Final = 16
MAX_SECONDS: Final = 7 * 86_400.0
DEFAULT_SECONDS: Final = 3600.0
FLUSH_SECONDS: Final = 1.0
DISK_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 3.0


class TrafficRecorder:
    """Makes recordings, one at a time, and knows those that are kept.

    Args:
        folder: where they lie; `None` where nothing can be kept.
        journal: told when a recording begins and ends.

    Attributes:
        now: the one that is being written.
        is_own: whether a request is the server's own and no user's: of those nothing is recorded.
        before: the one that ended last, since the start.
    """

    def __init__(self, folder: Path | None, journal: Journal) -> None:
        self._folder = folder
        self._journal = journal
        self.now: Recording | None = None
        self.before: Recording | None = None
        self.is_own: Callable[[GenerationRequest], bool] = lambda _request: False
        self._is_starting = False
        self._deed = ""
        self._counted: dict[str, tuple[int, int]] = {}
        self._wake = trio.Event()
        self._writer = trio.CapacityLimiter(1)
        self._readers = trio.CapacityLimiter(1)

    def opened(self, handle: Handle) -> None:
        """A request has come."""
        if self.now is not None and not self.is_own(handle.request):
            self.now.opened(handle)

    def ended(self, sequence_id: int, ending: Ending | None) -> None:
        """One has ended; `None` where it was refused."""
        if self.now is not None:
            self.now.ended(sequence_id, ending)
            if self.now.ends_as is not None:
                self._wake.set()

    async def start(self, seconds: float, max_requests: int, who: str) -> Recording:
        """Record what comes from now on.

        Raises:
            ApiError: 409, one is being written, or there are as many as are kept; 503, the disk does not take it.
        """
        if self.now is not None or self._is_starting:
            raise ApiError(409, "A recording is being written; stop it first.", code="is_recording")
        folder, at = self._there(), self._journal.wall()

        def make() -> Path:
            if count_kept(folder) >= MAX_RECORDINGS:
                message = f"There are {MAX_RECORDINGS} recordings, as many as are kept; delete one."
                raise ApiError(409, message, code="too_many_recordings")
            return make_file(folder, at)

        self._is_starting = True
        try:
            path = await self._on_disk(make)
        finally:
            self._is_starting = False
        began = trio.current_time()
        self.now = Recording(path, began, at, began + seconds, who, max_requests)
        self._wake.set()
        self._journal.note("recording", f"A recording of the traffic begins, by {who}")
        self._deed = self._journal.begin_deed(f"Recording of the traffic, {path.name}", who)
        return self.now

    def stop(self, who: str) -> None:
        """Record nothing that comes from now on; who asks again does not wait for those who are still inside.

        Raises:
            ApiError: 409, nothing is recorded.
        """
        if self.now is None:
            raise ApiError(409, "No recording is being written.", code="not_recording")
        if self.now.ends_as is not None and self.now.num_inside:
            self.now.ends_as += f" and {who} did not wait"
        self.now.finish(f"{who} stopped it", at_once=self.now.ends_as is not None)
        self._wake.set()

    async def kept(self) -> list[Kept]:
        """What lies on disk, the newest first.

        Raises:
            ApiError: 503, the disk does not give it.
        """
        return await self._on_disk(partial(list_kept, self._there(), self._counted)) if self._folder is not None else []

    async def read(self, name: str) -> bytes:
        """All lines of a recording.

        Raises:
            ApiError: 404, there is none of that name; 503, the disk does not give it.
        """
        return await self._on_disk(self._path(name).read_bytes)

    async def delete(self, name: str, who: str) -> None:
        """Delete a recording.

        Raises:
            ApiError: 404, there is none of that name; 409, it is being written; 503, the disk does not let go of it.
        """
        path = self._path(name)
        if self.now is not None and self.now.path == path:
            raise ApiError(409, "That recording is being written; stop it first.", code="is_recording")
        await self._on_disk(path.unlink)
        self._journal.begin_deed(f"Recording {name} deleted", who, outcome="done")
        log.info("%s deleted the recording %s", who, name)

    @property
    def last(self) -> str:
        """How the one that ended last did, and what is not in it; empty where there was none since the start."""
        if self.before is None:
            return ""
        return f"{self.before.path.name} {_end_of(self.before)}"

    @property
    def problem(self) -> str | None:
        """Why nothing can be recorded; `None` where it can."""
        return None if self._folder is not None else "no folder was opened for it"

    async def run(self) -> None:
        """Write what there is, for ever."""
        while True:
            with trio.move_on_after(math.inf if self.now is None else FLUSH_SECONDS):
                await self._wake.wait()
            self._wake = trio.Event()
            if self.now is not None:
                await self._turn(self.now)

    async def close(self) -> None:
        """The server ends: write what there is; a disk that does not answer is not waited for."""
        if self.now is None:
            return
        self.now.finish("the server ended", at_once=True)
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS):
            await self._turn(self.now)

    async def _turn(self, recording: Recording) -> None:
        """Write, and end it where it is at its end."""
        if trio.current_time() >= recording.until:
            recording.finish("its time was over")
        is_complete = recording.is_complete
        if is_complete:
            recording.let_go()
        lines = recording.take()
        try:
            if lines:
                await trio.to_thread.run_sync(recording.write, lines, limiter=self._writer, abandon_on_cancel=True)
        except OSError as error:
            recording.finish(f"the disk does not take it: {_told(error)}", at_once=True)
            is_complete = True
        if is_complete:
            self._let_go(recording)

    def _let_go(self, recording: Recording) -> None:
        self.now, self.before = None, recording
        self._journal.note("recording", f"The recording {self.last}")
        self._journal.audit.mark_outcome(self._deed, _end_of(recording))
        log.info("the recording %s", self.last)

    def _there(self) -> Path:
        if self._folder is None:
            raise ApiError(503, f"Nothing can be recorded: {self.problem}.", code="state_unwritable")
        return self._folder

    def _path(self, name: str) -> Path:
        if not is_name(name):
            raise _unknown(name)
        return self._there() / name

    async def _on_disk(self, work: Callable[[], T]) -> T:
        try:
            with trio.move_on_after(DISK_SECONDS):
                return await trio.to_thread.run_sync(work, limiter=self._readers, abandon_on_cancel=True)
        except FileNotFoundError as error:
            raise _unknown(str(error.filename).rpartition("/")[2]) from None
        except OSError as error:
            raise _unwritable(_told(error)) from None
        raise _unwritable(f"it has not answered for {DISK_SECONDS:g} s")


def _end_of(recording: Recording) -> str:
    """What is in it and what is not, in words."""
    missing = {
        "whose end was not waited for": recording.num_not_awaited,
        "that left before the prompt was read": recording.num_left_out,
        "that could not be written": recording.num_lost,
    }
    parts = [f"{numbers.plural(number, 'request')} {why}" for why, number in missing.items() if number]
    ended = f"ended with {numbers.plural(recording.num_written, 'request')}, as {recording.ends_as}."
    return f"{ended} Not in it: {', '.join(parts)}." if parts else ended


def _told(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _unwritable(why: str) -> ApiError:
    return ApiError(503, f"The disk does not take or give it: {why}.", code="state_unwritable")


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"There is no recording {name[:100]!r}.", code="recording_not_found")


@asynccontextmanager
async def open_recorder(folder: Path, journal: Journal) -> AsyncIterator[TrafficRecorder]:
    """The recorder of a state folder; the caller runs it."""
    recorder = TrafficRecorder(folder / FOLDER, journal)
    try:
        yield recorder
    finally:
        await recorder.close()
