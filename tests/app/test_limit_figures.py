"""The figures of a run against ones that are computed another way: from the raw bytes, and by the server itself."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.limit import generator, over_http
from app.limit.dispatch import Job, Planned
from app.limit.endpoint import Endpoint, find_endpoint
from app.limit.exchange import Exchange
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.over_http import HttpMeasure
from app.limit.runs import Promise
from app.limit.summary import figures
from engine.config import SloTargets
from tests.app.endpoints import open_endpoint
from tests.app.serving import open_server
from tests.app.test_limit_generator import run_inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.limit.dispatch import Told
    from app.limit.runs import Run

NUM_COUNTED, WARM_UP = 40, 8
# What the network, and a machine that is busy with other things, may add at most, in seconds.
SHARE = 1.0
TARGETS = SloTargets(0.15, 0.02, 0.4)


def reference_percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest that at least so many per cent do not exceed, by counting."""
    return next(
        one for one in sorted(samples) if sum(other <= one for other in samples) * 100 >= percent * len(samples)
    )


class Recorded:
    """Every connection's request and what came when, as the sockets gave it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connections: dict[bytes, list[tuple[float, bytes]]] = {}
        self.jobs: list[Job] = []
        self.told: list[Told] = []
        connections = self.connections

        class Noted(Exchange):
            def __init__(self, request: bytes, pieces: Any, ended: Any) -> None:
                super().__init__(request, pieces, ended)
                connections[request] = pieces

        def run(job: Job, _report: object) -> Told:
            self.jobs.append(job)
            self.told.append(run_inside(job))
            return self.told[-1]

        monkeypatch.setattr(generator, "Exchange", Noted)
        monkeypatch.setattr(over_http, "run_job", run)
        monkeypatch.setattr(over_http, "PAUSE_SECONDS", 0.0)

    def tokens_of(self, place: int) -> list[float]:
        """When the tokens of one request's answer came: the fake server writes "word " for each."""
        moments = []
        for moment, data in self.connections[self.jobs[-1].planned[place].request.encode()]:
            moments += [moment] * len(re.findall(rb"word ", data))
        return moments

    def end_of(self, place: int) -> float:
        return self.connections[self.jobs[-1].planned[place].request.encode()][-1][0]

    def status_of(self, place: int) -> int:
        data = b"".join(data for _, data in self.connections[self.jobs[-1].planned[place].request.encode()])
        return int(data.split(b" ", 2)[1])


@pytest.fixture
def run_and_raw(monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Recorded]:
    """A server that stalls for a while and refuses a few, and all that its connections carried."""
    raw = Recorded(monkeypatch)
    lengths = Ranges((5, 9), (2, 12))
    source = Source((WorkClass("requests", 1.0, lengths, TARGETS),), Promise((TARGETS,), 0.5))
    refused = ('"max_tokens": 7,',)
    with open_endpoint(first_seconds=0.02, gap_seconds=0.004, stall=(0.5, 0.8), refused=refused) as (url, _):
        measure = HttpMeasure(Endpoint(url, "", "chat", "made-up", {}, {}), source, NUM_COUNTED, 5.0, goes_on=True)
        return measure(50.0, 3), raw


def test_every_figure_is_that_of_the_raw_bytes(run_and_raw: tuple[Run, Recorded]) -> None:
    run, raw = run_and_raw
    (told,), (job,) = raw.told, raw.jobs
    figure = figures(run)
    counted = range(WARM_UP, WARM_UP + NUM_COUNTED)
    fine = [place for place in counted if raw.status_of(place) == 200]
    refused = [place for place in counted if raw.status_of(place) == 400]
    assert refused
    assert len(fine) + len(refused) == NUM_COUNTED
    # The one thing that is taken from the run: when its clock began.
    begin = raw.end_of(fine[0]) - told.answers[fine[0]].finished
    due = {place: begin + job.planned[place].due for place in counted}
    tokens = {place: raw.tokens_of(place) for place in fine}
    ttft = {place: tokens[place][0] - due[place] for place in fine}
    gaps = {place: [b - a for a, b in zip(tokens[place], tokens[place][1:], strict=False)] for place in fine}
    e2e = {place: raw.end_of(place) - due[place] for place in fine}
    samples = {"ttft": [*ttft.values()], "itl": [gap for one in gaps.values() for gap in one], "e2e": [*e2e.values()]}
    for name, values in samples.items():
        for percent in (50, 95, 99):
            assert figure[f"{name}_p{percent}_seconds"] == pytest.approx(reference_percentile(values, percent))
    assert (figure["requests"], figure["errors"]) == (len(fine), len(refused))
    assert figure["errors_by_kind"] == {"HTTP 400": len(refused)}
    good = [
        place
        for place in fine
        if ttft[place] <= 0.15
        and e2e[place] <= 0.4
        and sum(gap > 0.02 for gap in gaps[place]) <= 0.05 * len(gaps[place])
    ]
    assert 0 < len(good) < len(fine)
    assert figure["goodput"] == pytest.approx(50.0 * len(good) / NUM_COUNTED)
    until = max(due.values())
    ended = [place for place in range(len(job.planned)) if told.answers[place].sent and raw.status_of(place) == 200]
    within = [place for place in ended if due[WARM_UP] <= raw.end_of(place) <= until]
    written = sum(len(raw.tokens_of(place)) for place in within)
    assert figure["output_tokens_per_second"] == pytest.approx(written / (until - due[WARM_UP]))
    lags = [told.answers[place].sent - told.answers[place].due for place in counted]
    assert figure["dispatch_lag_p99_seconds"] == pytest.approx(reference_percentile(lags, 99))


def test_whether_it_holds_is_told_by_the_percentiles(run_and_raw: tuple[Run, Recorded]) -> None:
    """A target holds exactly where its 95th percentile is within it."""
    run, _ = run_and_raw
    figure = figures(run)
    for name in ("ttft", "itl", "e2e"):
        value = figure[f"{name}_p95_seconds"]
        for target, holds in ((value, True), (math.nextafter(value, 0), False)):
            targets = replace(SloTargets(None, None, None), **{f"{name}_p95_seconds": target})
            seen = [replace(one, num_slow_gaps=sum(gap > target for gap in one.gaps)) for one in run.seen]
            again = replace(run, promise=Promise((targets,), 1.0), seen=tuple(seen))
            assert (again.excesses()[name] <= 1) == holds


@pytest.mark.slow
async def test_the_servers_own_figures_are_those_of_the_client() -> None:
    """More is asked for than there are seats, so most of each latency is the server's; the network adds a little."""
    num = 40
    async with open_server(step_seconds=0.04, limits={"max_num_seqs": 4}) as server:
        endpoint = await trio.to_thread.run_sync(partial(find_endpoint, server.url, "completions"))
        host, port, tls = endpoint.address
        planned = [Planned(endpoint.request(f"question {place}", 4 + place % 5), 0.01 * place) for place in range(num)]
        before = await server.stats()
        told = await trio.to_thread.run_sync(run_inside, Job(host, port, tls, planned, (0, num), 30.0))
        await server.settle()
        after = await server.stats()
    answers = told.answers
    assert [answer.error for answer in answers] == [""] * num
    latency = after["latency"]
    counts = {name: latency[name]["count"] - before["latency"][name]["count"] for name in ("ttft", "e2e", "itl")}
    assert counts == {"ttft": num, "e2e": num, "itl": sum(answer.output_tokens - 1 for answer in answers)}
    for name in ("prompt", "output"):
        mine = sum(getattr(answer, f"{name}_tokens") for answer in answers)
        assert after["tokens"][name] - before["tokens"][name] == mine
    samples = {
        "ttft": [answer.first - answer.due for answer in answers],
        "e2e": [answer.finished - answer.due for answer in answers],
    }
    assert reference_percentile(samples["ttft"], 50) > 0.6
    for name, values in samples.items():
        # The two questions by which the server was found out are in its window, and were quick.
        low, high = (f"p{percent}" for percent in (50, 95))
        assert latency[name][low] <= reference_percentile(values, 50) <= latency[name][low] + SHARE
        assert latency[name][high] <= reference_percentile(values, 95) <= latency[name][high] + SHARE
    gaps = [gap for answer in answers for gap in answer.token_gaps()]
    assert reference_percentile(gaps, 50) == pytest.approx(latency["itl"]["p50"], abs=0.02)
