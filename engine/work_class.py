"""One class of work, interactive or background: who sits and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.waiting import SHARE_SLACK, Fairness, WaitingQueue

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
        self._empty()

    def begin_anew(self) -> None:
        """Nobody sits or waits here, whatever was known before; what the keys were given is not forgotten."""
        self.fairness.begin_anew()
        self._empty()

    def _empty(self) -> None:
        self.queue = WaitingQueue(self.fairness)
        self.running: list[Sequence] = []
        self.wait_reason: str | None = None
        self.too_large_now: frozenset[int] = frozenset()

    def why_waits(self, sequence: Sequence) -> str:
        """What one that waits needs: a reason from the closed set that metrics and pages count by."""
        if sequence.awaits_leader:
            return "shared_prompt"
        if sequence.sequence_id in self.too_large_now:
            return "kv_memory"
        return self.wait_reason or "token_budget"

    def lets_others_pass(self, max_overtaken: int) -> bool:
        """Whether all who wait here wait for memory alone, and none of them was overtaken too often."""
        waiting = self.queue
        return len(waiting) <= len(self.too_large_now) and all(
            [other.sequence_id in self.too_large_now and other.num_overtaken < max_overtaken for other in waiting]
        )

    def who_yields(self, waiter: Sequence, num_seats: int) -> Sequence | None:
        """Who gives up one of `num_seats` to `waiter`, the first in line: the youngest of the key that holds most.

        Nobody where that key does not hold two more than the waiter's, where the seat would be its own again by the
        order of the queue, or where all of its sequences have yielded often enough.
        """
        self.fairness.settle()
        accounts = self.fairness.accounts
        account = accounts[waiter.key_identity]
        most = max([other.num_seats for other in accounts.values()])
        if account.num_seats >= self.fairness.share(num_seats) or most < account.num_seats + 2:
            return None
        for other in reversed(self.running):
            holder = accounts[other.key_identity]
            if (
                holder.num_seats == most
                and other.num_yields < MAX_YIELDS
                and account.counter <= holder.counter + SHARE_SLACK
            ):
                return other
        return None

    def givers(self) -> list[Sequence]:
        """Those who run and have not yielded often enough, the youngest first."""
        return [sequence for sequence in reversed(self.running) if sequence.num_yields < MAX_YIELDS]


class Way(NamedTuple):
    """`waiter` has a better right to a place than `givers`, the first of whom is to yield first."""

    waiter: Sequence
    givers: list[Sequence]


def find_way(interactive: WorkClass, background: WorkClass, num_seats: int) -> Way | None:
    """For whom a place is to be made, and who can yield it.

    Interactive work has a better right than background work, and a key that holds fewer seats than its share a better
    one than the key that holds most. Served tokens alone would not bound the wait for a seat: those who sit may stay
    for long.

    Args:
        num_seats: seats there are now.
    """
    is_full = len(interactive.running) + len(background.running) == num_seats
    work = interactive if interactive.queue else background
    if not work.queue or not (is_full or work.wait_reason == "kv_memory"):
        return None
    waiter = next(work.queue.candidates(num_seats), None)
    if waiter is None:
        return None
    if work is interactive and (givers := background.givers()):
        return Way(waiter, givers)
    if not is_full or len(work.fairness.accounts) < 2:
        return None
    giver = work.who_yields(waiter, num_seats)
    return None if giver is None else Way(waiter, [giver])
