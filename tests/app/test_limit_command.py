"""`relevo limit` as a command: servers that cannot be measured, wrong use, the simulator, and real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.limit.against import against_lines
from app.limit.command import Looking
from app.limit.endpoint import EndpointError, find_endpoint
from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.options import Options, make_source
from app.limit.own_server import open_own_server
from app.limit.runs import Promise, Run, Seen
from app.limit.scrapes import Observed, bound_by, observe
from app.limit.summary import Outcome, summarize
from app.limit.words import lines_of, per_second
from app.render import numbers
from engine.config import SloTargets
from tests.app.endpoints import open_endpoint
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

SIMULATE = (
    "limit", "--simulate", "--memory-gb-per-second", "20", "--tflops", "0.5", "--parameters", "134515008",
    "--kv-bytes-per-token", "23040",
)  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["limit", "--ttft-p95", "0"], "a number above 0, or none"),
        (["limit", "--from", "x.json", "--html", "./x.json"], "--from and --html are the same file"),
        (["limit", "--mix", "x.toml", "--json", "x.toml"], "--mix and --json are the same file"),
        (["limit", "--json", "x", "--html", "x"], "--json and --html are the same file"),
        (["limit", "--max-error-share", "2"], "from 0 to 1"),
        (["limit", "--duration", "nan"], "must be a number above 0"),
        (["limit", "--workload", "mooncake", "--mix", "x"], "only one of --workload, --mix"),
        (["limit", "--gap-cv", "2"], "--arrivals gamma"),
        (["limit", "--arrivals", "gamma"], "--gap-cv is missing"),
        (["limit", "--url", "localhost:1"], "no address of a server"),
        (["limit", "--url", "http://x", "--max-num-seqs", "4"], "leave it out with --url"),
        (["limit", "--url", "http://x", "--simulate"], "either --simulate or --url"),
        (["limit", "--api-key", "x"], "--api-key is for the server of --url"),
        (["limit", "--admin-token", "x"], "--admin-token is for the server of --url"),
        (["limit", "--url", "http://x", "--api-key", "@nowhere"], "file of --api-key, nowhere, cannot be read"),
        (["limit", "--url", "http://x", "--admin-token", "a\nX-Other: b"], "--admin-token is no key"),
        (["limit", "--url", "http://x", "--api-key", ""], "--api-key is no key"),
        (["limit", "--tflops", "1"], "add --simulate"),
        (["limit", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["limit", "--workload", "azure-cod"], "did you mean azure-code?"),
        ([*SIMULATE, "--seats", "4", "--max-num-seqs", "8"], "contradict each other"),
        ([*SIMULATE, "--json", "nowhere/x.json"], "cannot be written"),
        ([*SIMULATE, "--against", "nowhere.json"], "nowhere.json"),
        ([*SIMULATE, "--ttft-p95", "none", "--itl-p95", "none"], "Without a target"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(
    run: Any, argv: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"key": "right"}, "refuses who has no key"),
        ({"streams": False}, "does not stream"),
        ({"has_usage": False}, "no usage"),
    ],
)
def test_a_server_that_cannot_be_measured_is_told_with_what_to_do(
    run: Any, behaviour: dict[str, Any], expected: str
) -> None:
    with open_endpoint(**behaviour) as (url, _):
        code, out, err = run("limit", "--url", url)
    assert (code, out) == (1, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_server_that_is_not_there_is_told(run: Any) -> None:
    with open_endpoint() as (url, _):
        pass
    code, _, err = run("limit", "--url", url)
    assert code == 1
    assert "cannot be reached" in err


def test_a_wrong_key_is_told_and_the_right_one_is_taken_from_a_file(run: Any, tmp_path: Path) -> None:
    with open_endpoint(key="right", context=64) as (url, _):
        code, _, err = run("limit", "--url", url, "--api-key", "wrong")
        assert (code, "refuses the key" in err) == (1, True)
        (tmp_path / "key").write_text("right\n")
        code, _, err = run("limit", "--url", url, "--api-key", f"@{tmp_path / 'key'}", "--factor", "1")
    assert code == 2
    assert "requests are longer than the context of 64 tokens; --factor" in err


def test_metrics_that_want_an_admin_token_are_read_with_it() -> None:
    text = "relevo:num_requests_running 0\n"
    with open_endpoint(key="right", metrics=text, metrics_key="admin") as (url, _):
        without = find_endpoint(url, "chat", key="right")
        found = find_endpoint(url, "chat", key="right", admin_token="admin")
        with pytest.raises(EndpointError, match=r"refuses the admin token \(HTTP 401\); .* --admin-token"):
            find_endpoint(url, "chat", key="right", admin_token="wrong")
        assert found.metrics() == {"num_requests_running": 0.0}
    assert (without.has_metrics, without.hides_metrics) == (False, True)
    assert (found.has_metrics, found.hides_metrics) == (True, False)
    assert "Bearer right" in found.request("x", 1)
    assert "admin" not in repr(found)


def test_what_a_server_takes_is_found_out() -> None:
    with open_endpoint(context=512, refused=("ignore_eos", '"max_tokens"')) as (url, behaviour):
        found = find_endpoint(f"{url}/v1/", "completions")
    assert (found.model, found.context, found.ignores_end) == ("made-up", 512, False)
    assert found.max_tokens_name == "max_completion_tokens"
    assert (found.spelling.tokens_per_word, found.spelling.extra_tokens) == (1.0, 7.0)
    assert not found.has_metrics
    assert "messages" not in behaviour.bodies[-1]
    assert "Authorization" not in found.request("x", 1)


def looking(url: str, targets: SloTargets, **options: Any) -> tuple[Looking, Options]:
    asked = Options(targets=targets, **{"factor": 40.0, "duration": 16.0, "requests": 20, "streams": 4, **options})
    return Looking(find_endpoint(url, "chat"), make_source(asked), asked, lambda *_: None), asked


@pytest.mark.long
def test_targets_that_one_user_alone_cannot_have_are_told_with_what_that_user_sees() -> None:
    with open_endpoint(first_seconds=0.2) as (url, _):
        look, asked = looking(url, SloTargets(0.1, None, None))
        result = summarize(look.find(), asked)
    assert result["limit"] is None
    assert "Not even one user alone" in result["why"]
    assert result["single_user"]["ttft_p50_seconds"] > 0.2
    assert result["curve"] == []
    assert any("One user alone: first token 2" in line for line in lines_of(result))


def test_a_server_that_fails_one_user_alone_is_not_measured() -> None:
    with open_endpoint() as (url, behaviour):
        look, _ = looking(url, SloTargets(1.0, None, None))
        behaviour.refused = ("made-up",)
        with pytest.raises(EndpointError, match=r"failed \(HTTP 400\)"):
            look.find()


def test_a_simulated_limit_is_written_and_compared_with_itself(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "limit.json"
    asked = (*SIMULATE, "--requests", "100", "--factor", "20", "--repeats", "2", "--json", path)
    code, out, err = run(*asked, "--think-time", "10", "--price-per-hour", "2")
    assert (code, err) == (0, "")
    result = json.loads(path.read_text())
    limit = result["limit"]
    assert {"requests_per_second", "goodput", "bound_by"} <= limit.keys()
    assert limit["low"] <= limit["requests_per_second"] <= limit["high"]
    assert result["targets"]["ttft_p95_seconds"] == 2.0
    below = [run["holds"] for run in result["curve"] if run["rate"] <= limit["requests_per_second"]]
    lost = [run["rate"] for run in result["curve"] if not run["holds"]]
    assert all(below)
    assert below
    assert limit["requests_per_second"] < min(lost) <= limit["requests_per_second"] * 1.05
    stay = limit["users"] / limit["requests_per_second"] - 10
    assert 0 < stay < 10
    speed = limit["output_tokens_per_second"]
    assert limit["cost_per_million_output_tokens"] == pytest.approx(2 / 3600 / speed * 1e6)
    assert f"The limit is {per_second(limit['requests_per_second'])} requests/s" in out
    assert "A p95 wants 300 finished requests; here are runs with 100" in out
    code, out, _ = run(*asked, "--against", path)
    assert code == 0
    assert "That is the same." in out
    assert "Other" not in out


@pytest.mark.parametrize(
    ("target", "why", "is_searched"),
    [
        ("0.037", "The targets hold at no rate that was tried", True),
        ("0.001", "Not even one user alone is served within the targets: the first token takes ", False),
    ],
)
def test_where_no_rate_holds_there_is_no_limit_and_it_is_said_why(
    run: Any, tmp_path: Path, target: str, why: str, is_searched: bool
) -> None:
    path = tmp_path / "limit.json"
    code, out, _ = run(*SIMULATE, "--requests", "20", "--factor", "20", "--ttft-p95", target, "--json", path)
    assert code == 1
    result = json.loads(path.read_text())
    assert result["limit"] is None
    assert result["why"].startswith(why)
    assert f"No limit: {result['why']}" in out
    assert result["single_user"]["ttft_p95_seconds"] > float(target)
    assert (result["curve"] != []) == is_searched
    assert f"One user alone: first token {numbers.seconds(result['single_user']['ttft_p50_seconds'])}" in out


def test_each_class_of_work_is_held_to_its_own_targets() -> None:
    quick, patient = SloTargets(1.0, None, None), SloTargets(None, None, 30.0)
    lengths = Ranges((5, 5), (2, 2))
    classes = (WorkClass("assistant", 3, lengths, quick), WorkClass("summaries", 1, lengths, patient))
    promise = Promise((quick, patient), 0.01)

    def run_at(rate: float, ttft: float, e2e: float) -> Run:
        seen = [
            Seen(place / rate, 0.0, e2e, ttft, e2e, 5, 2, 1, 0, (0.1,), work_class=place % 2) for place in range(400)
        ]
        return Run(rate, 0, promise, tuple(seen), cpu_share=0.25)

    # The summaries' first tokens may come late, and the assistant's last ones.
    runs = [run_at(1.0, 0.5, 20.0), run_at(2.0, 0.9, 31.0), run_at(3.0, 1.5, 20.0)]
    assert [run.holds for run in runs] == [True, False, False]
    assert runs[1].excesses()["ttft of class 1"] == 0
    assert runs[1].excesses()["e2e of class 2"] == runs[2].excesses()["ttft of class 1"] == 20
    outcome = Outcome({"model": "made up"}, Source(classes, promise), None, 3.0, runs[:2], 1.0)
    lines = lines_of(summarize(outcome, Options(targets=quick)))
    assert "Targets of summaries (share 1): 95 % of the whole answer within 30 s" in lines
    bound = "what bound it is unknown (the server shows no metrics); beyond it whole answers of class 2 take too long"
    assert any(bound in line for line in lines)
    assert any(line.split()[:4] == ["2.00", "0", "summaries", "900"] for line in lines)
    assert any("by a process that took 25" in line for line in lines)


def test_where_the_generator_was_late_it_is_the_bound_and_not_the_server() -> None:
    targets = SloTargets(1.0, None, None)
    promise = Promise((targets,), 0.01)
    source = Source((WorkClass("requests", 1, Ranges((5, 5), (2, 2)), targets),), promise)

    def run_at(rate: float, ttft: float, lag: float) -> Run:
        seen = [Seen(place / rate, lag, ttft, ttft, ttft, 5, 2, 1, 0) for place in range(400)]
        return Run(rate, 0, promise, tuple(seen))

    def result_of(*runs: Run) -> dict[str, Any]:
        return summarize(Outcome({}, source, None, 3.0, runs, 1.0), Options(targets=targets))

    held, late, lost = run_at(1.0, 0.5, 0.0), run_at(1.1, 3.0, 0.06), run_at(1.2, 3.0, 0.0)
    result = result_of(held, late)
    assert (result["limit"]["requests_per_second"], result["limit"]["bound_by"]) == (1.0, "the generator")
    assert result["limit"]["is_at_least"]
    assert [run["holds"] for run in result["curve"]] == [True, None]
    assert any("unknown: sent 60" in line for line in lines_of(result))
    assert "At 1.1 requests/s the generator itself was late; these runs say nothing of the server." in result["remarks"]
    beyond = result_of(held, late, lost)["limit"]
    assert (beyond["bound_by"], beyond["broken_promise"]) == ("unknown: the server shows no metrics", "ttft")
    assert not beyond["is_at_least"]
    failed = Seen(0.0, 0.0, 0.1, None, None, 5, 0, 0, 0, error="HTTP 503")
    assert "Errors: 2 HTTP 503." in result_of(replace(held, seen=(*held.seen, failed, failed)))["remarks"]
    nothing = result_of(late)
    assert nothing["limit"] is None
    assert "The generator was late by 60" in nothing["why"]


def test_results_of_other_targets_are_said_to_be_of_another_thing() -> None:
    limit = {"requests_per_second": 4.0, "low": 3.9, "high": 4.1}
    now = {"limit": limit, "targets": {"ttft": 1}, "classes": [], "workload": {}}
    then = {**now, "limit": {"requests_per_second": 2.0, "low": 1.9, "high": 2.1}, "targets": {"ttft": 2}}
    assert against_lines(now, then) == [
        "Other targets than then: the limits are not of the same thing.",
        "Then: 2.00 requests/s (1.90 to 2.10). Now: 4.00 requests/s (3.90 to 4.10). That is 2.00 times.",
    ]
    assert "Now: no limit" in against_lines({**now, "limit": None}, then)[-1]


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (None, "unknown: the server shows no metrics"),
        (Observed(running=3, max_num_seqs=8, preemptions=2), "KV memory"),
        (Observed(running=3, max_num_seqs=8, kv_cache_usage=0.97), "KV memory"),
        (Observed(running=7.8, max_num_seqs=8, kv_cache_usage=0.5), "sequences"),
        (Observed(running=3, max_num_seqs=8, step_tokens=120, token_budget=128), "token budget"),
        (Observed(running=3, waiting=4), "sequences or token budget"),
        (Observed(running=3, max_num_seqs=8, step_tokens=20, token_budget=128), "compute"),
    ],
)
def test_what_bounds_a_server_is_read_from_what_it_tells(observed: Observed | None, expected: str) -> None:
    assert bound_by(observed) == expected


def test_metrics_of_vllm_are_read_too() -> None:
    def scrape(running: int, preempted: int) -> str:
        return (
            f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_preemptions_total{{engine="0"}} {preempted}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} 0.{running}\n'
        )

    observed = observe([scrape(2, 1), "", "<html>", scrape(4, 3)])
    assert observed == Observed(running=3.0, kv_cache_usage=0.4, preemptions=2)
    assert observe([]) is None


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment by which a process, and all that it starts, can be found."""
    mark = uuid.uuid4().hex
    yield {**os.environ, "LIMIT_TEST": mark}
    assert not processes(mark)


def processes(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_everything_that_was_started(number: signal.Signals, marked: dict[str, str]) -> None:
    with open_endpoint(first_seconds=5.0, context=4096) as (url, behaviour):
        words = [sys.executable, "-m", "app.cli", "limit", "--url", url, "--seats", "2"]
        process = subprocess.Popen(words, env=marked, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        until = time.monotonic() + PATIENCE_SECONDS
        while not behaviour.bodies and time.monotonic() < until:
            time.sleep(0.02)
        assert any("app.limit.generator" in words for words in processes(marked["LIMIT_TEST"]))
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out, err) == (128 + number, "", "")


@pytest.mark.long
def test_the_server_that_is_started_answers_and_is_gone_afterwards(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.serve_command", str(tmp_path / "broken"))
    with open_own_server(["--max-num-seqs", "3"], command) as url:
        assert find_endpoint(url, "chat").has_metrics
    with pytest.raises(EndpointError, match="cannot be reached"):
        find_endpoint(url, "chat")
    with (
        pytest.raises(EndpointError, match=r"did not start: .*max_num_seqs"),
        open_own_server(["--max-num-seqs", "x"], command),
    ):
        pass


@pytest.mark.long
def test_a_whole_search_over_real_sockets(tmp_path: Path) -> None:
    """The server over the fake engine, 20 ms a step and 4 seats, with all that the command does."""
    fake = json.dumps({"step_seconds": 0.02, "max_model_len": 2048, "num_blocks": 4096})
    path = tmp_path / "limit.json"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.serve_fake", fake], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        words = [
            "--url",
            url,
            "--duration",
            "24",
            "--factor",
            "40",
            "--requests",
            "20",
            "--repeats",
            "2",
            "--json",
            path,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", "limit", *map(str, words)], capture_output=True, text=True, check=False
        )
        server.terminate()
    assert done.stderr == ""
    result = json.loads(path.read_text())
    assert done.returncode == (0 if result["limit"] else 1)
    assert result["server"]["model"] == "fake"
    assert 0.02 <= result["single_user"]["itl_p50_seconds"] < 0.2
    assert [run["errors"] for run in result["curve"]] == [0] * len(result["curve"])
    assert all(run["preemptions"] == 0 for run in result["curve"])
    for run in result["curve"]:
        assert run["requests"] == 20 or run["stopped_early"]
        assert run["observed"]["max_num_seqs"] == 4
        assert (run["unknown"] == "late") == (run["dispatch_lag_p99_seconds"] > 0.05 * 0.25)
        assert (run["holds"] is None) == (run["unknown"] is not None)
