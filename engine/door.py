"""How many may wait. Each class of work has a room of its own: background work keeps no interactive work out."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

from engine.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.handle import Handle
    from engine.scheduler import Scheduler
    from engine.stats import Stats

MAX_RETRY_AFTER_SECONDS = 60
UNKNOWN_RETRY_AFTER_SECONDS = 5  # nothing has finished in the last minute


class Door:
    """The open requests, and whether another one may come in. Decided from memory, before anything is tokenized."""

    def __init__(self, scheduler: Scheduler, stats: Stats) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._open: tuple[dict[int, Handle], dict[int, Handle]] = ({}, {})  # interactive, background

    def __len__(self) -> int:
        return len(self._open[0]) + len(self._open[1])

    def __iter__(self) -> Iterator[Handle]:
        return chain(*[opened.values() for opened in self._open])

    def add(self, handle: Handle) -> None:
        """It came in."""
        self._open[handle.request.background][handle.sequence_id] = handle

    def remove(self, handle: Handle) -> None:
        """It has ended."""
        del self._open[handle.request.background][handle.sequence_id]

    def find(self, number: int) -> Handle | None:
        """The open request of that sequence id."""
        return self._open[0].get(number) or self._open[1].get(number)

    def check_room(self, *, background: bool, now: float) -> None:
        """Raise `QueueFullError` when as many of this class wait as may."""
        depth, limit = self._depth(background), self._scheduler.limits.max_waiting
        if depth >= limit:
            raise QueueFullError("requests", depth, limit, retry_after_seconds=self._retry_after(background, now))

    def check_tokens(self, handle: Handle, num_tokens: int, now: float) -> None:
        """Raise `QueueFullError` when a prompt of so many tokens cannot wait beside those of its class."""
        background = handle.request.background
        running = self._scheduler.classes[background].running
        depth = sum([other.num_prompt_tokens for other in self._open[background].values()])
        depth -= sum([sequence.num_prompt_tokens for sequence in running])
        limit = self._scheduler.limits.max_waiting_tokens
        if depth and depth + num_tokens > limit:
            raise QueueFullError("prompt tokens", depth, limit, retry_after_seconds=self._retry_after(background, now))

    def _depth(self, background: bool) -> int:
        """Requests of a class beyond those that run and those that the next step will seat."""
        scheduler = self._scheduler
        work, other = scheduler.classes[background], scheduler.classes[not background]
        seats = len(work.running)
        if work.wait_reason is None:
            seats = max(seats, scheduler.limits.max_num_seqs - len(other.running))
        return max(0, len(self._open[background]) - seats)

    def _retry_after(self, background: bool, now: float) -> int:
        """Whole seconds until about half of the queue will be gone, at the rate at which requests finish now."""
        rate = self._stats.finish_rate.per_second(now)
        seconds = math.ceil(self._depth(background) / 2 / rate) if rate else UNKNOWN_RETRY_AFTER_SECONDS
        return max(1, min(seconds, MAX_RETRY_AFTER_SECONDS))
