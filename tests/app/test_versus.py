"""The comparison with other servers: the work, the client's reading, the figures, and whole runs against fakes."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.bench.versus import __main__ as versus
from tests.bench.versus import servers
from tests.bench.versus.client import NOT_FINISHED, Answer, EventReader, read_whole, run_job
from tests.bench.versus.servers import Program, ServerError, Usage, open_server, usage_of
from tests.bench.versus.summary import make_run, print_summary, summarize, token_gaps
from tests.bench.versus.work import ANSWERS, PROMPTS, Style, make_bodies, make_work

ROOT = Path(__file__).resolve().parents[2]
PYTHON = shlex.quote(sys.executable)


# The work


@pytest.mark.parametrize("streams", [16, 32, 7])
def test_lengths_have_their_bounds_and_means(streams: int) -> None:
    items = make_work(streams).items
    for lengths, (low, high, middle) in (
        ([item.num_prompt_tokens for item in items], PROMPTS),
        ([item.num_output_tokens for item in items], ANSWERS),
    ):
        assert low <= min(lengths) < middle / 2
        assert high >= max(lengths) > 2 * middle
        assert mean(lengths) == pytest.approx(middle, rel=0.01)
        assert lengths != sorted(lengths)


def test_numbers_of_requests_are_those_of_the_table_unless_told() -> None:
    assert [len(make_work(streams).items) for streams in (1, 16, 32, 5)] == [8, 64, 96, 20]
    assert {(item.num_prompt_tokens, item.num_output_tokens) for item in make_work(1).items} == {(128, 128)}
    assert len(make_work(32, 3).items) == 3


def test_all_servers_are_asked_the_same_and_each_run_something_else() -> None:
    def bodies(salt: int, style: Style) -> list[dict[str, Any]]:
        return make_bodies(work, style, model="m", salt=salt, vocab_size=49_152)

    work = make_work(16)
    for style in (Style(), Style(by_ids=False)):
        assert bodies(1, style) == bodies(1, style)
        # By nothing does one prompt begin as another: no server finds it in a cache.
        begins = [tuple(body["prompt"][:4]) for salt in (1, 2) for body in bodies(salt, style) if style.by_ids]
        begins += [body["prompt"][:60] for salt in (1, 2) for body in bodies(salt, style) if not style.by_ids]
        assert len(set(begins)) == len(begins) == 128
    for item, ids, text in zip(work.items, bodies(1, Style()), bodies(1, Style(by_ids=False)), strict=True):
        assert len(ids["prompt"]) == len(text["prompt"].split()) == item.num_prompt_tokens
        assert ids["max_tokens"] == ids["min_tokens"] == item.num_output_tokens
        assert ids["temperature"] == 0


def test_a_server_that_knows_no_ignore_eos_is_not_told_of_it() -> None:
    (body,) = make_bodies(make_work(1, 1), Style(can_ignore_end=False), model="m", salt=0, vocab_size=100)
    assert not {"ignore_eos", "min_tokens"} & set(body)


# What the client reads


def piece(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": None}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(*chunks: bytes) -> bytes:
    framed = b"".join(b"%x;x=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def whole(*events: bytes) -> bytes:
    return HEAD + b"\r\n" + b"".join(events)


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("frame", [chunked, whole])
def test_events_are_read_however_the_bytes_arrive(frame: Any, step: int) -> None:
    data = frame(b": waiting\n\n", b"data: one\r\n\r\n", b"event: x\ndata:two\ndata:  three\n\ndata: fo", b"ur\n\n")
    reader, events = EventReader(), []
    for begin in range(0, len(data), step):
        events += reader.feed(data[begin : begin + step])
    assert (reader.status, events) == (200, [b"one", b"two\n three", b"four"])


def test_times_and_tokens_of_an_answer() -> None:
    answer = Answer(asked_tokens=4)
    pieces = [(1.0, whole(piece(""))), (2.0, piece("a")), (2.5, piece("b")), (4.5, piece("c")), (5.0, USAGE + DONE)]
    read_whole(answer, pieces)
    assert (answer.error, answer.first, answer.finished, answer.gaps) == ("", 2.0, 5.0, [0.5, 2.0])
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 4)
    # Four tokens in three pieces, so nobody knows in which there were two.
    assert token_gaps({"output_tokens": 4, "gaps": answer.gaps}) == pytest.approx([0.375, 1.5])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no answer came"),
        (b'HTTP/1.1 404 Not Found\r\n\r\n{"error": "no"}', 'HTTP 404: {"error": "no"}'),
        (whole(piece("a"), b'data: {"error": {"message": "full"}}\n\n'), 'in the stream: {"message": "full"}'),
        (whole(piece("a"), USAGE), "the stream ended without [DONE]"),
        (whole(piece("a"), DONE), "the stream held no usage, or no text"),
        (whole(USAGE, DONE), "the stream held no usage, or no text"),
        (whole(b"data: nonsense\n\n"), "not understood"),
        (b"nonsense\r\n\r\n", "not understood"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(data: bytes, why: str) -> None:
    answer = Answer(asked_tokens=4)
    read_whole(answer, [(1.0, data)] if data else [])
    assert answer.error.startswith(why)


def test_the_client_keeps_its_streams_full_and_no_fuller() -> None:
    now, most = 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        await reader.readuntil(b"\r\n\r\n")
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        writer.write(chunked(piece("a"), USAGE, DONE))
        now -= 1
        await reader.read()  # the connection stays open: the last chunk is the end
        writer.close()

    async def run() -> dict[str, Any]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            bodies = [{"max_tokens": 4}] * 10
            told = await run_job({"port": port, "path": "/", "streams": 3, "timeout": 10, "bodies": bodies})
            await asyncio.sleep(0.05)  # the server's ends of the connections are closed
            return told

    told = asyncio.run(run())
    assert [answer["error"] for answer in told["answers"]] == [""] * 10
    assert most == 3
    assert 0 < told["cpu_seconds"] <= told["wall_seconds"]


def test_a_server_that_never_answers_costs_the_time_limit_and_no_more() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client goes
        writer.close()

    async def run() -> dict[str, Any]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            job = {"port": port, "path": "/", "streams": 2, "timeout": 0.05, "bodies": [{"max_tokens": 4}] * 3}
            told = await run_job(job)
            await asyncio.sleep(0.05)
            return told

    told = asyncio.run(run())
    assert [answer["error"] for answer in told["answers"]] == [NOT_FINISHED, NOT_FINISHED, "not sent in time"]


# Figures


def told_of(*answers: tuple[float, float, float, list[float]], wall: float = 10.0) -> dict[str, Any]:
    """Answers of 10 tokens, as (sent, first, finished, gaps)."""
    keys = ("sent", "first", "finished", "gaps")
    common = {"asked_tokens": 10, "prompt_tokens": 5, "output_tokens": 10, "error": ""}
    return {
        "wall_seconds": wall,
        "cpu_seconds": 0.5,
        "answers": [{**common, **dict(zip(keys, answer, strict=True))} for answer in answers],
    }


def run_of(server: str, round_: int, told: dict[str, Any], cpu: float = 3.0) -> Any:
    before, after = Usage(1.0, 100), Usage(1.0 + cpu, 200)
    return make_run(server, 2, round_, told, start_seconds=4.0, before=before, after=after)


def test_figures_of_a_run() -> None:
    told = told_of((0.0, 0.5, 2.0, [0.1] * 9), (1.0, 2.5, 5.0, [0.3] * 9))
    told["answers"].append({**told["answers"][0], "error": "HTTP 500: no"})
    run = run_of("x", 0, told)
    assert run.figures == pytest.approx(
        {
            "output_tokens_per_second": 20 / 5,
            "ttft_p50_seconds": 0.5,
            "ttft_p95_seconds": 1.5,
            "itl_p50_seconds": 0.1,
            "itl_p95_seconds": 0.3,
            "e2e_p95_seconds": 4.0,
            "cpu_seconds_per_1000_tokens": 3.0 * 1000 / 20,
            "start_seconds": 4.0,
            "peak_rss_bytes": 200.0,
            "client_share": 0.05,
        }
    )
    assert (run.num_requests, run.num_errors, run.errors, run.num_other_lengths) == (3, 1, ("HTTP 500: no",), 0)
    assert run.tokens_per_piece == 1.0


def test_without_an_answer_there_are_no_figures_and_nothing_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_of((0.0, 0.0, 0.0, []))
    told["answers"][0]["error"] = NOT_FINISHED
    run = run_of("x", 0, told)
    assert run.figures["output_tokens_per_second"] is None
    print_summary(summarize([run]), [run])
    assert NOT_FINISHED in capsys.readouterr().out


def test_ratios_are_of_the_same_round(capsys: pytest.CaptureFixture[str]) -> None:
    """The machine is four times slower in the second round, for both alike."""
    runs = [
        run_of("relevo", 0, told_of((0.0, 0.5, 1.0, [0.1] * 9))),
        run_of("other", 0, told_of((0.0, 1.0, 2.0, [0.1] * 9))),
        run_of("other", 1, told_of((0.0, 4.0, 8.0, [0.1] * 9))),
        run_of("relevo", 1, told_of((0.0, 2.0, 4.0, [0.1] * 9))),
        run_of("other", 2, told_of((0.0, 4.0, 8.0, [0.1] * 9))),  # a round without ours
    ]
    ours, other = summarize(runs)
    assert (ours["server"], other["server"]) == ("relevo", "other")
    assert ours["figures"]["output_tokens_per_second"] == {"median": 6.25, "min": 2.5, "max": 10.0}
    assert ours["ratios"] is None
    assert other["ratios"]["output_tokens_per_second"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert other["ratios"]["ttft_p95_seconds"] == {"median": 0.5, "min": 0.5, "max": 0.5}
    print_summary([ours, other], runs)
    out = capsys.readouterr().out
    assert "6.2 (2.5-10.0)" in out
    assert "relevo / ..." in out


def test_other_lengths_and_merged_pieces_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_of((0.0, 0.5, 1.0, [0.1] * 4))
    told["answers"][0]["asked_tokens"] = 12
    run = run_of("x", 0, told)
    print_summary(summarize([run]), [run])
    out = capsys.readouterr().out
    assert "0 of 1, 1 of another length" in out
    assert "2.00 tokens in a piece of text" in out


# Servers

BURN_IN_A_CHILD = """
import subprocess, sys, time
burn = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", burn], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
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
    """Whether a process is gone within five seconds."""
    deadline = time.monotonic() + 5
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
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
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
        (f"{PYTHON} -c 'import time; time.sleep(60)'", "did not answer within 0.3 s; it printed nothing"),
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


FAKE = {"step_seconds": 0.0, "max_model_len": 1024, "num_blocks": 1024, "limits": {"max_num_batched_tokens": 512}}
HANGS = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()

    def do_POST(self):
        time.sleep(60)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def fake_command() -> str:
    options = json.dumps(FAKE)[:-1] + ', "port": {port}}'
    return f"{PYTHON} -m tests.serve_fake {shlex.quote(options)}"


@pytest.mark.slow
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


@pytest.mark.slow
@NEEDS_PROC
def test_an_interruption_leaves_no_server_behind(tmp_path: Path) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS)
    words = ["--relevo", f"{PYTHON} {shlex.quote(str(hangs))} {{port}}"]
    command = [sys.executable, "-m", "tests.bench.versus", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        # With the client there are three.
        while len(members := servers.tree_of(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(members) == 3
        process.terminate()
        _, err = process.communicate(timeout=30)
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
    assert time.monotonic() - begin < 20
    assert "could not be measured" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert NOT_FINISHED in result["failures"]["relevo"]
    assert (result["runs"], result["summary"]) == ([], [])
