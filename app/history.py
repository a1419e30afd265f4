"""One point a second of the last ten minutes: what the charts and the small lines are drawn from."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SPAN_SECONDS = 600.0
BUCKET_SECONDS = 4.0


class Quantiles(NamedTuple):
    """Seconds; `None` where the window has no sample."""

    p50: float | None
    p95: float | None
    p99: float | None


class Point(NamedTuple):
    """One second of the engine's life.

    Attributes:
        time: seconds on the telemetry's clock.
        preemptions, rejected: totals since the start, so that a difference counts what happened between two points.
        generation: of the live settings.
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
    rejected: int
    generation: int


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
        rejected=sum(requests["rejected_by_reason"].values()),
        generation=snapshot["config"]["generation"],
    )


def _quantiles(snapshot: Mapping[str, Any], name: str) -> Quantiles:
    latency = snapshot["latency"][name]
    if not latency["count"]:
        return Quantiles(None, None, None)
    return Quantiles(latency["p50"], latency["p95"], latency["p99"])


class History:
    """The points of the last ten minutes, oldest first."""

    def __init__(self, span_seconds: float = SPAN_SECONDS) -> None:
        self.span_seconds = span_seconds
        self._points: deque[Point] = deque()

    def add(self, point: Point) -> None:
        """Append a point and let go of those that are too old."""
        self._points.append(point)
        while self._points[0].time < point.time - self.span_seconds:
            self._points.popleft()

    @property
    def points(self) -> Sequence[Point]:
        """All of them, oldest first."""
        return self._points

    def recent(self, seconds: float) -> list[Point]:
        """Those of the last `seconds`."""
        if not self._points:
            return []
        start = self._points[-1].time - seconds
        return [point for point in self._points if point.time >= start]

    def buckets(self, seconds: float = BUCKET_SECONDS) -> Buckets:
        """The points in groups of `seconds`, for charts that have fewer pixels than points."""
        groups: list[list[Point]] = []
        key = None
        for point in self._points:
            # Borders lie on the clock, not on the newest point, so that a line moves left without changing its shape.
            if (point_key := int(point.time // seconds)) != key:
                groups.append([])
                key = point_key
            groups[-1].append(point)
        now = self._points[-1].time if self._points else 0.0
        positions = [1 - (now - group[-1].time) / self.span_seconds for group in groups]
        return Buckets(groups, positions)

    def changes(self) -> list[float]:
        """Where the settings changed: 0 is the oldest time, 1 is now."""
        now = self._points[-1].time if self._points else 0.0
        marks, previous = [], None
        for point in self._points:
            if previous is not None and point.generation != previous:
                marks.append(1 - (now - point.time) / self.span_seconds)
            previous = point.generation
        return marks


class Buckets(NamedTuple):
    """Groups of points and where each lies between ten minutes ago (0) and now (1)."""

    groups: list[list[Point]]
    positions: list[float]

    def mean(self, value: Callable[[Point], float]) -> list[float | None]:
        """The mean of each group: right for rates and levels."""
        return [sum(value(point) for point in group) / len(group) for group in self.groups]

    def highest(self, value: Callable[[Point], float | None]) -> list[float | None]:
        """The highest of each group: a short peak of a latency must not be averaged away."""
        return [max((v for p in group if (v := value(p)) is not None), default=None) for group in self.groups]
