"""KV memory: a bar of used, cached and free, and the blocks as a grid of squares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from app.render.svg import number, rect, svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = 48
MAX_CELLS = COLUMNS * 10


class Owner(NamedTuple):
    """Blocks that one request holds: its colour class, its name, how many."""

    css: str
    request_id: str
    num_blocks: int


class BlockPicture(NamedTuple):
    """The drawn grid and how many blocks a square stands for."""

    grid: Markup
    blocks_per_cell: int


def draw_bar(kv: Mapping[str, Any]) -> Markup:
    """Used, cached and free as shares of one bar."""
    total = max(kv["total"], 1)
    used, cached = 100 * kv["used"] / total, 100 * kv["cached"] / total
    body = [
        rect("free", "0", 0, "100%", 10),
        rect("cached", f"{number(used)}%", 0, f"{number(cached)}%", 10),
        rect("used", "0", 0, f"{number(used)}%", 10),
    ]
    label = f"Of {kv['total']} blocks {kv['used']} are used, {kv['cached']} cached, {kv['free']} free."
    return svg("bar", body, height=10, label=label)


def draw_blocks(kv: Mapping[str, Any], owners: Sequence[Owner]) -> BlockPicture:
    """Squares by count, not by address: each request's own together, then shared ones, cached, free."""
    total = kv["total"]
    per_cell = max(1, -(-total // MAX_CELLS))
    cells = -(-total // per_cell)
    rows = max(1, -(-cells // COLUMNS))
    body: list[str] = []
    start = 0
    for css, title, amount in _kinds(kv, owners):
        # Both ends are rounded from exact block positions, so the squares always add up to the total.
        first, last = (round(end * cells / max(total, 1)) for end in (start, start + amount))
        start += amount
        body += _span(css, title, first, last)
    # The gaps between squares are drawn over the spans, once.
    body.append(f'<rect class="mesh" width="{COLUMNS * 10}" height="{rows * 10}"/>')
    grid = f'<svg class="blocks" viewBox="0 0 {COLUMNS * 10} {rows * 10}" aria-hidden="true">{"".join(body)}</svg>'
    return BlockPicture(Markup(grid), per_cell)  # noqa: S704


def _kinds(kv: Mapping[str, Any], owners: Sequence[Owner]) -> list[tuple[str, str, int]]:
    kinds: list[tuple[str, str, int]] = []
    left = kv["used"]
    for owner in owners:
        amount = min(owner.num_blocks, left)
        left -= amount
        if amount:
            kinds.append((owner.css, f"{owner.request_id}: {amount} blocks", amount))
    kinds.append(("used", f"{left} blocks that several requests share", left))
    kinds.append(("cached", f"{kv['cached']} cached blocks, can be evicted", kv["cached"]))
    kinds.append(("free", f"{kv['free']} free blocks", kv["free"]))
    return kinds


def _span(css: str, title: str, first: int, last: int) -> list[str]:
    """The squares `first` up to, not including, `last`: one rectangle a row."""
    shapes = []
    while first < last:
        row, column = divmod(first, COLUMNS)
        width = min(last - first, COLUMNS - column)
        shapes.append(rect(css, str(column * 10), row * 10, str(width * 10), 10, title))
        first += width
    return shapes
