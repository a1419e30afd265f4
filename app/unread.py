"""What was answered and is not read: bounded for all connections together, as bodies are on their way in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_UNREAD_BYTES: Final = 64 << 20
SPARE_PARTS: Final = 64

GiveUp = Callable[[], object]


class Unread:
    """Knows what waits for readers. Where that is too much, who has taken nothing for longest loses the answer.

    Who came last keeps it, however long it is: all of it is there already, and asked again it would be as long.
    Each that waits is known by the function that has it given up, which must not wait itself nor raise.

    Attributes:
        max_bytes: how much may wait.
        num_bytes: all that waits.
        num_given_up: answers that were, since the start.
    """

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.max_bytes = max_bytes
        self._waiting: OrderedDict[GiveUp, int] = OrderedDict()
        self.num_bytes = 0
        self.num_given_up = 0

    def note(self, give_up: GiveUp, num_bytes: int, *, has_taken: bool = False) -> None:
        """So much waits for a reader now.

        Args:
            has_taken: it has just taken some, and so has waited for less long than all others.
        """
        before = self._waiting.get(give_up, 0)
        self.num_bytes += num_bytes - before
        if num_bytes:
            self._waiting[give_up] = num_bytes
            if has_taken:
                self._waiting.move_to_end(give_up)
        elif before:
            del self._waiting[give_up]
        # Who is given up tells that it has nothing any more, and makes no room in the middle of it.
        if num_bytes > before and self.num_bytes > self.max_bytes:
            self._make_room(give_up)

    def _make_room(self, newcomer: GiveUp) -> None:
        """Also for what those who go will be told, which is sent at once and yet counts for a moment."""
        most = self.max_bytes - self.max_bytes // SPARE_PARTS
        for give_up in list(self._waiting):
            if self.num_bytes <= most:
                return
            if give_up != newcomer:
                self.num_bytes -= self._waiting.pop(give_up, 0)
                self.num_given_up += 1
                give_up()
