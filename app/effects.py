"""What users met before and after a change of the settings, side by side.

Percentiles and attainment are the engine's, over exactly the minute (later: the five minutes) up to the change and the
one behind it; rates and the queue come from the history, second by second. Nothing here proves that the change was the
cause: the load is told beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from app.audit import timestamp
from app.journal.rows import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.audit import AuditEntry
    from app.journal.journal import Journal
    from app.journal.rows import Row

# Seconds to each side: an early look, and the last word. Both are windows that the engine keeps.
WINDOWS: Final = (60, 300)
# So many changes are followed at the same time; of more nothing is measured.
MAX_FOLLOWED: Final = 64
# So many other changes are named, to each side.
MAX_OTHERS: Final = 10
# How often a change of policy is asked whether it holds.
LOOK_SECONDS: Final = 1.0
LATENCIES: Final = ("ttft", "itl")
NOTE: Final = "Before and after, not a proof: the load may have changed too."


class Experienced(Protocol):
    """What is asked of an engine."""

    @property
    def is_switching(self) -> bool:
        """Whether a change of policy waits for those who run."""

    def experience(self, window_seconds: int) -> dict[str, Any]:
        """What interactive work met in the last seconds."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A change, and what was met before it was asked for, by window."""

    entry_id: str
    before: Mapping[int, dict[str, Any]]


class EffectWatch:
    """Follows changes for five minutes each and writes what came of them into their entries.

    Args:
        engine: asked at the change, and when a window is over.
        journal: has the history and the entries.
    """

    def __init__(self, engine: Experienced, journal: Journal) -> None:
        self._engine = engine
        self._journal = journal
        self._followed: dict[str, float | None] = {}
        self._send, self._begun = trio.open_memory_channel[_Begun](MAX_FOLLOWED)

    @property
    def followed(self) -> dict[str, float | None]:
        """The changes of which more will be known, by the ids of their entries: a copy, which any thread may read.

        To each belongs when it began to hold, in seconds since the epoch; `None` while it waits.
        """
        return dict(self._followed)

    def begin(self, entry_id: str) -> None:
        """A change was made just now; one of policy may still wait for those who run, and is measured when it holds."""
        if len(self._followed) >= MAX_FOLLOWED:
            return
        before = {
            window: make_side(self._engine.experience(window), self._journal.recent(window)) for window in WINDOWS
        }
        self._followed[entry_id] = None if self._engine.is_switching else self._journal.wall()
        self._send.send_nowait(_Begun(entry_id, before))

    async def run(self) -> None:
        """Measure, for ever."""
        async with trio.open_nursery() as nursery:
            async for begun in self._begun:
                nursery.start_soon(partial(self._follow, begun))

    async def _follow(self, begun: _Begun) -> None:
        try:
            await self._measure(begun)
        finally:
            del self._followed[begun.entry_id]

    async def _measure(self, begun: _Begun) -> None:
        while self._engine.is_switching:  # noqa: ASYNC110 - the engine tells nobody when that is over
            await trio.sleep(LOOK_SECONDS)
        at, self._followed[begun.entry_id] = trio.current_time(), self._journal.wall()
        for window in WINDOWS:
            await trio.sleep_until(at + window)
            effect = {
                "window_seconds": window,
                "before": begun.before[window],
                "after": make_side(self._engine.experience(window), self._journal.recent(window)),
            }
            self._journal.audit.mark_effect(begun.entry_id, effect)


def make_side(experience: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """What was met on one side of a change.

    Args:
        experience: interactive work, over the window (`Engine.experience`).
        rows: the window's seconds, with the columns of `app.journal.rows`.

    Returns:
        `seconds` that the history has of it, requests that ended (and per second), output tokens per second, the mean
        of those waiting, percentiles of `ttft` and `itl` with their number of samples, and `attainment` by target.
        `None` stands for what nothing was measured of.
    """
    ended = experience["ended"]
    seconds = sum(_column(rows, "seconds"))
    waiting = [
        (level, lasted)
        for level, lasted in zip(_values(rows, "waiting"), _values(rows, "seconds"), strict=True)
        if level is not None and lasted is not None
    ]
    return {
        "seconds": round(seconds, 1),
        "requests": ended["finished"] + ended["failed"],
        "requests_per_second": round(sum(_column(rows, "requests")) / seconds, 4) if seconds else None,
        "output_tokens_per_second": round(sum(_column(rows, "output_tokens")) / seconds, 2) if seconds else None,
        "waiting": round(sum(level * lasted for level, lasted in waiting) / seconds, 2) if waiting else None,
        **{name: {key: experience["latency"][name][key] for key in ("count", "p50", "p95")} for name in LATENCIES},
        "attainment": dict(experience["slo"]["attainment"]),
    }


def tell_effects(entries: Sequence[AuditEntry], followed: Mapping[str, float | None]) -> list[dict[str, Any] | None]:
    """The object `effect` of each entry of `GET /admin/audit`; `None` where no setting was changed.

    Args:
        entries: oldest first.
        followed: `EffectWatch.followed`.

    Returns:
        `state` is `switching` (it waits for those who run), `early` (nothing is measured yet, but will be `at`),
        `minute` (five will follow), `complete`, or `unknown` (the server ended, or too much was changed at once).
        `others` are changes within the same time.
    """
    times = [datetime.fromisoformat(entry.time).timestamp() for entry in entries]
    return [_tell(index, entries, times, followed) if entries[index].changes else None for index in range(len(entries))]


def _tell(
    index: int, entries: Sequence[AuditEntry], times: Sequence[float], followed: Mapping[str, float | None]
) -> dict[str, Any]:
    entry = entries[index]
    since = followed.get(entry.entry_id)
    told: dict[str, Any] = dict(entry.effect or {"window_seconds": WINDOWS[0], "before": None, "after": None})
    window = told["window_seconds"]
    if entry.effect is not None:
        told["state"] = "complete" if window == WINDOWS[-1] else "minute"
    elif entry.entry_id in followed:
        told["state"] = "switching" if since is None else "early"
    else:
        told["state"] = "unknown"
    due = WINDOWS[0] if entry.effect is None else WINDOWS[-1]
    told["at"] = None if since is None else timestamp(since + due)
    near = [*range(max(0, index - MAX_OTHERS), index), *range(index + 1, min(len(entries), index + 1 + MAX_OTHERS))]
    told["others"] = [
        {"generation": entries[n].generation, "time": entries[n].time, "settings": list(entries[n].changes)}
        for n in near
        if entries[n].changes and abs(times[n] - times[index]) <= window
    ]
    told["note"] = NOTE
    return told


def _values(rows: Sequence[Row], name: str) -> list[float | None]:
    index = COLUMNS.index(name)
    return [row[index] for row in rows]


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [value for value in _values(rows, name) if value is not None]
