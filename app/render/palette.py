"""A colour for each request, kept while the request lives.

The colours are classes of the stylesheet (`c0` …). Those that some people cannot tell apart are not given to neighbours
at the table: who sits on the next seat, and who sat there before.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NUM_COLOURS: Final = 12
MAX_PAST: Final = 4096
NOBODY: Final[Mapping[int, str]] = MappingProxyType({})
# Pairs that are nearer to each other than 15 (CIE 1976) in light or dark, to full colour vision or without one of the
# three kinds of cones (as simulated by Machado, Oliveira and Fernandes, 2009). A test works them out again.
ALIKE: Final = frozenset({
    (0, 2), (0, 8), (0, 11), (1, 5), (1, 7), (2, 11), (3, 7), (4, 6), (4, 8), (4, 10), (5, 9), (5, 10), (6, 7), (6, 8),
})  # fmt: skip


class Palette:
    """Hands out colour numbers; a request keeps its own until it is out of sight."""

    def __init__(self) -> None:
        self._colours: dict[str, int] = {}
        self._given = [0] * NUM_COLOURS
        self._clock = 0
        self._at: dict[int, int] = {}  # seat to the colour that was last there
        self._past: dict[str, int] = {}  # of those out of sight, for who looks back

    def update(self, in_sight: Iterable[str], seated: Iterable[str] = (), seats: Mapping[int, str] = NOBODY) -> None:
        """Forget requests that are not in sight any more and give new ones a colour.

        It is one that nobody beside it at the table has, or one like it; then the one that fewest of those `seated` now
        have, then fewest of those in sight; among equals the one that was given longest ago.

        Args:
            seats: who sits where now.
        """
        wanted = dict.fromkeys(in_sight)
        self._past.update((name, colour) for name, colour in self._colours.items() if name not in wanted)
        while len(self._past) > MAX_PAST:
            del self._past[next(iter(self._past))]
        self._colours = {name: colour for name, colour in self._colours.items() if name in wanted}
        now = [0] * NUM_COLOURS
        for name in seated:
            if name in self._colours:
                now[self._colours[name]] += 1
        all_users = [0] * NUM_COLOURS
        for colour in self._colours.values():
            all_users[colour] += 1
        for seat, name in seats.items():
            if name in self._colours:
                self._at[seat] = self._colours[name]
        seat_of = {name: seat for seat, name in seats.items()}
        for name in wanted:
            if name not in self._colours:
                beside = self._beside(seat_of.get(name))
                colour = min(range(len(now)), key=lambda c: (beside[c], now[c], all_users[c], self._given[c]))
                if name in seat_of:
                    self._at[seat_of[name]] = colour
                self._clock += 1
                self._given[colour] = self._clock
                self._colours[name] = colour
                now[colour] += 1
                all_users[colour] += 1

    def _beside(self, seat: int | None) -> list[int]:
        """For each colour, how many beside that seat have it or one like it."""
        counts = [0] * NUM_COLOURS
        if seat is not None:
            for there in [self._at[near] for near in (seat - 1, seat, seat + 1) if near in self._at]:
                for colour in range(len(counts)):
                    counts[colour] += colour == there or (min(colour, there), max(colour, there)) in ALIKE
        return counts

    def css(self, request_id: str) -> str:
        """The stylesheet class of a request, `c-none` for one that was never in sight."""
        colour = self._colours.get(request_id)
        return "c-none" if colour is None else f"c{colour}"

    def looking_back(self, names: Iterable[str]) -> Palette:
        """The same colours, and of requests that are out of sight those they had, or, where all of their life went by
        between two looks, one that goes by the name.
        """
        palette = Palette()
        palette._colours = {**self._past, **self._colours}
        for name in names:
            palette._colours.setdefault(name, crc32(name.encode()) % NUM_COLOURS)
        return palette

    def __len__(self) -> int:
        return len(self._colours)
