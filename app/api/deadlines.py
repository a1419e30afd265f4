"""How long an answer may take, and how long it may wait for a seat."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.api.bodies import GenerationBody
    from app.config_schema import ServerSection
    from engine.handle import GenerationRequest, Handle


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
