"""Everything one frame of the dashboard is drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from app.journal.events import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from app.history import History
    from app.render.palette import Palette
    from engine.experience import Course


class Promise(NamedTuple):
    """What users were promised for the p95 of a latency, in seconds."""

    p95_seconds: float


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything one frame is drawn from.

    Attributes:
        snapshot: the numbers of `/ops/stats.json`, over the window that is watched.
        history: the points of that window.
        course: the window column by column.
        ready: whether new requests are taken; `reason` says why not.
        model: served name; `details` are short facts beside it.
        events: what happened; `problem` says why it does not outlive the process.
        wall: the time of the frame, in seconds since the epoch.
        ended: the last requests that ended, newest first, as the engine describes them.
        past: the table to be shown instead of the snapshot's.
    """

    snapshot: Mapping[str, Any]
    history: History
    course: Callable[[], Course]
    palette: Palette
    ready: bool
    reason: str | None
    model: str
    details: tuple[str, ...] = ()
    events: EventLog = field(default_factory=EventLog)
    problem: str | None = None
    wall: float = 0.0
    ended: Sequence[Mapping[str, Any]] = ()
    past: Mapping[str, Any] | None = None

    @property
    def promises(self) -> dict[str, Promise]:
        """The promised p95 of each latency that has one."""
        given = {name.removesuffix("_p95_seconds"): value for name, value in self.snapshot["slo"]["targets"].items()}
        return {name: Promise(value) for name, value in given.items() if value is not None}
