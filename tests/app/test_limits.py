"""Limits of an API key: the arithmetic in made-up time, then over HTTP with OpenAI's client."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from app.api.many import MANY_URL
from app.callers import Callers
from app.config import load_settings
from app.config_schema import KeyLimits
from app.limits import Bucket, Limits, Meter, RateLimitError, span
from engine.errors import ConfigError
from tests.app.serving import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Driver,
    body_for,
    chat_body,
    events,
    make_settings,
    open_app,
    open_server,
)
from tests.patience import PATIENCE_SECONDS

KEYS = ["alice=k1", "bob=k2"]


def settings_with(**limits: int) -> Any:
    return make_settings(security={"api_keys": KEYS}, security_limits={"alice": limits})


@dataclass
class FakeHandle:
    """What a permit reads of a request in the engine."""

    num_prompt_tokens: int = 0
    prompt: object = None
    outbox: Any = field(default_factory=lambda: SimpleNamespace(num_tokens=0))

    @property
    def request(self) -> Any:
        return SimpleNamespace(prompt=self.prompt if self.prompt is not None else self)


def meter(**limits: int) -> Meter:
    return Meter(KeyLimits(**limits), 0.0)


def refused(of: Meter, now: float) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        of.admit([], now)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return caught.value


def retry_after(error: RateLimitError) -> int:
    return int(error.headers["Retry-After"])


def test_a_bucket_fills_evenly_up_to_a_minutes_worth() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert [bucket.level(now) for now in (0.0, 1.0, 30.5, 60.0, 1000.0)] == [0, 1, 30.5, 60, 60]
    bucket.take(100, 60.0)
    assert bucket.level(60.0) == -40
    assert bucket.seconds_until(1, 60.0) == 41
    assert bucket.seconds_until(60, 70.0) == 90


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=40),
)
def test_the_average_is_never_exceeded(per_minute: int, uses: list[tuple[float, int]]) -> None:
    """Whenever something is taken: what was had is at most a full bucket, what ran in, and one debt."""
    bucket = Bucket(per_minute, 0.0)
    now, had, largest = 0.0, 0, 0
    for wait, amount in uses:
        now += wait
        if bucket.seconds_until(1, now) == 0:
            bucket.take(amount, now)
            had, largest = had + amount, max(largest, amount)
    assert had <= per_minute + now * per_minute / 60 + largest + 1e-6


def test_requests_a_minute_and_a_true_retry_after() -> None:
    alice = meter(requests_per_minute=3)
    for _ in range(3):
        alice.admit([FakeHandle(1)], 10.0)  # type: ignore[list-item]
    error = refused(alice, 10.0)
    assert retry_after(error) == 20
    assert "3 requests a minute" in str(error)
    assert retry_after(refused(alice, 29.9)) == 1
    alice.admit([FakeHandle()], 30.0)  # type: ignore[list-item]
    assert retry_after(refused(alice, 30.0)) == 20


def test_a_request_that_the_server_could_not_take_is_given_back_once() -> None:
    alice = meter(requests_per_minute=2)
    other = alice.admit([], 0.0)
    permit = alice.admit([FakeHandle(0)], 0.0)  # type: ignore[list-item]
    for _ in range(2):
        permit.give_back(0.0)
        permit.close(0.0)
    alice.admit([], 0.0)
    assert retry_after(refused(alice, 0.0)) == 30
    other.close(0.0)  # over, whatever became of it
    assert retry_after(refused(alice, 0.0)) == 30


def test_what_the_engine_took_a_part_of_is_not_given_back() -> None:
    alice = meter(requests_per_minute=1)
    alice.admit([FakeHandle(1), FakeHandle(0)], 0.0).give_back(0.0)  # type: ignore[list-item]
    assert retry_after(refused(alice, 0.0)) == 60


def test_a_refusal_adds_nothing_to_the_debt() -> None:
    alice = meter(requests_per_minute=1)
    alice.admit([], 0.0)
    assert [retry_after(refused(alice, 0.0)) for _ in range(3)] == [60] * 3


def test_places_are_held_until_the_end() -> None:
    alice = meter(max_concurrent=2)
    first, second = (alice.admit([FakeHandle()], 0.0) for _ in range(2))  # type: ignore[list-item]
    assert retry_after(refused(alice, 1000.0)) == 1
    first.close(1000.0)
    third = alice.admit([], 1000.0)
    refused(alice, 1000.0)
    first.close(1000.0)  # a second time: frees nobody else's place
    refused(alice, 1000.0)
    for permit in (second, third):
        permit.close(1001.0)
    assert alice.headers(1001.0) == {}


def test_tokens_are_charged_as_they_come_and_a_debt_is_paid_back() -> None:
    alice = meter(tokens_per_minute=600)
    handle = FakeHandle()
    permit = alice.admit([handle], 0.0)  # type: ignore[list-item]
    assert alice.headers(0.0)["x-ratelimit-remaining-tokens"] == "600"
    handle.num_prompt_tokens = 100  # it was accepted
    assert alice.headers(0.0)["x-ratelimit-remaining-tokens"] == "500"
    handle.outbox.num_tokens = 400
    assert alice.headers(0.0)["x-ratelimit-remaining-tokens"] == "100"
    alice.admit([], 0.0).close(0.0)  # something is left, so another may come
    handle.outbox.num_tokens = 700
    assert alice.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert retry_after(refused(alice, 0.0)) == 21  # 200 in debt, at 10 a second, and one more
    permit.close(0.0)
    assert retry_after(refused(alice, 5.05)) == 16
    refused(alice, 20.0)
    alice.admit([], 20.1)


def test_a_stream_at_the_rate_that_runs_in_uses_up_nothing() -> None:
    alice = meter(tokens_per_minute=600)
    handle = FakeHandle()
    alice.admit([handle], 0.0)  # type: ignore[list-item]
    for seconds in (1, 7, 300):
        handle.outbox.num_tokens = 10 * seconds
        assert alice.headers(float(seconds))["x-ratelimit-remaining-tokens"] == "600"


def test_several_answers_to_one_prompt_have_read_it_once() -> None:
    alice = meter(tokens_per_minute=1000)
    prompt, handles = object(), []
    alice.admit(handles, 0.0)
    handles += [FakeHandle(100, prompt) for _ in range(4)] + [FakeHandle(50)]
    for handle in handles:
        handle.outbox.num_tokens = 10
    assert alice.headers(0.0)["x-ratelimit-remaining-tokens"] == str(1000 - 100 - 50 - 50)


def test_the_longer_wait_counts() -> None:
    alice = meter(requests_per_minute=60, tokens_per_minute=60)
    handle = FakeHandle()
    for _ in range(60):
        alice.admit([handle], 0.0)  # type: ignore[list-item]
    assert retry_after(refused(alice, 0.0)) == 1
    handle.num_prompt_tokens = 5
    assert retry_after(refused(alice, 0.0)) > 100


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.02, "20ms"), (0.9999, "1000ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s"), (7261, "2h1m1s")],
)
def test_spans_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert span(seconds) == text


# ---- the settings ----------------------------------------------------------------------------------------------------


def test_keys_that_came_and_went_are_forgotten_when_they_owe_nothing() -> None:
    made = KeyLimits(requests_per_minute=60)
    records: Any = {f"k{index}": SimpleNamespace(identity=str(index), limits=made) for index in range(10)}
    limits = Limits(records.get)
    running = limits.admit("k0", [], 0.0)
    for index in range(1, 9):
        permit = limits.admit(f"k{index}", [], 0.0)
        assert permit is not None
        permit.close(0.0)
    assert limits.num_meters == 9
    del records["k3"]
    for _ in range(30):
        permit = limits.admit("k8", [], 15.0)
        assert permit is not None
        permit.close(15.0)
    assert limits.admit("k9", [], 31.0) is not None
    assert limits.num_meters == 3  # who is being answered, who owes something, and the new one
    assert limits.headers("k8", 31.0)["x-ratelimit-remaining-requests"] == "46"
    assert running is not None
    running.close(31.0)


def test_limits_come_from_the_file_by_name(tmp_path: Any) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        '[security]\napi_keys = ["alice=1", "b b=2"]\n[security.limits.alice]\nmax_concurrent = 2\n'
        'tokens_per_minute = "none"\n[security.limits."b b"]\nrequests_per_minute = 10\n'
    )
    settings = load_settings(path=path)
    assert settings.security_limits == {
        "alice": KeyLimits(max_concurrent=2),
        "b b": KeyLimits(requests_per_minute=10),
    }
    Callers(settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[security.limits.alice]\nmax_concurent = 1", "[security.limits.alice] has no setting max_concurent; did you"),
        ("[security.limits.alice]\nmax_concurrent = 0", "max_concurrent = 0 (from"),
        ("[security.limits.alice]\nmax_concurrent = true", "1 to 1048576, or none"),
        ("[security.limits.alice]\ntokens_per_minute = 1.5", "1 to 1099511627776, or none"),
        ("[security.limits]\nmax_concurrent = 1", "[security.limits.NAME]"),
        ("[security]\nlimits = 1", "[security.limits.NAME]"),
        ("[security.limits.alice.more]\nx = 1", "[security.limits.alice] has no setting more"),
    ],
)
def test_faults_in_limits_are_named(tmp_path: Any, text: str, words: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(path=path)


def test_limits_of_a_key_that_does_not_exist_are_refused() -> None:
    settings = make_settings(security={"api_keys": KEYS}, security_limits={"carol": {"max_concurrent": 1}})
    with pytest.raises(ConfigError, match=r"\[security\.limits\.carol\] names the API key 'carol'.*\(alice, bob\)"):
        Callers(settings)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_over_its_limit_gets_429_and_nobody_else_notices() -> None:
    async with open_server(settings_with(requests_per_minute=2)) as server:
        post, before = partial(server.client.post, CHAT, json=chat_body(max_tokens=2)), trio.current_time()
        answers = [await post(headers=bearer("k1")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
        assert answers[0].headers["x-ratelimit-reset-requests"] == "30s"
        error = answers[2].json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "rate_limit_exceeded")
        assert 30 - (trio.current_time() - before) <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].headers["x-request-id"]
        other = await post(headers=bearer("k2"))
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        stats = await server.stats()
        assert stats["requests"]["rejected_by_reason"]["rate_limited"] == 1
        metrics = (await server.client.get("/metrics")).text
        assert 'relevo:admission_rejections_total{model_name="fake",reason="rate_limited"} 1.0' in metrics
        await server.settle()


BAD_GRAMMAR = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat_body(temperature=9), 400),
        (CHAT, {"messages": 5}, 400),
        (CHAT, chat_body() | {"model": "another"}, 404),
        (CHAT, chat_body("x" * 9000), 400),
        (CHAT, chat_body(response_format=BAD_GRAMMAR), 400),
        (CHAT, chat_body(structured_outputs={"regex": "(a"}), 400),
        (COMPLETIONS, {"prompt": [10**6]}, 400),
        (RESPONSES, {"input": 5}, 400),
        (MESSAGES, chat_body(), 400),
        (MANY_URL, {"requests": []}, 400),
        (MANY_URL, {"requests": [chat_body(), chat_body(temperature=9)]}, 400),
        ("/tokenize", {"prompt": "abc"}, 200),
        ("/detokenize", {"tokens": [97]}, 200),
        ("/v1/messages/count_tokens", chat_body(), 200),
    ],
)
async def test_what_was_looked_at_counts_as_a_request(path: str, body: dict[str, Any], status: int) -> None:
    async with open_server(settings_with(requests_per_minute=1)) as server:
        post = partial(server.client.post, headers=bearer("k1"))
        before = trio.current_time()
        answer = await post(path, json=body)
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (status, "0"), answer.text
        again = await post(path, json=body)
        assert again.status_code == 429
        assert 60 - (trio.current_time() - before) <= int(again.headers["retry-after"]) <= 60


@pytest.mark.parametrize("path", [CHAT, MANY_URL])
async def test_a_body_that_is_broken_off_counts_as_a_request(path: str, autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(settings_with(requests_per_minute=1)) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, path, chat_body(), more_body=True)
        driver.scope["headers"].append((b"authorization", b"Bearer k1"))
        nursery.start_soon(driver.run)
        await trio.testing.wait_all_tasks_blocked()
        driver.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert context.limits.headers("alice", trio.current_time())["x-ratelimit-remaining-requests"] == "0"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("path", "status"), [(CHAT, 503), (COMPLETIONS, 503), (RESPONSES, 503), (MESSAGES, 529), (MANY_URL, 503)]
)
@pytest.mark.parametrize("why", ["queue_full", "draining"])
async def test_what_the_server_cannot_take_costs_nothing(path: str, status: int, why: str) -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 1}
    async with (
        open_server(settings_with(requests_per_minute=1), limits=limits, step_seconds=0.02) as server,
        trio.open_nursery() as nursery,
    ):
        post = server.client.post
        if why == "queue_full":
            others = partial(post, CHAT, json=chat_body(max_tokens=400), headers=bearer("k2"))
            for number in (1, 2):  # one sits, one waits
                nursery.start_soon(others)
                with trio.fail_after(PATIENCE_SECONDS):
                    while server.engine.num_open < number or server.engine.snapshot()["requests"]["running"] == 0:
                        await trio.sleep(0.001)
        else:
            server.engine.drain()
        body = {"requests": [chat_body()] * 3} if path == MANY_URL else body_for(path, max_tokens=1)
        for _ in range(3):
            answer = await post(path, json=body, headers=bearer("k1"))
            assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (status, "1"), answer.text
        server.engine.abort_all("admin")


async def test_prompt_and_answer_count_streamed_or_whole() -> None:
    async with open_server(settings_with(tokens_per_minute=1000)) as server:
        body = {"prompt": "x" * 100, "max_tokens": 50, "n": 1}
        started = trio.current_time()

        def run_in() -> float:
            """What has run in since, at most; on a busy machine it may be much."""
            return (trio.current_time() - started) * 1000 / 60

        whole = await server.client.post(COMPLETIONS, json=body, headers=bearer("k1"))
        assert whole.json()["usage"]["total_tokens"] == 150
        assert 850 <= int(whole.headers["x-ratelimit-remaining-tokens"]) <= 850 + run_in()
        streamed = await server.client.post(COMPLETIONS, json=body | {"stream": True}, headers=bearer("k1"))
        assert streamed.status_code == 200
        after = await server.client.post("/tokenize", json={"prompt": "a"}, headers=bearer("k1"))
        assert 700 <= int(after.headers["x-ratelimit-remaining-tokens"]) <= 700 + run_in()


async def test_a_stream_that_runs_is_never_cut(autojump_clock: trio.testing.MockClock) -> None:
    """60 tokens a minute, an answer of 300: it comes whole, and the next waits until the debt is paid."""
    async with open_app(settings_with(tokens_per_minute=60)) as (app, _), trio.open_nursery() as nursery:

        async def ask(max_tokens: int) -> tuple[int, dict[bytes, bytes], bytes]:
            driver = Driver(app, COMPLETIONS, {"prompt": "abc", "max_tokens": max_tokens, "stream": True})
            driver.scope["headers"].append((b"authorization", b"Bearer k1"))
            nursery.start_soon(driver.run)
            head = await driver.sent.receive()
            text = b""
            while piece := await driver.body():
                text += piece
            return head["status"], dict(head["headers"]), text

        status, headers, text = await ask(300)
        assert status == 200
        assert int(headers[b"x-ratelimit-remaining-tokens"]) <= 60
        assert text.endswith(b"data: [DONE]\n\n")
        chunks = events(text.decode())[:-1]
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])) == 300
        status, headers, text = await ask(1)
        assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
        wait = int(headers[b"retry-after"])
        assert 230 < wait < 250
        await trio.sleep(wait - 1.5)
        assert (await ask(1))[0] == 429
        await trio.sleep(1.5)
        assert (await ask(1))[0] == 200


async def test_places_are_free_again_when_a_client_leaves(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(settings_with(max_concurrent=1)) as (app, context), trio.open_nursery() as nursery:

        def call(path: str = CHAT) -> Driver:
            driver = Driver(app, path, chat_body(max_tokens=400, stream=True))
            driver.scope["headers"].append((b"authorization", b"Bearer k1"))
            nursery.start_soon(driver.run)
            return driver

        async def drain(driver: Driver) -> bytes:
            text = b""
            while piece := await driver.body():  # its last words have to go somewhere
                text += piece
            return text

        first = call()
        assert await first.status() == 200
        second = call()
        assert await second.status() == 429
        assert b"(1) are answered now" in await drain(second)
        other = call("/v1/messages")
        head = await other.sent.receive()
        assert head["status"] == 429
        assert (b"retry-after", b"1") in head["headers"]
        assert b"rate_limit_error" in await drain(other)
        first.leave()
        await drain(first)
        third = call()
        assert await third.status() == 200
        third.leave()
        await drain(third)
        await context.engine.wait_idle()
        nursery.cancel_scope.cancel()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_openais_client_knows_what_it_is_told() -> None:
    async with open_server(settings_with(requests_per_minute=1)) as server:

        def ask() -> Any:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="k1", max_retries=0)
            with client:
                return client.chat.completions.create(**chat_body(max_tokens=1))

        await trio.to_thread.run_sync(ask)
        with pytest.raises(openai.RateLimitError) as caught:
            await trio.to_thread.run_sync(ask)
        assert caught.value.code == "rate_limit_exceeded"
        assert 58 <= int(caught.value.response.headers["retry-after"]) <= 60
