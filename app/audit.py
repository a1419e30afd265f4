"""The history of the live settings: who changed what, when, why and for how long."""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAX_ENTRIES: Final = 1000


def make_id() -> str:
    """A name that nothing else has, in this process or another."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change.

    Attributes:
        time: when, as an ISO 8601 string in UTC.
        who: `admin`, the peer's address, `ttl` for a change that ended by itself, or `start` for a start at which other
            values held than when the server ended.
        changes: setting to its old and its new value; empty when only the time that they hold was changed.
        expires: when it will revert by itself, in the form of `time`.
        reverted: when it did, or was changed again before.
        effective: all settings as they were after it.
        effect: what users met before and after it, as far as that was measured (`app.effects`).
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
        }


class AuditLog:
    """The last thousand changes, newest last.

    Args:
        known: those of earlier processes.
        keep: called with each change, and again when it was reverted.
    """

    def __init__(self, known: Iterable[AuditEntry] = (), keep: Callable[[AuditEntry], None] | None = None) -> None:
        self._entries = deque(known, maxlen=MAX_ENTRIES)
        self._keep = keep

    @property
    def entries(self) -> tuple[AuditEntry, ...]:
        """All of them, oldest first."""
        return tuple(self._entries)

    @property
    def generation(self) -> int:
        """Of the newest; 0 where there is none."""
        return self._entries[-1].generation if self._entries else 0

    def add(self, entry: AuditEntry) -> None:
        """Append a change."""
        self._entries.append(entry)
        if self._keep is not None:
            self._keep(entry)

    def mark_reverted(self, entry_id: str, time: str) -> None:
        """Say when a temporary change ended."""
        self._replace(entry_id, reverted=time)

    def mark_effect(self, entry_id: str, effect: Mapping[str, Any]) -> None:
        """Say what came of a change."""
        self._replace(entry_id, effect=effect)

    def _replace(self, entry_id: str, **known: Any) -> None:
        for index, entry in enumerate(self._entries):
            if entry.entry_id == entry_id:
                self._entries[index] = replace(entry, **known)
                if self._keep is not None:
                    self._keep(self._entries[index])


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
