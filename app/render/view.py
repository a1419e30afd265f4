"""What each partial of the dashboard is given, from one scene."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.render import numbers
from app.render.charts import Chart, Figure, Line, draw_chart
from app.render.course import heat_figure, latency_figure, span_of, spent_figure
from app.render.events import chart_marks, event_variables
from app.render.figures import count_groups, latency_tables
from app.render.memory import memory_variables
from app.render.requests import request_variables
from app.render.table import NUM_STEPS, draw_table
from app.render.tiles import make_tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.render.scene import Scene
    from app.render.table import TablePicture


def state_of(scene: Scene) -> dict[str, Any]:
    """The line at the top of each page: is it well, and what is it."""
    # The engine says it as "draining: finishing what runs"; the first word is the state.
    word, _, reason = (scene.reason or "not ready").partition(": ")
    return {
        "word": "ready" if scene.ready else word,
        "level": "" if scene.ready else "warn" if word == "draining" else "bad",
        "reason": "" if scene.ready else reason,
        "model": scene.model,
        "details": (*scene.details, f"up {numbers.duration(scene.snapshot['uptime_seconds'])}"),
        "running": scene.snapshot["requests"]["running"],
    }


def table_of(scene: Scene) -> TablePicture:
    """Seats and steps; the seats that are drawn are those of the limit that holds now."""
    table = scene.snapshot["table"] if scene.past is None else scene.past
    return draw_table(table, scene.palette, seats=scene.snapshot["config"]["max_num_seqs"])


def table_variables(scene: Scene) -> dict[str, Any]:
    """The picture, what it is of, and where other steps are."""
    picture = table_of(scene)
    oldest, newest = picture.kept
    return {
        "picture": picture,
        "policy": scene.snapshot["config"]["policy"],
        "is_past": scene.past is not None,
        "earlier": picture.first_step - 1 if oldest < picture.first_step else None,
        "later": min(newest, picture.last_step + NUM_STEPS) if picture.last_step < newest else None,
    }


def charts_of(scene: Scene) -> list[Figure]:
    """The charts of the window, each with a caption."""
    history, total, course = scene.history, scene.snapshot["kv"]["total"], scene.course()
    points, marks, span = history.merged(), chart_marks(scene), span_of(course.seconds)
    positions = [history.position(point.time) for point in points]

    def levels(about: str, title: str, note: str, lines: list[Line], ceiling: float | None = None) -> Figure:
        chart = Chart(title, positions, lines, _axis_count, span=span, ceiling=ceiling, marks=marks)
        return Figure(title, note, draw_chart(chart), about, wide=ceiling is not None)

    output = Line("output", "strong", [p.output_rate for p in points])
    running = Line("running", "second", [p.running for p in points])
    waiting = Line("waiting", "strong", [p.waiting for p in points])
    cached = Line("used and cached", "second", [p.kv_used + p.kv_cached for p in points])
    used = Line("used", "strong", [p.kv_used for p in points])
    blocks = f"blocks used, pale with cached, of {numbers.count(total)}"
    return [
        *[latency_figure(scene, course, name, marks) for name in ("ttft", "itl", "e2e")],
        heat_figure(scene, course, marks),
        spent_figure(scene, course, marks),
        *[latency_figure(scene, course, name, marks) for name in ("queue", "tpot")],
        levels("output", "Output", "tokens/s", [output]),
        levels("waiting", "Requests", "waiting, pale running", [running, waiting]),
        levels("kv", "KV memory", blocks, [cached, used], float(total)),
    ]


def _window(scene: Scene) -> str:
    return numbers.duration(scene.history.span_seconds)


def _axis_count(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,g}"


# The parts that depend on the window that is watched; the others are drawn once for all.
WINDOWED: Final = ("diagnosis", "tiles", "charts", "latency")

# What each partial is given. A part can be drawn alone: the other pages show the state only.
PARTS: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "state": lambda scene: {"state": state_of(scene)},
    "diagnosis": lambda scene: {"findings": scene.snapshot["diagnosis"]},
    "tiles": lambda scene: {"tiles": make_tiles(scene.snapshot, scene.history, scene.promises)},
    "table": lambda scene: table_variables(scene),
    "charts": lambda scene: {"charts": charts_of(scene), "begin": _window(scene)},
    "latency": lambda scene: {"groups": latency_tables(scene), "window": _window(scene)},
    "requests": lambda scene: request_variables(scene),
    "memory": lambda scene: memory_variables(scene),
    "counts": lambda scene: {"groups": count_groups(scene.snapshot)},
    "events": lambda scene: event_variables(scene),
}
