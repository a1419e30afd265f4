"""The comparison with other servers: starting, stopping, wrong use, and whole runs against fakes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.versus import __main__ as versus
from tests.bench.versus import servers
from tests.bench.versus.client import NOT_FINISHED
from tests.bench.versus.servers import Program, ServerError, open_server, usage_of
from tests.bench.versus.work import make_work
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PYTHON = shlex.quote(sys.executable)


# Servers

BURN_IN_A_CHILD = """
import subprocess, sys, time
burn = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
NEEDS_PROC = pytest.mark.skipif(not Path("/proc").exists(), reason="the system has no /proc")


@NEEDS_PROC
@pytest.mark.slow
def test_children_count_and_are_stopped_too() -> None:
    """Also those that left the process group."""
    process = subprocess.Popen([sys.executable, "-c", BURN_IN_A_CHILD], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    usage = usage_of(process.pid)
    assert usage is not None
    assert usage.cpu_seconds >= 0.29
    assert usage.peak_bytes > 5_000_000
    servers.stop(process)
    process.stdout.close()
    assert ends(child)


def ends(pid: int) -> bool:
    """Whether a process is gone, or goes in a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
def test_a_server_that_ignores_the_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "GRACE_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        servers.stop(process)
        assert process.returncode == -9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            f"{PYTHON} -c \"raise SystemExit('no such model: ' + '{{model}} {{port}}')\"",
            "exit code 1\nno such model: m",
        ),
        (f"{PYTHON} -c 'import time; time.sleep(600)'", "did not answer within 0.3 s; it printed nothing"),
        ("no-such-program --port {port}", "its command does not run"),
    ],
)
def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(command: str, why: str, tmp_path: Path) -> None:
    program = Program("x", command)
    timeout = 0.3 if "sleep" in command else 20
    with (
        pytest.raises(ServerError, match=None) as caught,
        open_server(program, model="m", start_timeout=timeout, folder=tmp_path),
    ):
        pytest.fail("it started")
    assert why in str(caught.value)


# The command


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--peer", "x"], "is not NAME=COMMAND"),
        (["--peer", "a/b=c {port}"], "is not NAME=COMMAND"),
        (["--peer", "x=serve"], "lacks {port}"),
        (["--peer", "relevo=serve {port}"], "two servers have one name"),
        (["--peer", "x=serve {port} {model}"], "say with --model"),
        (["--peer", "x=serve {port} 'a"], "cannot be read"),
        (["--streams", "1,0"], "whole number"),
        (["--streams", "100000"], "at most 1024"),
        (["--rounds", "0"], "whole number"),
        (["--json", "no/such/folder/out.json"], "no such folder"),
    ],
)
def test_wrong_use_is_told_before_anything_starts(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        versus.main(words)
    assert why in capsys.readouterr().err


def test_every_second_round_is_turned_around() -> None:
    a, b = Program("a", ""), Program("b", "")
    assert [program.name for round_ in range(3) for program in versus.in_turn([a, b], round_)] == [*"abbaab"]


def test_the_port_is_added_to_our_own_command() -> None:
    options = versus.parse(["--relevo", "relevo serve --policy static", "--peer", "x=env A=1 y -p{port} -m {model}",
                            "--model", "a file.gguf"])  # fmt: skip
    ours, other = options.programs
    assert ours.words(9, "m") == ["relevo", "serve", "--policy", "static", "--port", "9"]
    assert other.words(9, options.model) == ["env", "A=1", "y", "-p9", "-m", "a file.gguf"]


@pytest.mark.parametrize("more", [[], ["--model", "m.gguf"]])
def test_our_own_server_drafts_no_tokens_as_its_peers_do_not(more: list[str]) -> None:
    ours, drafts = versus.parse([*more, "--peer", "relevo-drafts=relevo serve --port {port}"]).programs
    words = ours.words(9, "m.gguf")
    assert words[1:] == ["-m", "app.cli", "serve", "--num-speculative-tokens", "0", *more, "--port", "9"]
    assert drafts.words(9, "") == ["relevo", "serve", "--port", "9"]


FAKE = {"step_seconds": 0.0, "max_model_len": 1024, "num_blocks": 1024, "limits": {"max_num_batched_tokens": 512}}
HANGS = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()

    def do_POST(self):
        time.sleep(600)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def fake_command() -> str:
    options = json.dumps(FAKE)[:-1] + ', "port": {port}}'
    return f"{PYTHON} -m tests.serve_fake {shlex.quote(options)}"


@pytest.mark.long
def test_a_whole_run_goes_on_without_a_server_that_dies(
    fake_command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out.json"
    dead = f"{PYTHON} -c 'raise SystemExit(\"cannot use {{port}}\")'"
    words = ["--relevo", fake_command, "--peer", f"fake={fake_command}", "--peer", f"dead={dead}", "--json", str(out)]
    # Text in place of ids would be longer than the fake's context: this also shows that ids are taken.
    code = versus.main([*words, "--streams", "1,2", "--requests", "2", "--rounds", "1", "--vocab-size", "256"])
    told = capsys.readouterr()
    assert code == 1, told
    result = json.loads(out.read_text())
    assert set(result["failures"]) == {"dead"}
    assert "cannot use" in result["failures"]["dead"]
    assert "dead could not be measured" in told.out
    runs = result["runs"]
    names = [(run["server"], run["streams"]) for run in runs]
    assert names == [("relevo", 1), ("relevo", 2), ("fake", 1), ("fake", 2)]
    assert {run["num_errors"] for run in runs} == {run["num_other_lengths"] for run in runs} == {0}
    for run in runs:
        items = make_work(run["streams"], 2).items
        assert run["output_tokens"] == sum(item.num_output_tokens for item in items)
        assert run["prompt_tokens"] == sum(item.num_prompt_tokens for item in items)
        assert all(value is None or value >= 0 for value in run["figures"].values())
        assert (run["figures"]["peak_rss_bytes"] is None) == (not Path("/proc").exists())
    (ratios,) = [row["ratios"] for row in result["summary"] if (row["server"], row["streams"]) == ("fake", 2)]
    assert ratios["output_tokens_per_second"]["min"] > 0


ANSWERS_AT_FIRST = """
import itertools, json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

asked = itertools.count(1)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if next(asked) == 4:  # after the probe, the warm-up and one of the run
            exec(sys.argv[2])
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.send_response(200)
        self.end_headers()
        for said in ({"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}):
            self.wfile.write(f"data: {json.dumps(said)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.long
def test_what_stalls_or_dies_amid_a_run_is_named_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "server.py", tmp_path / "out.json"
    script.write_text(ANSWERS_AT_FIRST)

    def command(then: str) -> str:
        return f"{PYTHON} {shlex.quote(str(script))} {{port}} {shlex.quote(then)}"

    words = ["--relevo", command("pass"), "--json", str(out), "--timeout", "5"]
    for name, then in {"dies": "os._exit(3)", "stalls": "time.sleep(600)", "lasts": "pass"}.items():
        words += ["--peer", f"{name}={command(then)}"]
    assert versus.main([*words, "--streams", "1", "--requests", "3"]) == 1
    told = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert set(result["failures"]) == {"dies", "stalls"}
    assert "exit code 3" in result["failures"]["dies"]
    assert "not all was answered within 5 s" in result["failures"]["stalls"]
    assert all(f"{name} could not be measured, or not to the end" in told for name in ("dies", "stalls"))
    ran = [(run["server"], run["round"], run["num_requests"] - run["num_errors"]) for run in result["runs"]]
    assert ran == [
        ("relevo", 0, 3),
        ("dies", 0, 1),
        ("stalls", 0, 1),
        ("lasts", 0, 3),
        ("lasts", 1, 3),
        ("relevo", 1, 3),
    ]
    rows = dict(re.findall(r"^(\w+) .*  (\d of \d)$", told, re.MULTILINE))
    assert rows == {"relevo": "0 of 6", "dies": "2 of 3", "stalls": "2 of 3", "lasts": "0 of 6"}
    (stalled,) = [run for run in result["runs"] if run["server"] == "stalls"]
    # What it answered counts over all the time that it was given.
    assert stalled["figures"]["output_tokens_per_second"] <= stalled["output_tokens"] / 5


@pytest.mark.slow
def test_a_client_that_fails_costs_one_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the system kills it for the memory that it takes."""
    script = tmp_path / "server.py"
    script.write_text(ANSWERS_AT_FIRST)
    kill = "import os, signal, sys; sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(versus, "CLIENT", [sys.executable, "-c", kill])
    words = ["--relevo", f"{PYTHON} {shlex.quote(str(script))} {{port}} pass", "--peer", "none=no-such-program {port}"]
    assert versus.main(words) == 1
    told = capsys.readouterr().out
    assert "relevo could not be measured, or not to the end: the client that asked it ended with exit code -9" in told
    assert "none could not be measured" in told


@pytest.mark.slow
@NEEDS_PROC
def test_an_interruption_leaves_no_server_behind(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS)
    words = ["--relevo", f"{PYTHON} {shlex.quote(str(hangs))} {{port}}"]
    command = [sys.executable, "-m", "tests.bench.versus", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        # With the client there are three.
        while len(members := servers.tree_of(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(members) == 3
        process.terminate()
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    assert all(ends(pid) for pid in members)


@pytest.mark.slow
def test_a_server_that_hangs_costs_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says that it is ready, and answers no request."""
    hangs, out = tmp_path / "hangs.py", tmp_path / "out.json"
    hangs.write_text(HANGS)
    words = ["--relevo", f"{PYTHON} {shlex.quote(str(hangs))} {{port}}", "--timeout", "1", "--json", str(out)]
    begin = time.monotonic()
    assert versus.main(words) == 1
    assert time.monotonic() - begin < 5 * PATIENCE_SECONDS  # the server hangs for longer
    assert "could not be measured" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert NOT_FINISHED in result["failures"]["relevo"]
    assert (result["runs"], result["summary"]) == ([], [])
