"""Runs against a server, over HTTP."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Final

from app.limit.dispatch import Job, Planned, run_job
from app.limit.elsewhere import look, share_between
from app.limit.exchange import NO_CONNECTION, NOT_FINISHED, STOPPED, tokens_per_character
from app.limit.piling import there_before
from app.limit.runs import ALLOWED_MISSES, Run, Seen, tokens_per_second
from app.limit.scrapes import num_answered, observe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.limit.dispatch import Told
    from app.limit.elsewhere import Share
    from app.limit.endpoint import Endpoint
    from app.limit.exchange import Answer
    from app.limit.load import Load, Source
    from engine.workload import Workload

# What a run leaves behind is given up; a server takes so long at most to notice.
IDLE_SECONDS: Final = 10.0
IDLE_POLL_SECONDS: Final = 0.2
# Where a server does not tell whether it is idle.
PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class HttpMeasure:
    """Measures rates of a server.

    Attributes:
        num_counted: requests that count in each run.
        deadline: seconds from when a request is due until it is given up.
        report: told the rate and how many of how many requests have ended.
        goes_on: with a run that is certain to be lost, too.
        idle_seconds: to wait for the server to be idle before a run.
    """

    endpoint: Endpoint
    source: Source
    num_counted: int
    deadline: float
    report: Callable[[float, int, int], object] = lambda _rate, _ended, _total: None
    goes_on: bool = False
    idle_seconds: float = IDLE_SECONDS

    def __call__(self, rate: float, seed: int) -> Run:
        """One run in an open loop; another time the same lengths come with other words."""
        load = self.source.make(self.num_counted, rate, seed)
        num_of = [load.classes[slice(*load.counted)].count(number) for number in range(len(self.source.classes))]
        job = replace(
            self._job(load),
            allowed_late=tuple([math.inf if self.goes_on else ALLOWED_MISSES * number for number in num_of]),
            allowed_errors=math.inf if self.goes_on else self.source.promise.max_error_share * self.num_counted,
            scrape=self.endpoint.scrape,
        )
        told, elsewhere = self._run(job, rate)
        return replace(self._as_run(rate, seed, load, told), elsewhere=elsewhere)

    def closed(self, num_streams: int, num_requests: int, seconds: float, seed: int) -> Run:
        """So many streams, each of which sends its next request when its last answer is complete.

        The rate of the run is told from the tokens of answers that came, also of those that were under way at its end,
        and from how many such an answer has. In a short time mostly short answers are completed, and at its beginning
        nobody waits: neither how many were completed nor how long they took tells what a server gets through.
        """
        load = replace(self.source, seats=0).make(num_requests, 1.0, seed)  # nobody warms up, all of them count
        num_planned = len(load.workload.items)
        job = replace(self._job(load), counted=(0, num_planned), streams=num_streams, seconds=seconds)
        told, _ = self._run(job, 0.0)
        run = self._as_run(0.0, seed, replace(load, counted=(0, num_planned)), told)
        return replace(run, rate=_rate_of(load.workload, told))

    def _run(self, job: Job, rate: float) -> tuple[Told, Share | None]:
        """What came of a job, and what others took of the machine meanwhile."""
        self._wait_until_idle()
        total = job.counted[1] - job.counted[0]
        before = look(job.host, job.port)
        told = run_job(job, lambda ended: self.report(rate, ended, total))
        return told, share_between(before, look(job.host, job.port))

    def _job(self, load: Load) -> Job:
        salt = secrets.token_hex(8)
        host, port, tls = self.endpoint.address
        planned = []
        for index, (item, number) in enumerate(zip(load.workload.items, load.classes, strict=True)):
            work_class = self.source.classes[number]
            text = self.endpoint.spelling.prompt(load.workload, index, salt)
            request = self.endpoint.request(text, item.num_output_tokens, is_background=work_class.is_background)
            targets = work_class.targets
            planned.append(
                Planned(request, item.arrival_seconds, targets.ttft_p95_seconds, targets.e2e_p95_seconds, number)
            )
        return Job(host, port, tls, planned, load.counted, self.deadline)

    def _as_run(self, rate: float, seed: int, load: Load, told: Told) -> Run:
        """What was told, as a run; `rate` is 0 of a closed loop."""
        first, last = load.counted
        end = told.stopped_at if told.stopped_at is not None else told.wall_seconds
        whole = [answer for answer in told.answers if not answer.error]
        usual = tokens_per_character(whole)
        there = self._there(told.answers) if rate else [0] * len(told.answers)
        seen = [
            replace(
                self._seen(answer, load.classes[index], end, usual),
                asked_tokens=load.workload.items[index].num_output_tokens,
                num_there=there[index],
            )
            for index, answer in enumerate(told.answers)
            if first <= index < last and answer.sent
        ]
        begin, until = min([one.due for one in seen], default=0.0), max([one.due for one in seen], default=0.0)
        # Where it was ended early there may be no whole second of it: then all there is.
        within = [text for at, text in told.scrapes if begin <= at <= until]
        scrapes = within if len(within) > 1 else [text for _, text in told.scrapes]
        observed = observe(scrapes, max_num_seqs=self.endpoint.seats)
        return Run(
            rate,
            seed,
            self.source.promise,
            tuple(seen),
            tokens=tokens_per_second(
                [(one.finished, one.prompt_tokens, one.output_tokens) for one in whole], begin, until
            ),
            preemptions=observed.preemptions if observed else None,
            cpu_share=told.cpu_seconds / told.wall_seconds if told.wall_seconds else None,
            stopped=told.stopped_at is not None,
            observed=observed,
            others=_num_others(told),
            lead_seconds=begin if rate else None,
            own_want=next((one.error for one in told.answers if _kind(one) == NO_CONNECTION), ""),
        )

    def _there(self, answers: Sequence[Answer]) -> list[int]:
        """How many others were there when each request was due."""
        spans = []
        for answer in answers:
            kind = _kind(answer)
            end = answer.due + self.deadline if kind == NOT_FINISHED else answer.finished or answer.sent
            spans.append((answer.due, math.inf if kind == STOPPED else end))
        return there_before([answer.due for answer in answers], spans)

    def _seen(self, answer: Answer, work_class: int, end: float, usual: float) -> Seen:
        slow = self.source.classes[work_class].targets.itl_p95_seconds
        kind = _kind(answer)
        is_stopped = kind == STOPPED
        kind = "" if is_stopped else kind
        gaps = answer.token_gaps(usual) if answer.sizes else []
        is_whole = not answer.error
        # An answer of a token or two may have no text; then its end is all there is to be seen.
        first = answer.first if answer.sizes else answer.finished if is_whole else None
        ended = answer.finished or answer.sent  # who cannot connect is told nothing
        watched = answer.due + self.deadline if kind == NOT_FINISHED else end if is_stopped else ended
        return Seen(
            due=answer.due,
            lag=max(0.0, answer.sent - answer.due),
            watched=watched - answer.due,
            ttft=None if first is None else first - answer.due,
            e2e=answer.finished - answer.due if is_whole else None,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            num_gaps=len(gaps),
            num_slow_gaps=0 if slow is None else sum(gap > slow for gap in gaps),
            gaps=gaps,
            error=kind,
            work_class=work_class,
        )

    def _wait_until_idle(self) -> None:
        """So that no run pays for the one before it."""
        if not self.endpoint.has_metrics:
            time.sleep(PAUSE_SECONDS)
            return
        until = time.monotonic() + self.idle_seconds
        while time.monotonic() < until:
            values = self.endpoint.metrics()
            if not values.get("num_requests_running", 0.0) + values.get("num_requests_waiting", 0.0):
                return
            time.sleep(IDLE_POLL_SECONDS)


def _rate_of(workload: Workload, told: Told) -> float:
    """Requests a second that came through in a closed loop, by their tokens; 0 where none was completed."""
    pairs = list(zip(told.answers, workload.items, strict=True))
    whole = [(answer.output_tokens, item.num_output_tokens) for answer, item in pairs if not answer.error]
    came, asked = sum([tokens for tokens, _ in whole]), sum([tokens for _, tokens in whole])
    if not came:
        return 0.0
    usual = tokens_per_character([answer for answer in told.answers if not answer.error])
    under_way = [answer.sizes for answer in told.answers if _kind(answer) == STOPPED]
    came_of_others = sum([sum(sizes) * usual if usual else float(len(sizes)) for sizes in under_way])
    # A server may end answers by itself: then they are all so much shorter than was asked for.
    of_each = fmean([item.num_output_tokens for item in workload.items]) * came / asked
    end = told.wall_seconds if told.stopped_at is None else told.stopped_at
    return (came + came_of_others) / (of_each * end)


def _kind(answer: Answer) -> str:
    """Of its error; empty where there is none."""
    return answer.error.partition(":")[0]


def _num_others(told: Told) -> int | None:
    """Answers that the server gave to others during a run, at least; `None` where it does not tell.

    It is what it gave between the first scrape and the last, but for all that came here, before and after those too.
    """
    scrapes = [text for _, text in told.scrapes if text]
    given = num_answered(scrapes[0], scrapes[-1]) if scrapes else None
    return None if given is None else max(0, given - sum(answer.finished > 0 for answer in told.answers))
