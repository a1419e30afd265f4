"""The settings that move while the server runs: changed at a step boundary, written down, reverted in time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import trio

from app.audit import MAX_ENTRIES, AuditEntry, make_id, timestamp
from app.errors import ApiError
from app.live_change import CHOICES, FLUSH, KEYS, Change, check_value, parse_change, shrink_batch
from app.preview import look, make_preview
from engine.config import live_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.effects import EffectWatch
    from app.journal.journal import Journal
    from app.live_change import Value
    from engine.config import Limits
    from engine.engine import Engine

# A step boundary comes after milliseconds. When none comes for so long, the engine hangs.
APPLY_SECONDS: Final = 20.0
MAX_ORDERS: Final = 64
MAX_TOLD: Final = 20
# No value to tune: going back to other values leaves it as it is. As the last change it is taken back like any other.
STATE: Final = "draining"
REASONS: Final = {"previous": "the last change is taken back", "start": "back to the values at the start"}


class ChangedMeanwhileError(ApiError):
    """Somebody else changed the settings since they were looked at; nothing was changed.

    Args:
        generation: what holds now.
        entries: the changes since.
    """

    def __init__(self, seen: int, generation: int, entries: Sequence[AuditEntry]) -> None:
        super().__init__(
            409,
            f"The settings have changed meanwhile: generation {generation} holds, not {seen}. Nothing was changed; "
            "look again and send it again.",
            param="if_generation",
            code="changed_meanwhile",
        )
        self.entries = entries[-MAX_TOLD:]
        self.extra |= {"generation": generation, "changed": [entry.as_json() for entry in self.entries]}


@dataclass(frozen=True, slots=True)
class _Revert:
    """A value to go back to at `at` on trio's clock, which is `time` in words; the entry of that id planned it."""

    at: float
    time: str
    value: Value
    entry_id: str


@dataclass(slots=True)
class _Order:
    """A change that somebody waits for; `done` is set when it holds and has its entry, or `error` says why not."""

    change: Change
    who: str
    done: trio.Event = field(default_factory=trio.Event)
    error: ApiError | None = None


class LiveConfig:
    """The one place that changes the engine's limits.

    Changes are made one after the other by `run`, whoever waits for them still: a change and its entry in the history
    cannot be parted, neither by a client that leaves nor by a step that takes long.

    A temporary change goes back to the last value that was not temporary. A later change of the same key replaces it.

    Args:
        journal: has the history.
        effects: told of each change, to measure what came of it.

    Attributes:
        start: the values that the server was started with.
    """

    def __init__(self, engine: Engine, journal: Journal, effects: EffectWatch | None = None) -> None:
        self._engine = engine
        self._journal = journal
        self._audit = journal.audit
        self._effects = effects
        self.start = _values(engine.limits)
        self._has_resumed = False
        self._reverts: dict[str, _Revert] = {}
        # By the id of a change that was made on top of temporary ones: what would hold without all of them.
        self._lasting: dict[str, dict[str, Value]] = {}
        self._send, self._orders = trio.open_memory_channel[_Order](MAX_ORDERS)

    def view(self) -> dict[str, Any]:
        """The object of `GET /admin/config`.

        `reverts` tells which values end by themselves, and when; `unwritten_changes` how many changes hold that the
        disk has not taken yet, and `history_problem` why.
        """
        engine, limits = self._engine, self._engine.limits
        pending = {"max_num_seqs": max(0, engine.num_running - limits.max_num_seqs)}
        if engine.is_switching:
            pending["policy"] = engine.num_running
        if limits.draining:
            pending["draining"] = engine.num_running + engine.num_waiting
        return {
            "generation": limits.generation,
            "effective": _values(limits),
            "start": self.start,
            "capacity": {name: getattr(engine.capacity, name) for name in ("max_num_seqs", "max_num_batched_tokens")},
            "choices": CHOICES,
            "ranges": {name: list(live_range(name, engine.capacity)) for name in KEYS if name not in CHOICES},
            "pending_drain": {name: number for name, number in pending.items() if number},
            "reverts": {name: {"to": revert.value, "at": revert.time} for name, revert in self._reverts.items()},
            "unwritten_changes": self._journal.num_unwritten_changes,
            "history_problem": self._journal.problem,
        }

    @property
    def undo(self) -> dict[str, Value]:
        """What the settings of the last change that still holds were before it; empty where there is none.

        What goes back by itself, as its time is over or the server was started, is no change that could be taken back.
        Where it was made on top of a temporary one, what was lasting before that comes back.
        """
        limits = self._engine.limits
        for entry in reversed(self._audit.entries):
            if entry.who == "start":
                break
            if entry.who == "ttl":
                continue
            changed = [(name, *values) for name, values in entry.changes.items() if name in KEYS]
            lasting = self._lasting.get(entry.entry_id, {})
            held = {name: lasting.get(name, old) for name, old, new in changed if getattr(limits, name) == new}
            if undo := {name: value for name, value in held.items() if value != getattr(limits, name)}:
                return undo
        return {}

    async def apply(self, body: Mapping[str, Any], *, who: str) -> dict[str, Any]:
        """Check and apply the body of a `PATCH /admin/config`; all of it or nothing.

        Returns:
            What holds then; of a dry run what holds now, and `preview`.

        Raises:
            OutOfRangeError: a key is unknown or a value cannot be taken.
            ApiError: 409, it was built on what no longer holds, or there is nothing to go back to; 503, the engine does
                not come to a step boundary.
        """
        change = parse_change(body, self._engine.limits, self._engine.capacity)
        if change.dry_run:
            return {**self.view(), "preview": self.preview(change)}
        order = _Order(change, who)
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
        if order.error is not None:
            raise order.error
        await self._journal.settle()
        return self.view()

    def preview(self, change: Change) -> dict[str, Any]:
        """What a change would do now, without making it: `changes`, `drains`, `words` and who runs.

        Raises:
            ApiError: as `apply`.
        """
        return make_preview(self._resolved(change), self._engine.limits, look(self._engine.snapshot()))

    def check_generation(self, seen: int | None) -> None:
        """Raise `ChangedMeanwhileError` where somebody looked at another generation than what holds now."""
        generation = self._engine.limits.generation
        if seen is not None and seen != generation:
            since = [entry for entry in self._audit.entries if entry.generation > seen and entry.deed is None]
            raise ChangedMeanwhileError(seen, generation, since)

    async def run(self) -> None:
        """Make the changes that were ordered, and revert temporary ones when their time has come, for ever."""
        if not self._has_resumed:
            self._has_resumed = True
            await self._resume()
        while True:
            due = min((revert.at for revert in self._reverts.values()), default=math.inf)
            with trio.move_on_at(due) as scope:
                order = await self._orders.receive()
            if scope.cancelled_caught:
                await self._revert()
            else:
                await self._make(order)

    async def _make(self, order: _Order) -> None:
        try:
            await self._set(self._resolved(order.change), order.who)
        except ApiError as error:
            order.error = error
        except Exception:
            order.error = ApiError(500, "The change could not be made.", code="internal_error")
            order.done.set()
            raise
        order.done.set()

    async def _revert(self) -> None:
        now = trio.current_time()
        values = {name: revert.value for name, revert in self._reverts.items() if revert.at <= now}
        shrink_batch(values, self._engine.limits)
        await self._set(Change(values, "the time given to the change is over"), "ttl")

    def _resolved(self, change: Change) -> Change:
        """A change with the values that it stands for now.

        Raises:
            ApiError: it cannot be made.
        """
        self.check_generation(change.if_generation)
        if change.restore is not None:
            change = self._restoring(change, change.restore)
        if change.values.get(STATE) is False and self._engine.is_ending:
            raise ApiError(
                409, "The server is shutting down, which cannot be taken back.", param=STATE, code="draining"
            )
        return change

    def _restoring(self, change: Change, restore: str) -> Change:
        values = self.undo if restore == "previous" else {n: v for n, v in self.start.items() if n != STATE}
        if not values:
            raise ApiError(409, "There is no change to take back.", param="restore", code="nothing_to_take_back")
        checked = {name: check_value(name, value, self._engine.capacity) for name, value in values.items()}
        return replace(change, values=checked, restore=None, reason=change.reason or REASONS[restore])

    async def _set(self, change: Change, who: str) -> None:
        before = _values(self._engine.limits)
        changed = {name: (before[name], value) for name, value in change.values.items() if value != before[name]}
        done: dict[str, tuple[Any, Any]] = {**changed}
        entry_id = make_id()
        if changed or change.flush_prefix_cache:
            new = {name: new for name, (_, new) in changed.items()}
            done |= await self._order_engine(new, flush=change.flush_prefix_cache)
            if self._effects is not None:
                self._effects.begin(entry_id)
        known = {name: self._reverts[name] for name in change.values if name in self._reverts}
        if known:
            self._lasting[entry_id] = {name: revert.value for name, revert in known.items()}
            while len(self._lasting) > MAX_ENTRIES:
                del self._lasting[next(iter(self._lasting))]
        expires = self._schedule_reverts(change, before, entry_id)
        # How long a value holds is a setting too: the same values for longer, or for good, are an entry.
        if done or known or expires is not None:
            now = timestamp(time.time())
            limits = self._engine.limits
            entry = AuditEntry(
                limits.generation, now, who, done, change.reason, expires, None, _values(limits), entry_id
            )
            planned = {revert.entry_id for revert in self._reverts.values()}
            for ended in {revert.entry_id for revert in known.values()} - planned:
                self._audit.mark_reverted(ended, now)
            self._audit.add(entry)

    async def _order_engine(self, values: dict[str, Value], *, flush: bool) -> dict[str, tuple[int, int]]:
        """Have the engine take values, and forget its cache; tells how many blocks were forgotten."""
        if not flush:
            await self._engine.set_limits(values)
            return {}
        flushed = self._engine.num_flushed_blocks
        await self._engine.set_limits(values, flush=True)
        return {FLUSH: (self._engine.num_flushed_blocks - flushed, 0)}

    def note(self, changes: Mapping[str, tuple[Any, Any]], *, who: str, reason: str) -> None:
        """Write down what was changed elsewhere, by the engine itself: settings with their old and new values."""
        limits = self._engine.limits
        now = timestamp(time.time())
        entry = AuditEntry(limits.generation, now, who, dict(changes), reason, effective=_values(limits))
        if self._effects is not None:
            self._effects.begin(entry.entry_id)
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

    def _schedule_reverts(self, change: Change, before: Mapping[str, Value], entry_id: str) -> str | None:
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


def _values(limits: Limits) -> dict[str, Value]:
    return {name: getattr(limits, name) for name in KEYS}
