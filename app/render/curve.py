"""Scatter charts of runs at several rates: where each latency was, and whether the promises held there.

Positions across are in per cent of the width, so that the picture fits any room and its marks keep their shape. The
shape of a mark says the same as its colour.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup, escape

from app.render.svg import axis_svg, nice_ceiling, number, svg, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEIGHT = 176
TOP, BOTTOM = 10, 26  # the latter has the rates
AXIS_WIDTH = 48
# A target far above all values would flatten them, and a value far above the target as well.
MOST_OVER_TARGET = 2.5
ROOM = 0.06  # of the width, on either side of the rates
SHAPES = {
    "yes": '<circle class="point yes" r="4"/>',
    "no": '<path class="point no" d="M-4-4L4 4M4-4L-4 4"/>',
    "unknown": '<circle class="point unknown" r="3.5"/>',
}


class Point(NamedTuple):
    """One run: its rate, what was measured there, `yes`, `no` or `unknown`, what hovering tells, and its seed."""

    rate: float
    value: float
    verdict: str
    told: str
    seed: int = 0


class Limit(NamedTuple):
    """Where the limit is, in requests a second."""

    low: float
    estimate: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """What is drawn.

    Attributes:
        points: of the runs, in any order.
        older: those of other runs to compare with, drawn pale.
        beside: other values of the same runs, each drawn as a thin line alone.
        word: prints a value.
        target: what was promised, drawn dashed.
        trying: the rate that is tried now.
        limit, older_limit: drawn as bands.
    """

    title: str
    points: Sequence[Point]
    word: Callable[[float], str]
    target: float | None = None
    trying: float | None = None
    limit: Limit | None = None
    older: Sequence[Point] = ()
    older_limit: Limit | None = None
    beside: Sequence[Sequence[Point]] = ()


def draw_curve(curve: Curve) -> Markup:
    """The axis and the plot, side by side."""
    first, last = _span(curve)
    top = _top(curve)

    def x(rate: float) -> str:
        return f"{number(100 * (ROOM + (1 - 2 * ROOM) * (rate - first) / (last - first)))}%"

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value / top, 1.0))

    body = [_line("grid", "0%", y(value), "100%", y(value)) for value in (0.0, top / 2, top)]
    body += [text("tick rate", x(rate), HEIGHT - 8, f"{rate:g}") for rate in _ticks(first, last)]
    for css, limit in (("older", curve.older_limit), ("", curve.limit)):
        if limit is not None:
            body += _band(css, limit, x)
    if curve.target is not None and curve.target <= top:
        body.append(_line("target", "0%", y(curve.target), "100%", y(curve.target)))
    if curve.trying is not None:
        body.append(_line("trying", x(curve.trying), TOP, x(curve.trying), HEIGHT - BOTTOM))
    for points in curve.beside:
        body += _links("thin", [point for point in points if point.value <= top], x, y)
    for css, points in (("older", curve.older), ("", curve.points)):
        body += _links(css, points, x, y)
        body += [_mark(css, point, x(point.rate), y(point.value), is_over=point.value > top) for point in points]
    axis = [text("tick", number(AXIS_WIDTH - 2), y(value) + 3.5, curve.word(value)) for value in (0.0, top / 2, top)]
    drawing = svg("curve", body, height=HEIGHT, label=_describe(curve))
    return Markup('<div class="plot">{}{}</div>').format(axis_svg(axis, width=AXIS_WIDTH, height=HEIGHT), drawing)


def _span(curve: Curve) -> tuple[float, float]:
    """The lowest and the highest rate; never the same."""
    rates = [point.rate for point in (*curve.points, *curve.older)]
    rates += [rate for limit in (curve.limit, curve.older_limit) if limit is not None for rate in limit]
    rates += [] if curve.trying is None else [curve.trying]
    low, high = min(rates, default=0.0), max(rates, default=1.0)
    if high <= low * 1.01:
        low, high = low * 0.9, max(high * 1.1, 1e-6)
    return low, high


def _top(curve: Curve) -> float:
    values = [point.value for point in (*curve.points, *curve.older)]
    highest = max(values, default=0.0)
    if curve.target is not None:
        highest = max(min(highest, curve.target * MOST_OVER_TARGET), curve.target * 1.05)
    return nice_ceiling(highest)


def _ticks(first: float, last: float) -> list[float]:
    """Some round rates within."""
    wanted = (last - first) / 5
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= wanted), 10 * power)
    return [round(n * step, 12) for n in range(math.ceil(first / step), math.floor(last / step) + 1)]


def _line(css: str, x1: str, y1: float, x2: str, y2: float) -> str:
    return f'<line class="{css}" x1="{x1}" y1="{number(y1)}" x2="{x2}" y2="{number(y2)}"/>'


def _band(css: str, limit: Limit, x: Callable[[float], str]) -> list[str]:
    """Within what it lies, and the estimate as a line."""
    left, right = (float(x(rate)[:-1]) for rate in (limit.low, limit.high))
    size = f'width="{number(right - left)}%" height="{HEIGHT - TOP - BOTTOM}"'
    at = x(limit.estimate)
    return [
        f'<rect class="within {css}" x="{number(left)}%" y="{TOP}" {size}/>',
        _line(f"found {css}", at, TOP, at, HEIGHT - BOTTOM),
    ]


def _links(css: str, points: Sequence[Point], x: Callable[[float], str], y: Callable[[float], float]) -> list[str]:
    """Lines between neighbouring rates, of the seed that most of them were tried with: only its requests are the same.

    Of runs that say nothing there are none.
    """
    known = [point for point in points if point.verdict != "unknown"]
    seed = next((seed for seed, _ in Counter([point.seed for point in known]).most_common(1)), 0)
    by_rate: dict[float, list[float]] = {}
    for point in known:
        if point.seed == seed:
            by_rate.setdefault(point.rate, []).append(point.value)
    means = [(rate, sum(values) / len(values)) for rate, values in sorted(by_rate.items())]
    return [
        _line(f"link {css}", x(rate), y(value), x(next_rate), y(next_value))
        for (rate, value), (next_rate, next_value) in pairwise(means)
    ]


def _mark(css: str, point: Point, x: str, y: float, *, is_over: bool) -> str:
    """A point; one above the plot stands at its edge and has an arrow."""
    arrow = '<path class="over" d="M-3.5-7L0-11L3.5-7Z"/>' if is_over else ""
    title = f"<title>{escape(point.told)}</title>"
    return f'<svg class="spot {css}" x="{x}" y="{number(y)}">{SHAPES[point.verdict]}{arrow}{title}</svg>'


def _describe(curve: Curve) -> str:
    parts = [f"{curve.title} by rate."]
    if curve.target is not None:
        parts.append(f"Target {curve.word(curve.target)}.")
    parts += [point.told + "." for point in sorted(curve.points)]
    if curve.limit is not None:
        parts.append(f"The limit is at {curve.limit.estimate:.3g} requests/s.")
    return " ".join(parts if curve.points else [*parts, "No run has ended yet."])
