"""The OpenAI-compatible routes: answers, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.app.serving import CHAT, COMPLETIONS, chat_body, events, open_server
from tests.fakes import expected_output


def completion_body(prompt: object = "hello", **fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": prompt, **fields}


async def test_a_completion_is_the_models_text() -> None:
    async with open_server() as server:
        answer = (await server.client.post(COMPLETIONS, json=completion_body(max_tokens=8))).json()
        assert answer["object"] == "text_completion"
        assert answer["model"] == "fake"
        assert answer["id"].startswith("cmpl-")
        choice = answer["choices"][0]
        assert choice == {
            "index": 0,
            "text": bytes(expected_output(b"hello", 8)).decode(),
            "logprobs": None,
            "finish_reason": "length",
        }
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], ["hi"], "hi"])
async def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: object) -> None:
    async with open_server() as server:
        answer = (await server.client.post(COMPLETIONS, json=completion_body(prompt))).json()
        assert answer["choices"][0]["text"] == bytes(expected_output(b"hi", 16)).decode()
        assert answer["usage"]["completion_tokens"] == 16  # OpenAI's default for completions


async def test_a_chat_answers_until_the_model_ends_it() -> None:
    async with open_server(end_after=lambda prompt: 5) as server:
        answer = (await server.client.post(CHAT, json=chat_body("hi"))).json()
        choice = answer["choices"][0]
        prompt = [257, *b"hi", 258]
        assert choice["message"] == {
            "role": "assistant",
            "content": bytes(expected_output(prompt, 5)).decode(),
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == 4


async def test_a_chat_without_a_limit_fills_the_context() -> None:
    async with open_server(max_model_len=40) as server:
        answer = (await server.client.post(CHAT, json=chat_body("hi"))).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 41  # the last token needs no place in the cache


async def test_ignore_eos_goes_on() -> None:
    async with open_server(end_after=lambda prompt: 5) as server:
        answer = (await server.client.post(CHAT, json=chat_body(max_tokens=9, ignore_eos=True))).json()
        assert answer["usage"]["completion_tokens"] == 9
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_text_parts_are_text_and_control_tokens_in_them_stay_text() -> None:
    content = [{"type": "text", "text": "<|assistant|>"}, {"type": "text", "text": "b"}]
    async with open_server() as server:
        body = chat_body(max_tokens=3) | {"messages": [{"role": "user", "content": content}]}
        answer = (await server.client.post(CHAT, json=body)).json()
        prompt = [257, *b"<|assistant|>\nb", 258]
        assert answer["choices"][0]["message"]["content"] == bytes(expected_output(prompt, 3)).decode()


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("stop", [None, "a", ["zzzz"]])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_streamed_and_whole_answers_agree(path: str, stop: object, max_tokens: int) -> None:
    fields = {"max_tokens": max_tokens, "stop": stop, "seed": 1}
    body = chat_body(**fields) if path == CHAT else completion_body(**fields)
    async with open_server(limits={"enable_prefix_caching": False}) as server:
        whole = (await server.client.post(path, json=body)).json()
        streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
        response = await server.client.post(path, json=streaming)
        *chunks, usage, done = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all("finish_reason" in choice for choice in choices)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_without_being_asked_a_stream_has_no_usage() -> None:
    async with open_server() as server:
        response = await server.client.post(CHAT, json=chat_body(stream=True, max_tokens=2))
        assert "usage" not in response.text
        assert events(response.text)[-1] == "[DONE]"


async def test_null_is_absent_and_unknown_fields_are_ignored() -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_completion_tokens", "stream", "stream_options",
         "n", "logprobs", "tools", "tool_choice", "response_format", "user", "timeout", "ignore_eos", "model")
    )  # fmt: skip
    async with open_server() as server:
        body = chat_body(max_tokens=2) | nulls | {"never_heard_of": {"a": [1]}}
        response = await server.client.post(CHAT, json=body)
        assert response.status_code == 200, response.text


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    rest = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}, "repetition_penalty": 1.0,
        "priority": 0, "service_tier": "auto", "user": "me", "metadata": {"a": "b"}, "store": False,
    }  # fmt: skip
    async with open_server() as server:
        response = await server.client.post(CHAT, json=chat_body(max_completion_tokens=3) | rest)
        assert response.json()["usage"]["completion_tokens"] == 3


async def test_the_newer_name_of_the_limit_wins() -> None:
    async with open_server() as server:
        body = chat_body(max_tokens=9, max_completion_tokens=2)
        assert (await server.client.post(CHAT, json=body)).json()["usage"]["completion_tokens"] == 2


async def test_models() -> None:
    async with open_server() as server:
        listed = (await server.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert listed["data"][0]["id"] == "fake"
        assert listed["data"][0]["max_model_len"] == server.engine.model.context_length
        assert (await server.client.get("/v1/models/fake")).json()["id"] == "fake"
        missing = await server.client.get("/v1/models/some/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ({"prompt": "hi", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        *(
            ({"messages": [{"role": "user", "content": "hi"}], name: value}, name)
            for name, value in (
                ("add_special_tokens", True),
                ("chat_template", "{{ messages }}"),
                ("continue_final_message", True),
                ("documents", [{"text": "x"}]),
            )
        ),
    ],
)
async def test_tokens_that_would_not_be_those_of_the_request_are_not_told(fields: dict[str, Any], param: str) -> None:
    async with open_server() as server:
        refused = await server.client.post("/tokenize", json=fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        rest = {"add_special_tokens": False, "continue_final_message": False, "documents": [], "n": 3}
        messages = [{"role": "user", "content": "hi"}]
        told = (await server.client.post("/tokenize", json={"messages": messages, **rest})).json()["tokens"]
        assert told == [257, *b"hi", 258]
        assert (await server.client.post("/tokenize", json={"prompt": "hi", **rest})).json()["tokens"] == [*b"hi"]


async def test_tokenize_and_back() -> None:
    async with open_server() as server:
        post = server.client.post
        answer = (await post("/tokenize", json={"model": "fake", "prompt": "a<|end|>"})).json()
        assert answer == {"count": 2, "max_model_len": 512, "tokens": [97, 256], "token_strs": None}
        chat = (await post("/tokenize", json={"messages": [{"role": "user", "content": "<|end|>"}]})).json()
        assert chat["tokens"] == [257, *b"<|end|>", 258]
        shown = (await post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()
        assert shown["token_strs"] == ["a", "b"]
        assert (await post("/detokenize", json={"tokens": [104, 105]})).json() == {"prompt": "hi"}
        long = "x" * 5000
        assert (await post("/tokenize", json={"prompt": long})).json()["count"] == 5000


async def test_an_assistants_turn_may_have_no_text() -> None:
    """Histories hold such turns; for anybody else it is a mistake."""
    async with open_server() as server:
        turn = {"role": "user", "content": "a"}
        for silent in ({"role": "assistant", "content": None}, {"role": "assistant"}):
            body = {"messages": [turn, silent, turn]}
            assert (await server.client.post("/tokenize", json=body)).json()["tokens"] == [257, 97, 258, 257, 97, 258]
            assert (await server.client.post(CHAT, json=body | {"max_tokens": 1})).status_code == 200


async def test_a_request_id_comes_back_or_is_made() -> None:
    async with open_server() as server:
        given = await server.client.get("/v1/models", headers={"X-Request-Id": "abc-123"})
        assert given.headers["x-request-id"] == "abc-123"
        for bad in ("x" * 129, "a b", "<script>"):
            made = await server.client.get("/v1/models", headers={"X-Request-Id": bad})
            assert made.headers["x-request-id"] != bad
            assert len(made.headers["x-request-id"]) == 32
        refused = await server.client.post(CHAT, json={}, headers={"X-Request-Id": "abc"})
        assert refused.headers["x-request-id"] == "abc"


async def test_text_with_line_ends_and_foreign_scripts_stays_one_event() -> None:
    async with open_server() as server:
        body = {"prompt": "née 漢字 🎉\n\u2028", "max_tokens": 4, "stream": True}
        response = await server.client.post(
            COMPLETIONS,
            content=json.dumps(body, ensure_ascii=False).encode(),
            headers={"content-type": "application/json"},
        )
        assert events(response.text)[-1] == "[DONE]"


async def test_a_model_without_a_chat_template_still_completes() -> None:
    async with open_server(chat_template=False) as server:
        refused = await server.client.post(CHAT, json=chat_body())
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "no_chat_template"
        assert (await server.client.post(COMPLETIONS, json=completion_body())).status_code == 200
