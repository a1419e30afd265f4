"""The process that sends requests, over real sockets: what it notes, what it is late by, and that it always ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.limit import dispatch, over_http
from app.limit.dispatch import COMMAND, Job, Planned, Told, run_job
from app.limit.endpoint import Endpoint
from app.limit.exchange import NOT_FINISHED, Answer, Exchange
from app.limit.generator import Generator
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.options import Options
from app.limit.over_http import HttpMeasure
from app.limit.remarks import MORE_CONNECTIONS
from app.limit.runs import Promise, Run
from app.limit.summary import Outcome, figures, summarize
from engine.config import SloTargets
from tests.app.endpoints import open_endpoint
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CALM = SloTargets(5.0, 5.0, None)


def run_inside(job: Job, report: Callable[[int], object] = lambda _ended: None) -> Told:
    """A job in this process, which starts faster than another."""

    async def run() -> dict[str, Any]:
        return await Generator(job.as_json(), report).run()

    told = asyncio.run(run())
    answers = tuple(Answer(**answer) for answer in told.pop("answers"))
    return Told(answers, tuple(told.pop("scrapes")), **told)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Jobs run in this process; what each told."""
    told: list[Told] = []

    def run(job: Job, report: Callable[[int], object]) -> Told:
        told.append(run_inside(job, report))
        return told[-1]

    monkeypatch.setattr(over_http, "run_job", run)
    monkeypatch.setattr(over_http, "PAUSE_SECONDS", 0.0)
    return told


def endpoint(url: str, api: str = "chat") -> Endpoint:
    return Endpoint(url, "", api, "made-up", {}, {})


def measure(
    url: str, *, num: int = 20, targets: SloTargets = CALM, output: int = 3, may_fail: float = 0.01, **options: Any
) -> HttpMeasure:
    source = Source(
        (WorkClass("requests", 1.0, Ranges((5, 9), (output, output)), targets),),
        Promise((targets,), may_fail),
        arrivals="constant",
    )
    return HttpMeasure(endpoint(url), source, num, deadline=options.pop("deadline", 5.0))


def job(url: str, dues: list[float], *, tokens: int = 2, **options: Any) -> Job:
    host, port, tls = endpoint(url).address
    planned = [Planned(endpoint(url).request("one two", tokens), due) for due in dues]
    return Job(host, port, tls, planned, (0, len(planned)), options.pop("deadline", 5.0), **options)


def remarks_of(*runs: Run) -> list[str]:
    source = Source((WorkClass("requests", 1.0, Ranges((5, 9), (2, 4)), CALM),), runs[0].promise)
    return summarize(Outcome({}, source, None, 9.0, runs, 1.0), Options(targets=CALM))["remarks"]


@pytest.mark.slow
def test_a_stall_is_seen_by_all_who_were_due_in_it(inside: list[Told]) -> None:
    """Who waits for the stalled answer before it asks again sees one slow request; the schedule sees them all."""
    with open_endpoint(stall=(0.4, 1.4)) as (url, _):
        run = measure(url, num=60)(30.0, 0)
    ttft = np.array([seen.ttft for seen in run.seen], float)
    assert (ttft > 0.2).sum() >= 20
    assert figures(run)["ttft_p99_seconds"] > 0.9
    assert figures(run)["ttft_p50_seconds"] < 0.9


def test_requests_leave_when_they_are_due_whatever_the_server_does() -> None:
    """Nobody is answered before all have asked: who waited for the first answer would wait for ever."""
    with open_endpoint(gather=4) as (url, _):
        told = run_inside(job(url, [0.0, 0.05, 0.1, 0.15]))
    assert [answer.due for answer in told.answers] == pytest.approx([0.0, 0.05, 0.1, 0.15], abs=1e-6)
    assert all(answer.due <= answer.sent < answer.first for answer in told.answers)
    assert told.answers[0].first > 0.15
    assert [answer.error for answer in told.answers] == [""] * 4


@pytest.mark.slow
def test_a_generator_that_is_late_is_told_and_not_blamed_on_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = (
        "import time; from app.limit import generator; send = generator.Generator._send\n"
        "generator.Generator._send = lambda self, index: (time.sleep(0.03), send(self, index))\n"
        "generator.main()"
    )
    monkeypatch.setattr(dispatch, "COMMAND", (sys.executable, "-c", slow))
    with open_endpoint() as (url, _):
        run = measure(url, num=5, targets=SloTargets(0.2, None, None))(20.0, 0)
    assert run.lag_p50 >= 0.03
    assert not run.is_valid
    assert figures(run)["holds"] is None


def test_percentiles_are_those_of_the_raw_events(inside: list[Told]) -> None:
    with open_endpoint(first_seconds=0.01, gap_seconds=0.004) as (url, _):
        figure = figures(measure(url, num=30, output=6)(60.0, 0))
    counted = inside[0].answers[6:36]
    raw = {
        "ttft": [answer.first - answer.due for answer in counted],
        "itl": [gap for answer in counted for gap in answer.gaps],
        "e2e": [answer.finished - answer.due for answer in counted],
    }
    assert {name: len(values) for name, values in raw.items()} == {"ttft": 30, "itl": 150, "e2e": 30}
    for name, values in raw.items():
        for percent in (50, 95, 99):
            known = np.percentile(values, percent, method="inverted_cdf")
            assert figure[f"{name}_p{percent}_seconds"] == known


def test_a_gap_is_divided_by_the_tokens_of_its_piece() -> None:
    with open_endpoint(gap_seconds=0.04, pieces_of=4) as (url, _):
        told = run_inside(job(url, [0.0], tokens=12))
    (answer,) = told.answers
    assert (len(answer.gaps), answer.output_tokens) == (2, 12)
    assert all(gap >= 0.04 for gap in answer.gaps)
    assert answer.token_gaps() == pytest.approx([gap / 4 for gap in answer.gaps])


def test_one_piece_a_token_and_an_end_without_text_are_left_as_they_are() -> None:
    answer = Answer(gaps=[0.1, 0.2], sizes=[1, 9, 1], output_tokens=4)
    assert answer.token_gaps() == [0.1, 0.2]


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ({"streams": False}, "the answer is not a stream of events"),
        ({"has_usage": False}, "the stream held no usage"),
        ({"refused": ("made-up",)}, "HTTP 400"),
        ({"key": "secret"}, "HTTP 401"),
        ({"first_seconds": 1.0}, NOT_FINISHED),
    ],
)
def test_errors_are_counted_by_kind(behaviour: dict[str, Any], kind: str, inside: list[Told]) -> None:
    with open_endpoint(**behaviour) as (url, _):
        run = measure(url, num=4, may_fail=1.0, deadline=0.3 if kind == NOT_FINISHED else 10.0)(40.0, 0)
    assert figures(run)["errors_by_kind"] == {kind: 4}
    assert not replace(run, promise=Promise((CALM,), 0.01)).holds


def test_a_run_is_ended_for_its_errors_only_where_more_failed_than_may(inside: list[Told]) -> None:
    """Who fails at once is no one whose first text is late."""
    targets = SloTargets(0.2, None, None)
    with open_endpoint(refused=("made-up",)) as (url, _):
        lost = measure(url, num=40, targets=targets)(100.0, 0)
        borne = measure(url, num=40, targets=targets, may_fail=1.0)(100.0, 0)
    assert lost.stopped
    assert not lost.holds
    assert not borne.stopped
    assert borne.excesses()["ttft"] == 0


def test_nobody_there_is_an_error_of_its_own_kind() -> None:
    with open_endpoint() as (url, _):
        pass
    told = run_inside(job(url, [0.0]))
    assert told.answers[0].error.startswith("cannot connect: ")


@pytest.mark.long
def test_a_run_is_ended_when_it_is_certain_to_be_lost(inside: list[Told]) -> None:
    with open_endpoint(first_seconds=0.5) as (url, _):
        run = measure(url, num=400, targets=SloTargets(0.1, None, None))(20.0, 0)
    assert run.stopped
    assert 20 < len(run.seen) < 200
    assert run.excess > 10
    assert not any(seen.error for seen in run.seen)


@pytest.mark.slow
def test_what_a_server_tells_of_itself_is_asked_for_while_requests_run() -> None:
    text = "relevo:num_requests_running 3\nrelevo:num_requests_waiting 2\nrelevo:max_num_seqs 4\n"
    with open_endpoint(first_seconds=0.1, metrics=text) as (url, _):
        scrape = Endpoint(url, "", "chat", "made-up", {}, {}, has_metrics=True).scrape
        told = run_inside(job(url, [0.0, 1.3], scrape=scrape))
    assert [text for _, text in told.scrapes] == [text, text]
    assert 0.99 < told.scrapes[1][0] < 1.9


@pytest.mark.slow
def test_two_thousand_connections_are_open_at_once() -> None:
    number = 2000
    if not 2 * number <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        pytest.skip("a process may not have so many files open here")
    words = (sys.executable, "-m", "tests.app.gathering_server", str(number))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        told = run_job(job(url, [0.001 * place for place in range(number)], tokens=1, deadline=PATIENCE_SECONDS))
        server.stdin.close()
    assert [answer.error for answer in told.answers if answer.error] == []
    assert min(answer.first for answer in told.answers) > max(answer.sent for answer in told.answers)


@pytest.mark.parametrize("num_left", [2, 12])  # 5 are for requests that do not count
def test_a_machine_that_opens_no_more_connections_is_told_and_not_blamed_on_the_server(
    num_left: int, inside: list[Told]
) -> None:
    with open_endpoint() as (url, _), pytest.MonkeyPatch.context() as patched:
        left = iter(range(num_left))

        async def connect(generator: Generator, *words: Any) -> Any:
            if next(left, None) is None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return await opens(generator, *words)

        opens = Generator._open
        patched.setattr(Generator, "_open", connect)
        run = measure(url, num=20)(200.0, 0)
    assert (run.unknown, run.stopped) == ("wanting", True)
    assert figures(run)["holds"] is None
    assert len(inside[0].answers) > 12
    (said,) = [line for line in remarks_of(run) if "200 requests/s" in line]
    assert said == (
        "At 200 requests/s no connection was left here ([Errno 24] Too many open files), which says nothing of the "
        f"server: {MORE_CONNECTIONS}."
    )


def test_who_is_refused_waits_no_longer_than_for_the_refusal(inside: list[Told]) -> None:
    with open_endpoint(refused=("made-up",)) as (url, _):
        run = measure(url, num=20, may_fail=1.0)(40.0, 0)
    assert figures(run)["errors"] == 20
    assert figures(run)["waiting"] < 1
    with open_endpoint() as (url, _):
        pass
    nobody = measure(url, num=20, may_fail=1.0)(40.0, 0)
    assert {seen.error for seen in nobody.seen} == {"cannot connect"}
    assert figures(nobody)["waiting"] < 1


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for this machine's own address, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path / "certificate.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    words = ["openssl", "req", "-x509", *kind, *names, "-keyout", path, "-out", tmp_path / "public.pem"]
    subprocess.run(words, check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "public.pem").read_text())
    return path


def test_https_is_spoken_where_the_certificate_is_trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_endpoint(certificate=certificate) as (url, _):
        assert run_inside(job(url, [0.0])).answers[0].error.startswith("cannot connect: ")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.parent / "public.pem"))
        told = run_inside(job(url, [0.0, 0.0]))
    assert [answer.error for answer in told.answers] == ["", ""]
    assert [answer.output_tokens for answer in told.answers] == [2, 2]


@pytest.mark.slow
def test_the_process_ends_with_its_standard_input() -> None:
    with open_endpoint(first_seconds=30) as (url, _):
        process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job(url, [0.0], deadline=60).as_json()) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"ended": 0}
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == 0
        process.stdout.close()


@pytest.mark.slow
def test_half_a_job_ends_the_process_without_a_word() -> None:
    done = subprocess.run(COMMAND, input='{"host": "x"', capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_of_several_addresses_that_is_taken_at_which_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_endpoint() as (url, _):
        asked = job(url, [0.0])
        real, hosts = socket.getaddrinfo, ("127.0.0.2", "127.0.0.1")
        places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, asked.port)) for host in hosts]

        def look_up(host: str, *args: Any, **options: Any) -> Any:
            return places if host == "two.example" else real(host, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        told = run_inside(replace(asked, host="two.example"))
    assert [answer.error for answer in told.answers] == [""]


class Transport(asyncio.WriteTransport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Into nowhere."""


def test_a_response_ends_with_its_last_chunk_and_not_with_a_text_that_looks_like_it() -> None:
    ended: list[str] = []
    exchange = Exchange(b"", [], ended.append)
    exchange.connection_made(Transport())
    for data in (b"HTTP/1.1 200 OK\r\n\r\n", b": ping - 2026-01-31 12:00:00+00:00\r\n\r\n", b"\r\n0\r\n"):
        exchange.data_received(data)
        assert ended == []
    exchange.data_received(b"\r\n")
    exchange.connection_lost(None)
    assert ended == [""]


def test_a_response_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.limit.exchange.MAX_BYTES", 100)
    ended: list[str] = []
    exchange = Exchange(b"", [], ended.append)
    for _ in range(4):
        exchange.data_received(b"x" * 30)
    assert ended == ["more than 64 MiB came"]


@pytest.mark.slow
def test_an_interruption_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = subprocess.Popen

    def watched(*args: Any, **options: Any) -> Any:
        process = real(*args, **options)
        started.append(process.pid)
        return process

    def interrupt(_ended: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", watched)
    with open_endpoint(first_seconds=30) as (url, _), pytest.raises(KeyboardInterrupt):
        run_job(job(url, [0.0], deadline=60), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
