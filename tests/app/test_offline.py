"""Batch files and single prompts over a fake model."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import trio

from app import offline
from engine.errors import InvalidRequestError
from tests.fakes import fake_config, open_fake_engine


def line(custom_id: object, url: str, body: object, **more: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more).encode()


def results(target: io.StringIO) -> dict[str | None, dict[str, Any]]:
    return {entry["custom_id"]: entry for entry in map(json.loads, target.getvalue().splitlines())}


async def test_a_batch_file_is_answered_line_by_line(autojump_clock: object) -> None:
    messages = [{"role": "user", "content": "hello"}]
    lines = [
        line("chat", offline.CHAT_URL, {"messages": messages, "max_tokens": 5, "temperature": 0}),
        b"\n",
        line("text", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 3, "temperature": 0}),
        line("ids", offline.COMPLETION_URL, {"prompt": [97, 98, 99], "max_tokens": 3, "temperature": 0}),
        line("empty", offline.CHAT_URL, {"messages": []}),
        line("model", offline.CHAT_URL, {"messages": messages, "model": "other"}),
        line("long", offline.COMPLETION_URL, {"prompt": "x" * 100_000}),
        line("stream", offline.COMPLETION_URL, {"prompt": "x", "stream": True}),
    ]
    target, done = io.StringIO(), []
    async with open_fake_engine() as engine:
        counts = await offline.run_batch(engine, lines, target, progress=done.append)
    found = results(target)
    assert (counts.answered, counts.failed) == (3, 4)
    assert sorted(done) == list(range(1, 8))
    assert found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["error"] is None
    answer = found["chat"]["response"]["body"]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 5
    texts = [found[name]["response"]["body"]["choices"][0]["text"] for name in ("text", "ids")]
    assert texts[0] == texts[1]
    refused = {name: found[name]["response"]["status_code"] for name in ("empty", "model", "long", "stream")}
    assert refused == {"empty": 400, "model": 404, "long": 400, "stream": 400}
    assert found["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "text",
    [
        b"{not json",
        b"[1]",
        line("a", offline.CHAT_URL, {}).replace(b'"a"', b'"\xff"'),
        line(None, offline.CHAT_URL, {}),
        line("a", "/v1/embeddings", {}),
        line("a", offline.CHAT_URL, "text"),
        line("a", offline.CHAT_URL, {}, method="GET"),
    ],
)
async def test_a_wrong_line_fails_alone(autojump_clock: object, text: bytes) -> None:
    target = io.StringIO()
    good = line("good", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 1})
    async with open_fake_engine() as engine:
        counts = await offline.run_batch(engine, [text, good], target)
    assert (counts.answered, counts.failed) == (1, 1)
    wrong = next(entry for name, entry in results(target).items() if name != "good")
    assert wrong["response"] is None
    assert wrong["error"]["code"] == "invalid_line"


async def test_a_custom_id_is_taken_once(autojump_clock: object) -> None:
    target = io.StringIO()
    same = [line("a", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 1})] * 2
    async with open_fake_engine() as engine:
        counts = await offline.run_batch(engine, same, target)
    assert (counts.answered, counts.failed) == (1, 1)
    (wrong,) = [entry for entry in map(json.loads, target.getvalue().splitlines()) if entry["error"]]
    assert (wrong["custom_id"], wrong["response"]) == ("a", None)
    assert wrong["error"] == {"code": "invalid_line", "message": "The 'custom_id' 'a' is that of an earlier line."}


async def test_more_lines_than_places_are_all_answered(autojump_clock: object) -> None:
    lines = [line(f"{i}", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 1 + i % 7}) for i in range(200)]
    target = io.StringIO()
    async with open_fake_engine() as engine:
        counts = await offline.run_batch(engine, lines, target)
        snapshot = engine.snapshot()
    assert counts.answered == 200
    assert snapshot["kv"]["free"] + snapshot["kv"]["cached"] == snapshot["kv"]["total"]


async def test_the_queue_may_be_smaller_than_the_batch(autojump_clock: object) -> None:
    lines = [line(f"{i}", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 4}) for i in range(30)]
    async with open_fake_engine(fake_config(max_waiting=1)) as engine:
        counts = await offline.run_batch(engine, lines, io.StringIO())
    assert counts.answered == 30


async def test_a_timeout_ends_one_line(autojump_clock: object) -> None:
    target = io.StringIO()
    slow = line("slow", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 100, "timeout": 50})
    quick = line("quick", offline.COMPLETION_URL, {"prompt": "abc", "max_tokens": 10, "timeout": 50})
    async with open_fake_engine(step_seconds=1.0) as engine:
        before = trio.current_time()
        await offline.run_batch(engine, [slow, quick], target)
        assert trio.current_time() - before == pytest.approx(50, abs=1)
        await engine.wait_idle()
    found = results(target)
    assert found["slow"]["response"]["status_code"] == 408
    assert found["slow"]["response"]["body"]["error"]["code"] == "timeout"
    assert found["quick"]["response"]["status_code"] == 200


async def test_a_line_is_refused_in_the_words_of_the_route(autojump_clock: object) -> None:
    """The same plan: code and message are the route's, which is tested on its own."""
    turns = [{"role": "user", "content": ""}] * 1000
    bodies = {"no template": {"messages": turns[:1]}, "turns": {"messages": turns}}
    lines = [line(name, offline.CHAT_URL, body) for name, body in bodies.items()]
    target = io.StringIO()
    async with open_fake_engine(chat_template=False) as engine:
        await offline.run_batch(engine, lines, target)
    codes = {name: entry["response"]["body"]["error"]["code"] for name, entry in results(target).items()}
    assert codes == {"no template": "no_chat_template", "turns": "context_length_exceeded"}


async def test_a_prompt_is_streamed_as_it_comes(autojump_clock: object) -> None:
    pieces: list[str] = []
    body = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
    async with open_fake_engine() as engine:
        await offline.stream(engine, offline.plan_whole(engine, offline.COMPLETION_URL, body), pieces.append)
        whole = await offline.answer(engine, offline.plan_whole(engine, offline.COMPLETION_URL, body))
        with pytest.raises(InvalidRequestError, match="temperature"):
            offline.plan_whole(engine, offline.COMPLETION_URL, body | {"temperature": 9})
    assert "".join(pieces) == whole["choices"][0]["text"]
