"""The settings of a server while it is tuned, through `/admin/config`; what was there before comes back in any case.

Each change holds for a time that it brings with it (`ttl_seconds`): where this process is killed, the server goes back
by itself. Each asks for the generation that was seen last (`if_generation`), and bears a mark in its reason: where
somebody else has changed something, that is noticed, it is all over, and only what bears the mark is taken back.

A change waits in the server for the end of a step, whoever has left meanwhile. So where no answer came to the last one,
that it does not hold says nothing: it may yet. Changes are made one after the other, so the own values are asked for
behind it; once it has been made, they are refused, as another generation holds, and it is found and taken back.
"""

from __future__ import annotations

import math
import secrets
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from app.limit.endpoint import EndpointError
from app.limit.interrupted import uninterrupted
from app.limit.tune_admin import ChangedError
from app.limit.tune_candidates import RefusedError
from app.limit.tune_controls import SEATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from app.limit.tune_admin import Admin
    from app.limit.tune_controls import Values

# A batch is never larger than the seats, so it shrinks with them.
BATCH: Final = "dynamic_preferred_size"
# A change holds for so many times as long as the run takes for which it is made, so that not each run makes one.
TTL_RATIO: Final = 2.0
MIN_TTL_SECONDS: Final = 60.0
# For those who must end before another policy begins.
DRAIN_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.2
# What the reason of each change begins with.
MARK: Final = "relevo limit --tune"
# So often it is tried to bring back what was there, with so much time between.
RESTORE_TRIES, RESTORE_PAUSE_SECONDS = 5, 1.0


class LiveSettings:
    """The settings of one server, for as long as they are tuned (`open_settings`).

    Attributes:
        own: those that it had, of all controls.
        view: what it told of itself at the start.
    """

    def __init__(
        self,
        admin: Admin,
        names: Sequence[str],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._admin, self._now, self._sleep = admin, now, sleep
        self._mark = f"{MARK} {secrets.token_hex(4)}"
        self.view = admin.show()
        _check(self.view, admin)
        effective = self.view["effective"]
        self.own: Values = {name: effective[name] for name in names if name in effective}
        self._batch = int(effective.get(BATCH, 0))
        self._generation = int(self.view["generation"])
        self._held: Values = dict(self.own)
        self._until = self._asked_until = 0.0  # of the last change that was answered, and of the last one
        self._has_changed = self._is_unanswered = False

    def hold(self, values: Values, seconds: float) -> None:
        """Have these hold for so long at least, and wait until those who must end for it have.

        Raises:
            RefusedError: the server does not take them.
            ChangedError: somebody else has changed the settings.
        """
        away = {name: value for name, value in values.items() if value != self.own[name]}
        is_held = values == self._held
        if is_held and (not away or self._until - self._now() >= seconds):
            self.check()
            return
        back = {name: self.own[name] for name, held in self._held.items() if held != self.own[name]}
        ttl = max(MIN_TTL_SECONDS, TTL_RATIO * seconds)
        until = self._now() + ttl
        self._asked_until = max(until, self._until)
        answer = self._change({**back, **away}, ttl_seconds=ttl)
        self._held, self._until = dict(values), until
        self._wait_for_drain(answer)

    def check(self) -> None:
        """Raise `ChangedError` where other settings hold than were asked for."""
        self._compare(self._admin.show())

    def apply(self, values: Values) -> None:
        """Have these hold for good."""
        self._asked_until = math.inf
        self._change({**self._held, **values})
        self._held = dict(self.own)

    def restore(self) -> None:
        """Bring back what was there: whatever bears the mark and would go back by itself in time, or was not answered.

        Raises:
            EndpointError: that cannot be done; the server goes back by itself.
        """
        if not self._has_changed:
            return
        for attempt in range(RESTORE_TRIES):
            try:
                view = self._admin.show()
                if back := self._back(view):
                    reason = f"{self._mark}: as before"
                    self._admin.change({**back, "reason": reason, "if_generation": view["generation"]})
                return
            except EndpointError as error:
                if attempt == RESTORE_TRIES - 1:
                    raise EndpointError(f"The settings could not be put back; {self._what_comes()}. {error}") from error
                self._sleep(RESTORE_PAUSE_SECONDS)

    def _back(self, view: Mapping[str, Any]) -> Values:
        """What to ask for so that everything is as before: nothing of what somebody else has changed."""
        effective, reverts = view["effective"], view["reverts"]
        own = {**self.own, **({BATCH: self._batch} if self._batch and SEATS in self.own else {})}
        if self._is_unanswered and view["generation"] == self._generation:
            return own  # the last change may stand in the queue
        if not reverts and not self._is_unanswered:
            return {}
        changed_by: dict[str, str] = {}
        for entry in self._admin.history():
            for name in entry["changes"]:
                changed_by[name] = entry["reason"] or ""
        mine = [name for name, reason in changed_by.items() if self._mark in reason]
        back: Values = {name: plan["to"] for name, plan in reverts.items() if name in mine}
        if self._is_unanswered:  # it may be one that was to hold for good
            back = {name: own[name] for name in mine if name in own and effective[name] != own[name]} | back
        return back

    def _what_comes(self) -> str:
        if self._is_unanswered and math.isinf(self._asked_until):
            return "whether those that were found come to hold for good is not known"
        until = self._asked_until if self._is_unanswered else self._until
        return f"the server does so by itself within {max(0.0, until - self._now()):.0f} s"

    def _change(self, values: Values, **more: Any) -> dict[str, Any]:
        seats = int(values.get(SEATS, self._held.get(SEATS, self._batch)))
        batch = {BATCH: min(self._batch, seats)} if self._batch and SEATS in values else {}
        body = {**values, **batch, **more, "reason": self._mark, "if_generation": self._generation}
        self._has_changed = self._is_unanswered = True
        try:
            answer = self._admin.change(body)
        except (RefusedError, ChangedError) as error:
            self._is_unanswered = False
            if isinstance(error, ChangedError):
                self._compare(self._admin.show())
            raise
        self._is_unanswered = False
        self._generation = int(answer["generation"])
        return answer

    def _wait_for_drain(self, answer: Mapping[str, Any]) -> None:
        until = self._now() + DRAIN_SECONDS
        while answer["pending_drain"]:
            if self._now() > until:
                raise EndpointError(
                    f"Requests did not end within {DRAIN_SECONDS:.0f} s, so that the new settings do not hold yet."
                )
            self._sleep(POLL_SECONDS)
            answer = self._admin.show()
            self._compare(answer)

    def _compare(self, view: Mapping[str, Any]) -> None:
        if view["generation"] == self._generation:
            return
        others = [
            entry
            for entry in self._admin.history()
            if entry["changes"]  # else it is another deed, as a recording, which bears the generation that it met
            and entry["generation"] > self._generation
            and self._mark not in (entry["reason"] or "")
        ]
        if others and all(entry["who"] == "ttl" for entry in others):
            raise ChangedError("A run took so long that the server has its own settings again; give a larger --factor.")
        names = list(dict.fromkeys(name for entry in others for name in entry["changes"])) or ["the settings"]
        who = ", ".join(dict.fromkeys(str(entry["who"]) for entry in others)) or "somebody"
        raise ChangedError(
            f"{', '.join(names)} changed while they were tuned (by {who}): nothing of that is taken back, and nothing "
            "more is tried. Run it again when nobody else changes the settings."
        )


@contextmanager
def open_settings(admin: Admin, names: Sequence[str], **clock: Any) -> Iterator[LiveSettings]:
    """The settings of a server; what was there before is there again afterwards, unless others were applied.

    Raises:
        EndpointError: they cannot be tuned now.
    """
    live = LiveSettings(admin, names, **clock)
    try:
        yield live
    finally:
        try:
            with uninterrupted():
                live.restore()
        except KeyboardInterrupt:
            # Whoever interrupts again between the end of the search and the shield is late by a moment.
            with uninterrupted():
                live.restore()
            raise


def _check(view: Mapping[str, Any], admin: Admin) -> None:
    """Refuse a server that is no longer itself.

    Raises:
        EndpointError: it takes nothing new, or holds settings that go back by themselves.
    """
    if view["effective"].get("draining"):
        raise EndpointError("The server takes no new requests (draining); have it take them again first.")
    if view["reverts"]:
        reverts = view["reverts"]
        raise EndpointError(
            f"What holds now for {', '.join(reverts)} goes back by itself{_within(reverts)}, so what is found would "
            f"not last: wait for that, or make it last.{_by_whom(admin.history(), reverts)}"
        )


def _by_whom(history: Sequence[Mapping[str, Any]], reverts: Mapping[str, Any]) -> str:
    """That it was set by another search, where that was so."""
    last = next((entry for entry in reversed(history) if entry["changes"].keys() & reverts.keys()), None)
    if last is None or not (last["reason"] or "").startswith(MARK):
        return ""
    return " It was set by another relevo limit --tune, which goes on or was killed."


def _within(reverts: Mapping[str, Mapping[str, Any]]) -> str:
    """In how many seconds the last of them has gone back, where the server tells; its clock is taken for this one's."""
    try:
        left = max(datetime.fromisoformat(plan["at"]) for plan in reverts.values()) - datetime.now(UTC)
    except (KeyError, TypeError, ValueError):
        return ""
    return f" within {math.ceil(max(1.0, left.total_seconds()))} s"
