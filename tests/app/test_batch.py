"""Batch files over a fake model: answered line by line, and gone on with after an interruption."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app import batch
from app.api.planning import CHAT_URL, COMPLETION_URL
from app.api.responses import RESPONSES_URL
from app.batch_output import read_earlier
from engine.errors import ConfigError
from tests.fakes import FakeChatTemplate, fake_config, open_fake_engine
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "hello"}]


def line(custom_id: object, url: str, body: object, **more: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more).encode()


def completion(custom_id: str, **fields: Any) -> bytes:
    return line(custom_id, COMPLETION_URL, {"prompt": f"abc {custom_id}", "max_tokens": 3, "temperature": 0} | fields)


def numbered(lines: Iterable[bytes]) -> Iterable[tuple[int, bytes]]:
    return zip(count(1), lines)


def results(target: io.StringIO | Path) -> dict[str | None, dict[str, Any]]:
    text = target.read_text() if isinstance(target, Path) else target.getvalue()
    return {entry["custom_id"]: entry for entry in map(json.loads, text.splitlines())}


def texts(path: Path) -> dict[str | None, str]:
    found = results(path)
    return {name: entry["response"]["body"]["choices"][0]["text"] for name, entry in found.items()}


async def test_a_batch_file_is_answered_line_by_line(autojump_clock: object) -> None:
    lines = [
        line("chat", CHAT_URL, {"messages": MESSAGES, "max_tokens": 5, "temperature": 0}),
        b"\n",
        line("text", COMPLETION_URL, {"prompt": "abc", "max_tokens": 3, "temperature": 0}),
        line("ids", COMPLETION_URL, {"prompt": [97, 98, 99], "max_tokens": 3, "temperature": 0}),
        line("response", RESPONSES_URL, {"input": "hello", "max_output_tokens": 4}),
        line("empty", CHAT_URL, {"messages": []}),
        line("model", CHAT_URL, {"messages": MESSAGES, "model": "other"}),
        line("long", COMPLETION_URL, {"prompt": "x" * 100_000}),
        line("stream", COMPLETION_URL, {"prompt": "x", "stream": True}),
    ]
    target, done = io.StringIO(), []
    source = batch.read_lines(io.BytesIO(b"\n".join(lines)))
    async with open_fake_engine() as engine:
        counts = await batch.run_batch(engine, source, target, progress=lambda counts: done.append(counts.total))
    found = results(target)
    assert (counts.answered, counts.failed, counts.num_tokens) == (4, 4, 15)
    assert set(range(1, 9)) <= set(done)
    assert found["response"]["response"]["body"]["object"] == "response"
    assert found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["error"] is None
    answer = found["chat"]["response"]["body"]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 5
    spelled = [found[name]["response"]["body"]["choices"][0]["text"] for name in ("text", "ids")]
    assert spelled[0] == spelled[1]
    refused = {name: found[name]["response"]["status_code"] for name in ("empty", "model", "long", "stream")}
    assert refused == {"empty": 400, "model": 404, "long": 400, "stream": 400}
    assert found["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("text", "custom_id"),
    [
        (b"{not json", None),
        (b"[1]", None),
        (line("a", CHAT_URL, {}).replace(b'"a"', b'"\xff"'), None),
        (line(None, CHAT_URL, {}), None),
        (line("a", "/v1/embeddings", {}), "a"),
        (line("a", "/v1/embeddings", {}).replace(b'"/v1/embeddings"', b"[1]"), "a"),
        (line("a", CHAT_URL, "text"), "a"),
        (line("a", CHAT_URL, {}, method="GET"), "a"),
    ],
)
async def test_a_wrong_line_fails_alone(autojump_clock: object, text: bytes, custom_id: str | None) -> None:
    target = io.StringIO()
    async with open_fake_engine() as engine:
        counts = await batch.run_batch(engine, numbered([completion("good"), text]), target)
    assert (counts.answered, counts.failed) == (1, 1)
    wrong = results(target)[custom_id]
    assert wrong["response"] is None
    assert (wrong["error"]["code"], wrong["error"]["line"]) == ("invalid_line", 2)
    assert "body is not" not in wrong["error"]["message"]


async def test_a_line_that_is_far_too_long_is_not_read_to_its_end(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MAX_LINE_BYTES", 1 << 12)
    source = b"\n".join([completion("one"), b"x" * (3 << 20), b"", completion("two")])
    target = io.StringIO()
    async with open_fake_engine() as engine:
        counts = await batch.run_batch(engine, batch.read_lines(io.BytesIO(source)), target)
    assert (counts.answered, counts.failed) == (2, 1)
    assert results(target)[None]["error"]["line"] == 2
    exact = b"x" * ((1 << 12) - 1) + b"\n"
    assert [(number, text is None) for number, text in batch.read_lines(io.BytesIO(exact * 2))] == [
        (1, False),
        (2, False),
    ]


async def test_a_custom_id_is_taken_once_and_by_the_first(autojump_clock: object) -> None:
    target = io.StringIO()
    async with open_fake_engine() as engine:
        counts = await batch.run_batch(engine, numbered([completion("a"), completion("a", max_tokens=9)]), target)
    assert (counts.answered, counts.failed) == (1, 1)
    entries = [json.loads(text) for text in target.getvalue().splitlines()]
    (wrong,) = [entry for entry in entries if entry["error"]]
    (right,) = [entry for entry in entries if not entry["error"]]
    assert (wrong["custom_id"], wrong["response"]) == ("a", None)
    assert wrong["error"]["message"] == "The 'custom_id' 'a' is that of an earlier line."
    assert right["response"]["body"]["usage"]["completion_tokens"] == 3


async def test_every_seat_is_taken_and_no_more_is_read_than_needed(autojump_clock: object) -> None:
    """Four seats: four are answered, four more wait, and the rest of the file stays on the disk."""
    num_read = 0
    peaks: list[tuple[int, int]] = []

    def source() -> Iterable[tuple[int, bytes]]:
        nonlocal num_read
        for number in range(1, 201):
            num_read = number
            yield number, completion(f"{number}", max_tokens=1 + number % 7)

    def look(counts: batch.Counts) -> None:
        peaks.append((engine.num_running, num_read - counts.total))

    async with open_fake_engine() as engine:
        counts = await batch.run_batch(engine, source(), io.StringIO(), progress=look)
        snapshot = engine.snapshot()
    assert counts.answered == 200
    assert snapshot["kv"]["free"] + snapshot["kv"]["cached"] == snapshot["kv"]["total"]
    assert max(running for running, _ in peaks) == 4
    assert max(held for _, held in peaks) <= 9  # two of each seat, and the line that waits to come in
    assert snapshot["useful_row_share"] == 1


async def test_the_queue_may_be_smaller_than_the_batch(autojump_clock: object) -> None:
    lines = [completion(f"{i}", max_tokens=4) for i in range(30)]
    async with open_fake_engine(fake_config(max_waiting=1)) as engine:
        counts = await batch.run_batch(engine, numbered(lines), io.StringIO())
    assert counts.answered == 30


async def test_a_timeout_ends_one_line_and_speed_is_tokens_over_time(autojump_clock: object) -> None:
    target = io.StringIO()
    slow = completion("slow", max_tokens=100, timeout=50)
    quick = completion("quick", max_tokens=10, timeout=50)
    async with open_fake_engine(step_seconds=1.0) as engine:
        before = trio.current_time()
        counts = await batch.run_batch(engine, numbered([slow, quick]), target)
        assert trio.current_time() - before == pytest.approx(50, abs=1)
        assert counts.tokens_per_second == pytest.approx(counts.num_tokens / 50, rel=0.05)
        await engine.wait_idle()
    found = results(target)
    assert found["slow"]["response"]["status_code"] == 408
    assert found["slow"]["response"]["body"]["error"]["code"] == "timeout"
    assert found["quick"]["response"]["status_code"] == 200


async def test_a_line_is_refused_in_the_words_of_the_route(autojump_clock: object) -> None:
    """The same plan: code and message are the route's, which is tested on its own."""
    chat = line("no template", CHAT_URL, {"messages": [{"role": "user", "content": ""}]})
    lines = [chat, completion("ids", prompt=[97] * 100_000)]
    target = io.StringIO()
    async with open_fake_engine(chat_template=False) as engine:
        await batch.run_batch(engine, numbered(lines), target)
    codes = {name: entry["response"]["body"]["error"]["code"] for name, entry in results(target).items()}
    assert codes == {"no template": "no_chat_template", "ids": "context_length_exceeded"}


class Broken(FakeChatTemplate):
    """Lacks what every template has."""

    def __init__(self) -> None:
        """Nothing of it."""


async def test_a_mistake_of_ours_costs_one_line_and_is_logged(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    chat = line("chat", CHAT_URL, {"messages": [{"role": "user", "content": "hello"}]})
    target = io.StringIO()
    async with open_fake_engine(chat_template=Broken()) as engine:
        counts = await batch.run_batch(engine, numbered([completion("a"), chat, completion("b")]), target)
    assert (counts.answered, counts.failed) == (2, 1)
    response = results(target)["chat"]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "internal_error")
    assert "'chat'" in caplog.text
    assert "AttributeError" in caplog.text


async def test_a_number_that_no_float_can_hold_is_refused_as_by_the_route(autojump_clock: object) -> None:
    hot = completion("hot", temperature=1).replace(b'"temperature": 1', b'"temperature": 1e999')
    target = io.StringIO()
    async with open_fake_engine() as engine:
        counts = await batch.run_batch(engine, numbered([completion("a"), hot, completion("b")]), target)
    assert (counts.answered, counts.failed) == (2, 1)
    response = results(target)["hot"]["response"]
    assert (response["status_code"], response["body"]["error"]["param"]) == (400, "temperature")


LINES = [
    *[completion(f"{i}", max_tokens=2 + i % 9) for i in range(40)],
    b"{broken",
    completion("7"),
    completion("bad", temperature=9),
]


async def run_for(seconds: float, path: Path, lines: list[bytes] = LINES) -> batch.Counts | None:
    """A run that goes on with what is there and is cut off after a while; its counts if it came to its end."""
    with path.open("a"):
        earlier = read_earlier(path, batch.read_wanted(numbered(lines)))
    with trio.move_on_after(seconds), path.open("a") as target:
        async with open_fake_engine() as engine:
            return await batch.run_batch(engine, numbered(lines), target, earlier=earlier)
    return None


async def test_an_interrupted_run_goes_on_and_ends_like_one_that_was_not(
    autojump_clock: object, tmp_path: Path
) -> None:
    whole, pieces = tmp_path / "whole.jsonl", tmp_path / "pieces.jsonl"
    expected = await run_for(1e9, whole)
    assert expected is not None
    assert (expected.answered, expected.failed, expected.before) == (40, 3, 0)
    counts, runs = None, 0
    while counts is None:
        counts = await run_for(0.1 + 0.03 * runs, pieces)
        runs += 1
        assert runs < 100
        if counts is None:  # as if the machine had gone down in the midst of a line
            with pieces.open("a") as file:
                file.write('{"id": "batch_req_0", "custom_id": "3", "resp')
    assert runs > 3
    assert (counts.answered, counts.failed) == (40, 3)
    assert counts.before > 10
    assert len(pieces.read_text().splitlines()) == len(LINES)
    good = {name for name in results(whole) if name not in (None, "bad", "7")}
    answers = {path: results(path) for path in (whole, pieces)}
    for name in good:
        bodies = [answers[path][name]["response"]["body"]["choices"] for path in (whole, pieces)]
        assert bodies[0] == bodies[1]
    again = await run_for(1e9, pieces)
    assert again is not None
    assert (again.answered, again.failed, again.before, again.num_tokens) == (40, 3, 40, 0)
    assert len(pieces.read_text().splitlines()) == len(LINES)


async def run_whole(path: Path, *lines: bytes) -> tuple[int, int, int]:
    """How many were answered, failed, and were answered before."""
    counts = await run_for(1e9, path, list(lines))
    assert counts is not None
    return counts.answered, counts.failed, counts.before


async def test_lines_that_were_corrected_are_read_again(autojump_clock: object, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert await run_whole(path, completion("a"), b"{broken", completion("bad", temperature=9)) == (1, 2, 0)
    first = results(path)["a"]
    corrected = (completion("a"), completion("b"), completion("bad", temperature=1))
    assert await run_whole(path, *corrected) == (3, 0, 1)
    assert set(texts(path)) == {"a", "b", "bad"}
    assert len(path.read_text().splitlines()) == 3
    assert results(path)["a"] == first
    # Blanks around a line, its place, and a line before it that is wrong are nothing to it.
    assert await run_whole(path, b"{broken", *[b" %s\r\n" % line for line in reversed(corrected)]) == (3, 1, 3)


async def test_a_changed_prompt_is_answered_anew(autojump_clock: object, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await run_whole(path, completion("a"), completion("b"))
    before = texts(path)
    assert await run_whole(path, completion("a", prompt="another"), completion("b")) == (2, 0, 1)
    after = texts(path)
    assert len(path.read_text().splitlines()) == 2
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]


async def test_what_another_input_has_left_is_neither_counted_nor_touched(
    autojump_clock: object, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    await run_whole(path, completion("other"), completion("worse", temperature=9))
    left = path.read_text()
    assert await run_whole(path, completion("a"), completion("b")) == (2, 0, 0)
    assert path.read_text().startswith(left)


async def test_a_line_that_failed_by_our_fault_is_tried_again(autojump_clock: object, tmp_path: Path) -> None:
    path, lines = tmp_path / "out.jsonl", [completion("a"), line("chat", CHAT_URL, {"messages": MESSAGES})]
    async with open_fake_engine(chat_template=Broken()) as engine:
        with path.open("w") as target:
            await batch.run_batch(engine, numbered(lines), target)
    assert results(path)["chat"]["response"]["status_code"] == 500
    path.chmod(0o640)
    earlier = read_earlier(path, batch.read_wanted(numbered(lines)))
    assert (set(earlier.answers), earlier.num_failed, earlier.num_changed) == ({"a"}, 1, 0)
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert await run_whole(path, *lines) == (2, 0, 1)


async def test_a_custom_id_that_a_wrong_line_had_first_belongs_to_the_right_one(
    autojump_clock: object, tmp_path: Path
) -> None:
    path, lines = tmp_path / "out.jsonl", [line("a", "/v1/embeddings", {}), completion("a")]
    assert await run_whole(path, *lines) == (1, 1, 0)
    assert await run_whole(path, *lines) == (1, 1, 1)


# Another program's, which does not tell what it was asked.
STRANGE = '{"id": "1", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}\n'


@pytest.mark.parametrize(
    "content", ["nonsense\n", "[1]\n", STRANGE, '{"custom_id": "a"}\n', '{"a": 1}\n{"b": 2}\n', "5\n\n"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"line 1 is no result of a batch; name another --output, or --restart"):
        read_earlier(path, {"a": "b"})
    assert path.read_text() == content


PROGRAM = textwrap.dedent(
    """
    import sys
    from contextlib import asynccontextmanager
    from pathlib import Path
    import app.cli.pull, engine.engine
    from app.cli import main
    from tests.fakes import FakeChatTemplate, fake_config, open_fake_engine

    @asynccontextmanager
    async def open_(_config):
        async with open_fake_engine(fake_config(), step_seconds=0.002) as opened:
            yield opened

    app.cli.pull.fetch = Path
    engine.engine.open_engine = open_
    sys.exit(main(["generate", *sys.argv[1:]]))
    """
)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(completion(f"{i}", max_tokens=20) for i in range(150)))

    def start_(*more: str) -> subprocess.Popen[str]:
        words = ["-i", str(source), "-o", str(tmp_path / "out.jsonl"), *more]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    return start_


def interrupt(process: subprocess.Popen[str], output: Path, number: signal.Signals) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not output.exists() or output.stat().st_size < 9_000:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    return err


@pytest.mark.long
def test_the_command_goes_on_after_a_signal(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    process = start()
    err = interrupt(process, output, signal.SIGINT)
    assert process.returncode == 130
    assert err == f"interrupted; the same command goes on with what is in {output}\n"
    before = output.read_text().splitlines()
    assert 10 < len(before) < 150
    process = start("--restart")
    while output.read_text().split("\n")[0] in ("", before[0]):
        assert process.poll() is None
        time.sleep(0.01)
    interrupt(process, output, signal.SIGKILL)
    with output.open("a") as file:
        file.write('{"id": "batch')
    process = start()
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    told, end = err.splitlines()
    assert re.fullmatch(r"going on with .*out\.jsonl: \d+ lines answered before \(--restart answers all anew\)", told)
    assert end.startswith("150 of 150 lines answered (")
    assert len(output.read_text().splitlines()) == len(texts(output)) == 150
