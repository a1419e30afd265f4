"""The settings of a server while it is tuned, through `/admin/config`; what was there before comes back in any case.

Each change holds for a time that it brings with it (`ttl_seconds`): where this process is killed, the server goes back
by itself. Each asks for the generation that was seen last (`if_generation`), and bears a mark in its reason: where
somebody else has changed something, that is noticed, it is all over, and only what bears the mark is taken back.
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
        self._until = 0.0
        self._has_changed = False

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
        asked = self._now()
        answer = self._change({**back, **away}, ttl_seconds=ttl)
        self._held, self._until = dict(values), asked + ttl
        self._wait_for_drain(answer)

    def check(self) -> None:
        """Raise `ChangedError` where other settings hold than were asked for."""
        self._compare(self._admin.show())

    def apply(self, values: Values) -> None:
        """Have these hold for good."""
        self._change({**self._held, **values})
        self._held = dict(self.own)

    def restore(self) -> None:
        """Bring back what was there: whatever bears the mark and would go back by itself in time.

        Raises:
            EndpointError: that cannot be done; the server goes back by itself.
        """
        if not self._has_changed:
            return
        for attempt in range(RESTORE_TRIES):
            try:
                view = self._admin.show()
                mine = self._mine(view["reverts"]) if view["reverts"] else {}
                if mine:
                    reason = f"{self._mark}: as before"
                    self._admin.change({**mine, "reason": reason, "if_generation": view["generation"]})
                return
            except EndpointError as error:
                if attempt == RESTORE_TRIES - 1:
                    left = max(0.0, self._until - self._now())
                    raise EndpointError(
                        f"The settings could not be put back; the server does so by itself within {left:.0f} s. {error}"
                    ) from error
                self._sleep(RESTORE_PAUSE_SECONDS)

    def _mine(self, reverts: Mapping[str, Mapping[str, Any]]) -> Values:
        """What to go back to, of those settings that were changed last from here."""
        changed_by: dict[str, str] = {}
        for entry in self._admin.history():
            for name in entry["changes"]:
                changed_by[name] = entry["reason"] or ""
        return {name: plan["to"] for name, plan in reverts.items() if self._mark in changed_by.get(name, "")}

    def _change(self, values: Values, **more: Any) -> dict[str, Any]:
        seats = int(values.get(SEATS, self._held.get(SEATS, self._batch)))
        batch = {BATCH: min(self._batch, seats)} if self._batch and SEATS in values else {}
        body = {**values, **batch, **more, "reason": self._mark, "if_generation": self._generation}
        self._has_changed = True
        try:
            answer = self._admin.change(body)
        except ChangedError:
            self._compare(self._admin.show())
            raise
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
