"""Looks at the engine once a second, with the eyes of the live view: a row of the history, and what is an event."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from app.audit import make_id
from app.journal.events import Event, describe_spell
from app.journal.incidents import Incidents
from app.journal.rows import count_totals, make_row
from engine.engine import IS_ENDING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.journal.incidents import Spell
    from app.journal.journal import Journal
    from engine.engine import Health

# A clock may be corrected by so much without a second being written over another.
SLEWED_SECONDS: Final = 2


class Recorder:
    """Feeds a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._totals: Mapping[str, int] = {}
        self._looked: float | None = None
        self._last_second = 0
        self._incidents = Incidents()
        self._going_on: dict[str, Event] = {}
        self._draining = False

    def look(self, now: float, snapshot: Mapping[str, Any], health: Health) -> None:
        """Take in a snapshot.

        Args:
            now: seconds on the telemetry's clock, never decreasing.
        """
        journal, wall = self._journal, self._journal.wall()
        journal.running, journal.waiting = snapshot["requests"]["running"], snapshot["requests"]["waiting"]
        seconds = 1.0 if self._looked is None else now - self._looked
        second = int(wall)
        if 0 <= self._last_second - second < SLEWED_SECONDS:
            second = self._last_second + 1
        journal.put_row(make_row(second, seconds, self._totals, snapshot))
        self._totals, self._looked, self._last_second = count_totals(snapshot), now, second
        word, _, _ = (health.reason or "").partition(":")
        for kind, spell in self._incidents.look(now, snapshot, stalled=word == "stalled").items():
            self._keep(kind, spell, wall - now)
        if health.reason == IS_ENDING and not self._draining:
            self._draining = True
            journal.note("drain", "The server was asked to end; those who are inside may finish")

    def _keep(self, kind: str, spell: Spell, since_epoch: float) -> None:
        """Times of a spell are on the telemetry's clock, which nobody sets; `since_epoch` makes them the wall's."""
        journal, event = self._journal, self._going_on.pop(kind, None)
        if event is None:
            began = spell.began + since_epoch
            event = Event(make_id(), kind, began, "", running=journal.running, waiting=journal.waiting)
        end = None if spell.ended is None else event.time + spell.ended - spell.began
        event = replace(event, text=describe_spell(kind, spell), end=end, amount=spell.amount or None)
        if spell.ended is None:
            self._going_on[kind] = event
        self._journal.put_event(event)
