"""`relevo limit` that is interrupted: what was measured until then is told, what was changed is put back."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from app.limit.command import Looking, run_limit
from app.limit.endpoint import EndpointError, find_endpoint
from app.limit.interrupted import Ended, Interrupted, code_of
from app.limit.options import Options, make_source
from app.limit.policies import find_under
from app.limit.report import page_of
from app.limit.summary import summarize
from app.limit.tune import CutTuning, tune
from app.limit.tune_controls import SEATS
from app.limit.tune_result import tune_result
from app.limit.tune_words import tune_lines
from app.limit.watch import Watch
from app.limit.words import lines_of
from engine.config import SloTargets
from tests.app.endpoints import open_endpoint
from tests.app.test_limit_policies import SIMULATE, TARGETS, outcome_with_limit
from tests.app.test_limit_tune import OPTIONS, SEATS_CONTROL, Made, hill, timeless
from tests.app.test_limit_tune_live import process, served  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from app.limit.runs import Run
    from app.limit.summary import Outcome
    from app.limit.tune_controls import Values

ASKED = Options(targets=TARGETS)


class Killer(Watch):
    """Has this process asked to end when so many rates have been tried."""

    def __init__(self, num_runs: int, number: signal.Signals) -> None:
        self._left, self._number = num_runs, number

    def ran(self, kind: str, run: Run, *, factor: float | None = None) -> None:
        self._left -= kind == "rate"
        if not self._left:
            os.kill(os.getpid(), self._number)


def cut(number: int, outcome: Outcome) -> Callable[[Any], Outcome]:
    def find(_report: object) -> Outcome:
        raise Interrupted(number, replace(outcome, unfinished="The search was interrupted (SIGTERM)"))

    return find


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_each_signal_has_the_code_that_shells_know(number: signal.Signals, code: int) -> None:
    assert code_of(Ended(number)) == code_of(Interrupted(number, outcome_with_limit(2.0))) == code
    assert code_of(KeyboardInterrupt()) == 130


def test_what_was_measured_is_shown_and_written_as_unfinished(tmp_path: Path) -> None:
    lines: list[str] = []
    find, json_path, html_path = cut(signal.SIGTERM, outcome_with_limit(2.0)), tmp_path / "x.json", tmp_path / "x.html"
    assert run_limit(find, ASKED, json_path=json_path, html_path=html_path, echo=lines.append) == 143
    said = "The search was interrupted (SIGTERM). Until then the limit is 2.02 requests/s"
    assert any(line.startswith(said) for line in lines)
    assert "The search was interrupted (SIGTERM): this is what was measured by then." in lines
    result = json.loads(json_path.read_text())
    assert result["unfinished"] == "The search was interrupted (SIGTERM)"
    assert len(result["curve"]) == 2
    html = html_path.read_text()
    assert "Until then the limit is" in html
    assert "interrupted (SIGTERM): this is what was measured by then." in html
    assert html == page_of(result)


def test_where_nobody_is_told_it_ends_at_once() -> None:
    """As the process that the page `/ops/limit` has begun."""
    with pytest.raises(Interrupted) as raised:
        run_limit(cut(signal.SIGTERM, outcome_with_limit(2.0)), ASKED, echo=None)
    assert code_of(raised.value) == 143


class ClosedTerminal(io.StringIO):
    """Takes nothing any more."""

    def isatty(self) -> bool:
        return True

    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def gone(_line: str) -> None:
    raise OSError(errno.EPIPE, "Broken pipe")


def test_files_are_written_whoever_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    measured, json_path, html_path = outcome_with_limit(2.0), tmp_path / "x.json", tmp_path / "x.html"

    def find(report: Any) -> Outcome:
        report(1, 2, "closed loop")
        return cut(signal.SIGHUP, measured)(report)

    assert run_limit(find, ASKED, json_path=json_path, html_path=html_path, echo=gone) == 129
    assert json.loads(json_path.read_text())["unfinished"]
    assert "Until then the limit is" in html_path.read_text()
    with pytest.raises(BrokenPipeError):
        run_limit(lambda _: measured, ASKED, json_path=json_path, html_path=html_path, echo=gone)
    assert json.loads(json_path.read_text())["unfinished"] is None
    assert "The limit is" in html_path.read_text()
    folder = tmp_path / "folder"
    folder.mkdir()

    def find_and_remove(report: Any) -> Outcome:
        folder.rmdir()
        return find(report)

    with pytest.raises(FileNotFoundError, match=r"y\.json"):
        run_limit(find_and_remove, ASKED, json_path=folder / "y.json", echo=gone)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_interrupts_when_all_is_measured_waits_until_it_is_told(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    lines: list[str] = []

    def echo(line: str) -> None:
        if not lines:
            os.kill(os.getpid(), number)
        lines.append(line)

    with pytest.raises(Ended) as raised:
        run_limit(lambda _: outcome_with_limit(2.0), ASKED, json_path=path, echo=echo)
    assert code_of(raised.value) == 128 + number
    assert json.loads(path.read_text())["unfinished"] is None
    assert any(line.startswith("The limit is 2.02 requests/s") for line in lines)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_whoever_interrupts_while_the_server_ends_that_was_started_loses_nothing(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def open_server(_flags: object) -> Iterator[str]:
        with open_endpoint() as (url, _):
            yield url
        raise Ended(signal.SIGTERM)

    monkeypatch.setattr("app.limit.own_server.open_own_server", open_server)
    monkeypatch.setattr("app.cli.limit.fetch", lambda _model: None)
    monkeypatch.setattr(Looking, "find", lambda _self: outcome_with_limit(2.0))
    path = tmp_path / "x.json"
    code, out, err = run("limit", "--json", path)
    assert (code, err) == (143, "")
    assert "The limit is 2.02 requests/s" in out
    assert json.loads(path.read_text())["unfinished"] is None


def test_a_second_time_it_does_not_wait() -> None:
    lines: list[str] = []

    def echo(line: str) -> None:
        lines.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Ended):
        run_limit(lambda _: outcome_with_limit(2.0), ASKED, echo=echo)
    assert len(lines) == 2
    lines.clear()
    with pytest.raises(Ended):
        run_limit(cut(signal.SIGINT, outcome_with_limit(2.0)), ASKED, echo=echo)
    assert len(lines) == 1


def test_the_reason_that_there_is_no_limit_is_the_interruption_and_no_rate() -> None:
    lost = replace(outcome_with_limit(2.0), unfinished="The search was interrupted (SIGINT)")
    early = summarize(replace(lost, runs=[]), ASKED)
    assert early["why"] == "The search was interrupted (SIGINT), before any rate was tried."
    assert f"No limit: {early['why']}" in lines_of(early)
    result = summarize(replace(lost, runs=lost.runs[1:]), ASKED)
    said = "The search was interrupted (SIGINT), before any rate was known to hold (tried down to 2.04 requests/s)."
    assert (result["limit"], result["why"]) == (None, said)


def test_the_policies_that_were_measured_are_compared_and_the_others_named() -> None:
    def find(cut_at: str, error: KeyboardInterrupt, name: str, *_: object) -> Outcome:
        if name == cut_at:
            raise error
        return outcome_with_limit({"static": 2.0, "dynamic": 3.0, "continuous": 5.0}[name])

    names = ("static", "dynamic", "continuous")
    half = replace(outcome_with_limit(4.0), unfinished="The search was interrupted (SIGINT)")
    with pytest.raises(Interrupted) as raised:
        find_under(names, partial(find, "dynamic", Interrupted(signal.SIGINT, half)), ASKED, lambda *_: None)
    result = summarize(raised.value.outcome, ASKED)
    assert result["unfinished"] == "The search was interrupted (SIGINT); not measured: continuous"
    assert [one["unfinished"] is None for one in result["policies"].values()] == [True, False]
    assert result["ratio"]["dynamic_over_static"]["estimate"] == pytest.approx(2, rel=0.01)
    assert "The search was interrupted (SIGINT); not measured: continuous." in lines_of(result)
    with pytest.raises(Interrupted) as raised:
        find_under(names, partial(find, "continuous", Ended(signal.SIGTERM)), ASKED, lambda *_: None)
    assert [*raised.value.outcome.policies] == ["static", "dynamic"]
    assert raised.value.number == signal.SIGTERM
    lost = replace(outcome_with_limit(5.0), runs=outcome_with_limit(5.0).runs[1:])

    def find_last(name: str, *_: object) -> Outcome:
        return lost if name == "continuous" else cut(signal.SIGTERM, half)(0)

    with pytest.raises(Interrupted) as raised:
        find_under(("continuous", "static"), find_last, ASKED, lambda *_: None)
    result = summarize(raised.value.outcome, ASKED)
    assert result["why"] == result["policies"]["continuous"]["why"]
    assert result["why"].startswith("The targets hold at no rate that was tried")
    with pytest.raises(Ended, match=str(int(signal.SIGTERM))) as nothing:
        find_under(names, partial(find, "static", Ended(signal.SIGTERM)), ASKED, lambda *_: None)
    assert not isinstance(nothing.value, Interrupted)


def made_until(measure: Made, last: int, error: BaseException) -> Callable[..., Run]:
    """The same until so many runs were made; then it fails."""

    def measured(values: Values, rate: float, seed: int, *, whole: bool = False) -> Run:
        if len(measure.runs) == last:
            raise error
        return measure(values, rate, seed, whole=whole)

    return measured


def test_tuning_that_is_interrupted_at_whatever_run_tells_what_it_has() -> None:
    whole = Made(hill)
    tune(whole, [SEATS_CONTROL], {SEATS: 16}, 8.0, OPTIONS, timeless())
    for last in (0, 3, len(whole.runs) // 2, len(whole.runs) - 1):
        measure = Made(hill)

        until = made_until(measure, last, Ended(signal.SIGTERM))
        with pytest.raises(CutTuning) as raised:
            tune(until, [SEATS_CONTROL], {SEATS: 16}, 8.0, OPTIONS, timeless())
        done = raised.value.tuned
        own = [rate for values, rate, *_ in measure.runs if values == {SEATS: 16}]
        assert len(done.present.runs) == len(own)
        told = tune_result(done, applied=False)
        lines = tune_lines(told)
        assert (told["unfinished"], told["complete"]) == ("The search was interrupted (SIGTERM)", False)
        assert not any("--duration" in line for line in lines)
        if not done.pairs:
            assert not told["evidence"]["believed"]
            assert lines[-1].startswith("Whether other settings are better is not known: ")
            assert "the search was interrupted" in lines[-1]
            assert done.best is done.present


def test_a_server_that_fails_amid_tuning_ends_it_with_what_was_tried() -> None:
    whole = Made(hill)
    tune(whole, [SEATS_CONTROL], {SEATS: 16}, 8.0, OPTIONS, timeless())
    for last in (0, 3, len(whole.runs) // 2, len(whole.runs) - 1):
        measure = Made(hill)

        until = made_until(measure, last, EndpointError("http://made.up cannot be reached."))
        if last == 0:
            with pytest.raises(EndpointError, match="cannot be reached"):
                tune(until, [SEATS_CONTROL], {SEATS: 16}, 8.0, OPTIONS, timeless())
            continue
        done = tune(until, [SEATS_CONTROL], {SEATS: 16}, 8.0, OPTIONS, timeless())
        told = tune_result(done, applied=False)
        assert (told["unfinished"], told["complete"]) == ("http://made.up cannot be reached", False)
        assert len(told["candidates"]) <= len(measure.runs)
        assert len(done.present.runs) == len([values for values, *_ in measure.runs if values == {SEATS: 16}])
        if not done.pairs:
            assert "the search was ended before its time" in tune_lines(told)[-1]
            assert done.best is done.present


@pytest.mark.long
def test_a_search_over_http_keeps_its_runs() -> None:
    asked = Options(targets=SloTargets(1.0, None, None), factor=40.0, requests=10, duration=30.0, streams=4)
    with open_endpoint(first_seconds=0.02) as (url, _):
        look = Looking(find_endpoint(url, "chat"), make_source(asked), asked, lambda *_: None, Killer(1, signal.SIGINT))
        with pytest.raises(Interrupted) as raised:
            look.find()
    result = summarize(raised.value.outcome, asked)
    assert len(result["curve"]) == 1
    assert result["single_user"] is not None
    assert result["unfinished"] == "The search was interrupted (SIGINT)"


def interrupted(words: list[str], told: Path, kind: str, number: signal.Signals) -> tuple[int, str, str]:
    """Run a command, and end it when it has told of a run of that kind."""
    told.touch()
    command = [sys.executable, "-m", "app.cli", "limit", *words, "--progress-json", str(told)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        with told.open() as lines:
            while running.poll() is None and f'"kind": "{kind}"' not in (lines.readline() or "\n"):
                time.sleep(0.01)
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    return running.returncode, out, err


@pytest.mark.slow
def test_the_command_tells_and_writes_and_ends_with_the_code(tmp_path: Path) -> None:
    words = [*SIMULATE[1:], "--json", str(tmp_path / "x.json")]
    code, out, err = interrupted(words, tmp_path / "lines", "rate", signal.SIGINT)
    assert (code, err) == (130, "")
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["unfinished"] == "The search was interrupted (SIGINT)"
    assert result["curve"]
    assert f"{result['unfinished']}: this is what was measured by then." in out
    assert json.loads((tmp_path / "lines").read_text().splitlines()[-1])["result"] == result


# Its standard input, which is a terminal, becomes that of its session; where the tests ignore what is told of its end,
# it does not.
ON_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "app.cli", *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_terminal_that_closes_leaves_the_files_and_its_code(tmp_path: Path) -> None:
    told, json_path, html_path = (tmp_path / name for name in ("lines", "x.json", "x.html"))
    words = [*SIMULATE, "--json", str(json_path), "--html", str(html_path), "--progress-json", str(told)]
    told.touch()
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as running:
        os.close(theirs)
        with told.open() as lines:
            while running.poll() is None and '"kind": "rate"' not in (lines.readline() or "\n"):
                time.sleep(0.01)
        os.close(terminal)
    assert running.returncode == 129
    assert json.loads(json_path.read_text())["unfinished"] == "The search was interrupted (SIGHUP)"
    assert "interrupted (SIGHUP): this is what was measured by then." in html_path.read_text()


@pytest.mark.long
def test_a_live_tuning_that_is_ended_puts_the_settings_back_and_tells_what_it_tried(
    served: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ["--url", served, "--tune", "max_num_seqs", "--duration", "60", "--requests", "10", "--factor", "40"]
    words += ["--ttft-p95", "1", "--itl-p95", "none", "--json", str(tmp_path / "x.json")]
    code, out, err = interrupted(words, tmp_path / "lines", "rate", signal.SIGTERM)
    assert (code, err) == (143, "")
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["tune"]["unfinished"] == "The search was interrupted (SIGTERM)"
    assert result["settings"]["max_num_seqs"] == result["tune"]["present"]["settings"]["max_num_seqs"]
    assert "Whether other settings are better is not known: the search was interrupted." in out
    config = httpx.get(f"{served}/admin/config").json()
    assert config["reverts"] == {}
    assert config["effective"] == config["start"]
