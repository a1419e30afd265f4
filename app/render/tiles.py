"""The tiles above the fold: what users feel, and how full the house is. Colour only where something is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from app.history import ended_per_second, share_within
from app.render import numbers, words
from app.render.charts import sparkline
from app.render.glossary import ABOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from markupsafe import Markup

    from app.history import History, Point
    from app.render.scene import Promise

# Where fewer of the requests are within one of the targets, it is more than its p95 allows.
PROMISED_SHARE = 0.95


class Tile(NamedTuple):
    """One figure; `level` is empty, `warn` or `bad`, `about` says what it means."""

    label: str
    value: str
    unit: str
    note: str
    spark: Markup
    about: str
    level: str = ""


def make_tiles(snapshot: Mapping[str, Any], history: History, promises: Mapping[str, Promise]) -> list[Tile]:
    """The eight tiles, in reading order: what users feel, what is done, how full it is."""
    points = history.merged()

    def spark(value: Callable[[Point], float | None]) -> Markup:
        return sparkline([value(point) for point in points])

    latency = snapshot["latency"]
    return [
        _latency("ttft", "First token p95", latency["ttft"], promises.get("ttft"), spark(lambda p: p.ttft)),
        _latency("itl", "Between tokens p95", latency["itl"], promises.get("itl"), spark(lambda p: p.itl)),
        _within(snapshot, spark(lambda p: p.within)),
        _requests(snapshot, spark(lambda p: p.ended_rate)),
        _output(snapshot, spark(lambda p: p.output_rate)),
        _waiting(snapshot, spark(lambda p: p.waiting)),
        _running(snapshot, spark(lambda p: p.running)),
        _memory(snapshot, spark(lambda p: p.kv_used)),
    ]


def _latency(name: str, label: str, latency: Mapping[str, Any], promise: Promise | None, spark: Markup) -> Tile:
    figure = numbers.seconds(latency["p95"] if latency["count"] else None)
    note = numbers.plural(latency["count"], "sample") + ("" if latency["exact"] else ", to 1 %")
    broken = promise is not None and latency["count"] and latency["p95"] > promise.p95_seconds
    if promise:
        note = f"{'over' if broken else 'target'} {numbers.seconds(promise.p95_seconds)} · {note}"
    return Tile(label, figure.text, figure.unit, note, spark, ABOUT[name], "bad" if broken else "")


def _within(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    ended, share = snapshot["ended"], share_within(snapshot)
    figure = numbers.percent(share)
    goodput = numbers.rate(snapshot["slo"]["goodput_requests_per_second"])
    note = f"goodput {goodput}/s · {numbers.count(ended['good'])} of {numbers.plural(_total(ended), 'request')}"
    if share is None:
        note = "no target is set" if _total(ended) else "no request has ended"
    # Of two targets each may be missed by its 5 %, and not by the same requests.
    broken = any(met is not None and met < PROMISED_SHARE for met in snapshot["slo"]["attainment"].values())
    return Tile("Within targets", figure.text, figure.unit, note, spark, ABOUT["met"], "bad" if broken else "")


def _requests(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    failed = snapshot["ended"]["failed"] + snapshot["background"]["ended"]["failed"]
    refused = snapshot["recent"]["refused"]
    note = f"{numbers.count(refused)} refused · {numbers.count(failed)} failed"
    level = "bad" if refused or failed else ""
    return Tile("Requests", str(numbers.rate(ended_per_second(snapshot))), "/s", note, spark, ABOUT["requests"], level)


def _total(ended: Mapping[str, int]) -> int:
    return ended["finished"] + ended["failed"]


def _output(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    rates = snapshot["tokens_per_second"]
    note = f"+ {numbers.rate(rates['prompt'])} prompt tokens/s"
    return Tile("Output", str(numbers.rate(rates["output"])), "tokens/s", note, spark, ABOUT["output"])


def _waiting(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    requests, seats = snapshot["requests"], snapshot["config"]["max_num_seqs"]
    reasons = sorted(requests["waiting_by_reason"].items(), key=lambda item: -item[1])
    notes = [f"{numbers.count(amount)} {words.word(words.WAITING, reason)}" for reason, amount in reasons if amount]
    background = requests["by_class"]["background"]["waiting"]
    if background:
        notes.append(f"{numbers.count(background)} in the background")
    # A queue longer than the table itself means that users wait for more than one whole turn.
    level = "warn" if requests["waiting"] > seats else ""
    note = " · ".join(notes) or "nobody waits"
    return Tile("Waiting", numbers.count(requests["waiting"]), "", note, spark, ABOUT["waiting"], level)


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
    background = snapshot["requests"]["by_class"]["background"]["running"]
    if background:
        note += f" · {numbers.count(background)} in the background"
    return Tile("Running", numbers.count(running), f"of {numbers.plural(seats, 'seat')}", note, spark, ABOUT["running"])


def _memory(snapshot: Mapping[str, Any], spark: Markup) -> Tile:
    kv, preempted = snapshot["kv"], snapshot["recent"]["preemptions_by_reason"]["kv_memory"]
    figure = numbers.percent(kv["used"] / kv["total"] if kv["total"] else None)
    note = f"{numbers.count(kv['cached'])} cached · {numbers.count(kv['free'])} free blocks"
    if preempted:
        note = f"{numbers.plural(preempted, 'preemption')} · {numbers.count(kv['free'])} free"
    return Tile("KV memory", figure.text, figure.unit, note, spark, ABOUT["kv"], "warn" if preempted else "")
