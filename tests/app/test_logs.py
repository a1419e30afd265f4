"""The log: its forms, that nobody can forge a line of it or hold up the server by it, and what it never says."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from app import endings, logs
from app.endings import MAX_REFUSALS_A_SECOND, Refusals
from app.lifecycle import leave_now
from app.logs import FIELDS, FORMATS, HumanFormatter, JsonFormatter, LineWriter, open_logs
from engine.errors import ConstraintError
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.app.serving import CHAT, COMPLETIONS, chat_body, make_settings, open_server
from tests.app.wire import wait_for
from tests.fakes import FakeRunner, Poison
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from trio.testing import MockClock

MARKER = "xylophone"
texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(["a\n2026-01-01 INFO x: y", "\r\x1b[2J", "\u2028", '"'])


def record(message: str, fields: dict[str, Any] | None = None, error: Exception | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error is not None else None
    made = logging.LogRecord("relevo.test", logging.INFO, "", 0, "%s", (message,), exc_info)
    if fields is not None:
        setattr(made, FIELDS, fields)
    return made


@given(texts, texts)
def test_no_text_makes_a_line_of_its_own_for_people(message: str, told: str) -> None:
    line = HumanFormatter().format(record(message, {"key": message}))
    assert line.isprintable(), "one line, and nothing that a terminal obeys"
    failed = HumanFormatter().format(record("failed", error=ValueError(told)))
    first, *rest = failed.split("\n")
    assert first.endswith("relevo.test: failed")
    assert rest
    assert all(part.startswith("  | ") and part.isprintable() for part in rest)


@given(texts, texts)
def test_no_text_makes_a_line_of_its_own_for_programs(message: str, told: str) -> None:
    line = JsonFormatter().format(record(message, {"key": told}, ValueError(told)))
    assert line.isascii()
    assert "\n" not in line
    read = json.loads(line)
    assert (read["message"], read["key"], read["level"], read["logger"]) == (message, told, "info", "relevo.test")
    assert read["exception"].startswith("ValueError")


@given(texts)
def test_no_value_looks_like_a_further_pair(value: str) -> None:
    line = HumanFormatter().format(record("finished", {"key": value, "none": None, "tokens": 3}))
    start, _, rest = line.partition(" key=")
    assert start.endswith("finished")
    shown, end = json.JSONDecoder().raw_decode(rest) if rest.startswith('"') else (rest.split(" ")[0], rest.index(" "))
    assert shown == value
    assert rest[end:] == " tokens=3"


class Stuck(io.StringIO):
    """A terminal at which nobody reads, until somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.reads = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.is_asked.set()
        self.reads.wait(PATIENCE_SECONDS)
        return super().write(text)


def test_who_does_not_read_the_log_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "CLOSE_SECONDS", 0.05)
    stream = Stuck()
    writer = LineWriter(stream, max_lines=100)
    writer.setFormatter(FORMATS["json"]())
    writer.emit(record("0"))
    assert stream.is_asked.wait(PATIENCE_SECONDS)
    for number in range(1, 151):
        writer.emit(record(f"{number}"))
    writer.close()  # nor is the end of the process
    monkeypatch.setattr(logs, "CLOSE_SECONDS", 20.0)
    stream.reads.set()
    writer.close()
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages == ["0", "50 lines of the log are lost: they were not read in time", *map(str, range(1, 101))]


def test_the_log_is_written_before_an_end_that_cleans_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.002)
            return super().write(text)

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    slow, stuck = Slow(), Stuck()
    with open_logs("json", "info", slow):
        for number in range(20):
            logging.getLogger("relevo.test").info("%d", number)
        with pytest.raises(SystemExit):
            leave_now(1)
        assert len(slow.getvalue().splitlines()) == 20
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.02)
    with open_logs("json", "info", stuck):
        logging.getLogger("relevo.test").info("nobody reads this in time")
        with pytest.raises(SystemExit):
            leave_now(1)
        stuck.reads.set()


def test_after_the_body_the_log_is_as_it_was() -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before = (root.level, [*root.handlers])
    with open_logs("json", "warning", stream):
        logging.getLogger("relevo.test").info("too small")
        logging.getLogger("relevo.test").warning("told")
    assert (root.level, root.handlers) == before
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["told"]


def told(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [getattr(entry, FIELDS) for entry in caplog.records if entry.getMessage() == message]


async def test_each_request_that_ended_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relevo.requests")
    settings = make_settings(security={"api_keys": ["alice=k"]})
    async with open_server(settings, answer=lambda _: b"hello") as server:
        client, headers = server.client, {"Authorization": "Bearer k", "X-Request-Id": "mine"}
        whole = await client.post(CHAT, json=chat_body(max_tokens=9), headers=headers)
        await client.post(CHAT, json=chat_body(max_tokens=2, stream=True, service_tier="flex"), headers=headers)
        await client.post(CHAT, json=chat_body(stop="ll"), headers=headers)
        await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 3, "n": 2}, headers=headers)
        await server.settle()
    first, flex, stopped, *choices = told(caplog, "finished")
    assert {name: first[name] for name in first if not name.endswith("_seconds")} == {
        "request_id": "mine", "id": whole.json()["id"], "key": "alice", "model": "fake", "class": "interactive",
        "finish_reason": "stop", "abort_cause": None, "prompt_tokens": 7, "cached_tokens": 0, "output_tokens": 6,
        "preemptions": 0,
    }  # fmt: skip
    assert 0 <= first["queue_seconds"] < first["ttft_seconds"] < first["e2e_seconds"] < PATIENCE_SECONDS
    assert (flex["class"], flex["finish_reason"], flex["output_tokens"]) == ("background", "length", 2)
    assert flex["cached_tokens"] > 0
    assert (stopped["finish_reason"], stopped["output_tokens"]) == ("stop", 4)
    assert stopped["ttft_seconds"] > 0, "also where a stop string ended it before the engine knew"
    assert len(choices) == 2


async def test_who_leaves_and_what_fails_is_told_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relevo.requests")
    async with open_server(runner=FakeRunner(256, 4, before_step=Poison()), step_seconds=0.01) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(server.client.post, CHAT, json=chat_body(max_tokens=400)))
            await wait_for(lambda: server.engine.snapshot()["requests"]["running"] == 1)
            nursery.cancel_scope.cancel()
        await server.settle()
        await server.client.post(CHAT, json=chat_body(max_tokens=400, timeout=0.2))
        await server.client.post(CHAT, json=chat_body("poison"))
        await server.settle()
    ended = [(line["finish_reason"], line["abort_cause"]) for line in told(caplog, "finished")]
    assert ended == [("abort", "client"), ("abort", "timeout"), ("error", None)]
    refused = [(line["status"], line["code"]) for line in told(caplog, "refused")]
    assert refused == [(408, "timeout"), (500, "engine_error")]


async def test_each_refusal_has_a_line_up_to_so_many(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.INFO, "relevo.requests")
    refusals = Refusals()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refusals.run)
        await trio.sleep(0.5)
        for number in range(1000):
            refusals.note(503 if number % 4 else 429, "queue_full", {"who": "alice"})
        assert len(told(caplog, "refused")) == MAX_REFUSALS_A_SECOND
        await trio.sleep(5)
        (rest,) = told(caplog, "refused more")
        assert rest["number"] == 1000 - MAX_REFUSALS_A_SECOND == sum(rest["by_code"].values())
        assert set(rest["by_code"]) == {"503 queue_full", "429 queue_full"}
        refusals.note(404, "not_found", {})
        assert len(told(caplog, "refused")) == MAX_REFUSALS_A_SECOND + 1
        nursery.cancel_scope.cancel()


async def test_what_is_refused_is_told_by_route_and_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "relevo.requests")
    async with open_server(make_settings(security={"api_keys": ["alice=k"]})) as server:
        await server.client.post(CHAT, json=chat_body(), headers={"Authorization": "Bearer wrong"})
        await server.client.post(CHAT, json=chat_body(n=0), headers={"Authorization": "Bearer k"})
        await server.client.get(f"/{MARKER}")
        many = {"requests": [chat_body("x" * 600)]}
        assert "context_length" in (await server.client.post("/chat/many", json=many, auth=Key("k"))).text
    lines = [(line["status"], line["who"], line["route"]) for line in told(caplog, "refused")]
    assert lines == [(401, None, CHAT), (400, "alice", CHAT), (404, None, None), (400, "alice", "/chat/many")]


class Key(httpx.Auth):
    """A bearer token."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def auth_flow(self, request: httpx.Request) -> Any:
        request.headers["Authorization"] = f"Bearer {self._secret}"
        yield request


class Failing:
    """A constraint that cannot be followed, and says by what it was broken."""

    def begin(self, token_ids: tuple[int, ...]) -> Any:
        raise ConstraintError(f"The grammar does not allow it: {MARKER}")


@pytest.mark.parametrize("log_format", FORMATS)
async def test_no_word_of_prompt_or_answer_is_in_the_log(
    log_format: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "MAX_REFUSALS_A_SECOND", 1000)
    caplog.set_level(logging.WARNING, "httpx")  # the client, who logs its own addresses
    tool = {"type": "function", "function": {"name": MARKER, "description": MARKER, "parameters": {"title": MARKER}}}
    says = {"role": "user", "content": MARKER, "name": MARKER}
    fine: list[dict[str, Any]] = [
        {"messages": [says], "user": MARKER, "stop": [MARKER + "!"], "stream": True},
        {"messages": [says], "logprobs": True, "n": 2, "metadata": {MARKER: MARKER}},
        {"messages": [says], "tools": [tool], "stop": MARKER},
    ]
    wrong: list[dict[str, Any]] = [
        {"messages": [says], "model": MARKER},
        {"messages": [{"role": MARKER, "content": MARKER}]},
        {"messages": [says], "stop": [MARKER] * 99},
        {"messages": [says], "response_format": {"type": "json_schema", "json_schema": {"name": MARKER, "schema": 3}}},
        {"messages": [says], "response_format": {"type": "regex", "regex": f"({MARKER}"}},
        {"messages": [says], "guided_regex": f"({MARKER}"},
        {"messages": [{"role": "user", "content": MARKER * 200}]},
        {"messages": [says], "logit_bias": {MARKER: 1}},
        {"messages": [says], MARKER: MARKER, "max_tokens": MARKER},
    ]
    stream = io.StringIO()
    with open_logs(log_format, "info", stream):
        async with open_server(answer=lambda _: MARKER.encode()) as server:
            for body in fine:
                assert (await server.client.post(CHAT, json=body)).status_code == 200
            for body in wrong:
                answer = await server.client.post(CHAT, json=body)
                assert 400 <= answer.status_code < 500, answer.text
            await server.client.post(CHAT, content=MARKER.encode(), headers={"Content-Type": "application/json"})
            await server.client.post(CHAT, json=chat_body(), headers={"X-Request-Id": f"{MARKER} {MARKER}"})
            await server.client.get(f"/v1/models/{MARKER}?{MARKER}={MARKER}")
            await server.client.post("/tokenize", json={"prompt": MARKER, "add_special_tokens": MARKER})
            await server.settle()
            failing = SamplingParams(max_tokens=3, constraint=Failing())
            handle = server.engine.submit(GenerationRequest("fails", TextPrompt(MARKER), failing))
            assert MARKER in ((await handle.take()).error or ""), "whoever asked is told all of it"
            await server.settle()
    lines = stream.getvalue()
    assert "fails ends with an error: The grammar does not allow it" in lines
    assert lines.count("finished") >= 4
    assert lines.count("refused") >= len(wrong) + 3, "none of them untold"
    assert MARKER not in lines
