"""Tuning a server over HTTP, live."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from app.limit.command import RUN_SECONDS, Looking
from app.limit.endpoint import EndpointError
from app.limit.interrupted import Interrupted, number_of, uninterrupted, words_of
from app.limit.search import FIRST_SHARE
from app.limit.tune import Clock, CutTuning, least_seconds, tune
from app.limit.tune_admin import HttpAdmin
from app.limit.tune_controls import controls_of
from app.limit.tune_live import open_settings
from app.limit.tune_result import tune_result
from app.limit.words import per_second
from app.render import numbers

if TYPE_CHECKING:
    from app.limit.command import Prepared, Reporter
    from app.limit.endpoint import Endpoint
    from app.limit.load import Source
    from app.limit.options import Options
    from app.limit.runs import Run
    from app.limit.summary import Outcome
    from app.limit.tune import Tuned, Wish
    from app.limit.tune_controls import Values
    from app.limit.tune_live import LiveSettings
    from app.limit.watch import Watch

# About as many whole runs as tuning takes.
NUM_RUNS: Final = 32
# Beside sending requests a run waits for the server and for the last answers.
SPARE_SECONDS: Final = 15.0
# For so long nobody may be there before it begins; between runs, what a run leaves behind has so long to end.
WATCHED_SECONDS, IDLE_SECONDS, POLL_SECONDS = 3.0, 10.0, 0.2
# Where others are served, a server is never idle.
BESIDE_OTHERS_SECONDS: Final = 1.0


class LiveMeasure:
    """Measures settings of a server: has them hold, and sends requests.

    Args:
        beside_others: the server may have requests that are not from here.
    """

    def __init__(
        self,
        live: LiveSettings,
        endpoint: Endpoint,
        ready: Prepared,
        clock: Clock,
        report: Reporter,
        watch: Watch,
        *,
        beside_others: bool,
    ) -> None:
        self._live, self._endpoint, self._ready = live, endpoint, ready
        self._clock, self._report, self._watch = clock, report, watch
        self._beside_others = beside_others
        self._what = ""

    def tell(self, what: str) -> None:
        """What is tried from now on."""
        self._what = what

    def __call__(self, values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        """One run."""
        measure = self._ready.measure
        if not self._beside_others:
            refuse_others(self._endpoint, IDLE_SECONDS)
        self._live.hold(values, measure.source.num_sent(measure.num_counted) / rate + measure.deadline + SPARE_SECONDS)
        measure = replace(
            measure,
            goes_on=whole,
            report=self._tell,
            idle_seconds=BESIDE_OTHERS_SECONDS if self._beside_others else IDLE_SECONDS,
        )
        run = measure(rate, seed)
        self._live.check()
        self._watch.ran("rate" if values == self._live.own else "tried", run)
        return run

    def _tell(self, rate: float, ended: int, total: int) -> None:
        self._watch.trying(rate, ended, total)
        gone, planned = self._clock.gone, self._clock.duration
        left = f"{numbers.duration(max(1.0, planned - gone))} left"
        self._report(int(gone), int(planned), f"{self._what}, {per_second(rate)}/s: {ended} of {total}, {left}")


def find_tuned(
    endpoint: Endpoint, source: Source, options: Options, wish: Wish, report: Reporter, watch: Watch
) -> Outcome:
    """Find the limit of a server, and better settings for it.

    The runs of the outcome are those of the settings that it had.

    Raises:
        ConfigError: it has no such control.
        EndpointError: it cannot be tuned, or not now, or somebody else has changed its settings.
        Interrupted: somebody ends it; its settings are its own again.
    """
    looking = Looking(endpoint, source, options, report, watch, NUM_RUNS)
    ready: Prepared | None = None
    tuned: Tuned | None = None
    number: int | None = None  # of the signal that has ended it
    applied = False
    try:
        with open_settings(HttpAdmin(endpoint), wish.names) as live:
            controls = controls_of(live.view, wish.names)
            if not wish.while_serving:
                _refuse_unknown(endpoint)
                refuse_others(endpoint, 0.0, watched=WATCHED_SECONDS)
            ready = looking.prepare()
            _refuse_short(ready, options.duration)
            clock = Clock(options.duration, ready.seconds_of, ready.began)
            measure = LiveMeasure(live, endpoint, ready, clock, report, watch, beside_others=wish.while_serving)
            try:
                tuned = tune(measure, controls, live.own, FIRST_SHARE * ready.capacity, options, clock, measure.tell)
            except CutTuning as cut:
                tuned, number = cut.tuned, cut.number
                raise
            if wish.apply and tuned.best is not tuned.present and not tuned.unfinished:
                with uninterrupted():
                    live.apply(tuned.best.values)
                    applied = True
        return _outcome(looking, ready, tuned, wish, applied=applied)
    except EndpointError as error:
        if ready is None or tuned is None:
            raise
        # What it had could not be put back, or what was found not be applied.
        why = ". ".join(filter(None, [tuned.unfinished, str(error).removesuffix(".")]))
        told = _outcome(looking, ready, replace(tuned, unfinished=why), wish, applied=applied)
        if number is not None:
            raise Interrupted(number, told) from None
        return told
    except KeyboardInterrupt as key:
        if ready is None or tuned is None:
            raise
        told = _outcome(looking, ready, replace(tuned, unfinished=words_of(key)), wish, applied=applied)
        raise Interrupted(number_of(key), told) from None


def _outcome(looking: Looking, ready: Prepared, tuned: Tuned, wish: Wish, *, applied: bool) -> Outcome:
    """With what came of tuning."""
    outcome = looking.outcome(ready, tuned.present.runs, tuned.unfinished)
    remarks = ["The limit and the runs above are those of the settings that the server had."]
    if wish.while_serving:
        remarks.append("Others may have been served meanwhile: what they asked for is in every figure.")
    return replace(outcome, tune=tune_result(tuned, applied=applied), remarks=[*outcome.remarks, *remarks])


def refuse_others(endpoint: Endpoint, patience: float, watched: float = 0.0) -> None:
    """Refuse a server that has requests although none of ours is open.

    Args:
        patience: seconds until the last of ours has ended.
        watched: seconds for which there must be nobody.

    Raises:
        EndpointError: it has.
    """
    began = time.monotonic()
    while True:
        values = endpoint.metrics()
        running, waiting = (int(values.get(f"num_requests_{name}", 0)) for name in ("running", "waiting"))
        gone = time.monotonic() - began
        if not running + waiting and gone >= watched:
            return
        if running + waiting and gone >= patience:
            raise EndpointError(
                f"{endpoint.url} serves others ({running} run, {waiting} wait), and settings would be tried on them; "
                "tune it when nobody uses it, or add --while-serving."
            )
        time.sleep(POLL_SECONDS)


def _refuse_short(ready: Prepared, duration: float) -> None:
    """Refuse to spend the time on the present settings alone.

    Raises:
        EndpointError: it is not enough for one other value, about.
    """
    run_seconds = ready.seconds_of(FIRST_SHARE * ready.capacity)
    least = least_seconds(time.monotonic() - ready.began, duration, run_seconds, RUN_SECONDS)
    if least:
        raise EndpointError(
            f"In {numbers.duration(duration)} no other setting could be tried: a run takes about "
            f"{numbers.duration(run_seconds)} here. For one value give --duration {least} or more, for all of them "
            f"about {max(least, ready.seconds_of_all(NUM_RUNS))}; or a larger --factor."
        )


def _refuse_unknown(endpoint: Endpoint) -> None:
    if not endpoint.has_metrics:
        raise EndpointError(
            f"{endpoint.url} does not show whether it serves others (/metrics); give its --admin-token, "
            "or add --while-serving."
        )
