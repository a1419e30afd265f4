"""The few primitives the pictures share. Text and titles are escaped here and nowhere else."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@lru_cache(maxsize=8192)  # most of a picture stands where it stood a second ago
def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rect(css: str, x: str, y: float, width: str, height: float, title: str = "") -> str:
    """A rectangle; `x` and `width` are coordinates or percentages, `title` is what hovering tells."""
    shape = f'<rect class="{css}" x="{x}" y="{number(y)}" width="{width}" height="{number(height)}"'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(css: str, x: str, y: float, words: str) -> str:
    """A line of text whose baseline is at `y`."""
    return f'<text class="{css}" x="{x}" y="{number(y)}">{escape(words)}</text>'


def line_path(points: Iterable[tuple[float, float | None]]) -> str:
    """Path data through the points, to a tenth of a pixel; a gap where the value is `None`."""
    pieces: list[str] = []
    command = "M"
    for x, y in points:
        if y is None:
            command = "M"
        else:
            pieces.append(f"{command}{x:.1f} {y:.1f}")
            command = "L"
    return "".join(pieces)


def lone_dots(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    """Path data of a dot for each point without a neighbour, of which a line shows nothing."""
    around = [None, *ys, None]
    return "".join(
        f"M{x:.1f} {y:.1f}h0"
        for x, y, before, after in zip(xs, ys, around, around[2:], strict=False)
        if y is not None and before is None and after is None
    )


def band_paths(xs: Sequence[float], low: Sequence[float | None], high: Sequence[float | None]) -> str:
    """Path data of the area between two lines, one closed piece for each stretch without gaps."""
    pieces: list[str] = []
    stretch: list[int] = []
    for index in range(len(xs) + 1):
        if index < len(xs) and low[index] is not None and high[index] is not None:
            stretch.append(index)
            continue
        if len(stretch) > 1:
            upper = line_path((xs[i], high[i]) for i in stretch)
            lower = line_path((xs[i], low[i]) for i in reversed(stretch))
            pieces.append(f"{upper}L{lower[1:]}Z")
        stretch = []
    return "".join(pieces)


def nice_ceiling(value: float) -> float:
    """The smallest 1, 1.5, 2, 3, 4, 5, 6 or 8 times a power of ten that is not below `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    for step in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0):
        if value <= step * power * 1.0000001:
            return step * power
    return 10.0 * power


def svg(css: str, body: Iterable[str], *, height: int, label: str, view_box: str = "") -> Markup:
    """A picture as wide as its box. With a view box the drawing is stretched to it, without one x is in per cent."""
    frame = f' viewBox="{view_box}" preserveAspectRatio="none"' if view_box else ""
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return Markup(f'<svg class="{css}" width="100%" height="{height}"{frame} {role}>{"".join(body)}</svg>')  # noqa: S704


def axis_svg(body: Iterable[str], *, width: int, height: int) -> Markup:
    """The labels beside a plot, in pixels; a reader of the page is told by the plot's own description."""
    frame = f'<svg class="axis" width="{width}" height="{height}" aria-hidden="true">{"".join(body)}</svg>'
    return Markup(frame)  # noqa: S704
