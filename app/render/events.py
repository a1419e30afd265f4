"""Events as people see them: a list, and marks on the charts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from app.render import numbers
from app.render.charts import Mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from app.journal.events import Event
    from app.render.scene import Scene

SHOWN: Final = 8


def event_variables(scene: Scene) -> dict[str, Any]:
    """The last events, newest first."""
    return {"events": event_rows(scene.events.latest(SHOWN)), "problem": scene.problem}


def event_rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events as they are listed."""
    return [
        {
            "kind": event.kind,
            "title": event.title,
            "level": event.level,
            "time": numbers.clock(event.time),
            "time_iso": datetime.fromtimestamp(event.time, UTC).isoformat(timespec="seconds"),
            "text": event.text,
            "requests": f"{event.running} running, {event.waiting} waiting",
            "lasted": numbers.duration(event.end - event.time) if event.end and event.end - event.time >= 1 else None,
        }
        for event in events
    ]


def chart_marks(scene: Scene) -> list[Mark]:
    """The events of the time that the live charts show."""
    span = scene.history.span_seconds
    return [
        Mark(1 - (scene.wall - event.time) / span, event.kind, f"{numbers.clock(event.time)} · {event.text}")
        for event in scene.events
        if scene.wall - span <= event.time <= scene.wall
    ]
