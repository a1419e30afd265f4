"""What each partial of the dashboard is given, from one scene."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.render import numbers
from app.render.charts import Chart, Line, draw_chart
from app.render.events import chart_marks, event_variables
from app.render.figures import count_groups, latency_rows, slo_words
from app.render.requests import memory_variables, request_variables
from app.render.table import draw_table
from app.render.tiles import make_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.history import Quantiles
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
    return draw_table(scene.snapshot["table"], scene.palette, seats=scene.snapshot["config"]["max_num_seqs"])


def charts_of(scene: Scene) -> list[dict[str, Any]]:
    """The charts of the last ten minutes, each with a caption."""
    history, targets, total = scene.history, scene.targets, scene.snapshot["kv"]["total"]
    points, marks = history.merged(), chart_marks(scene)
    positions = [history.position(point.time) for point in points]

    def latency(title: str, quantiles: Sequence[Quantiles], target: float | None) -> dict[str, Any]:
        lines = [
            Line("p50", "thin", [q.p50 for q in quantiles]),
            Line("p95", "strong", [q.p95 for q in quantiles]),
            Line("p99", "pale", [q.p99 for q in quantiles]),
        ]
        chart = Chart(title, positions, lines, _axis_seconds, band=True, target=target, marks=marks)
        note = "p50 · p95 · p99" + (f" · target {numbers.seconds(target)}" if target else "")
        return {"title": title, "note": note, "plot": draw_chart(chart)}

    def levels(title: str, note: str, lines: list[Line], ceiling: float | None = None) -> dict[str, Any]:
        chart = Chart(title, positions, lines, _axis_count, ceiling=ceiling, marks=marks)
        return {"title": title, "note": note, "plot": draw_chart(chart)}

    output = Line("output", "strong", [p.output_rate for p in points])
    running = Line("running", "second", [p.running for p in points])
    waiting = Line("waiting", "strong", [p.waiting for p in points])
    cached = Line("used and cached", "second", [p.kv_used + p.kv_cached for p in points])
    used = Line("used", "strong", [p.kv_used for p in points])
    return [
        latency("First token", [p.ttft for p in points], targets.ttft_p95_seconds),
        latency("Between tokens", [p.itl for p in points], targets.itl_p95_seconds),
        latency("End to end", [p.e2e for p in points], targets.e2e_p95_seconds),
        levels("Output", "tokens/s", [output]),
        levels("Requests", "waiting, pale running", [running, waiting]),
        levels("KV memory", f"blocks used, pale with cached, of {numbers.count(total)}", [cached, used], float(total)),
    ]


def _axis_seconds(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def _axis_count(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,g}"


# What each partial is given. A part can be drawn alone: the other pages show the state only.
PARTS: dict[str, Callable[[Scene], dict[str, Any]]] = {
    "state": lambda scene: {"state": state_of(scene)},
    "tiles": lambda scene: {"tiles": make_tiles(scene.snapshot, scene.history, scene.promises)},
    "table": lambda scene: {"picture": table_of(scene), "policy": scene.snapshot["config"]["policy"]},
    "charts": lambda scene: {"charts": charts_of(scene)},
    "latency": lambda scene: {"rows": latency_rows(scene), "slo": slo_words(scene)},
    "requests": lambda scene: request_variables(scene),
    "memory": lambda scene: memory_variables(scene),
    "counts": lambda scene: {"groups": count_groups(scene.snapshot)},
    "events": lambda scene: event_variables(scene),
}
