"""What was answered and is not read: bounded for all connections together, as bodies are on their way in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_UNREAD_BYTES: Final = 64 << 20
SPARE_PARTS: Final = 64
# What a call holds that waits for its reader, beside the bytes: 29 KiB on HTTP/2.
CALL_BYTES: Final = 1 << 15

GiveUp = Callable[[], object]


class Unread:
    """Knows what waits for readers. Where that is too much, who has taken nothing for longest loses the answer.

    Each that waits is known by the function that has it given up, which must not wait itself nor raise.

    Attributes:
        num_bytes: all that waits, with what the calls hold.
    """

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[GiveUp, int] = OrderedDict()
        self.num_bytes = 0

    def note(self, give_up: GiveUp, num_bytes: int, *, has_taken: bool = False) -> None:
        """So much waits for a reader now.

        Args:
            has_taken: it has just taken some, and so has waited for less long than all others.
        """
        before = self._waiting.get(give_up, 0)
        now = num_bytes + CALL_BYTES if num_bytes else 0
        self.num_bytes += now - before
        if now:
            self._waiting[give_up] = now
            if has_taken:
                self._waiting.move_to_end(give_up)
        elif before:
            del self._waiting[give_up]
        if self.num_bytes > self._max_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Also for what those who go will be told, which is sent at once and yet counts for a moment."""
        most = self._max_bytes - self._max_bytes // SPARE_PARTS
        while self._waiting and self.num_bytes > most:
            give_up, num_held = self._waiting.popitem(last=False)
            self.num_bytes -= num_held
            give_up()
