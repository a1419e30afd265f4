"""The history of the live settings: who changed what, when, why and for how long."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

MAX_ENTRIES: Final = 1000


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change.

    Attributes:
        time: when, as an ISO 8601 string in UTC.
        who: `admin`, the peer's address, or `ttl` for a change that ended by itself.
        changes: setting to its old and its new value; empty when only the time that they hold was changed.
        expires: when it will revert by itself, in the form of `time`.
    """

    generation: int
    time: str
    who: str
    changes: dict[str, tuple[Any, Any]]
    reason: str | None = None
    expires: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The object of `GET /admin/audit`."""
        return {
            "generation": self.generation,
            "time": self.time,
            "who": self.who,
            "changes": {name: list(values) for name, values in self.changes.items()},
            "reason": self.reason,
            "expires": self.expires,
        }


class AuditLog:
    """The last thousand changes, newest last; kept in memory."""

    def __init__(self) -> None:
        self._entries: deque[AuditEntry] = deque(maxlen=MAX_ENTRIES)

    @property
    def entries(self) -> tuple[AuditEntry, ...]:
        """All of them, oldest first."""
        return tuple(self._entries)

    def add(self, entry: AuditEntry) -> None:
        """Append a change."""
        self._entries.append(entry)


def timestamp(seconds: float) -> str:
    """Seconds since the epoch as `2026-01-31T12:00:00.000Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
