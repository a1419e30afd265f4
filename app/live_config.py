"""The settings that move while the server runs: checked, applied at a step boundary, written down, reverted in time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trio

from app.api.errors import ApiError
from app.audit import AuditEntry, AuditLog, timestamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Limits
    from engine.engine import Engine

KEYS: Final = ("max_num_seqs", "max_num_batched_tokens")
MAX_REASON_LENGTH: Final = 500
MAX_TTL_SECONDS: Final = 7 * 86_400.0
# A step boundary comes after milliseconds. When none comes for so long, the engine hangs.
APPLY_SECONDS: Final = 20.0


class OutOfRangeError(ApiError):
    """A value that cannot be taken; nothing was changed."""

    def __init__(self, param: str, message: str, allowed: tuple[float, float] | None = None) -> None:
        super().__init__(422, f"'{param}' {message}", param=param, code="out_of_range")
        if allowed is not None:
            self.extra["range"] = list(allowed)


@dataclass(frozen=True, slots=True)
class _Change:
    values: dict[str, int]
    reason: str | None
    ttl_seconds: float | None


@dataclass(frozen=True, slots=True)
class _Revert:
    """A value to go back to at `at`, on trio's clock."""

    at: float
    value: int


class LiveConfig:
    """The one place that changes the engine's limits.

    A temporary change goes back to the last value that was not temporary. A later change of the same key replaces it.
    """

    def __init__(self, engine: Engine, audit: AuditLog) -> None:
        self._engine = engine
        self._audit = audit
        self._reverts: dict[str, _Revert] = {}
        self._wake = trio.Event()
        # One change at a time: each entry of the history must start from the value the one before left.
        self._turn = trio.Lock()

    def view(self) -> dict[str, Any]:
        """The object of `GET /admin/config`."""
        limits = self._engine.limits
        running = self._engine.snapshot()["requests"]["running"]
        over = running - limits.max_num_seqs
        return {
            "generation": limits.generation,
            "effective": _values(limits),
            "capacity": _values(self._engine.capacity),
            "pending_drain": {"max_num_seqs": over} if over > 0 else {},
        }

    async def apply(self, body: Mapping[str, Any], *, who: str) -> dict[str, Any]:
        """Check and apply the body of a `PATCH /admin/config`; all of it or nothing.

        Raises:
            OutOfRangeError: a key is unknown or a value cannot be taken.
            ApiError: 503, the engine does not come to a step boundary.
        """
        change = parse_change(body, self._engine.capacity)
        async with self._turn:
            await self._set(change, who)
        return self.view()

    async def run(self) -> None:
        """Revert temporary changes when their time has come, for ever."""
        while True:
            self._wake = trio.Event()
            due = min((revert.at for revert in self._reverts.values()), default=math.inf)
            with trio.move_on_at(due):
                await self._wake.wait()
            async with self._turn:
                now = trio.current_time()
                values = {name: revert.value for name, revert in self._reverts.items() if revert.at <= now}
                if values:
                    await self._set(_Change(values, "the time given to the change is over", None), "ttl")

    async def _set(self, change: _Change, who: str) -> None:
        before = _values(self._engine.limits)
        changed = {name: (before[name], value) for name, value in change.values.items() if value != before[name]}
        # Shielded, so that a client that leaves cannot part the change from its entry in the history.
        with trio.move_on_after(APPLY_SECONDS, shield=True) as scope:
            if changed:
                await self._engine.set_limits({name: new for name, (_, new) in changed.items()})
        if scope.cancelled_caught:
            raise ApiError(503, "The engine does not answer; the change may still come.", code="engine_hangs")
        expires = self._schedule_reverts(change, before)
        if changed:
            generation = self._engine.limits.generation
            now = timestamp(time.time())
            self._audit.add(AuditEntry(generation, now, who, changed, change.reason, expires))

    def _schedule_reverts(self, change: _Change, before: dict[str, int]) -> str | None:
        if not change.values:
            return None
        for name in change.values:
            pending = self._reverts.pop(name, None)
            if change.ttl_seconds is not None:
                lasting = before[name] if pending is None else pending.value
                self._reverts[name] = _Revert(trio.current_time() + change.ttl_seconds, lasting)
        self._wake.set()
        return None if change.ttl_seconds is None else timestamp(time.time() + change.ttl_seconds)


def parse_change(body: Mapping[str, Any], capacity: Limits) -> _Change:
    """Check a body without changing anything; `null` means absent.

    Raises:
        OutOfRangeError: naming the key and what it takes.
    """
    values: dict[str, int] = {}
    reason, ttl_seconds = None, None
    for name, value in body.items():
        if name in KEYS:
            if value is not None:
                values[name] = _check_value(name, value, getattr(capacity, name))
        elif name == "reason":
            reason = _check_reason(value)
        elif name == "ttl_seconds":
            ttl_seconds = _check_ttl(value)
        else:
            raise OutOfRangeError(name, f"is no live setting; there are {', '.join(KEYS)}, reason and ttl_seconds.")
    return _Change(values, reason, ttl_seconds)


def _check_value(name: str, value: object, capacity: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= capacity:
        raise OutOfRangeError(name, f"must be a whole number from 1 to {capacity}.", (1, capacity))
    return value


def _check_reason(value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or len(value) > MAX_REASON_LENGTH):
        raise OutOfRangeError("reason", f"must be a text of at most {MAX_REASON_LENGTH} characters.")
    return value or None


def _check_ttl(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1 <= value <= MAX_TTL_SECONDS:
        top = int(MAX_TTL_SECONDS)
        raise OutOfRangeError("ttl_seconds", f"must be a number of seconds from 1 to {top}.", (1, top))
    return float(value)


def _values(limits: Limits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in KEYS}
