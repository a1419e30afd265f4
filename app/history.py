"""One point a second of the last ten minutes: what the charts and the small lines are drawn from."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPAN_SECONDS = 600.0
BUCKET_SECONDS = 4.0
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
        preemptions, turned_away: totals since the start, so that a difference counts what happened between two points.
            Turned away is who came at a bad time, and not who asked for what cannot be.
    """

    time: float
    output_rate: float
    prompt_rate: float
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
    turned_away: int


def make_point(time: float, snapshot: Mapping[str, Any]) -> Point:
    """Take from a snapshot what is worth remembering for ten minutes."""
    requests, kv, rates = snapshot["requests"], snapshot["kv"], snapshot["tokens_per_second"]
    return Point(
        time=time,
        output_rate=rates["output"],
        prompt_rate=rates["prompt"],
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
        turned_away=sum(requests["rejected_by_reason"].get(reason, 0) for reason in BAD_TIMES),
    )


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
    """The points of the last ten minutes, oldest first; beside them the same in groups of a few seconds."""

    def __init__(self, span_seconds: float = SPAN_SECONDS, bucket_seconds: float = BUCKET_SECONDS) -> None:
        self.span_seconds = span_seconds
        self.bucket_seconds = bucket_seconds
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

    def recent(self, seconds: float) -> list[Point]:
        """Those of the last `seconds`."""
        if not self.points:
            return []
        start = self.points[-1].time - seconds
        return list(takewhile(lambda point: point.time >= start, reversed(self.points)))[::-1]

    def merged(self) -> list[Point]:
        """One point for every few seconds, for charts that have fewer pixels than points."""
        return [*self._merged, merge(self._group)] if self._group else []

    def position(self, time: float) -> float:
        """Where a time lies between the oldest shown (0) and now (1)."""
        return 1 - (self.points[-1].time - time) / self.span_seconds

    def _bucket(self, point: Point) -> int:
        return int(point.time // self.bucket_seconds)
