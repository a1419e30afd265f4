"""`/v1/messages`, read strictly by Anthropic's own types and client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
import trio
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from app.api.anthropic_answer import PING
from app.api.generation import HEARTBEAT_SECONDS
from app.api.translated_answers import MessageAnswer, MessageError, MessageEvent, TokenCount
from tests.app.serving import Driver, make_settings, open_app, open_server
from tests.fakes import FakeChatTemplate, expected_output

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
USE = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": CITY}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
ANSWER = bytes(expected_output([257, *b"hi", 258], 6)).decode()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 6, "messages": [USER], **fields}


def events(text: str) -> list[Any]:
    """A stream's events, each read strictly and held to its name; pings left out."""
    found = []
    for block in text.split("\n\n"):
        if not block.startswith("event: "):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] != "ping":
            MessageEvent.model_validate(value)
            found.append(EVENT.validate_python(value, strict=True))
    return found


def build(stream: list[Any]) -> dict[str, Any]:
    """The message that a stream's events make up, as its own client puts it together."""
    message = stream[0].message.model_dump(exclude_none=True)
    assert [event.type for event in stream[-2:]] == ["message_delta", "message_stop"]
    arguments = ""
    for event in stream[1:]:
        match event.type:
            case "content_block_start":
                assert event.index == len(message["content"])
                message["content"].append(event.content_block.model_dump(exclude_none=True))
                arguments = ""
            case "content_block_delta":
                assert event.index == len(message["content"]) - 1
                block = message["content"][-1]
                match event.delta.type:
                    case "text_delta":
                        block["text"] += event.delta.text
                    case "thinking_delta":
                        block["thinking"] += event.delta.thinking
                    case "input_json_delta":
                        arguments += event.delta.partial_json
            case "content_block_stop":
                if arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event.delta.model_dump(exclude_none=True)
                message["usage"] |= event.usage.model_dump(exclude_none=True)
    return without_ids(message)


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {
        **message,
        "id": message["id"].partition("_")[0],
        "content": [{key: value for key, value in block.items() if key != "id"} for block in message["content"]],
    }


async def ask(request: dict[str, Any], **fake: Any) -> dict[str, Any]:
    """A whole answer; a streamed one must agree with it."""
    async with open_server(limits={"enable_prefix_caching": False}, **fake) as server:
        response = await server.client.post(MESSAGES, json=request)
        assert response.status_code == 200, response.text
        MessageAnswer.model_validate(response.json())
        whole = Message.model_validate(response.json(), strict=True).model_dump(exclude_none=True)
        streamed = await server.client.post(MESSAGES, json=request | {"stream": True})
        assert "[DONE]" not in streamed.text
        assert build(events(streamed.text)) == without_ids(whole)
        await server.settle()
    return whole


async def test_an_answer() -> None:
    whole = await ask(body(temperature=0))
    assert whole["id"].startswith("msg_")
    assert whole["content"] == [{"type": "text", "text": ANSWER}]
    assert whole["stop_reason"] == "max_tokens"
    usage = whole["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["cache_read_input_tokens"]) == (4, 6, 0)


async def test_an_answer_that_ends_by_itself() -> None:
    whole = await ask(body(max_tokens=50), end_after=lambda prompt: 3)
    assert whole["stop_reason"] == "end_turn"
    assert "stop_sequence" not in whole


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
async def test_a_stop_sequence_is_told(max_tokens: int) -> None:
    whole = await ask(body(stop_sequences=["zz", ANSWER[3:5]], max_tokens=max_tokens))
    if max_tokens >= 5:
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", ANSWER[3:5])
        assert whole["content"] == [{"type": "text", "text": ANSWER[:3]}]
    else:
        assert whole["stop_reason"] == "max_tokens"


async def test_a_call_of_a_tool() -> None:
    whole = await ask(
        body(tools=[TOOL], max_tokens=200),
        answer=lambda prompt: f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>".encode(),
    )
    assert whole["stop_reason"] == "tool_use"
    text, first, second = whole["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert first["id"] != second["id"]
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "weather", {"city": "Paris"})


async def test_thinking_is_a_block_of_its_own() -> None:
    whole = await ask(body(max_tokens=200), answer=lambda prompt: b"<think>Hm.</think>\n\nYes.")
    thinking, text = whole["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "Yes."}


async def test_an_empty_answer_has_no_blocks() -> None:
    whole = await ask(body(), answer=lambda prompt: b"")
    assert whole["content"] == []
    assert whole["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("thinking", "opened"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
async def test_thinking_is_off_unless_it_is_asked_for(thinking: Any, opened: bool) -> None:
    template = FakeChatTemplate(["enable_thinking"], opening="<think>")
    async with open_server(chat_template=template) as server:
        request = {"messages": [USER], "thinking": thinking}
        count = (await server.client.post(COUNT, json=request)).json()
    TokenCount.model_validate(count)
    assert count == {"input_tokens": 4 + (len("<think>") if opened else 0)}


async def test_a_conversation_with_tools_is_laid_out() -> None:
    seen: list[str] = []

    def answer(prompt: list[int]) -> bytes:
        seen.append("".join("|" if token_id > 255 else chr(token_id) for token_id in prompt))
        return b"ok"

    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "see"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}]
    async with open_server(answer=answer) as server:
        response = await server.client.post(MESSAGES, json=body(messages=turns, system=system))
        assert response.status_code == 200, response.text
    assert seen[-1] == (
        f'|brief|a\nb|see\n{CALL}\n{{"name": "weather", "arguments": {{}}}}|'
        "Result of weather: sunny\nResult of weather: Error: no\nand?|"
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": "and"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "[0].content[0].tool_use_id",
        ),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"tools": 3}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "'tools[0].name'"),
        ({"tools": [{**TOOL, "input_schema": []}]}, "'tools[0].input_schema'"),
        (
            {"system": "x", "messages": [USER, {"role": "assistant", "content": [USE, {**USE, "id": ""}]}, USER]},
            "'messages[1].content[1].id'",
        ),
        (
            {"system": "x", "messages": [USER, {"role": "assistant", "content": [USE, USE]}, USER]},
            "'messages[1].content' has two 'tool_use' blocks of the same id",
        ),
        ({"system": "x", "messages": [USER, {"role": "assistant", "content": [USE]}, USER]}, "'tool_result'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'tool_choice.name'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": True}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
    ],
)
async def test_bad_requests_are_named_in_anthropics_shape(fields: dict[str, Any], named: str) -> None:
    async with open_server() as server:
        response = await server.client.post(MESSAGES, json=body(**fields))
    assert response.status_code == 400, response.text
    answer = response.json()
    MessageError.model_validate(answer)
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"]
    for theirs in (".function", "tool_calls", "tool_call_id", "chat_template_kwargs"):
        assert theirs not in answer["error"]["message"]


async def test_other_errors_have_the_shape_too() -> None:
    async with open_server() as server:
        post = server.client.post
        wrong = await post(MESSAGES, json=body(model="claude"))
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
        form = await post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
        assert (form.status_code, form.json()["type"]) == (415, "error")
        get = await server.client.get(MESSAGES)
        assert (get.status_code, get.json()["type"]) == (405, "error")
        large = await post(MESSAGES, content=b" " * (5 << 20), headers={"content-type": "application/json"})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        long = await post(MESSAGES, json=body(messages=[{"role": "user", "content": "x" * 2000}]))
        assert (long.status_code, long.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_key_may_come_as_theirs_do() -> None:
    settings = make_settings(security={"api_keys": ["me=secret"]})
    async with open_server(settings) as server:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await server.client.post(MESSAGES, json=body(), headers=headers)).status_code == 200
        for headers in ({"x-api-key": "wrong"}, {}, {"x-api-key": "secret", "authorization": "Bearer wrong"}):
            refused = await server.client.post(MESSAGES, json=body(), headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_a_heartbeat_is_a_ping(autojump_clock: trio.testing.MockClock) -> None:
    async with open_app(step_seconds=HEARTBEAT_SECONDS * 1.5) as (app, _), trio.open_nursery() as nursery:
        driver = Driver(app, MESSAGES, body(stream=True))
        nursery.start_soon(driver.run)
        assert await driver.status() == 200
        received = b""
        while chunk := await driver.body():
            received += chunk
    assert received.count(PING) >= 6
    assert build(events(received.decode()))["content"] == [{"type": "text", "text": ANSWER}]


async def test_tokens_are_counted() -> None:
    async with open_server() as server:
        request = {"model": "fake", "messages": [USER], "system": "brief"}
        assert (await server.client.post(COUNT, json=request)).json() == {"input_tokens": 10}
        more = (await server.client.post(COUNT, json={**request, "tools": [TOOL]})).json()
        assert more["input_tokens"] > 100
        odd = await server.client.post(COUNT, json={**request, "tools": [{**TOOL, "name": "a b"}]})
        assert "'tools[0].name'" in odd.json()["error"]["message"]
        refused = await server.client.post(COUNT, json={"messages": []})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")


async def test_their_client() -> None:
    def work(url: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            message = client.messages.create(**body())
            assert message._request_id is not None
            assert message.content[0].type == "text"
            assert message.content[0].text == ANSWER
            with client.messages.stream(**body()) as stream:
                assert "".join(stream.text_stream) == ANSWER
                final = stream.get_final_message()
            assert final.usage.output_tokens == 6
            assert final.stop_reason == "max_tokens"
            assert client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": "hi"}]) == (
                anthropic.types.MessageTokensCount(input_tokens=4)
            )
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(**body(model="claude"))

    async with open_server() as server:
        await trio.to_thread.run_sync(work, server.url)
