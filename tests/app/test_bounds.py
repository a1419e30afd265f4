"""Bounded before it costs: what is refused unread, how much is read at once, how long a body can hold up the rest."""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.api import requests
from app.api.anthropic import plan_messages
from app.api.json_values import is_small
from app.api.many import MANY_URL
from app.api.planning import plan_chat, plan_completion
from app.api.requests import FORM_TYPE, INLINE_BYTES, MAX_FORM_BYTES, OTHER_VALUES
from app.api.responses import plan_response
from app.api.schemas import MAX_CONTAINERS, load_json_object, parse_json_object
from app.callers import NOBODY
from engine.config import NO_TARGETS
from engine.errors import RelevoError
from tests.app.serving import CHAT, COMPLETIONS, Driver, chat_body, events, make_settings, open_app, open_server
from tests.fakes import open_fake_engine
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from engine.engine import Engine

PLANNERS = (plan_chat, plan_completion, plan_response, plan_messages)
JSON = {"content-type": "application/json"}
CONTEXT = 8192
MAX_VALUES = OTHER_VALUES + CONTEXT
MAX_BYTES = requests.OTHER_BYTES + requests.BYTES_PER_TOKEN * CONTEXT


def full(value: str, field: str = "metadata", number: int = MAX_VALUES - 8) -> bytes:
    """A body with as many values as may be."""
    return f'{{"messages": [], "prompt": "x", "{field}": [{",".join([value] * number)}]}}'.encode()


def many_keys(prefix: str) -> str:
    return ",".join(f'"{prefix}{number}": {number}' for number in range(MAX_VALUES - 16))


def messages(number: int, content: str = '"x"') -> bytes:
    turn = f'{{"role": "user", "content": {content}}}'
    return f'{{"messages": [{",".join([turn] * number)}]}}'.encode()


WORST: dict[str, bytes] = {
    "lists": full("[]", number=MAX_CONTAINERS - 4),
    "objects": full('{"a":1}', number=MAX_CONTAINERS - 4),
    "the last number": full("1.5", number=MAX_VALUES - 16)[:-2] + b",1e999]}",
    "too many": full("[]", number=390_000),
    "too many texts": full('""', number=390_000),
    "token ids": full("49151", "prompt", CONTEXT - 1).replace(b'"prompt": "x", ', b""),
    "prompts of ids": full("[" + ",".join(["4915"] * 600) + "]", "prompt", 64).replace(b'"prompt": "x", ', b""),
    "digits": full("9" * 4000, number=MAX_BYTES // 4010),
    "text": b'{"messages": [{"role": "user", "content": "' + b"x" * (MAX_BYTES - 100) + b'"}]}',
    "text of commas": b'{"messages": [{"role": "user", "content": "' + b",[" * (MAX_BYTES // 2 - 100) + b'"}]}',
    "text of escapes": b'{"messages": [{"role": "user", "content": "' + b'\\"' * (MAX_BYTES // 2 - 100) + b'"}]}',
    "fields": b'{"messages": [], ' + many_keys("a").encode() + b"}",
    "bias": b'{"messages": [], "prompt": "x", "logit_bias": {' + many_keys("").encode() + b"}}",
    "turns": messages(MAX_CONTAINERS - 4),
    "items": messages(MAX_CONTAINERS - 4).replace(b"messages", b"input"),
    "Anthropic's": messages(MAX_CONTAINERS - 4).replace(b'{"messages', b'{"max_tokens": 5, "messages'),
    "parts": messages(8, "[" + ",".join(['{"type": "text", "text": "x"}'] * 1000) + "]"),
    "a schema": b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", '
    b'"json_schema": {"name": "a", "schema": {"enum": [' + b",".join([b"1"] * (OTHER_VALUES + 8000)) + b"]}}}}",
    "tools": json.dumps({
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {"type": "function", "function": {"name": f"f{n}", "parameters": {"enum": [0] * 300}}} for n in range(128)
        ],
    }).encode(),
}  # fmt: skip


def handle(engine: Engine, data: bytes) -> list[str]:
    """What a body costs before the engine sees it; gives what it was refused with."""
    found = []
    for plan in PLANNERS:
        try:
            plan(engine, parse_json_object(data, MAX_VALUES), NOBODY)
        except RelevoError as error:
            found.append(str(error))
    return found


def seconds(work: Callable[[], object]) -> float:
    """Of this thread."""
    begin = time.thread_time()
    with suppress(RelevoError):
        work()
    return time.thread_time() - begin


def longest_hold(engine: Engine, data: bytes) -> float:
    """Seconds of this thread for the longest piece of work on a body that nothing else in the process can interrupt.

    A long one is read on a worker thread, where Python lets others go ahead between two calls, but not within one.
    """
    body: dict[str, Any] = {}
    if len(data) <= INLINE_BYTES:
        holds = [seconds(lambda: body.update(parse_json_object(data, MAX_VALUES)))]
    else:
        holds = [seconds(lambda: is_small(data, MAX_VALUES, MAX_CONTAINERS))]
        if is_small(data, MAX_VALUES, MAX_CONTAINERS):
            holds.append(seconds(lambda: body.update(load_json_object(data))))
    holds += [seconds(partial(plan, engine, body, NOBODY)) for plan in PLANNERS]
    return max(holds)


async def test_no_body_holds_the_event_loop() -> None:
    """None takes many times what the standard parser needs for `turns`, measured beside it: about 2 ms."""
    async with open_fake_engine(max_model_len=CONTEXT, num_blocks=4096) as engine:
        for name, data in WORST.items():
            pairs = [(longest_hold(engine, data), seconds(partial(json.loads, WORST["turns"]))) for _ in range(5)]
            hold, yardstick = map(min, zip(*pairs, strict=True))
            assert hold < 15 * yardstick, f"{name}: {hold:.4f} s, and the yardstick {yardstick:.4f} s"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"n": 16, "best_of": 10**9},
        {"stop": ["x" * 256] * 3000},
        {"logit_bias": {str(token_id): 1 for token_id in range(30_000)}},
        {"logprobs": True, "top_logprobs": 10**9},
        {"prompt": ["x"] * 30_000, "messages": None},
        {"max_tokens": 10**9, "min_tokens": 10**9 + 1},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": ["x" * 99] * 9000}},
            }
        },
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_would_be_huge_takes_no_memory(fields: dict[str, Any]) -> None:
    """No more than a few times what its body takes, and nothing stays."""
    data = json.dumps(chat_body("hi") | {"prompt": "hi"} | fields).encode()
    async with open_fake_engine(max_model_len=CONTEXT, num_blocks=4096) as engine:
        handle(engine, data)
        tracemalloc.start()
        try:
            refusals = handle(engine, data)
            _, peak = tracemalloc.get_traced_memory()
            gc.collect()
            now, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert refusals
    assert peak < 200_000 + 12 * len(data)
    assert now < 1_000_000  # the parser remembers short keys, a bounded number of them


async def read(driver: Driver) -> bytes:
    """All that is left of an answer."""
    data = b""
    while piece := await driver.body():
        data += piece
    return data


@pytest.mark.parametrize("path", [CHAT, MANY_URL])
async def test_where_the_queue_is_full_the_body_is_not_waited_for(path: str, autojump_clock: MockClock) -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 2}
    async with open_app(limits=limits, step_seconds=1.0) as (app, context), trio.open_nursery() as nursery:
        for _ in range(3):
            context.engine.submit(plan_chat(context.engine, chat_body("x", max_tokens=400), NOBODY).requests[0])
        driver = Driver(app, path, {}, more_body=True)
        nursery.start_soon(driver.run)
        assert await driver.status() == 503
        error = json.loads(await read(driver))["error"]
        assert error["code"] == "queue_full"
        assert (error["what"], error["depth"], error["limit"]) == ("requests", 2, 2)
        assert error["retry_after_seconds"] >= 1
        context.engine.abort_all("admin")


async def test_bodies_that_are_read_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_BYTES_AT_ONCE", 100_000)
    large = json.dumps(chat_body("x", max_tokens=1, metadata={"a": "y" * 60_000})).encode()
    async with open_server() as server:
        fields = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(large)}")
        head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *fields, "", ""])
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as slow:
            await slow.send_all(head.encode() + large[:-1])
            with trio.fail_after(PATIENCE_SECONDS):
                while (response := await server.client.post(CHAT, content=large, headers=JSON)).status_code == 200:
                    await trio.sleep(0.001)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["code"] == "busy"
            small = await server.client.post(CHAT, json=chat_body("x", max_tokens=1))
            assert small.status_code == 200
            await slow.send_all(large[-1:])
            assert b" 200 " in await slow.receive_some(1000)
        assert (await server.client.post(CHAT, content=large, headers=JSON)).status_code == 200
        assert (await server.stats())["requests"]["rejected_by_reason"]["busy"] == 1


async def test_a_form_is_bounded_too() -> None:
    """Anybody may send one to `/login`, and hundreds of thousands of fields would take long to take apart."""
    headers = {"content-type": FORM_TYPE}
    async with open_server() as server:
        for size, status in ((MAX_FORM_BYTES, 401), (MAX_FORM_BYTES + 1, 413)):
            response = await server.client.post("/login", content=b"&" * size, headers=headers)
            assert response.status_code == status


async def test_too_many_values_are_400_and_a_text_full_of_commas_is_none() -> None:
    async with open_server(max_model_len=CONTEXT, num_blocks=4096) as server:
        for data in (WORST["too many"], WORST["too many texts"]):
            response = await server.client.post(CHAT, content=data, headers=JSON)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "invalid_json")
            assert "more than 40,960 values" in error["message"]
        text = ',[{"' * 5000
        response = await server.client.post("/tokenize", json={"prompt": text[:8000]})
        assert response.json()["count"] == 8000
        response = await server.client.post(COMPLETIONS, json={"prompt": text * 5})
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("settings", [{}, {"server": {"queue_timeout_seconds": 5.0}}], ids=["body", "setting"])
async def test_who_finds_no_seat_in_time_is_told_to_come_back(
    autojump_clock: MockClock, settings: dict[str, Any]
) -> None:
    """One request sits for 40 s; of those behind it one would be whole, one is a stream."""
    own = {} if settings else {"queue_timeout": 5.0}
    app_settings = make_settings(**settings)
    async with open_app(app_settings, limits={"max_num_seqs": 1}, step_seconds=0.1) as (app, context):
        async with trio.open_nursery() as nursery:
            first = Driver(app, CHAT, chat_body("sits", max_tokens=400, **own))
            nursery.start_soon(first.run)
            await trio.sleep(0.5)
            begin = trio.current_time()
            whole, stream = [Driver(app, CHAT, chat_body("waits", stream=stream, **own)) for stream in (False, True)]
            nursery.start_soon(whole.run)
            nursery.start_soon(stream.run)
            assert await stream.status() == 200
            started = await whole.sent.receive()
            assert trio.current_time() - begin == pytest.approx(5.0, abs=0.01)
            assert started["status"] == 503
            assert dict(started["headers"])[b"retry-after"] == b"6"  # nothing has ended; the first came 5.5 s ago
            error = json.loads(await read(whole))["error"]
            assert (error["code"], error["retry_after_seconds"]) == ("queue_timeout", 6)
            assert events((await read(stream)).decode())[-1]["error"]["code"] == "queue_timeout"
            # It had its seat: the deadline is not for it.
            assert await first.status() == 200
            assert trio.current_time() - begin == pytest.approx(40 - 0.5, abs=0.5)
            await read(first)
        await context.engine.wait_idle()
        requests_ = context.engine.snapshot()["requests"]
        assert requests_["aborted_by_cause_and_phase"] == {"queue_timeout": {"queued": 2}}
        assert requests_["finished_by_reason"] == {"stop": 0, "length": 1, "abort": 2, "error": 0}


@pytest.mark.parametrize(
    ("server", "own", "what"),
    [
        ({"request_timeout_seconds": 5.0}, {"timeout": 1e9}, "ttft"),
        ({}, {"timeout": 5.0}, "ttft"),
        ({"queue_timeout_seconds": 5.0}, {}, "queue"),
        ({"queue_timeout_seconds": 50.0}, {"queue_timeout": 5.0}, "queue"),
    ],
    ids=["the server's end", "its own end", "the server's wait", "its own wait"],
)
async def test_who_would_meet_a_deadline_while_it_waits_is_refused_at_once(
    autojump_clock: MockClock, server: dict[str, Any], own: dict[str, Any], what: str
) -> None:
    """One seat, an answer a second, and twice as many that ask; no first token is promised."""
    limits = {"max_num_seqs": 1, "slo_admission": True, "slo": NO_TARGETS}
    statuses: list[int] = []
    refused: list[dict[str, Any]] = []

    async with open_app(make_settings(server=server), limits=limits, step_seconds=0.1) as (app, context):

        async def ask(number: int) -> None:
            driver, begin = Driver(app, CHAT, chat_body(f"{number:04}", max_tokens=10, **own)), trio.current_time()
            nursery.start_soon(driver.run)
            statuses.append(await driver.status())
            seconds = trio.current_time() - begin
            answer = json.loads(await read(driver))
            if statuses[-1] == 503:
                refused.append(answer["error"])
                assert seconds < 0.2
            else:
                assert seconds < 6.2

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(ask, number)
                await trio.sleep(0.5)
        await context.engine.wait_idle()
    assert {*statuses} == {200, 503}
    assert statuses.count(200) > 15
    assert {error["code"] for error in refused} == {"late"}
    assert refused[-1][f"predicted_{what}_seconds"] > refused[-1][f"allowed_{what}_seconds"] > 4.9
