"""The comparison with other servers: the work, the client's reading, and the figures."""

from __future__ import annotations

import asyncio
import json
from statistics import mean
from typing import Any

import pytest

from tests.bench.versus.client import NOT_FINISHED, NOT_SENT, Answer, EventReader, read_whole, run_job
from tests.bench.versus.servers import Usage
from tests.bench.versus.summary import make_run, print_summary, summarize, token_gaps
from tests.bench.versus.work import ANSWERS, PROMPTS, Style, make_bodies, make_work

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
        (whole(piece("a"), DONE), "the stream held no usage"),
        (whole(USAGE, DONE), "the stream held no text"),
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


@pytest.mark.parametrize("why", [NOT_FINISHED, NOT_SENT])
def test_a_stall_counts_in_the_speed(why: str) -> None:
    """Ten tokens within a second, and then nothing for nine."""
    told = told_of((0.0, 0.5, 1.0, [0.1] * 9), (0.0, 0.0, 0.0, []))
    told["answers"][1]["error"] = "HTTP 500: no"
    assert run_of("x", 0, told).figures["output_tokens_per_second"] == 10
    told["answers"][1]["error"] = why
    assert run_of("x", 0, told).figures["output_tokens_per_second"] == 1


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
