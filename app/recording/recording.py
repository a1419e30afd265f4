"""The recording that is being written: what it takes, and when it takes no more. Nothing here waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from app.recording.folder import append
from app.recording.lines import line_of

if TYPE_CHECKING:
    from pathlib import Path

    from app.endings import Ending
    from engine.handle import Handle

MAX_BYTES: Final = 16 << 20  # of one recording: about 140,000 requests
FULL: Final = "it is full"
MAX_UNWRITTEN: Final = 20_000
# One that takes no more waits so long for the ends of those that came within it: else the long ones were missing.
LAST_SECONDS: Final = 600.0


@dataclass(slots=True)
class Recording:
    """The one that is being written.

    Attributes:
        began, until: on trio's clock; it takes requests that come between them.
        began_at: seconds since the epoch.
        who: started it.
        max_requests: it is full with so many.
        num_requests, num_bytes: of its lines, written or not.
        num_written: lines that are on disk.
        num_left_out: requests that were refused or left before their prompt was counted; they are in no line.
        num_not_awaited: those whose end was not waited for; they are in no line either.
        ends_as: why it takes no more requests; `None` while it does.
        waits_until: then, for those that came before.
    """

    path: Path
    began: float
    began_at: float
    until: float
    who: str
    max_requests: int
    num_requests: int = 0
    num_bytes: int = 0
    num_written: int = 0
    num_left_out: int = 0
    num_not_awaited: int = 0
    ends_as: str | None = None
    waits_until: float = math.inf
    _inside: set[int] = field(default_factory=set)
    _lines: list[bytes] = field(default_factory=list)
    _num_over: int = 0  # for whose line there was no room
    _written_bytes: int = 0

    @property
    def num_inside(self) -> int:
        """Requests that came within it and have not ended."""
        return len(self._inside)

    @property
    def num_lost(self) -> int:
        """Requests that ended in time and are in no line, or in one that is not on disk."""
        return self.num_requests + self._num_over - self.num_written

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.ends_as is not None and (not self._inside or trio.current_time() >= self.waits_until)

    def opened(self, handle: Handle) -> None:
        """A request has come."""
        if self.ends_as is not None or handle.arrival_time >= self.until:
            return
        self._inside.add(handle.sequence_id)
        if self.num_requests + len(self._inside) >= self.max_requests:
            self.finish(FULL)

    def ended(self, sequence_id: int, ending: Ending | None) -> None:
        """One has ended; `None` where it was refused."""
        if sequence_id not in self._inside:
            return  # it came before, or after
        self._inside.discard(sequence_id)
        if ending is None or not ending.num_prompt_tokens:
            self.num_left_out += 1
            return
        line = line_of(ending, self.began)
        if self.num_bytes + len(line) > MAX_BYTES:
            self._num_over = 1
            self.finish(FULL, at_once=True)
            return
        self._lines.append(line)
        self.num_requests += 1
        self.num_bytes += len(line)
        if len(self._lines) >= MAX_UNWRITTEN:
            self.finish("the disk did not take it in time", at_once=True)

    def finish(self, why: str, *, at_once: bool = False) -> None:
        """Take no more requests, and with `at_once` wait for none."""
        if self.ends_as is None:
            self.ends_as, self.waits_until = why, trio.current_time() + LAST_SECONDS
        if at_once:
            self.let_go()

    def let_go(self) -> None:
        """Wait for nobody's end any more, and count whose that are."""
        self.num_not_awaited += len(self._inside)
        self._inside.clear()

    def take(self) -> bytes:
        """The lines that are not written yet; whoever takes them brings them to the disk."""
        lines, self._lines = self._lines, []
        return b"".join(lines)

    def write(self, lines: bytes) -> None:
        """Bring lines to the disk; on a thread, one after the other.

        Raises:
            OSError: it does not take them.
        """
        append(self.path, lines, self._written_bytes)
        self._written_bytes += len(lines)
        self.num_written += lines.count(b"\n")
