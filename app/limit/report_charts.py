"""The pictures of a report: what was measured at each rate, beside what was promised and what was measured before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.limit.runs import MAX_LAG_SHARE
from app.limit.words import per_second
from app.render import numbers
from app.render.curve import Curve, Point, draw_curve
from app.render.limit import LATENCIES, band_of, verdict_of, verdict_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from markupsafe import Markup

    Result = Mapping[str, Any]

PERCENTILES: Final = "p95; thin above it p99, below it p50"


class Chart(NamedTuple):
    """A picture with its caption."""

    title: str
    note: str
    plot: Markup


@dataclass(frozen=True, slots=True)
class Measure:
    """What a chart shows.

    Attributes:
        of: its value in a run, `None` where there is none.
        beside: others that are drawn as thin lines.
        target: what was promised.
    """

    title: str
    note: str
    of: Callable[[Result], float | None]
    word: Callable[[float], str]
    beside: tuple[Callable[[Result], float | None], ...] = ()
    target: float | None = None


def charts_of(result: Result, older: Result | None) -> list[tuple[str, list[Chart]]]:
    """Headings with their charts; what was never measured, or never anything but nothing, has none."""
    groups = (("Latency by rate", _latencies(result)), ("Load by rate", _loads(result)))
    drawn = [
        (heading, [_draw(one, result, older) for one in measures if any(map(one.of, result["curve"]))])
        for heading, measures in groups
    ]
    return [(heading, charts) for heading, charts in drawn if charts]


def _latencies(result: Result) -> list[Measure]:
    """Of each class of work those that something was promised of; of a single class all."""
    several = len(result["classes"]) > 1
    measures = []
    for number, one in enumerate(result["classes"]):
        for name, title in LATENCIES.items():
            target = one[f"{name}_p95_seconds"]
            if several and not target:
                continue
            promised = f"target {numbers.seconds(target)}" if target else "nothing promised"
            measures.append(
                Measure(
                    f"{title}, {one['name']}" if several else title,
                    f"{PERCENTILES}; {promised}",
                    _percentile(name, 95, number),
                    _seconds,
                    (_percentile(name, 50, number), _percentile(name, 99, number)),
                    target,
                )
            )
    return measures


def _percentile(name: str, percent: int, number: int) -> Callable[[Result], float | None]:
    key = f"{name}_p{percent}_seconds"

    def of(run: Result) -> float | None:
        value: float | None = (run["classes"][number] if run["classes"] else run)[key]
        return value

    return of


def _loads(result: Result) -> list[Measure]:
    targets = [one[f"{name}_p95_seconds"] for one in result["classes"] for name in LATENCIES]
    lag = MAX_LAG_SHARE * min([target for target in targets if target], default=0.0)
    late = f"p99, of the process that sends; beyond {numbers.seconds(lag)} a run says nothing of the server"
    return [
        Measure("Goodput", "requests/s that met every target", lambda run: run["goodput"], _number),
        Measure("Waiting", "requests without a first token, on average", lambda run: run["waiting"], _number),
        Measure("Output", "tokens/s", lambda run: run["output_tokens_per_second"], _number),
        Measure("Preemptions", "in a run", lambda run: run["preemptions"], _number),
        Measure("Sent late", late, lambda run: run["dispatch_lag_p99_seconds"], _seconds, (), lag or None),
    ]


def _draw(measure: Measure, result: Result, older: Result | None) -> Chart:
    curve = Curve(
        title=measure.title,
        points=_points(measure, measure.of, result),
        word=measure.word,
        target=measure.target,
        limit=band_of(result),
        older=_points(measure, measure.of, older) if older is not None else (),
        older_limit=band_of(older),
        beside=[_points(measure, other, result) for other in measure.beside],
    )
    return Chart(measure.title, measure.note, draw_curve(curve))


def _points(measure: Measure, of: Callable[[Result], float | None], result: Result) -> Sequence[Point]:
    points = []
    for run in result["curve"]:
        value = _known(of, run)
        if value is not None:
            told = f"{per_second(run['rate'])} requests/s, seed {run['seed']}: {measure.word(value)}"
            points.append(Point(run["rate"], value, verdict_of(run), f"{told}, {verdict_words(run)}", run["seed"]))
    return points


def _known(of: Callable[[Result], float | None], run: Result) -> float | None:
    """An older result may have had other classes of work."""
    try:
        return of(run)
    except LookupError:
        return None


def _seconds(value: float) -> str:
    return str(numbers.seconds(value)) if value else "0"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else numbers.count(round(value))
