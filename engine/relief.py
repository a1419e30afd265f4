"""Limits that were lowered because steps failed, and how they come back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Limits

# After so long without a fault of that kind the limits are doubled, up to what they were. Where the fault comes back
# before the same time has passed once more, the next try waits twice as long.
FIRST_WAIT_SECONDS: Final = 60.0
MAX_WAIT_SECONDS: Final = 3600.0


class Relief:
    """Remembers what the engine lowered by itself. Pure: the clock is handed in, and the caller sets the limits.

    A limit that somebody else has set meanwhile is theirs, and is left alone.

    Attributes:
        due: when the next values are due, in seconds on the engine's clock; infinity while nothing is lowered.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._lowered: dict[str, tuple[int, int]] = {}  # what it was, and what it is
        self._before: dict[str, int] = {}  # what it was when the trial began
        self._wait = FIRST_WAIT_SECONDS
        self._raised = -math.inf

    def begin(self) -> None:
        """A trial begins; `changes` and `undo` reach back to here."""
        self._before = {}

    def lower(self, limits: Limits, values: Mapping[str, int], now: float) -> None:
        """These values are set now."""
        self._forget_others(limits)
        if now < self._raised + self._wait:
            self._wait = min(2 * self._wait, MAX_WAIT_SECONDS)
        elif not self._lowered:
            self._wait = FIRST_WAIT_SECONDS
        self._raised = -math.inf
        for name, value in values.items():
            self._before.setdefault(name, getattr(limits, name))
            first, _ = self._lowered.get(name, (getattr(limits, name), 0))
            self._lowered[name] = (first, value)
        self.due = now + self._wait

    def changes(self, limits: Limits) -> dict[str, tuple[int, int]]:
        """What was lowered since `begin`, with what it was then and what it is now."""
        self._forget_others(limits)
        return {name: (old, self._lowered[name][1]) for name, old in self._before.items() if name in self._lowered}

    def undo(self, limits: Limits) -> dict[str, int]:
        """One request alone was the cause of what was lowered since `begin`. Gives what to set, at once."""
        return self._take({name: old for name, (old, _) in self.changes(limits).items()})

    def step_back(self, limits: Limits, now: float) -> dict[str, int]:
        """Limits of which more may be tried again, once that is due. Gives what to set."""
        self._forget_others(limits)
        self._raised, self.due = now, now + self._wait
        return self._take({name: min(first, 2 * value) for name, (first, value) in self._lowered.items()})

    def _take(self, values: dict[str, int]) -> dict[str, int]:
        for name, value in values.items():
            first, _ = self._lowered.pop(name)
            if value < first:
                self._lowered[name] = (first, value)
        if not self._lowered:
            self.due = math.inf
        return values

    def _forget_others(self, limits: Limits) -> None:
        self._lowered = {name: kept for name, kept in self._lowered.items() if getattr(limits, name) == kept[1]}
