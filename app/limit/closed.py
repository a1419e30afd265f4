"""Closed loops: so many streams, each of which asks again when its last answer is complete.

So one user alone is measured, and what a server gets through at most. Nobody else needs to be told how many it serves
at once: streams are doubled for as long as more come through.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from app.limit.asking import one_line
from app.limit.endpoint import EndpointError
from app.limit.exchange import NO_CONNECTION
from app.limit.remarks import MORE_CONNECTIONS
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.limit.endpoint import Endpoint
    from app.limit.options import Options
    from app.limit.over_http import HttpMeasure
    from app.limit.runs import Run

SINGLE_REQUESTS: Final = 10
REQUESTS_PER_STREAM, MAX_REQUESTS = 50, 2000
# Where nobody tells how many a server serves at once: streams to begin with, and the most that are tried.
FIRST_STREAMS, MAX_STREAMS = 32, 1024
# Twice as many streams that bring less more than this only wait for each other.
LEAST_GROWTH: Final = 1.1
# Of the time there is: for measuring one user, and the capacity; for each further number of streams, or so many answers
# one after the other, so that each stream has one at least.
SINGLE_SHARE, CLOSED_SHARE, MORE_SHARE = 1 / 16, 1 / 16, 1 / 32
MORE_ANSWERS: Final = 2
# Each may take as much as this where no answer has come by then, and streams are doubled until then.
MOST_SHARE: Final = 1 / 4
# Before a server is taken for dead.
PROBES, PROBE_PAUSE_SECONDS = 3, 1.0


@dataclass(frozen=True, slots=True)
class ClosedLoops:
    """Measures a server in closed loops.

    Attributes:
        deadline: seconds until a request is given up.
        gone: seconds since the search began.
    """

    endpoint: Endpoint
    options: Options
    deadline: float
    gone: Callable[[], float]

    def single(self, measure: HttpMeasure) -> Run:
        """One user alone; raises as `_run`."""
        return self._run(measure, 1, SINGLE_REQUESTS, SINGLE_SHARE)

    def capacity(self, measure: HttpMeasure, seats: int | None) -> tuple[Run, int]:
        """The run in which most answers came through, and its streams; raises as `_run`.

        Args:
            seats: how many the server serves at once; `None` has that looked for.
        """
        streams = seats or FIRST_STREAMS
        best = self._run(measure, streams, _num_requests(streams), CLOSED_SHARE)
        while not seats and 2 * streams <= MAX_STREAMS and self.gone() < MOST_SHARE * self.options.duration:
            seconds = max(MORE_SHARE * self.options.duration, MORE_ANSWERS * best.mean_stay)
            more = measure.closed(2 * streams, _num_requests(2 * streams), seconds, self.options.seed)
            if any(seen.error for seen in more.seen) or more.rate < LEAST_GROWTH * best.rate:
                break
            best, streams = more, 2 * streams
        return best, streams

    def _run(self, measure: HttpMeasure, streams: int, num_requests: int, share: float) -> Run:
        """So many streams at once, for a share of the time, and for longer where nobody has an answer by then.

        Raises:
            EndpointError: it fails requests; or it takes more of the time than can be spared, with what would do where
                that is seen before all of the time is gone.
        """
        options, seconds = self.options, share * self.options.duration
        run = measure.closed(streams, num_requests, seconds, options.seed)
        while not run.finished and not any(seen.error for seen in run.seen):
            longest = min(self.deadline, options.duration - self.gone())
            if seconds >= longest:
                break
            seconds = min(2 * seconds, longest)
            run = measure.closed(streams, num_requests, seconds, options.seed)
        self._check_works(run, streams)
        if run.finished and seconds <= MOST_SHARE * options.duration:
            return run
        within, longer = seconds, "" if seconds >= self.deadline else "a larger --duration, or "
        if run.finished:
            within = MOST_SHARE * options.duration
            longer = f"--duration {math.ceil(seconds / MOST_SHARE) * options.num_shares} or more, or "
        said = f"{self.endpoint.url} finished no request within {within:.3g} s"
        raise EndpointError(f"{said}; give {longer}a larger --factor.")

    def _check_works(self, run: Run, streams: int) -> None:
        """Refuse a server that fails the requests of a closed loop, in which nobody asks before the last answer."""
        errors = [seen.error for seen in run.seen if seen.error]
        if errors and (gone := what_ended(self.endpoint)):
            raise EndpointError(f"{self.endpoint.url}: {gone[0].lower()}{gone[1:]} before a rate could be tried.")
        if len(errors) > self.options.max_error_share * len(run.seen) or NO_CONNECTION in errors:
            said = f"{len(errors)} of {numbers.plural(len(run.seen), 'request')} failed"
            advice = _advice(errors[0], streams, knows_context=self.endpoint.context is not None)
            raise EndpointError(f"{self.endpoint.url}: {said} ({errors[0]}) with {streams} at once{advice}.")


def _num_requests(streams: int) -> int:
    return min(MAX_REQUESTS, REQUESTS_PER_STREAM * streams)


def _advice(error: str, streams: int, *, knows_context: bool) -> str:
    """What may help against an error of a closed loop."""
    if error in ("HTTP 400", "HTTP 413", "HTTP 422") and not knows_context:
        return "; if prompts are too long for it, say its context with --context"
    if error in ("HTTP 429", "HTTP 503") and streams > 1:
        return "; ask for fewer at once with --seats"
    return f"; {MORE_CONNECTIONS}" if error == NO_CONNECTION else ""


def what_ended(endpoint: Endpoint) -> str:
    """That the server serves no more, a sentence without its full stop; empty where it does.

    It is asked several times: one that is only busy with what a run has left answers in the end.
    """
    status, said = 0, ""
    for attempt in range(PROBES):
        if attempt:
            time.sleep(PROBE_PAUSE_SECONDS)
        status, said = endpoint.get("/v1/models", endpoint.keys)
        if status and status < 500:
            return ""
    if not status:
        return f"The server died, or cannot be reached any more ({one_line(said)})"
    return f"The server serves no more (HTTP {status})"
