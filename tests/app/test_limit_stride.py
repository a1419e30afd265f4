"""Servers with many seats, rates beyond what can be served, rare classes of work and long targets."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from app.compare.simulated import Machine
from app.limit.closed import ClosedLoops
from app.limit.command import Looking
from app.limit.dispatch import Job, Told
from app.limit.endpoint import Endpoint
from app.limit.exchange import STOPPED, Answer
from app.limit.lengths import Ranges
from app.limit.load import MAX_FOR_SEATS, Source, WorkClass
from app.limit.options import Options, deadline_of
from app.limit.over_http import HttpMeasure
from app.limit.piling import filled, piling_excess, there_before
from app.limit.report import page_of
from app.limit.runs import Promise, Run, Seen
from app.limit.search import search
from app.limit.simulated import SimulatedMeasure, find_simulated
from app.limit.summary import Outcome, figures, summarize
from app.limit.words import lines_of
from app.render.limit import run_variables, verdict_words
from engine.config import EngineConfig, SloTargets
from engine.cost_model import CostModel, Curve
from tests.app.endpoints import open_endpoint
from tests.app.test_limit_search import make_run
from tests.app.test_limit_servers import find_endpoint

TARGETS = SloTargets(1.0, None, None)
PROMISE = Promise((TARGETS,), 0.01)
# Nothing that a growing wait would break.
GAPS_ALONE = Promise((SloTargets(None, 1.0, None),), 0.01)
SOURCE = Source((WorkClass("requests", 1.0, Ranges((5, 9), (2, 4)), TARGETS),), PROMISE)


class Crowd:
    """A server that serves so many at once, each in a second, and hangs up on more than a crowd."""

    def __init__(self, seats: int, crowd: float = math.inf) -> None:
        self._seats, self._crowd = seats, crowd
        self.tried: list[int] = []

    def closed(self, num_streams: int, *_: object) -> Run:
        self.tried.append(num_streams)
        seen = Seen(0.0, 0.0, 1.0, 0.1, 1.0, 5, 2, 1, 0)
        seen = replace(seen, error="HTTP 429") if num_streams > self._crowd else seen
        return Run(min(num_streams, self._seats), 0, PROMISE, (seen,) * num_streams)


@pytest.mark.parametrize(
    ("server", "seats", "tried", "streams", "rate"),
    [
        (Crowd(8), None, [32, 64], 32, 8),
        (Crowd(40), None, [32, 64, 128], 64, 40),
        (Crowd(256), None, [32, 64, 128, 256, 512], 256, 256),
        (Crowd(256, crowd=100), None, [32, 64, 128], 64, 64),
        (Crowd(9999), None, [32, 64, 128, 256, 512, 1024], 1024, 1024),
        (Crowd(256), 48, [48], 48, 48),
    ],
)
def test_streams_are_doubled_until_no_more_come_through(
    server: Crowd, seats: int | None, tried: list[int], streams: int, rate: float
) -> None:
    with open_endpoint() as (url, _):
        loops = ClosedLoops(find_endpoint(url, "chat"), Options(targets=TARGETS), 120.0, lambda: 0.0)
    measure: Any = server
    run, found = loops.capacity(measure, seats)
    assert (server.tried, found, run.rate) == (tried, streams, rate)


def test_a_closed_loop_is_no_slower_for_what_is_under_way_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told((), (), None, 0.0, 0.0)

    def run_job(_job: Job, _report: object) -> Told:
        return told

    monkeypatch.setattr("app.limit.over_http.run_job", run_job)
    monkeypatch.setattr("app.limit.over_http.PAUSE_SECONDS", 0.0)
    of_ten = replace(SOURCE, classes=(WorkClass("requests", 1.0, Ranges((5, 9), (10, 10)), TARGETS),))
    measure = HttpMeasure(Endpoint("http://x", "", "chat", "m", {}, {}), of_ten, 5, 60.0)

    def rate(*answers: Answer) -> float:
        nonlocal told
        told = Told((*answers, *[Answer(error=STOPPED)] * (13 - len(answers))), (), 8.0, 9.0, 0.1)
        return measure.closed(4, 6, 8.0, 0).rate

    whole = Answer(sent=0.0, first=1.0, finished=5.0, output_tokens=10, sizes=[3] * 10)
    under_way = Answer(sent=5.0, first=6.0, sizes=[3] * 5, error=STOPPED)
    assert rate(whole, whole, under_way, replace(under_way, sizes=[])) == pytest.approx(2.5 / 8)
    # Several tokens a piece; and a server that ends answers at half of what was asked for.
    coarse = replace(whole, sizes=[15, 15])
    assert rate(coarse, coarse, replace(under_way, sizes=[15])) == pytest.approx(2.5 / 8)
    assert rate(replace(whole, output_tokens=5, sizes=[3] * 5), under_way) == pytest.approx(2 / 8)
    assert rate(under_way) == 0
    assert rate(whole, replace(whole, error="HTTP 500: no")) == pytest.approx(1 / 8)


class Queue:
    """A server that gives so many answers at once, each at ten tokens a second, and the others wait."""

    def __init__(self, seats: int) -> None:
        self._seats = seats

    def run_job(self, job: Job, _report: object) -> Told:
        free, ready = [0.0] * self._seats, [0.0] * job.streams
        answers = []
        for planned in job.planned:
            if ready[0] >= job.seconds:
                answers.append(Answer(error=STOPPED))
                continue
            sent = heapq.heappop(ready)
            tokens = json.loads(planned.request.partition("\r\n\r\n")[2])["max_tokens"]
            first = max(sent, heapq.heappop(free))
            end = first + tokens / 10
            heapq.heappush(free, end)
            heapq.heappush(ready, end)
            came = min(tokens, max(0, int((job.seconds - first) * 10)))
            answer = Answer(due=sent, sent=sent, sizes=[3] * came, gaps=[0.1] * max(0, came - 1), error=STOPPED)
            if came:
                answer.first = first
            if end <= job.seconds:
                answer.error, answer.finished, answer.output_tokens, answer.prompt_tokens = "", end, tokens, 5
            answers.append(answer)
        return Told(tuple(answers), (), job.seconds, job.seconds, 0.1)


@pytest.mark.parametrize(("seats", "longest", "streams"), [(16, 39, 32), (16, 159, 32), (32, 299, 32), (256, 499, 256)])
def test_neither_who_waits_nor_who_is_long_makes_a_closed_loop_any_faster(
    seats: int, longest: int, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers take half as long on average as the longest: two to twenty-five seconds, of 480 for the whole search."""
    monkeypatch.setattr("app.limit.over_http.run_job", Queue(seats).run_job)
    monkeypatch.setattr("app.limit.over_http.PAUSE_SECONDS", 0.0)
    source = replace(SOURCE, classes=(WorkClass("requests", 1.0, Ranges((5, 5), (1, longest)), TARGETS),))
    endpoint = Endpoint("http://x", "", "chat", "m", {}, {})
    loops = ClosedLoops(endpoint, Options(targets=TARGETS), 120.0, lambda: 0.0)
    run, found = loops.capacity(HttpMeasure(endpoint, source, 5, 120.0), None)
    assert found == streams
    assert run.rate == pytest.approx(seats / ((1 + longest) / 20), rel=0.08)


def test_a_server_with_many_seats_has_them_filled_before_requests_count() -> None:
    assert SOURCE.make(100, 8.0, 0).counted == (20, 120)
    many = replace(SOURCE, seats=256)
    load = many.make(100, 8.0, 0)
    assert load.counted == (384, 484)
    assert len(load.classes) == 484 + 384
    assert replace(SOURCE, seats=100_000).make(100, 8.0, 0).counted[0] == MAX_FOR_SEATS
    for source in (SOURCE, many):
        assert source.num_counted(source.num_sent(300)) in (299, 300)
    assert many.num_counted(100) == 0


def test_no_more_seats_are_filled_than_are_taken_at_a_rate_and_the_same_requests_count() -> None:
    many = replace(SOURCE, seats=256)
    brief = replace(many, stay_seconds=4.0)
    assert brief.make(100, 8.0, 0).counted == (48, 148)  # 32 are there at once
    assert brief.make(100, 1.0, 0).counted == (20, 120)
    assert brief.make(100, 640.0, 0).counted == many.make(100, 640.0, 0).counted == (384, 484)
    assert replace(brief, stay_seconds=0.0).make(100, 8.0, 0).counted == (20, 120)
    assert brief.num_sent(100, 8.0) == pytest.approx(48 + 110)
    assert brief.num_sent(100) == many.num_sent(100)
    assert brief.num_counted(158, 8.0) in (99, 100)
    counted = []
    for rate in (1.0, 8.0, 640.0):
        load = brief.make(100, rate, 0)
        items = load.workload.items[slice(*load.counted)]
        counted.append([(one.num_prompt_tokens, one.num_output_tokens) for one in items])
        gaps = [(two.arrival_seconds - one.arrival_seconds) for one, two in itertools.pairwise(items)]
        counted[-1] += [round(gap / gaps[0], 6) for gap in gaps]
        assert len(load.classes) == len(load.workload.items)
        assert load.workload.items[0].arrival_seconds == 0
    assert counted[0] == counted[1] == counted[2]


def cold(rate: float, ttft: float = 0.1) -> Run:
    """Its answers take five seconds, and what is sent before those that count takes one."""
    seen = make_run(rate, ttft=lambda _: ttft).seen
    return Run(rate, 0, PROMISE, tuple([replace(one, e2e=5.0) for one in seen]), lead_seconds=1.0)


def test_a_server_that_was_not_in_its_stride_is_not_said_to_hold() -> None:
    assert cold(30.0).unknown == "cold"
    assert figures(cold(30.0))["holds"] is None
    assert replace(cold(30.0), lead_seconds=5.0).is_valid
    assert replace(cold(30.0), lead_seconds=None).is_valid  # of one user alone nothing is to be filled
    lost = cold(30.0, ttft=2.0)
    assert (lost.is_valid, lost.holds) == (True, False)
    runs = search(lambda rate, _seed: cold(rate) if rate > 11 else make_run(rate, ttft=lambda _: 0.1), 10.0, (0,))
    rates = [run.rate for run in runs if not run.is_valid]
    assert max(rates) == 13
    assert all(rates.count(rate) == 2 for rate in rates)
    result = summarize(Outcome({}, SOURCE, None, 12.0, runs, 1.0), Options(targets=TARGETS))
    assert result["limit"]["is_at_least"]
    assert result["limit"]["requests_per_second"] <= 11
    assert result["limit"]["bound_by"].startswith("unknown: beyond it runs were too short")
    (said,) = [remark for remark in result["remarks"] if "in its stride" in remark]
    assert re.match(r"At [\d., ]+ requests/s the promises were kept, but by a server that was not", said)
    assert said.endswith("Give --seats 65.")
    assert any(line.endswith("unknown: too few were sent before those that count") for line in lines_of(result))
    assert verdict_words(result["curve"][-1]) == "unknown: too few were sent before those that count"
    none = summarize(Outcome({}, SOURCE, None, 12.0, [cold(30.0)], 1.0), Options(targets=TARGETS))
    assert none["why"].startswith("At 30 requests/s the promises were kept, but by a server that was not in its stride")


@dataclass(frozen=True)
class Wide:
    """A server that keeps its promise up to 40 requests a second, each of which takes four seconds."""

    endpoint: Endpoint
    source: Source
    num_counted: int
    deadline: float
    report: object

    def closed(self, num_streams: int, *_: object) -> Run:
        seen = Seen(0.0, 0.0, 4.0, 0.1, 4.0, 5, 2, 1, 0)
        return Run(num_streams / 4, 0, self.source.promise, (seen,) * num_streams)

    def __call__(self, rate: float, seed: int) -> Run:
        seen = make_run(rate, ttft=lambda _: 0.1 if rate < 40 else 9.0, num=self.num_counted).seen
        before, _ = self.source.make(self.num_counted, rate, seed).counted
        return Run(
            rate, seed, self.source.promise, tuple([replace(one, e2e=4.1) for one in seen]), lead_seconds=before / rate
        )


def test_where_a_server_was_not_in_its_stride_more_are_sent_before_the_next_that_count() -> None:
    options = Options(targets=TARGETS, factor=1.0, requests=50, streams=8, duration=1e6, repeats=1)
    with open_endpoint() as (url, _), pytest.MonkeyPatch.context() as patched:
        patched.setattr("app.limit.command.HttpMeasure", Wide)
        look = Looking(find_endpoint(url, "chat"), SOURCE, options, lambda *_: None)
        outcome = look.find()
        result = summarize(outcome, options)
    assert result["limit"]["requests_per_second"] == pytest.approx(40, rel=0.05)
    unknown = [run.rate for run in outcome.runs if not run.is_valid]
    assert 0 < len(unknown) < 8
    assert not any("in its stride" in remark for remark in result["remarks"])


def test_a_capacity_that_is_told_from_shorter_requests_says_so() -> None:
    outcome = Outcome({}, SOURCE, None, 12.0, [make_run(9.0, ttft=lambda _: 0.1)], 1.0)
    plain = summarize(outcome, Options(targets=TARGETS))
    assert plain["capacity_factor"] == 1
    assert "12.0 requests/s in a closed loop" in page_of(plain)
    divided = summarize(replace(outcome, capacity_factor=8.0), Options(targets=TARGETS))
    assert "about 12.0 requests/s, told from a closed loop with lengths divided by 8" in page_of(divided)
    run = figures(make_run(9.0, ttft=lambda _: 0.1))
    told = {"single_user": None, "capacity": run | {"factor": 8.0}, "curve": []}
    assert [row["title"] for row in run_variables(told)["rows"]] == ["all seats at once, lengths divided by 8"]


def test_how_many_are_there_is_counted_without_who_comes() -> None:
    spans = [(0.0, 2.0), (1.0, 5.0), (2.0, math.inf), (2.0, 3.0)]
    assert there_before([0.0, 1.0, 2.0, 4.0, 9.0], spans) == [0, 1, 1, 2, 1]


def piling(due: np.ndarray, there: np.ndarray, rate: float) -> float:
    return float(piling_excess(due, there, rate, 0.0, np.ones((1, len(due))))[0])


def test_a_share_that_stays_unanswered_piles_up_and_a_crowd_by_chance_does_not() -> None:
    place = np.arange(400)
    even = place / 10.0
    assert piling(even, 8 + 0.1 * place, 10.0) > 1
    assert piling(even, 8 + 0.0 * place, 10.0) == 0
    # More of them come later on, and are there: all of the growth is of them.
    early = np.where(place < 200, place * 0.12, 24 + (place - 200) * 0.08)
    assert piling(early, 8 + np.maximum(0.0, place - 10.0 * early), 10.0) < 0.2
    assert piling(even[:3], place[:3], 10.0) == 0
    # Where three come for each that is there, seats may still fill.
    assert piling(even, 100 + 0.1 * place, 10.0) == 0


@pytest.mark.parametrize("num", [300, 1000])
def test_long_answers_of_which_there_come_to_be_more_are_no_piling_up(num: int) -> None:
    """Ten come a second and all are served at once: a tenth for a hundred seconds, the others for one."""
    num_refused = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        before, total = num // 5, num + num // 2
        due = np.cumsum(rng.exponential(0.1, total))
        spans = np.where(rng.random(total) < 0.1, 100.0, 1.0)
        there = there_before(due.tolist(), list(zip(due.tolist(), (due + spans).tolist(), strict=True)))
        seen = [
            Seen(
                float(due[place]),
                0.0,
                float(spans[place]),
                0.0,
                float(spans[place]),
                5,
                5,
                4,
                0,
                num_there=there[place],
            )
            for place in range(before, before + num)
        ]
        run = Run(10.0, seed, GAPS_ALONE, tuple(seen), lead_seconds=float(due[before]))
        assert run.filled > 10
        num_refused += run.excesses()["waiting grows"] > 1
    assert num_refused == 0


def test_how_many_more_there_are_in_the_end_goes_by_how_long_answers_take() -> None:
    due = [float(place) for place in range(80)]  # the first quarter is due at 9.5 on average, the last at 69.5
    assert filled(due, [0.0, 0.0], 2.0) == 0
    assert filled(due, [1000.0], 2.0) == pytest.approx(2 * 60)
    assert filled(due, [20.0], 2.0) == pytest.approx(2 * 10.5)
    assert filled(due, [1000.0, 0.0], 2.0) == pytest.approx(60)
    assert filled(due, [], 2.0) == filled([1.0, 2.0], [9.0], 2.0) == 0


@pytest.mark.parametrize(
    ("targets", "judged"),
    [
        (SloTargets(None, 0.1, None), True),
        (SloTargets(2.0, 0.1, None), False),
        (SloTargets(None, None, 5.0), False),
        (SloTargets(20.0, 0.1, 30.0), True),  # the run takes 40 s
    ],
)
def test_ever_more_are_looked_for_where_no_promise_tells_of_them(targets: SloTargets, judged: bool) -> None:
    run = make_run(10.0, ttft=lambda _: 0.1)
    seen = tuple([replace(one, num_there=8 + place // 8) for place, one in enumerate(run.seen)])
    run = replace(run, seen=seen, promise=Promise((targets,), 0.01))
    assert (run.excesses()["waiting grows"] > 1) == judged


def test_where_so_many_are_there_that_it_cannot_be_told_it_is_said_what_would_tell() -> None:
    def remarks(num_there: int) -> list[str]:
        run = make_run(9.0, ttft=lambda _: 0.1)
        seen = tuple([replace(one, num_there=num_there) for one in run.seen])
        run = replace(run, seen=seen, promise=GAPS_ALONE)
        told = summarize(Outcome({}, SOURCE, None, 12.0, [run], 1.0), Options(targets=TARGETS))["remarks"]
        return [remark for remark in told if "too few to tell whether ever more" in remark]

    assert remarks(50) == []
    (said,) = remarks(100)
    assert said.startswith("400 requests a run")
    assert "--requests 800 would tell" in said


def test_one_slow_request_of_a_rare_class_does_not_refuse_the_search() -> None:
    promise = Promise((TARGETS, TARGETS), 0.01, ("usual", "rare"))

    def alone(num_rare: int) -> Run:
        usual = [Seen(0.0, 0.0, 0.2, 0.1, 0.2, 5, 2, 1, 0)] * 17
        rare = [Seen(0.0, 0.0, 9.0, 8.0, 9.0, 5, 2, 1, 0, work_class=1)] * num_rare
        return Run(1.0, 0, promise, (*usual, *rare))

    assert alone(1).hopeless == alone(4).hopeless == []
    assert alone(5).hopeless == ["ttft of rare"]


def test_the_deadline_leaves_room_for_every_target() -> None:
    def deadline(*seconds: float | None, given: float | None = None) -> float:
        promise = Promise(tuple([SloTargets(1.0, None, one) for one in seconds]), 0.01)
        return deadline_of(Options(deadline=given), promise)

    assert deadline(None) == deadline(30.0) == 120
    assert deadline(None, 180.0) == 270
    assert deadline(180.0, given=60.0) == 60


def test_one_user_alone_who_is_given_up_is_told_with_the_deadline() -> None:
    targets = SloTargets(None, 10.0, None)
    source = Source((WorkClass("requests", 1.0, Ranges((5, 5), (45, 60)), targets),), Promise((targets,), 0.01))
    machine = Machine(CostModel(Curve(((1.0, 3.0), (64.0, 4.0)))), {}, "made up", "none", 512, 1024)
    options = Options(targets=targets, requests=20)
    result = summarize(find_simulated(machine, EngineConfig(), source, options), options)
    assert result["why"] == (
        "Not even one user alone is served within the targets: 100 of 100 requests failed (100 not finished in time; "
        "see --deadline)."
    )
    options = replace(options, deadline=300.0)
    assert summarize(find_simulated(machine, EngineConfig(), source, options), options)["limit"]


@pytest.mark.slow
def test_what_cannot_be_served_does_not_hold_though_no_first_token_is_promised() -> None:
    """Against the real scheduler in virtual time: the wait for a seat is in no gap, and no answer is over by then."""
    targets = SloTargets(None, 1.0, 600.0)
    source = Source((WorkClass("requests", 1.0, Ranges((80, 120), (15, 25)), targets),), Promise((targets,), 0.01))
    machine = Machine(CostModel(Curve(((16.0, 0.02), (128.0, 0.05)))), {}, "made up", "none", 512, 1024)
    measure = SimulatedMeasure(machine, EngineConfig(), source, 400)
    capacity = measure.capacity(0)
    for seed in range(100, 104):
        below, above = measure(0.95 * capacity, seed), measure(1.1 * capacity, seed)
        assert below.holds
        assert {name for name, excess in above.excesses().items() if excess > 1} == {"waiting grows"}
