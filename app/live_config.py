"""The settings that move while the server runs: checked, applied at a step boundary, written down, reverted in time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trio

from app.api.errors import ApiError
from app.audit import AuditEntry, AuditLog, make_id, timestamp
from app.config import keys
from engine.batching import POLICIES
from engine.config import live_range
from engine.policy import ADMISSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import Limits
    from engine.engine import Engine

    Value = int | float | str

CHOICES: Final[dict[str, tuple[str, ...]]] = {"policy": POLICIES, "admission": ADMISSIONS}
KEYS: Final = (
    *CHOICES,
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "dynamic_preferred_size",
    "dynamic_max_queue_delay_seconds",
    "num_speculative_tokens",
)
# The words for 0, which files and flags take for these settings.
ABSENT: Final = {
    key.name: key.absent for key in keys() if key.section == "scheduler" and key.name in KEYS and key.absent
}
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
    values: dict[str, Value]
    reason: str | None
    ttl_seconds: float | None


@dataclass(frozen=True, slots=True)
class _Revert:
    """A value to go back to at `at` on trio's clock, which is `time` in words; the entry of that id planned it."""

    at: float
    time: str
    value: Value
    entry_id: str


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
        engine, limits = self._engine, self._engine.limits
        pending = {"max_num_seqs": max(0, engine.num_running - limits.max_num_seqs)}
        if engine.is_switching:
            pending["policy"] = engine.num_running
        return {
            "generation": limits.generation,
            "effective": _values(limits),
            "capacity": {name: getattr(engine.capacity, name) for name in ("max_num_seqs", "max_num_batched_tokens")},
            "choices": CHOICES,
            "ranges": {name: list(live_range(name, engine.capacity)) for name in KEYS if name not in CHOICES},
            "pending_drain": {name: number for name, number in pending.items() if number},
            "reverts": {name: {"to": revert.value, "at": revert.time} for name, revert in self._reverts.items()},
        }

    async def apply(self, body: Mapping[str, Any], *, who: str) -> dict[str, Any]:
        """Check and apply the body of a `PATCH /admin/config`; all of it or nothing.

        Raises:
            OutOfRangeError: a key is unknown or a value cannot be taken.
            ApiError: 503, the engine does not come to a step boundary.
        """
        order = _Order(parse_change(body, self._engine.limits, self._engine.capacity), who, trio.Event())
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
        await self._resume()
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
        entry_id = make_id()
        expires = self._schedule_reverts(change, before, entry_id)
        # How long a value holds is a setting too: the same values for longer, or for good, are an entry.
        if changed or known or expires is not None:
            now = timestamp(time.time())
            limits = self._engine.limits
            entry = AuditEntry(
                limits.generation, now, who, changed, change.reason, expires, None, _values(limits), entry_id
            )
            planned = {revert.entry_id for revert in self._reverts.values()}
            for ended in {revert.entry_id for revert in known.values()} - planned:
                self._audit.mark_reverted(ended, now)
            self._audit.add(entry)

    async def _resume(self) -> None:
        """A server starts with its configuration, whatever held when it ended: where that differs, it is a change."""
        last = self._audit.entries[-1] if self._audit.entries else None
        if last is None:
            return
        now = timestamp(time.time())
        for entry in self._audit.entries:
            if entry.expires is not None and entry.reverted is None:
                self._audit.mark_reverted(entry.entry_id, now)
        values = _values(self._engine.limits)
        changed = {
            name: (old, values[name]) for name, old in last.effective.items() if name in values and old != values[name]
        }
        if changed:
            limits = await self._engine.set_limits({})
            reason = "the server was started, and its configuration holds"
            self._audit.add(AuditEntry(limits.generation, now, "start", changed, reason, effective=values))

    def _schedule_reverts(self, change: _Change, before: Mapping[str, Value], entry_id: str) -> str | None:
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
                self._reverts[name] = _Revert(trio.current_time() + change.ttl_seconds, expires, lasting, entry_id)
        return expires


def parse_change(body: Mapping[str, Any], limits: Limits, capacity: Limits) -> _Change:
    """Check a body against what holds now, without changing anything; `null` means absent.

    Raises:
        OutOfRangeError: naming the key and what it takes.
    """
    values: dict[str, Value] = {}
    reason, ttl_seconds = None, None
    for name, value in body.items():
        if name in KEYS:
            if value is not None:
                values[name] = _check_value(name, value, capacity)
        elif name == "reason":
            reason = _check_reason(value)
        elif name == "ttl_seconds":
            ttl_seconds = _check_ttl(value)
        else:
            raise OutOfRangeError(name, f"is no live setting; there are {', '.join(KEYS)}, reason and ttl_seconds.")
    seats = int(values.get("max_num_seqs", limits.max_num_seqs))
    preferred = int(values.get("dynamic_preferred_size", limits.dynamic_preferred_size))
    if "dynamic_preferred_size" in values and preferred > seats:
        message = f"must not be above the seats, which are {seats}; 0 is as many as there are."
        raise OutOfRangeError("dynamic_preferred_size", message, (0, seats))
    if preferred > seats:
        values["dynamic_preferred_size"] = seats  # a batch shrinks with its seats
    return _Change(values, reason, ttl_seconds)


def _check_value(name: str, value: object, capacity: Limits) -> Value:
    if name in CHOICES:
        if not isinstance(value, str) or value not in CHOICES[name]:
            raise OutOfRangeError(name, f"must be one of {', '.join(CHOICES[name])}.")
        return value
    least, most = live_range(name, capacity)
    word = ABSENT.get(name)
    if word is not None and value == word:
        return 0
    kinds, words = ((int, float), "number") if name.endswith("_seconds") else ((int,), "whole number")
    # `isinstance` alone would take true and false, which count as whole numbers.
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        or_else = f', or "{word}", which is 0' if word else ""
        raise OutOfRangeError(name, f"must be a {words} from {least} to {most:g}{or_else}.", (least, most))
    return float(value) if name.endswith("_seconds") else value


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


def _values(limits: Limits) -> dict[str, Value]:
    return {name: getattr(limits, name) for name in KEYS}
