"""The seats of the batch: taken, kept for one that has ended, or free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class Seats:
    """Numbers from 0 to `num_seats` - 1. The lowest free one is taken first, so that the table fills from the top."""

    def __init__(self, num_seats: int) -> None:
        self._num_seats = num_seats
        self._free = list(range(num_seats - 1, -1, -1))
        self._kept: list[int] = []

    def take(self) -> int:
        """Take the lowest free seat."""
        return self._free.pop()

    def leave(self, seat: int) -> None:
        """The seat is free."""
        self._free.append(seat)
        self._free.sort(reverse=True)

    def keep(self, seat: int) -> None:
        """Nobody sits there, and nobody may until `free_kept`."""
        self._kept.append(seat)

    def free_kept(self) -> None:
        """Seats that were kept are free."""
        self._free += self._kept
        self._free.sort(reverse=True)
        self._kept.clear()

    def check_integrity(self, taken: Collection[int]) -> None:
        """Raise `RuntimeError` unless taken, kept and free seats are all the seats there are."""
        if sorted([*taken, *self._kept, *self._free]) != list(range(self._num_seats)):
            free = sorted(self._free)
            raise RuntimeError(f"seats taken {sorted(taken)}, kept {self._kept} and free {free} do not add up")
