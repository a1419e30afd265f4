"""A colour for each request, kept while the request lives.

The colours are classes of the stylesheet (`c0` …): dark and light take turns, so that neighbours differ in lightness
too and can be told apart without seeing hue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_COLOURS = 12


class Palette:
    """Hands out colour numbers; a request keeps its own until it is out of sight."""

    def __init__(self, num_colours: int = NUM_COLOURS) -> None:
        self._colours: dict[str, int] = {}
        self._given = [0] * num_colours
        self._clock = 0

    def update(self, in_sight: Iterable[str], seated: Iterable[str] = ()) -> None:
        """Forget requests that are not in sight any more and give new ones a colour.

        It is the one that fewest of those `seated` now have, then fewest of those in sight; among equals the one that
        was given longest ago.
        """
        wanted = dict.fromkeys(in_sight)
        self._colours = {name: colour for name, colour in self._colours.items() if name in wanted}
        now = [0] * len(self._given)
        for name in seated:
            if name in self._colours:
                now[self._colours[name]] += 1
        all_users = [0] * len(self._given)
        for colour in self._colours.values():
            all_users[colour] += 1
        for name in wanted:
            if name not in self._colours:
                colour = min(range(len(now)), key=lambda c: (now[c], all_users[c], self._given[c]))
                self._clock += 1
                self._given[colour] = self._clock
                self._colours[name] = colour
                now[colour] += 1
                all_users[colour] += 1

    def css(self, request_id: str) -> str:
        """The stylesheet class of a request, `c-none` for one that was never in sight."""
        colour = self._colours.get(request_id)
        return "c-none" if colour is None else f"c{colour}"

    def __len__(self) -> int:
        return len(self._colours)
