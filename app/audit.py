"""The history of what operators did: who changed which setting, when, why and for how long; and other deeds."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAX_ENTRIES: Final = 1000  # of changes, and as many deeds


def make_id() -> str:
    """A name that nothing else has, in this process or another."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change of the settings, or another deed.

    Attributes:
        time: when, as an ISO 8601 string in UTC.
        who: `admin`, the peer's address, `ttl` for a change that ended by itself, or `start` for a start at which other
            values held than when the server ended.
        changes: setting to its old and its new value; empty where only the time that they hold was, and of deeds.
        expires: when it will revert by itself, in the form of `time`.
        reverted: when it did, or was changed again before.
        effective: all settings as they were after it.
        effect: what users met before and after it, as far as that was measured (`app.effects`).
        deed: what was done, of what is no change of the settings; `outcome` how it ended, `None` while it goes on.
        entry_id: the same for ever.
    """

    generation: int
    time: str
    who: str
    changes: dict[str, tuple[Any, Any]]
    reason: str | None = None
    expires: str | None = None
    reverted: str | None = None
    effective: Mapping[str, Any] = field(default_factory=dict)
    entry_id: str = field(default_factory=make_id)
    effect: Mapping[str, Any] | None = None
    deed: str | None = None
    outcome: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The object of `GET /admin/audit`, but for its effect."""
        return {
            "generation": self.generation,
            "time": self.time,
            "who": self.who,
            "changes": {name: list(values) for name, values in self.changes.items()},
            "reason": self.reason,
            "expires": self.expires,
            "reverted": self.reverted,
            "deed": self.deed,
            "outcome": self.outcome,
        }


class AuditLog:
    """The last thousand changes, and the last thousand deeds among them, newest last: neither push out the other.

    Args:
        known: those of earlier processes.
        keep: called with each of them, and again when more is known of it.
    """

    def __init__(self, known: Iterable[AuditEntry] = (), keep: Callable[[AuditEntry], None] | None = None) -> None:
        self._entries = {entry.entry_id: entry for entry in known}
        self._keep = keep
        self._bound()

    @property
    def entries(self) -> tuple[AuditEntry, ...]:
        """All of them, oldest first."""
        return tuple(self._entries.values())

    @property
    def generation(self) -> int:
        """Of the newest; 0 where there is none."""
        last = self._last
        return 0 if last is None else last.generation

    @property
    def _last(self) -> AuditEntry | None:
        return next(reversed(self._entries.values()), None)

    def add(self, entry: AuditEntry) -> None:
        """Append a change."""
        self._entries[entry.entry_id] = entry
        self._bound()
        if self._keep is not None:
            self._keep(entry)

    def add_deed(self, deed: str, who: str, time: str, outcome: str | None = None) -> str:
        """Append what changes no setting; gives the id of its entry."""
        last = self._last
        effective = {} if last is None else last.effective
        entry = AuditEntry(self.generation, time, who, {}, effective=effective, deed=deed, outcome=outcome)
        self.add(entry)
        return entry.entry_id

    def mark_reverted(self, entry_id: str, time: str) -> None:
        """Say when a temporary change ended."""
        self._replace(entry_id, reverted=time)

    def mark_effect(self, entry_id: str, effect: Mapping[str, Any]) -> None:
        """Say what came of a change."""
        self._replace(entry_id, effect=effect)

    def mark_outcome(self, entry_id: str, outcome: str) -> None:
        """Say how a deed ended."""
        self._replace(entry_id, outcome=outcome)

    def _replace(self, entry_id: str, **known: Any) -> None:
        entry = self._entries.get(entry_id)
        if entry is not None:
            self._entries[entry_id] = entry = replace(entry, **known)
            if self._keep is not None:
                self._keep(entry)

    def _bound(self) -> None:
        if len(self._entries) <= MAX_ENTRIES:
            return
        for is_deed in (False, True):
            ids = [entry_id for entry_id, entry in self._entries.items() if (entry.deed is not None) is is_deed]
            for old in ids[:-MAX_ENTRIES]:
                del self._entries[old]


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
