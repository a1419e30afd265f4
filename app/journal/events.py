"""Events: what an operator wants to find again beside the curves, in words."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from app.audit import timestamp
from app.render import numbers, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from app.audit import AuditEntry
    from app.journal.incidents import Spell

# What is trouble; the rest is what an operator did.
TROUBLE: Final = ("preemptions", "rejections", "stall", "late", "fault", "integrity")
MAX_EVENTS: Final = 1000
MAX_TEXT_LENGTH: Final = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        event_id: the same while an event goes on, whatever else of it changes.
        kind: one of `words.EVENTS`.
        time: seconds since the epoch.
        text: a sentence for people; what is in it may come from anybody.
        end: when it was over; `None` of a moment, and while it goes on.
        amount: how many requests it struck, where that is counted.
        running, waiting: requests when it began.
    """

    event_id: str
    kind: str
    time: float
    text: str
    end: float | None = None
    amount: int | None = None
    running: int = 0
    waiting: int = 0

    @property
    def title(self) -> str:
        """What pages call its kind."""
        return words.word(words.EVENTS, self.kind)

    @property
    def level(self) -> str:
        """`warn` where it is trouble."""
        return "warn" if self.kind in TROUBLE else ""

    def as_json(self) -> dict[str, Any]:
        """The object in `/ops/stats.json` and `/ops/history.json`."""
        known = asdict(self) | {"time": timestamp(self.time), "end": None if self.end is None else timestamp(self.end)}
        del known["event_id"]
        return known | {"title": self.title, "level": self.level}


class EventLog:
    """The last thousand events, oldest first."""

    def __init__(self, known: Iterable[Event] = ()) -> None:
        self._events = OrderedDict((event.event_id, event) for event in known)

    def put(self, event: Event) -> None:
        """Add an event, or say anew what is known of one."""
        self._events[event.event_id] = event
        while len(self._events) > MAX_EVENTS:
            self._events.popitem(last=False)

    def latest(self, number: int) -> list[Event]:
        """The last of them, newest first."""
        newest = reversed(self._events.values())
        return [event for event, _ in zip(newest, range(number), strict=False)]

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events.values()))


def describe_change(entry: AuditEntry) -> str:
    """A change of the settings in a sentence."""
    changes = ", ".join(
        f"{words.word(words.SETTINGS, key)} {numbers.setting(old)} → {numbers.setting(new)}"
        for key, (old, new) in entry.changes.items()
    )
    who = "by itself" if entry.who == "ttl" else f"by {entry.who}" if entry.who != "start" else "at the start"
    reason = f": {entry.reason}" if entry.reason and entry.who not in ("ttl", "start") else ""
    return f"{changes}, {who}{reason}"[:MAX_TEXT_LENGTH]


def describe_spell(kind: str, spell: Spell) -> str:
    """A crowd of refusals or preemptions, or a state that lasted, in a sentence."""
    lasted = numbers.duration(max(1.0, spell.last - spell.began))
    going_on = spell.ended is None
    match kind:
        case "preemptions":
            return f"{numbers.plural(spell.amount, 'preemption')} for want of KV memory within {lasted}"
        case "rejections":
            return f"{numbers.plural(spell.amount, 'request')} refused within {lasted}"
        case "stall":
            return "A step does not end" if going_on else f"A step did not end for {lasted} more"
        case _:
            return f"The event loop was late by up to {numbers.seconds(spell.worst)}"
