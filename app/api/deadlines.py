"""How long an answer may take, and how long it may wait for a seat."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import ref

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.api.bodies import GenerationBody
    from app.config_schema import ServerSection
    from engine.handle import GenerationRequest, Handle

# So many more answers are looked after before those that have ended are looked for.
_FEW: Final = 16


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Of one answer, both on trio's clock.

    Attributes:
        end: what is open then is ended with cause `timeout`.
        seat: the same with `queue_timeout`, where none of its choices has had a seat by then.
    """

    end: float
    seat: float

    def next(self, handles: Sequence[Handle]) -> float:
        """The earlier of those that still count for an answer with these choices."""
        return self.end if any([handle.has_sat for handle in handles]) else min(self.seat, self.end)

    def bind(self, request: GenerationRequest) -> GenerationRequest:
        """A request that is handed in now, with the time that is left to it."""
        now = trio.current_time()
        return replace(request, ends_within_seconds=self.end - now, seated_within_seconds=self.seat - now)

    def enforce(self, handles: Sequence[Handle]) -> None:
        """End the choices whose time is over."""
        if trio.current_time() >= self.next(handles):
            cause = "timeout" if trio.current_time() >= self.end else "queue_timeout"
            for handle in handles:
                handle.abort(cause)


def deadlines_of(body: GenerationBody, server: ServerSection, arrived: float) -> Deadlines:
    """What body and settings say, the stricter of both, for a request that arrived then."""
    end, seat = (
        arrived + min([math.inf, *filter(None, seconds)])
        for seconds in (
            (body.timeout, server.request_timeout_seconds),
            (body.queue_timeout, server.queue_timeout_seconds),
        )
    )
    return Deadlines(end, seat)


class DeadlineWatch:
    """Ends answers at their deadlines, whether somebody reads them or not.

    Who reads an answer cannot do so: while the client takes nothing, its reader waits to hand on the last piece.

    Nothing is kept here that all others have let go of: a handle has the prompt.
    """

    def __init__(self) -> None:
        # A heap, the next one first; numbered, so that two of one moment can be told apart.
        self._open: list[tuple[float, int, Deadlines, list[ref[Handle]]]] = []
        self._numbers = count()
        self._sooner = trio.Event()
        self._most = _FEW

    def add(self, deadlines: Deadlines, handles: Sequence[Handle]) -> None:
        """Look after the choices of one answer until they have ended. Never waits."""
        if len(self._open) >= self._most:
            self._open = [entry for entry in self._open if not _have_ended(_living(entry[-1]))]
            heapify(self._open)
            self._most = len(self._open) + _FEW
        number = next(self._numbers)
        heappush(self._open, (deadlines.next(handles), number, deadlines, list(map(ref, handles))))
        if self._open[0][1] == number:
            self._sooner.set()
        self._enforce()  # it may be over already: to tokenize takes time, too

    async def run(self) -> None:
        """End what is due, for ever."""
        while True:
            self._sooner = trio.Event()
            with trio.move_on_at(self._open[0][0] if self._open else math.inf):
                await self._sooner.wait()
            self._enforce()

    def _enforce(self) -> None:
        while self._open and self._open[0][0] <= trio.current_time():
            _, number, deadlines, known = heappop(self._open)
            handles = _living(known)
            deadlines.enforce(handles)
            if not _have_ended(handles):  # it has had its seat in time; the end is still to come
                heappush(self._open, (deadlines.next(handles), number, deadlines, known))


def _living(known: Sequence[ref[Handle]]) -> list[Handle]:
    return [handle for look in known if (handle := look()) is not None]


def _have_ended(handles: Sequence[Handle]) -> bool:
    return all([handle.outbox.last is not None for handle in handles])
