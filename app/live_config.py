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
MAX_ORDERS: Final = 64


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
    """A value to go back to at `at` on trio's clock, which is `time` in words."""

    at: float
    time: str
    value: int


@dataclass(frozen=True, slots=True)
class _Order:
    """A change that somebody waits for; `done` is set when it holds and is written down."""

    change: _Change
    who: str
    done: trio.Event


class LiveConfig:
    """The one place that changes the engine's limits.

    Changes are made one after the other by `run`, whoever waits for them still: a change and its entry in the history
    cannot be parted, neither by a client that leaves nor by a step that takes long.

    A temporary change goes back to the last value that was not temporary. A later change of the same key replaces it.
    """

    def __init__(self, engine: Engine, audit: AuditLog) -> None:
        self._engine = engine
        self._audit = audit
        self._reverts: dict[str, _Revert] = {}
        self._send, self._orders = trio.open_memory_channel[_Order](MAX_ORDERS)

    def view(self) -> dict[str, Any]:
        """The object of `GET /admin/config`; `reverts` tells which values end by themselves, and when."""
        limits = self._engine.limits
        over = self._engine.num_running - limits.max_num_seqs
        return {
            "generation": limits.generation,
            "effective": _values(limits),
            "capacity": _values(self._engine.capacity),
            "pending_drain": {"max_num_seqs": over} if over > 0 else {},
            "reverts": {name: {"to": revert.value, "at": revert.time} for name, revert in self._reverts.items()},
        }

    async def apply(self, body: Mapping[str, Any], *, who: str) -> dict[str, Any]:
        """Check and apply the body of a `PATCH /admin/config`; all of it or nothing.

        Raises:
            OutOfRangeError: a key is unknown or a value cannot be taken.
            ApiError: 503, the engine does not come to a step boundary.
        """
        order = _Order(parse_change(body, self._engine.capacity), who, trio.Event())
        try:
            self._send.send_nowait(order)
        except trio.WouldBlock:
            message = f"The engine does not answer and {MAX_ORDERS} changes wait; this one was not taken."
            raise ApiError(503, message, code="engine_hangs") from None
        with trio.move_on_after(APPLY_SECONDS) as scope:
            await order.done.wait()
        if scope.cancelled_caught:
            message = "The engine does not answer; the change is made, and written down, when it does."
            raise ApiError(503, message, code="engine_hangs")
        return self.view()

    async def run(self) -> None:
        """Make the changes that were ordered, and revert temporary ones when their time has come, for ever."""
        while True:
            with trio.move_on_at(min((revert.at for revert in self._reverts.values()), default=math.inf)) as scope:
                order = await self._orders.receive()
            if not scope.cancelled_caught:
                await self._set(order.change, order.who)
                order.done.set()
                continue
            now = trio.current_time()
            values = {name: revert.value for name, revert in self._reverts.items() if revert.at <= now}
            await self._set(_Change(values, "the time given to the change is over", None), "ttl")

    async def _set(self, change: _Change, who: str) -> None:
        before = _values(self._engine.limits)
        changed = {name: (before[name], value) for name, value in change.values.items() if value != before[name]}
        if changed:
            await self._engine.set_limits({name: new for name, (_, new) in changed.items()})
        known = {name: self._reverts[name] for name in change.values if name in self._reverts}
        expires = self._schedule_reverts(change, before)
        # How long a value holds is a setting too: the same values for longer, or for good, are an entry.
        if changed or known or expires is not None:
            now = timestamp(time.time())
            generation = self._engine.limits.generation
            self._audit.add(AuditEntry(generation, now, who, changed, change.reason, expires))

    def _schedule_reverts(self, change: _Change, before: Mapping[str, int]) -> str | None:
        """Replace what was planned for the changed keys.

        Returns:
            When they go back, if any of them does.
        """
        expires = None
        for name, value in change.values.items():
            pending = self._reverts.pop(name, None)
            lasting = before[name] if pending is None else pending.value
            if change.ttl_seconds is not None and value != lasting:
                expires = timestamp(time.time() + change.ttl_seconds)
                self._reverts[name] = _Revert(trio.current_time() + change.ttl_seconds, expires, lasting)
        return expires


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
