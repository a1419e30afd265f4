"""One point a second of a window: what the charts and the small lines are drawn from."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Charts have fewer pixels than there are seconds.
POINTS = 150
BAD_TIMES = ("queue_full", "draining")


class Quantiles(NamedTuple):
    """Seconds; `None` where the window has no sample."""

    p50: float | None
    p95: float | None
    p99: float | None


class Point(NamedTuple):
    """One second of the engine's life.

    Attributes:
        time: seconds on the telemetry's clock.
        ended_rate, within: requests that ended in a second, and the share of them that met their targets, over the
            window of the snapshot.
        preemptions, recomputed, evictions, turned_away: totals since the start, so that a difference counts what
            happened between two points. Turned away is who came at a bad time, and not who asked for what cannot be.
    """

    time: float
    output_rate: float
    prompt_rate: float
    ended_rate: float
    within: float | None
    running: int
    waiting: int
    seats: int
    kv_used: int
    kv_cached: int
    kv_total: int
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles
    step_seconds: float | None
    preemptions: int
    recomputed: int
    evictions: int
    turned_away: int


def make_point(time: float, snapshot: Mapping[str, Any]) -> Point:
    """Take from a snapshot what is worth remembering."""
    requests, kv, rates = snapshot["requests"], snapshot["kv"], snapshot["tokens_per_second"]
    return Point(
        time=time,
        output_rate=rates["output"],
        prompt_rate=rates["prompt"],
        ended_rate=ended_per_second(snapshot),
        within=share_within(snapshot),
        running=requests["running"],
        waiting=requests["waiting"],
        seats=snapshot["config"]["max_num_seqs"],
        kv_used=kv["used"],
        kv_cached=kv["cached"],
        kv_total=kv["total"],
        ttft=_quantiles(snapshot, "ttft"),
        itl=_quantiles(snapshot, "itl"),
        e2e=_quantiles(snapshot, "e2e"),
        step_seconds=snapshot["step"]["seconds_p50"],
        preemptions=snapshot["preemptions"],
        recomputed=snapshot["recomputed_tokens"],
        evictions=snapshot["prefix_cache"]["evictions"],
        turned_away=sum(requests["rejected_by_reason"].get(reason, 0) for reason in BAD_TIMES),
    )


def ended_per_second(snapshot: Mapping[str, Any]) -> float:
    """Requests that ended, of both classes of work."""
    rates: list[float] = [work["ended"]["requests_per_second"] for work in (snapshot, snapshot["background"])]
    return sum(rates)


def share_within(snapshot: Mapping[str, Any]) -> float | None:
    """The share of the interactive requests that met every target they have; `None` where none has ended."""
    ended = snapshot["ended"]
    total = ended["finished"] + ended["failed"]
    return ended["good"] / total if total else None


def _quantiles(snapshot: Mapping[str, Any], name: str) -> Quantiles:
    latency = snapshot["latency"][name]
    if not latency["count"]:
        return Quantiles(None, None, None)
    return Quantiles(latency["p50"], latency["p95"], latency["p99"])


def merge(points: Sequence[Point]) -> Point:
    """One point for several, at the time of the last.

    Rates and levels are averaged; of latencies and of the queue the highest stays, so that no short peak gets lost.
    """
    last, size = points[-1], len(points)
    return last._replace(
        output_rate=sum(point.output_rate for point in points) / size,
        running=round(sum(point.running for point in points) / size),
        kv_used=round(sum(point.kv_used for point in points) / size),
        kv_cached=round(sum(point.kv_cached for point in points) / size),
        waiting=max(point.waiting for point in points),
        ttft=_highest([point.ttft for point in points]),
        itl=_highest([point.itl for point in points]),
        e2e=_highest([point.e2e for point in points]),
    )


def _highest(quantiles: Sequence[Quantiles]) -> Quantiles:
    return Quantiles(
        *[max((v for v in column if v is not None), default=None) for column in zip(*quantiles, strict=True)]
    )


class History:
    """The points of a window, oldest first; beside them the same in groups of a few seconds."""

    def __init__(self, span_seconds: int) -> None:
        self.span_seconds = span_seconds
        self.bucket_seconds = max(1.0, span_seconds / POINTS)
        self.points: deque[Point] = deque()
        self._merged: deque[Point] = deque()
        self._group: list[Point] = []

    def add(self, point: Point) -> None:
        """Append a point and let go of those that are too old."""
        # Borders lie on the clock, not on the newest point, so that a line moves left without changing its shape.
        if self._group and self._bucket(self._group[-1]) != self._bucket(point):
            self._merged.append(merge(self._group))
            self._group = []
        self._group.append(point)
        self.points.append(point)
        for kept in (self.points, self._merged):
            while kept and kept[0].time < point.time - self.span_seconds:
                kept.popleft()

    def recent(self) -> dict[str, int]:
        """What happened within the window: the object `recent` of `/ops/stats.json`."""
        first, last = (self.points[0], self.points[-1]) if self.points else (None, None)
        return {
            "seconds": self.span_seconds,
            "refused": last.turned_away - first.turned_away if first and last else 0,
            "preemptions": last.preemptions - first.preemptions if first and last else 0,
            "recomputed_tokens": last.recomputed - first.recomputed if first and last else 0,
            "evictions": last.evictions - first.evictions if first and last else 0,
        }

    def merged(self) -> list[Point]:
        """One point for every few seconds, for charts that have fewer pixels than points."""
        return [*self._merged, merge(self._group)] if self._group else []

    def position(self, time: float) -> float:
        """Where a time lies between the oldest shown (0) and now (1)."""
        return 1 - (self.points[-1].time - time) / self.span_seconds

    def _bucket(self, point: Point) -> int:
        return int(point.time // self.bucket_seconds)
