"""Where the time of steps goes."""

from __future__ import annotations

import time
from collections import defaultdict


class Stopwatch:
    """Adds up laps by the part of the work they belong to."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """A lap begins here."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """What was done since the last lap was this; the next one begins."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call of this."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
