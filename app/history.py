"""One point a second of a window: what the charts and the small lines are drawn from."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.journal.rows import REFUSED
from engine.report import PREEMPTION_REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Charts have fewer pixels than there are seconds.
POINTS = 150
TOTALS: Final = (*REFUSED, *PREEMPTION_REASONS, "recomputed_tokens", "evictions", "rows", "useful_rows")


class Point(NamedTuple):
    """One second of the engine's life.

    Attributes:
        time: seconds on the telemetry's clock.
        ended_rate, within: requests that came to their end in a second, and the share of them that met their targets,
            over the window of the snapshot.
        ttft, itl: their p95 over that window, in seconds; `None` where it has no sample.
        totals: since the start, in the order of `TOTALS`, so that a difference counts what happened between two points.
    """

    time: float
    output_rate: float
    ended_rate: float
    within: float | None
    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    ttft: float | None
    itl: float | None
    totals: Sequence[int]


def make_point(time: float, snapshot: Mapping[str, Any]) -> Point:
    """Take from a snapshot what is worth remembering."""
    requests, kv = snapshot["requests"], snapshot["kv"]
    return Point(
        time=time,
        output_rate=snapshot["tokens_per_second"]["output"],
        ended_rate=ended_per_second(snapshot),
        within=share_within(snapshot),
        running=requests["running"],
        waiting=requests["waiting"],
        kv_used=kv["used"],
        kv_cached=kv["cached"],
        ttft=_p95(snapshot, "ttft"),
        itl=_p95(snapshot, "itl"),
        totals=(
            *[requests["rejected_by_reason"].get(reason, 0) for reason in REFUSED],
            *[snapshot["preemptions_by_reason"][reason] for reason in PREEMPTION_REASONS],
            snapshot["recomputed_tokens"],
            snapshot["prefix_cache"]["evictions"],
            snapshot["rows"]["computed"],
            snapshot["rows"]["useful"],
        ),
    )


def ended_per_second(snapshot: Mapping[str, Any]) -> float:
    """Requests that came to their end, of both classes of work."""
    rates: list[float] = [work["ended"]["requests_per_second"] for work in (snapshot, snapshot["background"])]
    return sum(rates)


def share_within(snapshot: Mapping[str, Any]) -> float | None:
    """The share of the interactive requests that met every target; `None` without a target, or where none has ended."""
    ended = snapshot["ended"]
    total = ended["finished"] + ended["failed"]
    return ended["good"] / total if total and any(snapshot["slo"]["targets"].values()) else None


def _p95(snapshot: Mapping[str, Any], name: str) -> float | None:
    latency = snapshot["latency"][name]
    return latency["p95"] if latency["count"] else None


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
        ttft=max((point.ttft for point in points if point.ttft is not None), default=None),
        itl=max((point.itl for point in points if point.itl is not None), default=None),
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

    def recent(self) -> dict[str, Any]:
        """What happened within the window: the object `recent` of `/ops/stats.json`."""
        first, last = (self.points[0].totals, self.points[-1].totals) if self.points else ((0,) * len(TOTALS),) * 2
        came = {name: after - before for name, before, after in zip(TOTALS, first, last, strict=True)}
        refused = {reason: came[reason] for reason in REFUSED}
        preempted = {reason: came[reason] for reason in PREEMPTION_REASONS}
        return {
            "seconds": self.span_seconds,
            "refused": sum(refused.values()),
            "refused_by_reason": refused,
            "preemptions": sum(preempted.values()),
            "preemptions_by_reason": preempted,
            "recomputed_tokens": came["recomputed_tokens"],
            "evictions": came["evictions"],
            "rows": {"computed": came["rows"], "useful": came["useful_rows"]},
        }

    def merged(self) -> list[Point]:
        """One point for every few seconds, for charts that have fewer pixels than points."""
        return [*self._merged, merge(self._group)] if self._group else []

    def position(self, time: float) -> float:
        """Where a time lies between the oldest shown (0) and now (1)."""
        return 1 - (self.points[-1].time - time) / self.span_seconds

    def _bucket(self, point: Point) -> int:
        return int(point.time // self.bucket_seconds)
