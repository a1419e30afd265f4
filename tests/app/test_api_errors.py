"""Every error of the API: its status, its shape, and that it leaves the engine clean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from tests.app.serving import (
    CHAT,
    COMPLETIONS,
    ENDS,
    MESSAGES,
    RESPONSES,
    ROUTES,
    Driver,
    body_for,
    chat_body,
    error_at_the_end,
    make_settings,
    open_app,
    open_server,
)
from tests.fakes import FakeRunner, Poison
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    import httpx


def completion_body(prompt: object = "hello", **fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": prompt, **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 300}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"timeout": 0}, "timeout"),
    ({"queue_timeout": 0}, "queue_timeout"),
    ({"stream": True, "stream_options": 3}, "stream_options"),
    ({"timeout": "soon"}, "timeout"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"model": 7}, "model"),
    ({"n": 17}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": {}}, "tools"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"store": True}, "store"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"service_tier": "batch"}, "service_tier"),
    ({"service_tier": 1}, "service_tier"),
    ({"service_tier": ["flex"]}, "service_tier"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"stop_token_ids": [259]}, "stop_token_ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 65}, "stop_token_ids"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    (message(role="king", content="hi"), "messages[0].role"),
    (message(content="hi"), "messages[0].role"),
    (message(role="user"), "messages[0].content"),
    (message(role="system", content=None), "messages[0].content"),
    (message(role="user", content=[]), "messages[0].content"),
    (message(role="user", content=5), "messages[0].content"),
    (message(role="user", content=[{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type"),
    (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(role="assistant", content="", tool_calls=[{}]), "messages[0].tool_calls[0].function"),
]
BAD_PROMPTS: list[tuple[object, str]] = [
    (None, "prompt"),
    ("", "prompt"),
    ([], "prompt"),
    ([[]], "prompt"),
    (["a"] * 65, "prompt"),
    (["a", ""], "prompt[1]"),
    (["a", [1]], "prompt[1]"),
    ([[1], "a", [2]], "prompt[1]"),
    ([[1], [259]], "prompt[1]"),
    ([1, "a"], "prompt"),
    ([True], "prompt"),
    ([-1], "prompt"),
    ([259], "prompt"),
    ([2**40], "prompt"),
    ([2**80], "prompt"),
    ([1.0], "prompt"),
    ([[True]], "prompt"),
    ({"a": 1}, "prompt"),
]


async def test_a_bad_field_is_400_that_names_it() -> None:
    async with open_server() as server:
        for fields, param in BAD_FIELDS:
            response = await server.client.post(CHAT, json=chat_body() | fields)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (fields, response.text)
            assert error["type"] == "invalid_request_error"
            assert set(error) == {"message", "type", "param", "code"}
            assert "instance of" not in error["message"]  # names of our classes say nothing to a client
        for prompt, param in BAD_PROMPTS:
            response = await server.client.post(COMPLETIONS, json=completion_body(prompt))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), (prompt, response.text)
        for field in (
            {"suffix": "x"},
            {"best_of": 2},
            {"logprobs": 6},
            {"logprobs": True},
            {"logprobs": 0, "echo": True},
        ):
            response = await server.client.post(COMPLETIONS, json=completion_body(**field))
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(field)))
        assert server.engine.num_open == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b'{"messages": NaN}', b"[" * 5000, b'{"a":"\\ud800"}'],
)
async def test_a_body_that_is_no_json_object_is_400(content: bytes) -> None:
    async with open_server() as server:
        response = await server.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"


async def test_what_is_no_json_by_its_own_word_is_415() -> None:
    async with open_server() as server:
        for headers in (
            {"content-type": "text/plain"},
            {"content-type": "application/json", "content-encoding": "gzip"},
        ):
            response = await server.client.post(CHAT, content=b"{}", headers=headers)
            assert response.status_code == 415
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_addresses_and_methods_that_do_not_exist() -> None:
    async with open_server() as server:
        for path in ("/v1", "/v1/", "/v1/nothing", "/v1/chat/completions/", "/nothing"):
            response = await server.client.post(path, json={})
            assert response.status_code == 404, path
            assert response.json()["error"]["type"] == "not_found_error"
        for path in (CHAT, COMPLETIONS, "/tokenize"):
            response = await server.client.get(path)
            assert response.status_code == 405
            assert response.json()["error"]["type"] == "invalid_request_error"
            assert "POST" in response.headers["allow"]


async def test_a_body_beyond_the_limit_is_413_and_told_what_it_is() -> None:
    async with open_server() as server:

        async def post(num_bytes: int) -> tuple[int, str]:
            answer = await server.client.post(
                CHAT, content=b" " * num_bytes, headers={"content-type": "application/json"}
            )
            return answer.status_code, answer.json()["error"]["message"]

        status, message = await post(5 << 20)
        assert status == 413
        told = re.fullmatch(r"The body is larger than ([\d,]+) bytes, the most that this server takes\.", message)
        assert told, message
        most = int(told[1].replace(",", ""))
        assert [(await post(most + more))[0] for more in (0, 1)] == [400, 413]


async def test_an_unknown_model_is_404() -> None:
    async with open_server() as server:
        response = await server.client.post(CHAT, json=chat_body() | {"model": "gpt-9"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_a_prompt_that_can_never_fit_is_400_and_the_next_is_served() -> None:
    async with open_server(num_blocks=8, limits={"block_size": 16}) as server:
        capacity = server.engine.model.context_length
        for body, path in ((chat_body("x" * 200), CHAT), (completion_body("x" * 200), COMPLETIONS)):
            for stream in (False, True):
                response = await server.client.post(path, json=body | {"stream": stream})
                assert response.status_code == 400
                error = response.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert error["capacity"] == capacity
        exact = await server.client.post(COMPLETIONS, json=completion_body("x" * capacity))
        assert exact.json()["usage"]["completion_tokens"] == 1
        assert exact.json()["choices"][0]["finish_reason"] == "length"
        assert (await server.client.post(COMPLETIONS, json=completion_body())).status_code == 200
        await server.settle()


async def test_more_turns_than_tokens_fit_is_400_before_they_are_laid_out() -> None:
    async with open_server() as server:
        body = chat_body() | {"messages": [{"role": "user", "content": ""}] * 5_000}
        response = await server.client.post(CHAT, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_more_ids_or_turns_than_fit_are_400_and_none_is_looked_at() -> None:
    """Were one looked at, the answer would be about it."""
    wrong = ["no id", {"no": "message"}] * 1000
    async with open_server() as server:
        for path, body in (
            (COMPLETIONS, completion_body([1, *wrong])),
            (CHAT, {"messages": wrong}),
            ("/tokenize", {"messages": wrong}),
            ("/detokenize", {"tokens": wrong}),
        ):
            response = await server.client.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), (path, error)
            assert error["capacity"] == server.engine.model.context_length


async def test_a_text_that_cannot_fit_is_400_and_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_server() as server:
        monkeypatch.setattr(type(server.engine.tokenizer), "encode", lambda *_, **__: pytest.fail("was tokenized"))
        longest = len("<|assistant|>")
        text = "x" * (longest * server.engine.model.context_length + 1)
        for body, param in (({"prompt": text}, "prompt"), (chat_body(text), "messages")):
            response = await server.client.post("/tokenize", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            assert error["prompt_tokens"] == server.engine.model.context_length + 1


async def test_ids_that_cannot_be_are_400() -> None:
    async with open_server() as server:
        for tokens in (None, "x", [259], [-1], [2**80], ["a"], [True], [1.0]):
            response = await server.client.post("/detokenize", json={"tokens": tokens})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens"), tokens


@pytest.mark.parametrize("path", ROUTES)
async def test_a_full_queue_is_503_at_once_and_says_when_to_come_back(path: str) -> None:
    limits = {"max_num_seqs": 1, "max_waiting": 2}
    async with open_server(limits=limits, step_seconds=0.02) as server, trio.open_nursery() as nursery:
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await server.client.post(path, json=body_for(path, max_tokens=400))).status_code)

        for _ in range(3):
            nursery.start_soon(ask)
            while server.engine.snapshot()["requests"]["running"] == 0:
                await trio.sleep(0.001)
        while server.engine.num_open < 3:
            await trio.sleep(0.001)
        for stream in (False, True):
            response = await server.client.post(path, json=body_for(path, max_tokens=400, stream=stream))
            error = check_unavailable(path, response, "queue_full")
            assert path == MESSAGES or (error["depth"], error["limit"]) == (2, 2)
        assert server.engine.num_open == 3, "nobody had to end first"
        server.engine.abort_all("admin")
    assert statuses == [403, 403, 403]


def check_unavailable(path: str, response: httpx.Response, code: str) -> dict[str, Any]:
    """Anthropic's clients know another status and no code."""
    error: dict[str, Any] = response.json()["error"]
    wanted = (529, "overloaded_error") if path == MESSAGES else (503, "service_unavailable_error")
    assert (response.status_code, error["type"]) == wanted
    assert path == MESSAGES or error["code"] == code
    assert int(response.headers["retry-after"]) >= 1
    return error


@pytest.mark.parametrize("path", ROUTES)
async def test_while_draining_new_requests_are_503(path: str) -> None:
    async with open_server() as server:
        server.engine.drain()
        check_unavailable(path, await server.client.post(path, json=body_for(path, max_tokens=3)), "draining")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_deadline_before_the_first_byte_is_408_and_frees_everything(path: str) -> None:
    settings = make_settings(server={"request_timeout_seconds": 0.1})
    async with open_server(settings, step_seconds=0.01) as server:
        assert (await server.client.post(path, json=body_for(path, max_tokens=300))).status_code == 408
        await server.settle()
    async with open_server(step_seconds=0.01) as server:
        response = await server.client.post(path, json=body_for(path, max_tokens=300, timeout=0.1))
        assert (response.status_code, response.json()["error"]["type"]) == (408, "timeout_error")
        assert path == MESSAGES or response.json()["error"]["code"] == "timeout"
        await server.settle()
        assert server.engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"timeout": {"decode": 1}}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_deadline_after_the_first_byte_is_told_in_band_without_done(path: str) -> None:
    async with open_server(step_seconds=0.01) as server:
        response = await server.client.post(path, json=body_for(path, max_tokens=300, timeout=0.1, stream=True))
        assert response.status_code == 200
        assert not [end for end in ENDS if end in response.text]
        error = error_at_the_end(response.text)
        assert error["type"] == "timeout_error" if path == MESSAGES else error["code"] == "timeout"
        assert ("\n\nevent: error\n" in response.text) == (path in (RESPONSES, MESSAGES))
        await server.settle()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_frees_the_seat(path: str, stream: bool, autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=0.1) as (app, context), trio.open_nursery() as nursery:
        driver = Driver(app, path, body_for(path, max_tokens=400, stream=stream))
        nursery.start_soon(driver.run)
        await trio.sleep(1)
        assert context.engine.num_open == 1
        if stream:
            assert await driver.status() == 200
            await driver.body()
        driver.leave()
        await trio.sleep(0.5)
        assert context.engine.num_open == 0
        assert context.engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"client": {"decode": 1}}
        nursery.cancel_scope.cancel()


async def test_a_step_that_fails_fails_its_requests_alone() -> None:
    poison = Poison(error=RuntimeError("the chip is on fire"))
    async with open_server(runner=FakeRunner(256, 4, before_step=poison)) as server:
        response = await server.client.post(CHAT, json=chat_body("poison", max_tokens=3))
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
        assert "fire" not in response.text
        assert (await server.client.post(CHAT, json=chat_body(max_tokens=3))).status_code == 200
        streamed = await server.client.post(CHAT, json=chat_body("poison", max_tokens=3, stream=True))
        assert streamed.status_code == 200
        assert '"error"' in streamed.text
        assert "[DONE]" not in streamed.text
        await server.settle()


async def test_odd_paths_and_hosts_reach_nothing_unjudged() -> None:
    """Raw requests: clients would tidy these up."""
    async with open_server(make_settings(security={"api_keys": ["me=secret"]})) as server:
        for target in (
            "//v1/models",
            "/v1//models",
            "/%76%31/models",
            "/v1/%2e%2e/v1/models",
            "/./v1/models",
            "/v1/models%00",
            "*",
            "/v1/models;x",
        ):
            for host in ("localhost", "a:b:c", "", "[::1", "evil.example", "\x7f"):
                stream = await trio.open_tcp_stream("127.0.0.1", server.port)
                await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                received = b""
                with trio.fail_after(PATIENCE_SECONDS):
                    while chunk := await stream.receive_some(65536):
                        received += chunk
                status = received[9:12]  # to the end: `Connection: close` is kept
                assert status in (b"400", b"401", b"404"), (target, host, received)
                if received.endswith(b"}"):  # what is no HTTP at all is answered before there is an application
                    assert b"x-request-id: " in received.lower()
                await stream.aclose()
