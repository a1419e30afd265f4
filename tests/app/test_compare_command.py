"""`relevo compare` as a command: wrong use, the simulator, and a tiny real model from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from app.compare.load import Source
from app.compare.measure import StepWatch
from app.compare.options import Options
from app.compare.rounds import compare_on, config_for
from app.compare.runs import POLICIES
from app.compare.simulated import MIN_REQUESTS_FOR_PROCESSES, Machine, _run_all, compare_simulated
from engine.config import SloTargets
from engine.cost_model import CostModel, Curve
from engine.errors import EngineError
from engine.scripted_runner import ScriptedRunner
from tests.app.killed import be_killed
from tests.fakes import FakeRunner, fake_config, open_fake_engine
from tests.patience import PATIENCE_SECONDS
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trio.testing import MockClock

DESCRIBED = ("--memory-gb-per-second", "20", "--tflops", "0.5", "--parameters", "134515008")
KV_BYTES = ("--kv-bytes-per-token", "23040")
SIMULATE = ("compare", "--simulate", *DESCRIBED, *KV_BYTES)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["compare", "--requests", "0"], "whole number of at least 1"),
        (["compare", "--seats", "0"], "whole number of at least 1"),
        (["compare", "--rate", "-1"], "must be a number above 0"),
        (["compare", "--rate", "nan"], "must be a number above 0"),
        (["compare", "--price-per-hour", "-0.5"], "must be a number above 0"),
        (["compare", "--duration", "0"], "must be a number above 0"),
        (["compare", "--seats", "4", "--max-num-seqs", "8"], "contradict each other"),
        (["compare", "--seats", "5000"], "1 to 4096"),
        (["compare", "--policy", "static"], "leave --policy out"),
        (["compare", "--admission", "hope"], "on_demand, reserve, predicted"),
        (["compare", "--workload", "azure-conversations"], "did you mean azure-conversation?"),
        (["compare", "--workload", "mooncake", "--trace", "x"], "either --workload or --trace"),
        (["compare", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["compare", "--tflops", "1"], "add --simulate"),
        (["compare", "--simulate"], "--cost-model FILE, or --memory-gb-per-second"),
        (["compare", "--simulate", "--tflops", "1"], "together"),
        (["compare", "--simulate", "--cost-model", "nowhere.json"], "nowhere.json"),
        (["compare", "--simulate", *DESCRIBED], "2 x layers x KV heads x head size x bytes"),
        ([*SIMULATE, "--repeats", "2"], "leave --repeats out"),
        ([*SIMULATE, "--seats", "64", "--memory", "2MiB"], "64 seats need a KV block each"),
        ([*SIMULATE, "--json", "nowhere/x.json"], "cannot be written"),
        ([*SIMULATE, "--html", "nowhere/x.html"], "cannot be written"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    run: Any, argv: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.startswith("relevo: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "no trace\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,x\n"])
def test_a_malformed_trace_is_refused_before_anything_is_loaded(run: Any, tmp_path: Path, content: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(content)
    code, _, err = run("compare", "--trace", trace, "--model", tmp_path / "nowhere.gguf")
    assert code == 2
    assert "trace.csv" in err


def test_a_file_that_is_no_cost_model_is_refused(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    path.write_text('{"machine": {}, "rows": []}')
    code, _, err = run("compare", "--simulate", "--cost-model", path)
    assert code == 2
    assert "cost model" in err


def test_an_interruption_is_told_by_the_exit_code_and_leaves_no_file(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.compare.simulated.compare_simulated", interrupt)
    fresh, known = tmp_path / "figures.json", tmp_path / "page.html"
    known.write_text("from before")
    code, _, err = run(*SIMULATE, "--json", fresh, "--html", known)
    assert (code, err) == (130, "")
    assert not fresh.exists()
    assert known.read_text() == "from before"


@pytest.mark.parametrize("rate", [(), ("--rate", "3")])
def test_a_simulation_writes_figures_and_page(run: Any, tmp_path: Path, rate: tuple[str, ...]) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    asked = ("--requests", "200", "--factor", "8.123456789", "--seats", "8", *rate)
    code, out, err = run(*SIMULATE, *asked, "--json", figures, "--html", page)
    assert (code, err) == (0, "")
    result = json.loads(figures.read_text())
    assert result["simulated"] is True
    assert list(result["policies"]) == list(POLICIES)
    assert result["policies"]["continuous"]["samples"] == 200
    assert result["ratio"]["continuous_over_static"]["median"] > (1 if not rate else 0.99)
    assert "continuous over static" in out
    caveat = "Of the described machine attention's arithmetic and the server's own time are not counted"
    assert caveat in out
    assert caveat.replace("'", "&#39;") in page.read_text()
    assert page.read_text().count('<svg class="steps"') == 3
    # The line to repeat it gives the same figures.
    again = tmp_path / "again.json"
    assert run(*result["command"].split()[1:], "--json", again)[0] == 0
    repeated = json.loads(again.read_text())
    assert {**repeated, "seconds": 0} == {**result, "seconds": 0}


async def test_simulator_and_engine_take_the_same_steps(autojump_clock: MockClock) -> None:
    """The simulator with a step of constant length against the real actors over the fake model."""
    config = fake_config(max_num_seqs=4, max_num_batched_tokens=32, block_size=16)
    options = Options(requests=24, factor=20.0, repeats=1)
    machine = Machine(CostModel(Curve(((1.0, 0.05), (2.0, 0.05)))), {"processor": "a fake"}, "fake", "none", 512, 2048)
    result, simulated = compare_simulated(machine, config, options)
    watch = StepWatch()
    runner = ScriptedRunner(FakeRunner(2048, 16), watch)
    engine_config = config_for(config, max_requests=24)
    async with open_fake_engine(
        engine_config, num_blocks=2048, max_model_len=512, step_seconds=0.05, runner=runner
    ) as engine:
        measured = await compare_on(engine, watch, Source(options, max_requests=24), options, echo=str)
    for ours, real in zip(simulated.runs, measured.runs, strict=True):
        assert (ours.policy, ours.counts) == (real.policy, real.counts)
        assert ours.seconds == pytest.approx(real.seconds)
        for one, other in zip(ours.answers, real.answers, strict=True):
            assert one.first_token == pytest.approx(other.first_token)
            assert one.finished == pytest.approx(other.finished)
    assert result["policies"]["static"]["steps"] == measured.runs[0].counts.steps


def test_slow_gaps_are_counted_one_by_one() -> None:
    """Beside a long prompt steps are slow, and between prompts they are not."""
    config = replace(fake_config(max_num_seqs=4, block_size=16), slo=SloTargets(itl_p95_seconds=0.02))
    curve = Curve(((1.0, 0.01), (8.0, 0.01), (64.0, 0.1)))
    machine = Machine(CostModel(curve), {"processor": "a fake"}, "fake", "none", 512, 2048)
    _, compared = compare_simulated(machine, config, Options(requests=24, factor=8.0))
    (run,) = [run for run in compared.runs if run.policy == "continuous"]
    assert any(0 < answer.num_slow_gaps < answer.num_output_tokens - 1 for answer in run.answers)


@pytest.mark.slow
def test_a_killed_process_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(EngineError, match="was killed"):
        list(_run_all(be_killed, MIN_REQUESTS_FOR_PROCESSES))


SAYS_WHEN_PROCESSES_BEGIN = """
import os, sys
import app.compare.simulated as simulated
from app.cli import main

def begin(*args, begin=simulated._begin):
    begun = begin(*args)
    print("begun", flush=True)
    return begun

simulated._begin, os.cpu_count = begin, lambda: 2
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("send", "after"), [(os.kill, 1.5), (os.killpg, 0.0)])
def test_an_interruption_leaves_no_process_behind(send: Callable[[int, int], None], after: float) -> None:
    """Of this process alone, as `kill -INT` does it, or of its whole group, as a key on a terminal does."""
    words = [sys.executable, "-c", SAYS_WHEN_PROCESSES_BEGIN, *SIMULATE, "--requests", "40000"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(after)
        send(process.pid, signal.SIGINT)
        try:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    assert (process.returncode, out.replace("begun\n", ""), err) == (130, "", "")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _has_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _has_members(process.pid)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_tiny_real_model_from_end_to_end(run: Any, tmp_path: Path) -> None:
    config = make_config(context_length=256)
    model = write_gguf(tmp_path / "tiny.gguf", config, make_tensors(config))
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    asked = ("--requests", "12", "--factor", "40", "--repeats", "2", "--seats", "4", "--num-threads", "1")
    code, out, err = run("compare", "--model", model, *asked, "--memory", "4MiB", "--json", figures, "--html", page)
    assert (code, err) == (0, "")
    assert "2 rounds through four policies" in out
    result = json.loads(figures.read_text())
    assert (result["model"], result["rounds"], result["simulated"]) == ("tiny", 2, False)
    assert result["policies"]["static"]["padded_rows"] > 0
    assert result["policies"]["continuous"]["steps"] < result["policies"]["static_dropped"]["steps"]
    assert result["machine"]["processor"]
    assert page.read_text().count('<svg class="steps"') == 3
