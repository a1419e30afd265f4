"""When something is an event: plain rules over totals and states. Time comes in as an argument, in seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from app.journal.rows import REFUSED

if TYPE_CHECKING:
    from collections.abc import Mapping

LATE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Spell:
    """Something that lasts.

    Attributes:
        began: when its first sign was seen; `last` when its latest was.
        ended: when it was seen to be over; `None` while it goes on.
        amount: how often it happened.
        worst: the highest value that was seen.
    """

    began: float
    last: float
    ended: float | None = None
    amount: int = 0
    worst: float = 0.0


class Crowd:
    """Finds times in which something that is counted comes in crowds.

    A crowd begins with `threshold` within `window_seconds`, and is over when none has come for `quiet_seconds`.
    """

    def __init__(self, threshold: int, window_seconds: float, quiet_seconds: float) -> None:
        self._threshold, self._window, self._quiet = threshold, window_seconds, quiet_seconds
        self._total = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._spell: Spell | None = None

    def look(self, now: float, total: int) -> Spell | None:
        """Take in the total since the start.

        Returns:
            A crowd that has just begun or is just over.
        """
        came, self._total = max(0, total - self._total), total
        if came:
            self._recent.append((now, came))
        while self._recent and self._recent[0][0] <= now - self._window:
            self._recent.popleft()
        spell = self._spell
        if spell is None:
            amount = sum(number for _, number in self._recent)
            if amount < self._threshold:
                return None
            self._spell = Spell(self._recent[0][0], now, amount=amount)
            return self._spell
        if came:
            self._spell = replace(spell, last=now, amount=spell.amount + came)
        elif now - spell.last >= self._quiet:
            self._spell = None
            return replace(spell, ended=now)
        return None


class State:
    """Finds times in which a value is too high; such a time is over when it was not for `quiet_seconds`."""

    def __init__(self, limit: float, quiet_seconds: float = 0.0) -> None:
        self._limit, self._quiet = limit, quiet_seconds
        self._spell: Spell | None = None

    def look(self, now: float, value: float) -> Spell | None:
        """Take in the value.

        Returns:
            A time that has just begun or is just over.
        """
        spell = self._spell
        if value > self._limit:
            if spell is None:
                self._spell = Spell(now, now, worst=value)
                return self._spell
            self._spell = replace(spell, last=now, worst=max(spell.worst, value))
        elif spell is not None and now - spell.last >= self._quiet:
            self._spell = None
            return replace(spell, ended=now)
        return None


class Incidents:
    """The rules that one engine is watched by."""

    def __init__(self) -> None:
        self._preemptions = Crowd(10, 30.0, 30.0)
        self._rejections = Crowd(5, 10.0, 30.0)
        self._stall = State(0.0)
        self._late = State(LATE_SECONDS, 5.0)

    def look(self, now: float, snapshot: Mapping[str, Any], *, stalled: bool) -> dict[str, Spell]:
        """What has just begun or is just over, by its kind.

        Args:
            stalled: a step of the engine does not end.
        """
        rejected = snapshot["requests"]["rejected_by_reason"]
        found = {
            "preemptions": self._preemptions.look(now, snapshot["preemptions_by_reason"]["kv_memory"]),
            "rejections": self._rejections.look(now, sum(rejected.get(reason, 0) for reason in REFUSED)),
            "stall": self._stall.look(now, float(stalled)),
            "late": self._late.look(now, snapshot.get("loop_lag_seconds", 0.0)),
        }
        return {kind: spell for kind, spell in found.items() if spell is not None}
