"""From options to files and lines: the whole of `relevo limit`."""

from __future__ import annotations

import errno
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from app.cli.progress import Progress
from app.compare.options import check_writable
from app.limit.against import read_result
from app.limit.closed import CLOSED_SHARE, SINGLE_SHARE, ClosedLoops, what_ended
from app.limit.division import choose_division, division_words
from app.limit.interrupted import Interrupted, code_of, ended_like_a_key, number_of, uninterrupted, words_of
from app.limit.load import check_lengths
from app.limit.options import deadline_of
from app.limit.over_http import HttpMeasure
from app.limit.runs import COLD
from app.limit.search import FIRST_SHARE, search
from app.limit.summary import Outcome, summarize
from app.limit.surroundings import machine_words, settings_of
from app.limit.telling import tell
from app.limit.watch import Watch
from app.limit.words import per_second
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from app.limit.endpoint import Endpoint
    from app.limit.load import Source
    from app.limit.options import Options
    from app.limit.runs import Run
    from app.limit.watch import Lines

    Reporter = Callable[[int, int, str], object]

# Where the factor is free, the capacity is measured with lengths divided by this, so that enough requests end.
FIRST_FACTOR: Final = 8.0
# About as many runs as a search takes; those that are lost are ended early and count for little.
NUM_WHOLE_RUNS: Final = 7
MIN_REQUESTS, WANTED_REQUESTS, MAX_REQUESTS = 50, 300, 1000
# Beside a run's own length: starting the process, waiting for the last answers.
RUN_SECONDS: Final = 4.0
# Of what is shown: its reader has left, its terminal is closed.
GONE: Final = (errno.EPIPE, errno.EIO)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before rates are tried.

    Attributes:
        measure: of the requests that were settled on.
        single: one user alone.
        capacity: requests a second in a closed loop.
        capacity_factor: by which lengths were divided there; the capacity is told from that of such requests.
        began: on the monotonic clock.
    """

    measure: HttpMeasure
    single: Run
    capacity: float
    capacity_factor: float
    began: float

    def seconds_of(self, rate: float) -> float:
        """What a run takes."""
        return self.measure.source.num_sent(self.measure.num_counted, rate) / rate + RUN_SECONDS

    def seconds_of_all(self, num_runs: int) -> int:
        """What so many runs of one search take with all before them, about, where none is made any longer than now."""
        runs = num_runs * self.seconds_of(FIRST_SHARE * self.capacity)
        return math.ceil(runs / (1 - SINGLE_SHARE - CLOSED_SHARE))


class Looking:
    """Looks for the limit of one server.

    Args:
        report: told (seconds gone, seconds planned, a word about what is going on).
        watch: told of each run.
        num_runs: for about so many the time is to be enough.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        source: Source,
        options: Options,
        report: Reporter,
        watch: Watch | None = None,
        num_runs: int = NUM_WHOLE_RUNS,
    ) -> None:
        self._num_runs = num_runs
        self._endpoint, self._options = endpoint, options
        self._deadline = deadline_of(options, source.promise)
        self._watch = watch or Watch()
        self._source = replace(source, max_model_len=endpoint.context)
        self._report = report
        self._began = time.monotonic()
        self._runs: list[Run] = []
        self._settings: Mapping[str, Any] | None = None
        self._gone, self._divided, self._num_others, self._was_short = "", "", 0, False
        self._seats, self._stay_seconds = 0, 0.0

    def find(self) -> Outcome:
        """Measure one user, the capacity, and then rates.

        Raises:
            ConfigError: requests are longer than the context.
            EndpointError: the server fails requests even of one user alone.
            Interrupted: somebody ends it while rates are tried.
        """
        ready = self._with_seats_filled(self.prepare())
        start, afford = FIRST_SHARE * ready.capacity, partial(self._affords, ready)
        try:
            if not ready.single.hopeless:
                search(partial(self._run, ready.measure), start, self._options.seeds, afford=afford)
            return self.outcome(ready, self._runs, self._gone)
        except KeyboardInterrupt as key:
            raise Interrupted(number_of(key), self.outcome(ready, self._runs, words_of(key))) from None

    def prepare(self) -> Prepared:
        """Measure one user and the capacity, and settle on requests; raises as `find`."""
        options = self._options
        check_lengths(self._source, options.factor)
        self._settings = settings_of(self._endpoint)
        told = self._endpoint.metrics()
        self._num_others = int(told.get("num_requests_running", 0) + told.get("num_requests_waiting", 0))
        seats = int(told.get("max_num_seqs", 0)) or self._endpoint.seats
        first = options.factor or max(self._source.least_factor(), FIRST_FACTOR)
        loops = ClosedLoops(self._endpoint, options, self._deadline, self._gone_seconds)
        closed, streams = loops.capacity(self._measure(first, 1), options.streams or seats)
        self._watch.ran("capacity", closed, factor=first)
        self._source = replace(self._source, seats=streams)
        factor, num_counted = self._choose(first, closed.rate)
        measure = self._measure(factor, num_counted)
        single = loops.single(measure)
        self._watch.ran("single", single, factor=factor)
        return Prepared(measure, single, closed.rate * factor / first, first, self._began)

    def outcome(self, ready: Prepared, runs: Sequence[Run], unfinished: str = "") -> Outcome:
        """Everything that was measured until now.

        Args:
            unfinished: why there is no more.
        """
        wanted = ready.seconds_of_all(self._num_runs) * self._options.num_shares
        return Outcome(
            server=self._server(),
            source=ready.measure.source,
            single=ready.single,
            capacity=ready.capacity,
            capacity_factor=ready.capacity_factor,
            runs=runs,
            seconds=self._gone_seconds(),
            remarks=self._remarks(),
            settings=self._settings,
            machine=machine_words(),
            unfinished=unfinished,
            wanted_seconds=wanted if self._was_short else None,
        )

    def _run(self, measure: HttpMeasure, rate: float, seed: int) -> Run:
        run = self._filling(measure)(rate, seed)
        if run.unknown == COLD:
            # From now on more are sent before those that count, as then, with room for higher rates.
            self._seats = max(self._seats, math.ceil(2 * rate * run.mean_stay))
            self._stay_seconds = max(self._stay_seconds, 2 * run.mean_stay)
        if any(seen.error for seen in run.seen):
            self._gone = self._gone or what_ended(self._endpoint)
        if not self._gone:  # else its errors say nothing of the rate
            self._runs.append(run)
            self._watch.ran("rate", run)
        return run

    def _filling(self, measure: HttpMeasure) -> HttpMeasure:
        """With as many requests before those that count as it has turned out to take."""
        if not self._seats:
            return measure
        source = measure.source
        seats, stay = max(source.seats, self._seats), max(source.stay_seconds, self._stay_seconds)
        return replace(measure, source=replace(source, seats=seats, stay_seconds=stay))

    def _with_seats_filled(self, ready: Prepared) -> Prepared:
        """With no more requests before those that count than are there at once at a rate, and more that count for it.

        They are there for as long as that of one user alone is; where it is longer, the server is not in its stride.
        """
        source = replace(ready.measure.source, stay_seconds=ready.single.mean_stay)
        self._source = replace(self._source, stay_seconds=source.stay_seconds)
        num_counted = ready.measure.num_counted
        if self._options.requests is None:
            rate = FIRST_SHARE * ready.capacity
            sent = ((self._options.duration - self._gone_seconds()) / self._num_runs - RUN_SECONDS) * rate
            num_counted = max(num_counted, min(source.num_counted(sent, rate), MAX_REQUESTS))
        return replace(ready, measure=self._measure(source.factor, num_counted))

    def _gone_seconds(self) -> float:
        return time.monotonic() - self._began

    def _measure(self, factor: float, num_counted: int) -> HttpMeasure:
        source = replace(self._source, factor=factor)
        return HttpMeasure(self._endpoint, source, num_counted, self._deadline, self._tell)

    def _tell(self, rate: float, ended: int, total: int) -> None:
        self._watch.trying(rate, ended, total)
        gone, planned = self._gone_seconds(), self._options.duration
        what = f"{per_second(rate)}/s" if rate else "closed loop"
        left = f"{numbers.duration(max(1.0, planned - gone))} left"
        self._report(int(gone), int(planned), f"{what}: {ended} of {total}, {left}")

    def _affords(self, ready: Prepared, rate: float) -> bool:
        self._gone = self._gone or what_ended(self._endpoint)
        if self._gone:
            return False
        ready = replace(ready, measure=self._filling(ready.measure))
        affords = self._gone_seconds() + ready.seconds_of(rate) <= self._options.duration
        self._was_short = self._was_short or not affords
        return affords

    def _choose(self, first: float, capacity: float) -> tuple[float, int]:
        """The factor and the number of requests of a run, where they were not given.

        Shorter requests are taken to be served as much more often as they are shorter.
        """
        options, runs = self._options, self._num_runs
        left = options.duration - self._gone_seconds() - SINGLE_SHARE * options.duration
        rate = FIRST_SHARE * capacity / first  # that a search begins with, for each unit of the factor

        def fitting(factor: float) -> int:
            return self._source.num_counted((left / runs - RUN_SECONDS) * rate * factor)

        factor, wanted = options.factor, options.requests or WANTED_REQUESTS
        if factor is None:
            factor = choose_division(self._source, wanted, min(wanted, MIN_REQUESTS), fitting)
            least = self._source.least_factor()
            if factor > least:
                seconds = runs * (self._source.num_sent(wanted) / (rate * least) + RUN_SECONDS)
                whole = math.ceil(seconds / (1 - SINGLE_SHARE - CLOSED_SHARE)) * options.num_shares
                self._divided = division_words(self._source, factor, whole)
        return factor, options.requests or min(max(fitting(factor), MIN_REQUESTS), MAX_REQUESTS)

    def _server(self) -> dict[str, Any]:
        endpoint = self._endpoint
        return {
            "model": endpoint.model,
            "url": endpoint.url,
            "api": endpoint.api,
            "context": f"context {endpoint.context}" if endpoint.context else None,
        }

    def _remarks(self) -> list[str]:
        remarks = [self._divided] if self._divided else []
        if self._num_others:
            others = numbers.plural(self._num_others, "request")
            remarks.append(f"The server had {others} of others when this began: the limit is of what they left.")
        if not self._endpoint.ignores_end:
            remarks.append("The server does not take ignore_eos: answers may be shorter than was asked for.")
        if self._endpoint.hides_metrics:
            remarks.append("The server shows its metrics to no one without its admin token (--admin-token).")
        if self._endpoint.context is None:
            remarks.append("The server does not tell its context, so no length was fitted to it (--context).")
        if self._endpoint.url.startswith("https"):
            remarks.append("Each request opens a connection of its own: latencies hold TCP's and TLS's hand-shake.")
        return remarks


def run_limit(
    find: Callable[[Reporter], Outcome],
    options: Options,
    *,
    json_path: Path | None = None,
    html_path: Path | None = None,
    against: Path | None = None,
    lines: Lines | None = None,
    echo: Callable[[str], object] | None = print,
) -> int:
    """Look for the limit, show the figures, and write the files where asked; gives the exit code.

    Args:
        find: measures; takes what is told about its progress.
        against: an older result to compare with.
        lines: are told of the progress, and nobody else.
        echo: takes the lines of the table; `None` where nobody reads it.

    Returns:
        0, or 1 where there is no limit or the search was cut short. Where it was interrupted, the signal's code
        (`code_of`): then what was measured until then is told, as unfinished.

    Raises:
        RelevoError: what was asked for cannot be done.
        KeyboardInterrupt: it was interrupted before a rate was tried, or a second time, or nobody would be told; or
            when all was measured, and has been told.
    """
    check_writable(json_path)
    check_writable(html_path)
    older = read_result(against) if against is not None else None
    code, outcome = 0, None
    with ended_like_a_key(), ExitStack() as shield:
        try:
            with Progress("Measuring", unit="s") as progress:
                outcome = find(lines or progress)
            shield.enter_context(uninterrupted(first_only=True))
        except KeyboardInterrupt as key:
            if isinstance(key, Interrupted) and (echo or json_path or html_path):
                outcome = key.outcome
            if outcome is None:
                raise
            code = code_of(key)
        result = summarize(outcome, options)
        try:
            try:
                if lines is not None:
                    lines.found(result)
            finally:
                told = tell(result, older, json_path=json_path, html_path=html_path, echo=echo)
        except OSError as error:
            # A terminal that closes is what interrupted it. Errors of files bear their names.
            if not code or error.filename is not None or error.errno not in GONE:
                raise
    return code or told
