"""Bytes that no honest client sends, thousands of connections of them: the server answers in its way, lives, and nobody
else notices.

The suite plays some; more, and others, with `FUZZ_CASES=200000 FUZZ_FIRST=100000`. A fault tells its number, and
`python -m tests.app.raw_fuzz --first NUMBER --cases 1` plays that one against a running server.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from tests.app.raw_cases import FAMILIES, make_case
from tests.app.raw_fuzz import WrongAnswerError, http1_statuses, http2_statuses
from tests.app.serving import COMPLETIONS, Server, events, open_server
from tests.app.test_soak import count_own_tasks
from tests.app.wire import wait_for
from tests.fakes import expected_output

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NUM_CASES = int(os.environ.get("FUZZ_CASES", "1500"))
FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
NUM_TOKENS = 300


async def keep_asking(server: Server, is_over: trio.Event, answers: list[str]) -> None:
    """A neighbour, who reads one stream after the other."""
    while not is_over.is_set():
        body = {"prompt": "neighbour", "max_tokens": NUM_TOKENS, "stream": True}
        response = await server.client.post(COMPLETIONS, json=body, timeout=60)
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        answers.append("".join(chunk["choices"][0]["text"] for chunk in chunks))


async def while_asking(server: Server, work: Callable[[], Awaitable[Any]]) -> list[str]:
    answers: list[str] = []
    is_over = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, server, is_over, answers)
        await work()
        is_over.set()
    return answers


@pytest.mark.slow
async def test_no_bytes_break_the_server(caplog: pytest.LogCaptureFixture) -> None:
    told: dict[str, Any] = {}

    async def play() -> None:
        command = [sys.executable, "-m", "tests.app.raw_fuzz", "--port", str(server.port), "--cases", str(NUM_CASES)]
        done = await trio.run_process([*command, "--first", str(FIRST)], capture_stdout=True)
        told.update(json.loads(done.stdout))

    async with open_server() as server:
        await trio.testing.wait_all_tasks_blocked(0.01)
        before = count_own_tasks(server)
        answers = await while_asking(server, play)
        print(json.dumps(told))
        await server.client.aclose()
        await wait_for(lambda: count_own_tasks(server) == before)
        await server.settle()
        assert server.engine.num_streams == 0
    assert not told["faults"]
    assert told["cases"] == NUM_CASES
    assert set(told["families"]) == set(FAMILIES)
    assert {"200", "400", "404", "431", "501"} <= set(told["statuses"])
    assert set(answers) == {bytes(expected_output(b"neighbour", NUM_TOKENS)).decode()}
    assert not caplog.records, "something went wrong that nobody foresaw"


def test_a_case_is_its_number() -> None:
    assert make_case(7) == make_case(7)
    assert len({make_case(number).pieces for number in range(100)}) > 90


HEAD_200 = b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"", []),
        (HEAD_200 + b"ab", [200]),
        (HEAD_200 + HEAD_200 + b"ab" + HEAD_200, [200, 200, 200]),  # the first of them to a HEAD
        (b"HTTP/1.1 100 \r\n\r\n" + HEAD_200 + b"a", [200]),
        (b"HTTP/1.1 200 \r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n" + HEAD_200, [200, 200]),
        (b"HTTP/1.1 204 \r\n\r\n" + HEAD_200[:-9], [204]),
    ],
)
def test_answers_are_told_apart(data: bytes, statuses: list[int]) -> None:
    assert http1_statuses(data) == statuses


@pytest.mark.parametrize("data", [b"ab", HEAD_200 + b"abHTTP/1.0 200 \r\n\r\n"])
def test_what_is_no_answer_is_seen(data: bytes) -> None:
    with pytest.raises(WrongAnswerError):
        http1_statuses(data)


def test_an_unknown_frame_is_seen() -> None:
    with pytest.raises(WrongAnswerError):
        http2_statuses(b"\0\0\0\xee\0\0\0\0\0")
