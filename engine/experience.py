"""What users met lately, as the dashboard shows it: over one window, and column by column."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.samples import counted_ranks, edge_of
from engine.stats import SPENT
from engine.timeline import WIDTHS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.stats import ClassStats, Stats

COURSE_PERCENTS = (50, 95, 99)
# Buckets of 1 % in one band: it ends 1.42 times as high as it begins.
BAND = 35


class Quantiles(NamedTuple):
    """Percentiles of one column in seconds; to within 1 %, from counts."""

    p50: float
    p95: float
    p99: float


class Spent(NamedTuple):
    """Where the time of the requests that ended in one column went, in seconds a request."""

    requests: int
    queue: float
    prefill: float
    decode: float
    preempted: float


@dataclass(frozen=True, slots=True)
class Course:
    """A window column by column; columns are named by where they begin, on the engine's clock, and may be missing.

    Attributes:
        now, seconds, width: the window's end and length, and the width of a column.
        latency: percentiles, by the name of the latency.
        gaps: number of gaps between tokens, by band: number `b` is from `band_edge(b)` to `band_edge(b + 1)`.
        spent: where the time went.
    """

    now: float
    seconds: int
    width: int
    latency: Mapping[str, Mapping[float, Quantiles]]
    gaps: Mapping[float, Mapping[int, int]]
    spent: Mapping[float, Spent]


def all_experience(stats: Stats, now: float, seconds: int) -> dict[str, Any]:
    """What the snapshot says of a window: interactive work at the top, background work under its name."""
    return {**experience(stats.interactive, now, seconds), "background": experience(stats.background, now, seconds)}


def experience(work: ClassStats, now: float, seconds: int) -> dict[str, Any]:
    """What one class of work met in the last `seconds`, one of `engine.timeline.WINDOWS`."""
    total, covered = work.outcomes.total(now, seconds), work.outcomes.covered(now, seconds)
    timed = total["timed"]
    attainment = work.attainment(now, seconds)
    return {
        "latency": {name: samples.summary(now, seconds) for name, samples in work.windows.items()},
        "slo": {
            "targets": asdict(work.slo),
            "attainment": {f"{name}_p95_seconds": share for name, share in attainment.items()},
            "goodput_requests_per_second": round(total["good"] / covered, 4),
        },
        "ended": {
            "finished": total["finished"],
            "failed": total["failed"],
            "timed_out": total["timed_out"],
            "timed_out_queued": total["timed_out_queued"],
            "good": total["good"],
            "requests_per_second": round((total["finished"] + total["failed"]) / covered, 4),
        },
        "spent": {
            "requests": timed,
            **{f"{name}_seconds": round(total[name] / timed, 6) if timed else None for name in SPENT},
        },
    }


def course(work: ClassStats, now: float, seconds: int) -> Course:
    """The same window column by column, for pictures."""
    return Course(
        now=now,
        seconds=seconds,
        width=WIDTHS[seconds],
        latency={name: samples.by_column(now, seconds, _quantiles) for name, samples in work.windows.items()},
        gaps=work.windows["itl"].by_column(now, seconds, _bands),
        spent={
            column.start: _spent(column.counts["timed"], [column.counts[name] for name in SPENT])
            for column in work.outcomes.columns(now, seconds)
            if column.counts["timed"]
        },
    )


def band_edge(band: int) -> float:
    """Where a band of `Course.gaps` begins, in seconds; the lowest has all that is shorter, too."""
    return edge_of(band * BAND)


def _bands(counts: Mapping[int, int]) -> dict[int, int]:
    bands: dict[int, int] = {}
    for bucket, amount in counts.items():
        band = (bucket - 1) // BAND if bucket else 0
        bands[band] = bands.get(band, 0) + amount
    return bands


def _quantiles(counts: Mapping[int, int]) -> Quantiles:
    return Quantiles(*counted_ranks(counts, COURSE_PERCENTS))


def _spent(requests: int, seconds: Sequence[float]) -> Spent:
    return Spent(requests, *[total / requests for total in seconds])
