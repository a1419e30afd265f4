"""One class of work, interactive or background: who sits and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.waiting import Fairness, WaitingQueue

if TYPE_CHECKING:
    from engine.sequence import Sequence

# How often in its life one gives up its seat for the sake of the order.
MAX_YIELDS = 8


class WorkClass:
    """Its sequences.

    Attributes:
        running: those who sit, in the order in which they sat down.
        queue: those who wait.
        fairness: what the keys that ask were given.
        wait_reason: why the queue does not move, `None` where it is empty or nothing was planned since it grew.
        too_large_now: ids of those who wait for memory whatever `wait_reason` says.
    """

    def __init__(self) -> None:
        self.fairness = Fairness()
        self.queue = WaitingQueue(self.fairness)
        self.running: list[Sequence] = []
        self.wait_reason: str | None = None
        self.too_large_now: frozenset[int] = frozenset()

    def why_waits(self, sequence: Sequence) -> str:
        """What one that waits needs: a reason from the closed set that metrics and pages count by."""
        if sequence.sequence_id in self.too_large_now:
            return "kv_memory"
        return self.wait_reason or "token_budget"

    def who_yields(self, num_seats: int) -> Sequence | None:
        """Who gives up one of `num_seats` so that the first who waits, of a key below its share, can sit.

        It is the youngest of the key that holds most; nobody where the share is reached, where no key holds more than
        it, or where all have yielded often enough.
        """
        share, accounts = self.fairness.share(num_seats), self.fairness.accounts
        if len(accounts) < 2 or not self.queue or accounts[self.queue.first(num_seats).key_name].num_seats >= share:
            return None
        most = max([account.num_seats for account in accounts.values()])
        if most <= share:
            return None
        return self._youngest([other for other in self.running if accounts[other.key_name].num_seats == most])

    def youngest(self) -> Sequence | None:
        """Who sat down last of those who have not yielded often enough."""
        return self._youngest(self.running)

    def _youngest(self, sequences: list[Sequence]) -> Sequence | None:
        return next((sequence for sequence in reversed(sequences) if sequence.num_yields < MAX_YIELDS), None)


def who_makes_way(interactive: WorkClass, background: WorkClass, num_seats: int) -> Sequence | None:
    """Who gives up its seat for one with a better right to it; at most one in a step.

    Interactive work has it before background work, and a key that holds less than its share of the seats before one
    that holds more. Served tokens alone would not bound the wait for a seat: those who sit may stay for long.

    Args:
        num_seats: seats there are now.
    """
    is_full = len(interactive.running) + len(background.running) >= num_seats
    victim = interactive.who_yields(num_seats) if is_full else None
    if victim is None and interactive.queue and (is_full or interactive.wait_reason == "kv_memory"):
        victim = background.youngest()
    if victim is None and is_full and not interactive.queue:
        victim = background.who_yields(num_seats)
    return victim
