"""Line charts of the last minutes and the small lines in the tiles, as inline SVG."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup, escape

from app.render.svg import axis_svg, band_paths, line_path, lone_dots, nice_ceiling, number, svg, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HEIGHT = 116
TOP = 8
BOTTOM = 8
AXIS_WIDTH = 48  # the longest label is like "500 ms"
WIDTH = 600.0


class Mark(NamedTuple):
    """An event on a chart: its position, 0 to 1, its kind and what hovering tells."""

    position: float
    kind: str
    text: str

    def draw(self) -> str:
        """A line from top to bottom, and around it an invisible one that is wide enough to be hit."""
        path = f"M{number(self.position * WIDTH)} 0V{HEIGHT}"
        title = f"<title>{escape(self.text)}</title>"
        lines = f'<path class="mark" d="{path}"/><path class="reach" d="{path}"/>'
        return f'<g class="event {self.kind}">{lines}{title}</g>'


class LegendItem(NamedTuple):
    """A colour of a picture, what it stands for and how much of that there is."""

    css: str
    title: str
    value: str


class Figure(NamedTuple):
    """A picture with its caption; `about` is its key in the glossary, a `wide` one takes two columns."""

    title: str
    note: str
    plot: Markup
    about: str
    wide: bool = False
    legend: Sequence[LegendItem] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart.

    Attributes:
        name: what it shows, for the description.
        css: stylesheet class.
        values: one a point in time, `None` where nothing was measured.
    """

    name: str
    css: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn over the same points in time.

    Attributes:
        positions: x of each point, 0 (oldest) to 1 (now).
        lines: drawn in order; the first and the last bound the shaded band where `band` is set.
        word: prints a value of the axis.
        span: what time is shown, as in `last 5 min`.
        target: a promised limit, drawn dashed.
        ceiling: top of the axis where it is known beforehand.
        marks: events.
    """

    title: str
    positions: Sequence[float]
    lines: Sequence[Line]
    word: Callable[[float], str]
    span: str
    band: bool = False
    target: float | None = None
    ceiling: float | None = None
    marks: Sequence[Mark] = ()


def draw_chart(chart: Chart) -> Markup:
    """The axis and the plot, side by side; the plot stretches to the room that is left."""
    top = _top_of(chart)
    axis = [text("tick", number(AXIS_WIDTH - 2), y + 3.5, chart.word(value)) for value, y in grid_lines(top)]
    plot = [f'<path class="grid" d="M0 {number(y)}H{number(WIDTH)}"/>' for _, y in grid_lines(top)]
    xs = [position * WIDTH for position in chart.positions]
    heights = [[None if v is None else _y(v, top) for v in line.values] for line in chart.lines]
    if chart.band and len(heights) > 1:
        plot.append(f'<path class="band" d="{band_paths(xs, heights[0], heights[-1])}"/>')
    if chart.target is not None and chart.target <= top:
        plot.append(f'<path class="target" d="M0 {number(_y(chart.target, top))}H{number(WIDTH)}"/>')
    plot += [mark.draw() for mark in chart.marks]
    for line, ys in zip(chart.lines, heights, strict=True):
        path = line_path(zip(xs, ys, strict=True)) + lone_dots(xs, ys)
        plot.append(f'<path class="line {line.css}" d="{path}"/>')
    drawing = svg("lines", plot, height=HEIGHT, label=_describe(chart), view_box=f"0 0 600 {HEIGHT}")
    labels = axis_svg(axis, width=AXIS_WIDTH, height=HEIGHT)
    return Markup('<div class="plot">{}{}</div>').format(labels, drawing)


def sparkline(values: Sequence[float | None], css: str = "") -> Markup:
    """A line without an axis, from zero to its own highest value."""
    known = [value for value in values if value is not None]
    top = max(known, default=0.0) or 1.0
    step = WIDTH / max(len(values) - 1, 1)
    points = ((index * step, None if v is None else 25 - 23 * v / top) for index, v in enumerate(values))
    path = f'<path class="line {css}" d="{line_path(points)}"/>'
    return svg("spark", [path], height=26, label="", view_box="0 0 600 26")


def _top_of(chart: Chart) -> float:
    if chart.ceiling is not None:
        return max(chart.ceiling, 1e-9)
    highest = max((v for line in chart.lines for v in line.values if v is not None), default=0.0)
    # A target far above the data would flatten the lines; it is shown once they come near it.
    if chart.target is not None and (not highest or highest > chart.target / 3):
        highest = max(highest, chart.target * 1.05)
    return nice_ceiling(highest)


def grid_lines(top: float) -> list[tuple[float, float]]:
    """The values that have a line across the plot, and where."""
    return [(value, _y(value, top)) for value in (0.0, top / 2, top)]


def _y(value: float, top: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value / top, 1.0))


def _describe(chart: Chart) -> str:
    latest = []
    for line in chart.lines:
        known = [value for value in line.values if value is not None]
        latest.append(f"{line.name} {chart.word(known[-1]) if known else 'not measured'}")
    return f"{chart.title}, {chart.span}. Now: {', '.join(latest)}."
