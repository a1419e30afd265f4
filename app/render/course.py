"""Latency over a window: percentiles as lines, gaps between tokens as a heat map, and where the requests' time went."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from app.render import numbers, words
from app.render.charts import AXIS_WIDTH, HEIGHT, WIDTH, Chart, Figure, LegendItem, Line, draw_chart, grid_lines
from app.render.svg import axis_svg, nice_ceiling, number, svg, text
from engine.experience import band_edge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.render.charts import Mark
    from app.render.scene import Scene
    from engine.experience import Course, Quantiles

# A line is not drawn across so many columns without a sample.
GAP_COLUMNS: Final = 5
LEVELS: Final = 8
LEAST_BANDS: Final = 6


def latency_figure(scene: Scene, course: Course, name: str, marks: Sequence[Mark] = ()) -> Figure:
    """One latency: p50, p95 and p99 of each column."""
    promise = scene.promises.get(name)
    target = promise.p95_seconds if promise else None
    columns = _with_gaps(course, sorted(course.latency[name].items()))
    lines = [
        Line("p50", "thin", [q.p50 if q else None for _, q in columns]),
        Line("p95", "strong", [q.p95 if q else None for _, q in columns]),
        Line("p99", "pale", [q.p99 if q else None for _, q in columns]),
    ]
    positions = [_middle(course, start) for start, _ in columns]
    title = words.LATENCIES[name]
    chart = Chart(
        title, positions, lines, axis_seconds, span=span_of(course.seconds), band=True, target=target, marks=marks
    )
    note = "p50 · p95 · p99" + (f" · target {numbers.seconds(target)}" if target else "")
    return Figure(title, note, draw_chart(chart), name)


def heat_figure(scene: Scene, course: Course, marks: Sequence[Mark] = ()) -> Figure:
    """Gaps between tokens: when, how long, how many."""
    cells = {(start, band): amount for start, bands in course.gaps.items() for band, amount in bands.items()}
    target = scene.promises["itl"].p95_seconds if "itl" in scene.promises else None
    most = max(cells.values(), default=0)
    note = "each row a length, each column a time; the darker the more"
    if most:
        note += f", up to {numbers.count(most)} in {numbers.duration(course.width)}"
    plot = _draw_heat(course, cells, most, target, marks)
    return Figure("Between tokens, all of them", note, plot, "heat", wide=True)


def spent_figure(scene: Scene, course: Course, marks: Sequence[Mark] = ()) -> Figure:
    """Where the time of the requests that ended in each column went, a request."""
    spent = scene.snapshot["spent"]
    note = f"mean of {numbers.plural(spent['requests'], 'request')}" if spent["requests"] else "no request has ended"
    legend = [
        LegendItem(name, title, str(numbers.seconds(spent[f"{name}_seconds"]))) for name, title in words.SPENT.items()
    ]
    return Figure("Where the time went", note, _draw_spent(course, note, marks), "spent", legend=legend)


def _draw_heat(
    course: Course, cells: Mapping[tuple[float, int], int], most: int, target: float | None, marks: Sequence[Mark]
) -> Markup:
    bands = [band for _, band in cells]
    low = min(bands, default=6)
    high = max([*bands, low + LEAST_BANDS - 1])
    row = HEIGHT / (high - low + 1)
    paths: dict[int, list[str]] = {}
    for (start, band), amount in cells.items():
        left, right = _edges(course, start)
        x, width = number(left * WIDTH), number((right - left) * WIDTH)
        y = number((high - band) * row)
        level = math.ceil(LEVELS * math.log1p(amount) / math.log1p(most))
        paths.setdefault(level, []).append(f"M{x} {y}h{width}v{number(row)}h-{width}Z")
    body = [f'<path class="heat heat{level}" d="{"".join(drawn)}"/>' for level, drawn in sorted(paths.items())]
    if target is not None:
        height = HEIGHT - math.log(target / band_edge(low)) / math.log(band_edge(1) / band_edge(0)) * row
        if 0 < height < HEIGHT:
            body.append(f'<path class="target" d="M0 {number(height)}H{number(WIDTH)}"/>')
    body += [mark.draw() for mark in marks]
    axis = axis_svg(_band_labels(low, high, row), width=AXIS_WIDTH, height=HEIGHT)
    total = sum(cells.values())
    label = f"Gaps between tokens, {span_of(course.seconds)}: {numbers.plural(total, 'gap')}"
    if total:
        label += f", the shortest from {axis_seconds(_short(band_edge(low)))}"
        label += f", the longest up to {axis_seconds(_short(band_edge(max(bands) + 1)))}"
    drawing = svg("lines heatmap", body, height=HEIGHT, label=f"{label}.", view_box=f"0 0 600 {HEIGHT}")
    return Markup('<div class="plot">{}{}</div>').format(axis, drawing)


def _band_labels(low: int, high: int, row: float) -> list[str]:
    """What some of the lines between the bands stand for."""
    labels = []
    for band in range(low, high + 2, max(1, round((high - low + 1) / 6))):
        baseline = HEIGHT - (band - low) * row + 3.5
        if 8 <= baseline <= HEIGHT:
            labels.append(text("tick", number(AXIS_WIDTH - 2), baseline, axis_seconds(_short(band_edge(band)))))
    return labels


def _draw_spent(course: Course, note: str, marks: Sequence[Mark]) -> Markup:
    top = nice_ceiling(max((sum(column[1:]) for column in course.spent.values()), default=0.0))
    scale = (HEIGHT - 16) / top
    paths: dict[str, list[str]] = {name: [] for name in words.SPENT}
    for start, column in course.spent.items():
        left, right = _edges(course, start)
        x, width = number(left * WIDTH), number((right - left) * WIDTH * 0.9)
        base = HEIGHT - 8.0
        for name in words.SPENT:
            height = getattr(column, name) * scale
            if height >= 0.05:
                paths[name].append(f"M{x} {number(base)}v-{number(height)}h{width}v{number(height)}Z")
            base -= height
    body = [f'<path class="grid" d="M0 {number(y)}H{number(WIDTH)}"/>' for _, y in grid_lines(top)]
    body += [f'<path class="spent-{name}" d="{"".join(drawn)}"/>' for name, drawn in paths.items()]
    body += [mark.draw() for mark in marks]
    axis = [text("tick", number(AXIS_WIDTH - 2), y + 3.5, axis_seconds(value)) for value, y in grid_lines(top)]
    label = f"Where the time of requests went, {span_of(course.seconds)}, {note}."
    drawing = svg("lines", body, height=HEIGHT, label=label, view_box=f"0 0 600 {HEIGHT}")
    return Markup('<div class="plot">{}{}</div>').format(axis_svg(axis, width=AXIS_WIDTH, height=HEIGHT), drawing)


def _with_gaps(course: Course, columns: Sequence[tuple[float, Quantiles]]) -> list[tuple[float, Quantiles | None]]:
    """The columns, and one without a value wherever a line must not be drawn through."""
    shown: list[tuple[float, Quantiles | None]] = []
    for start, quantiles in columns:
        if shown and start - shown[-1][0] > GAP_COLUMNS * course.width:
            shown.append((start, None))
        shown.append((start, quantiles))
    return shown


def _edges(course: Course, start: float) -> tuple[float, float]:
    """Where a column begins and ends, between the oldest (0) and now (1)."""
    begin = course.now - course.seconds
    return (start - begin) / course.seconds, min(1.0, (start + course.width - begin) / course.seconds)


def _middle(course: Course, start: float) -> float:
    left, right = _edges(course, start)
    return (left + right) / 2


def span_of(seconds: float) -> str:
    """`last 5 min`."""
    return f"last {numbers.duration(seconds)}"


def axis_seconds(value: float) -> str:
    """A value of an axis of seconds."""
    if value == 0:
        return "0"
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def _short(value: float) -> float:
    return float(f"{value:.2g}")
