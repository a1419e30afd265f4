"""The tiles above the fold: what users feel, and how full the house is. Colour only where something is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from app.render import numbers, words
from app.render.charts import sparkline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from markupsafe import Markup

    from app.history import History, Point
    from app.render.scene import Promise

SPARK_SECONDS = 120.0


class Tile(NamedTuple):
    """One figure; `level` is empty, `warn` or `bad`."""

    label: str
    value: str
    unit: str
    note: str
    spark: Markup
    level: str = ""


def make_tiles(snapshot: Mapping[str, Any], history: History, promises: Mapping[str, Promise]) -> list[Tile]:
    """The seven tiles, in reading order."""
    recent = history.recent(SPARK_SECONDS)

    def spark(value: Callable[[Point], float | None]) -> Markup:
        return sparkline([value(point) for point in recent])

    return [
        _output(snapshot, spark(lambda p: p.output_rate)),
        _latency("First token p95", snapshot["latency"]["ttft"], promises.get("ttft"), spark(lambda p: p.ttft.p95)),
        _latency("Between tokens p95", snapshot["latency"]["itl"], promises.get("itl"), spark(lambda p: p.itl.p95)),
        _waiting(snapshot, spark(lambda p: p.waiting), recent),
        _running(snapshot, spark(lambda p: p.running)),
        _memory(snapshot, spark(lambda p: p.kv_used), recent),
        _step(snapshot, spark(lambda p: p.step_seconds)),
    ]


def _output(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    rates = snapshot["tokens_per_second"]
    note = f"+ {numbers.rate(rates['prompt'])} prompt tokens/s"
    return Tile("Output", str(numbers.rate(rates["output"])), "tokens/s", note, spark)


def _latency(label: str, latency: Mapping[str, Any], promise: Promise | None, spark: Markup) -> Tile:
    figure = numbers.seconds(latency["p95"] if latency["count"] else None)
    note = f"{numbers.plural(latency['count'], 'sample')} in {numbers.duration(latency['window_seconds'])}"
    if promise:
        note = f"target {numbers.seconds(promise.p95_seconds)} · {note}"
    broken = promise is not None and latency["count"] and latency["p95"] > promise.p95_seconds
    return Tile(label, figure.text, figure.unit, note, spark, "bad" if broken else "")


def _waiting(snapshot: Mapping[str, Any], spark: Markup, recent: list[Point]) -> Tile:
    requests, seats = snapshot["requests"], snapshot["config"]["max_num_seqs"]
    reasons = sorted(requests["waiting_by_reason"].items(), key=lambda item: -item[1])
    note = " · ".join(f"{amount} {words.word(words.WAITING, reason)}" for reason, amount in reasons if amount)
    refused = recent[-1].turned_away - recent[0].turned_away if recent else 0
    if refused:
        note = f"{numbers.count(refused)} refused in 2 min" + (f" · {note}" if note else "")
    # A queue longer than the table itself means that users wait for more than one whole turn.
    level = "bad" if refused else "warn" if requests["waiting"] > seats else ""
    return Tile("Waiting", numbers.count(requests["waiting"]), "", note or "nobody waits", spark, level)


def _running(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    running, seats = snapshot["requests"]["running"], snapshot["config"]["max_num_seqs"]
    over = running - seats
    note = (
        f"{over} above the limit, finishing"
        if over > 0
        else f"{numbers.plural(-over, 'seat')} free"
        if over
        else "all taken"
    )
    return Tile("Running", numbers.count(running), f"of {numbers.plural(seats, 'seat')}", note, spark)


def _memory(snapshot: Mapping[str, Any], spark: Markup, recent: list[Point]) -> Tile:
    kv = snapshot["kv"]
    figure = numbers.percent(kv["used"] / kv["total"] if kv["total"] else None)
    preempted = recent[-1].preemptions - recent[0].preemptions if recent else 0
    note = f"{numbers.count(kv['cached'])} cached · {numbers.count(kv['free'])} free blocks"
    if preempted:
        note = f"{numbers.plural(preempted, 'preemption')} in 2 min · {numbers.count(kv['free'])} free"
    return Tile("KV memory", figure.text, figure.unit, note, spark, "warn" if preempted else "")


def _step(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    step = snapshot["step"]
    figure = numbers.seconds(step["seconds_p50"])
    budget = numbers.count(snapshot["config"]["max_num_batched_tokens"])
    return Tile("Step p50", figure.text, figure.unit, f"budget {budget} tokens a step", spark)
