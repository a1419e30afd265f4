"""Several chats over one stream, and the table as its visitors may see it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import trio
import trio.testing

from app.api.envelope import ChatEnvelope
from app.api.many import MANY_URL, MAX_CHATS
from app.chat import seen_by
from engine.place import Place
from tests.app.serving import CHAT, Driver, Server, chat_body, make_settings, open_app, open_server
from tests.patience import PATIENCE_SECONDS

SEATS = "/chat/seats"
PROMPTS = [f"question {number}" for number in range(10)]


def by_chat(text: str) -> dict[int, list[Any]]:
    """The data of a stream's events by the number of their chat; -1 is for those of none."""
    found: dict[int, list[Any]] = {}
    for event in text.split("\n\n"):
        fields = dict(re.findall(r"^(event|data): (.*)$", event, re.MULTILINE))
        if "data" in fields:
            data = fields["data"]
            found.setdefault(int(fields.get("event", -1)), []).append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk.get("choices"))


async def ask(server: Server, bodies: list[dict[str, Any]], **more: Any) -> dict[int, list[Any]]:
    answer = await server.client.post(MANY_URL, json={"requests": bodies}, **more)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return by_chat(answer.text)


async def test_ten_at_once_are_ten_chats() -> None:
    async with open_server() as server:
        found = await ask(server, [chat_body(prompt, max_tokens=5 + index) for index, prompt in enumerate(PROMPTS)])
        assert sorted(found) == [-1, *range(10)]
        assert found[-1] == ["[DONE]"]
        for index, prompt in enumerate(PROMPTS):
            alone = (await server.client.post(CHAT, json=chat_body(prompt, max_tokens=5 + index))).json()
            *chunks, usage, done = found[index]
            assert done == "[DONE]"
            assert text_of(chunks) == alone["choices"][0]["message"]["content"]
            assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "length"]
            assert usage["usage"]["completion_tokens"] == 5 + index
            assert usage["relevo"]["queue_seconds"] >= 0
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert len({found[index][0]["id"] for index in range(10)}) == 10
        assert (await server.stats())["requests"]["finished_by_reason"]["length"] == 20
        await server.settle()


async def test_what_is_refused_ends_alone() -> None:
    security = {"api_keys": ["alice=k1"]}
    settings = make_settings(security=security, security_limits={"alice": {"max_concurrent": 2}})
    async with open_server(settings) as server:
        key = {"Authorization": "Bearer k1"}
        found = await ask(server, [chat_body(max_tokens=3)] * 3, headers=key)
        (refused,) = found[2]
        assert refused["error"]["code"] == "rate_limit_exceeded"
        assert (refused["status"], refused["retry_after"]) == (429, 1)
        assert [found[index][-1] for index in (0, 1)] == ["[DONE]", "[DONE]"]
        assert (await server.stats())["requests"]["rejected_by_reason"]["rate_limited"] == 1
        # Both places are free again.
        assert sorted(await ask(server, [chat_body(max_tokens=3)] * 2, headers=key)) == [-1, 0, 1]
        assert (await server.client.post(MANY_URL, json={"requests": [chat_body()]})).status_code == 401


@pytest.mark.parametrize("method", ["opening", "piece", "finish", "closing"])
async def test_a_fault_of_the_servers_own_in_one_of_them_ends_it_alone(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, seen = getattr(ChatEnvelope, method), []

    def breaks(self: ChatEnvelope, *args: Any) -> bytes:
        if self not in seen:
            seen.append(self)
        if seen.index(self) == 1:
            raise ZeroDivisionError("a secret")
        written: bytes = plain(self, *args)
        return written

    monkeypatch.setattr(ChatEnvelope, method, breaks)
    async with open_server() as server:
        found = await ask(server, [chat_body(prompt, max_tokens=30) for prompt in PROMPTS[:4]])
        await server.settle()
        requests = server.engine.snapshot()["requests"]
    assert found.pop(-1) == ["[DONE]"]
    (broken,) = [told for told in found.values() if told[-1] != "[DONE]"]
    error = broken[-1]
    assert (error["status"], error["error"]["code"]) == (500, "internal_error")
    assert "secret" not in str(broken)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == ["an answer failed"]
    is_early = method in ("opening", "piece")
    assert requests["finished_by_reason"]["length"] == (3 if is_early else 4)
    assert set(requests["aborted_by_cause_and_phase"]) == ({"error"} if is_early else set())


async def test_the_call_is_the_first_of_its_chats_to_the_limits_of_its_key() -> None:
    security = {"api_keys": ["alice=k1"]}
    limits = {"requests_per_minute": 10, "tokens_per_minute": 60, "max_concurrent": 3}
    settings = make_settings(security=security, security_limits={"alice": limits})
    async with open_server(settings) as server:
        before = trio.current_time()
        body = {"requests": [chat_body(max_tokens=3)] * 3}
        answer = await server.client.post(MANY_URL, json=body, headers={"Authorization": "Bearer k1"})
        assert answer.headers["x-ratelimit-remaining-requests"] == "7"
        await server.settle()
        left = server.context.limits.headers("alice", trio.current_time())["x-ratelimit-remaining-tokens"]
        # A prompt of 7 tokens and 3 of an answer, each.
        assert 30 <= int(left) <= 30 + trio.current_time() - before


async def test_a_place_is_free_when_its_own_chat_has_ended() -> None:
    settings = make_settings(security={"api_keys": ["alice=k1"]}, security_limits={"alice": {"max_concurrent": 2}})
    async with open_server(settings, step_seconds=0.005) as server, trio.open_nursery() as nursery:
        key = {"Authorization": "Bearer k1"}
        bodies = [chat_body(max_tokens=2), chat_body("long", max_tokens=400)]
        nursery.start_soon(lambda: ask(server, bodies, headers=key))
        with trio.fail_after(PATIENCE_SECONDS):
            while not server.engine.snapshot()["requests"]["finished_by_reason"]["length"]:
                await trio.sleep(0.002)
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=2), headers=key)).status_code == 200
        assert server.engine.num_running == 1
        nursery.cancel_scope.cancel()


async def test_one_that_is_too_long_or_comes_too_late_ends_alone() -> None:
    async with open_server(step_seconds=0.01) as server:
        bodies = [chat_body("x" * 600), chat_body(max_tokens=400, timeout=0.1), chat_body(max_tokens=3)]
        found = await ask(server, bodies)
        assert [text_of(found[0][:-1]), found[0][-1]["error"]["code"]] == ["", "context_length_exceeded"]
        assert found[0][-1]["status"] == 400
        assert (found[1][-1]["error"]["code"], found[1][-1]["status"]) == ("timeout", 408)
        assert found[2][-1] == "[DONE]"
        await server.settle()


async def test_a_full_queue_is_told_and_the_key_is_not_charged() -> None:
    settings = make_settings(
        security={"api_keys": ["alice=k1"]}, security_limits={"alice": {"requests_per_minute": 10}}
    )
    limits = {"max_num_seqs": 1, "max_waiting": 1}
    async with open_server(settings, limits=limits) as server:
        answer = await server.client.post(
            MANY_URL, json={"requests": [chat_body(max_tokens=3)] * 4}, headers={"Authorization": "Bearer k1"}
        )
        found = by_chat(answer.text)
        refused = [index for index in range(4) if found[index][-1] != "[DONE]"]
        assert refused
        for index in refused:
            assert found[index][-1]["error"]["code"] == "queue_full"
            assert found[index][-1]["status"] == 503
            assert found[index][-1]["retry_after"] >= 1
        left = await server.client.get("/v1/models", headers={"Authorization": "Bearer k1"})
        assert left.status_code == 200
        answer = await server.client.post(CHAT, json=chat_body(max_tokens=1), headers={"Authorization": "Bearer k1"})
        assert int(answer.headers["x-ratelimit-remaining-requests"]) == 10 - (4 - len(refused)) - 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "requests"),
        ({"requests": {}}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": [chat_body()] * (MAX_CHATS + 1)}, "requests"),
        ({"requests": [chat_body(), "hello"]}, "requests[1]"),
        ({"requests": [chat_body(), chat_body(temperature=3)]}, "requests[1].temperature"),
        ({"requests": [chat_body(n=2)]}, "requests[0].n"),
        ({"requests": [chat_body(), {"messages": []}]}, "requests[1].messages"),
    ],
)
async def test_what_can_never_be_is_refused_and_nothing_is_begun(body: dict[str, Any], param: str) -> None:
    async with open_server() as server:
        answer = await server.client.post(MANY_URL, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert server.engine.num_open == 0


async def test_who_leaves_leaves_all_seats(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=0.01) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, MANY_URL, {"requests": [chat_body(prompt, max_tokens=400) for prompt in PROMPTS]})
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        assert b'"role":"assistant"' in await driver.body()
        assert b'"content":' in await driver.body()
        assert context.engine.num_running == 4
        assert context.engine.num_open == 10
        driver.leave()
        await context.engine.wait_idle()
        assert context.engine.snapshot()["requests"]["finished_by_reason"]["abort"] == 10


async def test_a_long_wait_is_not_silent(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=35) as (app, _), trio.open_nursery() as nursery:
        driver = Driver(app, MANY_URL, {"requests": [chat_body(max_tokens=1)]})
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        assert b'"role":"assistant"' in await driver.body()
        for _ in range(3):
            assert await driver.body() == b": still here\n\n"
        nursery.cancel_scope.cancel()


async def test_a_visitor_sees_its_own_seats_and_nobody_elses_name() -> None:
    settings = make_settings(security={"api_keys": ["alice=k1", "bob=k2"]})
    async with open_server(settings, step_seconds=0.01) as server, trio.open_nursery() as nursery:
        alice, bob = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}
        for name, key in (("alice", alice), ("bob", bob)):
            body = chat_body(f"I am {name}", max_tokens=400)
            nursery.start_soon(lambda body=body, key=key: server.client.post(CHAT, json=body, headers=key))
        with trio.fail_after(PATIENCE_SECONDS):
            while [entry["output_tokens"] > 3 for entry in server.engine.snapshot()["active"]] != [True, True]:
                await trio.sleep(0.01)
        ids = {entry["key"]: entry["request_id"] for entry in server.engine.snapshot()["active"]}
        answer = await server.client.get(SEATS, params={"id": [ids["alice"], "gone"]}, headers=alice)
        assert answer.headers["cache-control"] == "no-store"
        assert ids["bob"] not in answer.text
        assert "bob" not in answer.text
        seen = answer.json()
        assert (seen["running"], seen["waiting"], seen["seats"]) == (2, 0, 4)
        own, gone = seen["mine"]
        assert gone is None
        assert own["seat"] in (0, 1)
        assert own["output_tokens"] > 3
        last = {whose: (seat, phase) for seat, whose, phase in seen["steps"][-1]["rows"]}
        assert last == {0: (own["seat"], "decode"), 2: (1 - own["seat"], "decode")}
        assert (await server.client.get(SEATS)).status_code == 401
        many = await server.client.get(SEATS, params={"id": [f"id{n}" for n in range(MAX_CHATS + 1)]}, headers=alice)
        assert many.status_code == 400
        assert (await server.client.get(SEATS, params={"id": "x" * 65}, headers=alice)).status_code == 400
        nursery.cancel_scope.cancel()


async def test_who_waits_is_told_why_and_how_long() -> None:
    async with open_server(limits={"max_num_seqs": 1}, step_seconds=0.01) as server, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: server.client.post(CHAT, json=chat_body(max_tokens=400)))
        nursery.start_soon(lambda: server.client.post(CHAT, json=chat_body("later", max_tokens=400)))
        with trio.fail_after(PATIENCE_SECONDS):
            while not (server.engine.num_running and server.engine.num_waiting):
                await trio.sleep(0.01)
        ids = [entry["request_id"] for entry in server.engine.snapshot()["active"]]
        mine = (await server.client.get(SEATS, params={"id": ids})).json()["mine"]
        waiting = next(place for place in mine if place["seat"] is None)
        assert (waiting["reason"], waiting["why"]) == ("seats", "no free seat")
        assert waiting["waited_seconds"] > 0
        nursery.cancel_scope.cancel()


def test_others_are_told_apart_and_are_nobody() -> None:
    rows = [[0, "mine", "decode", 1], [1, "theirs", "prefill", 9], [2, "another", "decode", 1]]
    steps = [{"step": 7, "rows": rows, "preempted": ["theirs"]}, {"step": 8, "rows": rows[2:]}]
    seen = seen_by(["other", "mine"], {"seats": 4, "steps": steps}, {"mine": Place(0, None, 0.5, 20, 16, 3)})
    assert seen["mine"] == [
        None,
        {
            "seat": 0, "reason": None, "why": None, "waited_seconds": 0.5, "prompt_tokens": 20, "cached_tokens": 16,
            "output_tokens": 3,
        },
    ]  # fmt: skip
    assert seen["steps"] == [
        {"step": 7, "rows": [[0, 1, "decode"], [1, 2, "prefill"], [2, 3, "decode"]]},
        {"step": 8, "rows": [[2, 3, "decode"]]},
    ]
