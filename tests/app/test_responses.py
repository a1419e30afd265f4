"""`/v1/responses`, read strictly by OpenAI's own types and client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import trio
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.api.translated_answers import ResponseAnswer, ResponseEvent
from tests.app.serving import open_server
from tests.fakes import FakeChatTemplate, expected_output

RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": CITY, "strict": True}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
USER = {"role": "user", "content": "hi"}
ASKED = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "warm"}
ANSWER = bytes(expected_output([257, *b"hi", 258], 6)).decode()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "input": "hi", "max_output_tokens": 6, **fields}


def events(text: str) -> list[Any]:
    """A stream's events, each read strictly, named and numbered."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("event: "):
            name, data = block.split("\n")
            value = json.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            assert value["sequence_number"] == len(found)
            ResponseEvent.model_validate(value)
            found.append(EVENT.validate_python(value, strict=True))
    return found


def check_stream(stream: list[Any]) -> dict[str, Any]:
    """Hold a stream's events to each other; its last one has the whole answer."""
    assert [event.type for event in stream[:2]] == ["response.created", "response.in_progress"]
    last = stream[-1]
    assert last.type in ("response.completed", "response.incomplete")
    items: dict[int, str] = {}
    done: list[dict[str, Any]] = []
    for event in stream[2:-1]:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert event.output_index == len(items)
            items[event.output_index] = ""
        elif kind == "output_item.done":
            assert event.output_index == len(done)
            done.append(event.item.model_dump(exclude_none=True))
        elif kind.endswith(".delta"):
            assert event.output_index == len(items) - 1
            items[event.output_index] += event.delta
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event.text == items[event.output_index]
        elif kind == "function_call_arguments.done":
            assert event.arguments == items[event.output_index]
    assert done == [item.model_dump(exclude_none=True) for item in last.response.output]
    return normalized(last.response)


def normalized(response: Response) -> dict[str, Any]:
    """Without what differs from call to call."""
    shown: dict[str, Any] = response.model_dump(exclude_none=True, by_alias=True)
    for item in shown["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return shown | {"id": "", "created_at": 0}


async def ask(request: dict[str, Any], **fake: Any) -> Response:
    """A whole answer; a streamed one must agree with it."""
    async with open_server(limits={"enable_prefix_caching": False}, **fake) as server:
        response = await server.client.post(RESPONSES, json=request)
        assert response.status_code == 200, response.text
        ResponseAnswer.model_validate(response.json())
        whole = Response.model_validate(response.json(), strict=True)
        streamed = await server.client.post(RESPONSES, json=request | {"stream": True})
        assert "[DONE]" not in streamed.text
        assert check_stream(events(streamed.text)) == normalized(whole)
        await server.settle()
    return whole


async def test_an_answer() -> None:
    whole = await ask(body(temperature=0, metadata={"a": "b"}, instructions=None))
    assert whole.id.startswith("resp_")
    assert whole.output_text == ANSWER
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (4, 6, 10)
    assert whole.metadata == {"a": "b"}
    assert whole.temperature == 0


async def test_an_answer_that_ends_by_itself() -> None:
    whole = await ask(body(max_output_tokens=None), end_after=lambda prompt: 3)
    assert whole.status == "completed"
    assert whole.output_text == ANSWER[:3]


async def test_an_empty_answer_is_an_empty_message() -> None:
    whole = await ask(body(), answer=lambda prompt: b"")
    assert whole.output_text == ""
    assert [item.type for item in whole.output] == ["message"]


async def test_calls_of_functions() -> None:
    text = f"<think>Hm.</think>Let me see.\n<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    whole = await ask(body(tools=[TOOL], max_output_tokens=None), answer=lambda prompt: text.encode())
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    thinking, _, call, other = whole.output
    assert thinking.type == "reasoning"
    assert thinking.content is not None
    assert thinking.content[0].text == "Hm."
    assert call.type == "function_call"
    assert other.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert call.call_id != other.call_id
    assert whole.output_text == "Let me see."
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == len("Hm.")


@pytest.mark.parametrize("max_output_tokens", range(1, 60, 7))
async def test_an_answer_that_is_cut_off(max_output_tokens: int) -> None:
    text = f"<think>Hm.</think>See.<tool_call>{CALL}"
    whole = await ask(body(tools=[TOOL], max_output_tokens=max_output_tokens), answer=lambda prompt: text.encode())
    assert whole.status == "incomplete"
    assert whole.output


async def test_items_are_laid_out_as_turns() -> None:
    seen: list[str] = []

    def answer(prompt: list[int]) -> bytes:
        seen.append("".join("|" if token_id > 255 else chr(token_id) for token_id in prompt))
        return b"ok"

    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "see", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    async with open_server(answer=answer) as server:
        response = await server.client.post(RESPONSES, json=body(input=items, instructions="brief"))
        assert response.status_code == 200, response.text
        again = body(input=[*items, *response.json()["output"], {"role": "user", "content": "more"}])
        assert (await server.client.post(RESPONSES, json=again)).status_code == 200
    assert seen[0] == (
        f'|brief|d|a|see\n{CALL}\n{{"name": "weather", "arguments": {{}}}}|'
        "Result of weather: sunny\nResult of weather: no|b|c|and?|"
    )
    assert seen[-1].endswith("|and?|ok|more|")


async def test_an_effort_switches_thinking() -> None:
    template = FakeChatTemplate(["enable_thinking"], opening="<think>")
    on = await ask(body(reasoning={"effort": "high"}), chat_template=template)
    off = await ask(body(reasoning={"effort": "none"}), chat_template=template)
    assert on.usage is not None
    assert off.usage is not None
    assert on.usage.input_tokens - off.usage.input_tokens == len("<think>")
    assert [item.type for item in on.output] == ["reasoning"]
    assert [item.type for item in off.output] == ["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"instructions": 3}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": 3}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": 3}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "b"}}}}, "text.format.schema"),
        ({"input": "x" * 2000}, "input"),
        ({"instructions": "x", "input": [ASKED]}, "input"),
        ({"instructions": "x", "input": [USER, ASKED, USER]}, "input[2]"),
        ({"instructions": "x", "input": [USER, ASKED, {**ASKED, "call_id": ""}]}, "input[2].call_id"),
        ({"input": [USER, {**ASKED, "name": "x" * 300}]}, "input[1].name"),
        ({"input": [USER, ASKED, {**RESULT, "call_id": "d"}]}, "input[2].call_id"),
    ],
)
async def test_bad_requests_are_named(fields: dict[str, Any], param: str) -> None:
    async with open_server() as server:
        response = await server.client.post(RESPONSES, json=body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    for theirs in ("messages", "response_format", ".function", "tool_calls", "reasoning_effort"):
        assert theirs not in error["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "'name', 'description' and 'parameters' stand"),
        ({"tools": [5]}, "'tools[0]' must be an object"),
        ({"tools": [{}]}, "'tools[0].type' is missing"),
        ({"input": [5]}, "'input[0]' must be an object"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "'input[0].name' is missing"),
        ({"input": [{"type": "function_call", "call_id": 5}]}, "'input[0].call_id' must be a string"),
        ({"input": [{"type": "picture"}]}, "'input[0].type' is 'picture'"),
    ],
)
async def test_what_is_wrong_with_it_is_said(fields: dict[str, Any], said: str) -> None:
    async with open_server() as server:
        assert said in (await server.client.post(RESPONSES, json=body(**fields))).json()["error"]["message"]


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    rest = {
        "store": False, "background": False, "include": [], "previous_response_id": None, "truncation": "disabled",
        "reasoning": {"effort": "none", "summary": "auto"}, "text": {"format": {"type": "text"}}, "tools": [],
        "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "user": "me", "top_logprobs": 0,
        "prompt_cache_key": "x", "service_tier": "auto",
    }  # fmt: skip
    async with open_server() as server:
        response = await server.client.post(RESPONSES, json=body(**rest))
    assert response.status_code == 200, response.text


async def test_a_failure_in_a_stream_is_an_event_of_theirs() -> None:
    async with open_server(step_seconds=0.01) as server:
        response = await server.client.post(RESPONSES, json=body(max_output_tokens=400, stream=True, timeout=0.1))
    *_, last = events(response.text)
    assert (last.type, last.code) == ("error", "timeout")


async def test_their_client() -> None:
    def work(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(model="fake", input="hi", max_output_tokens=6)
            assert whole.output_text == ANSWER
            with client.responses.stream(model="fake", input="hi", max_output_tokens=6) as stream:
                text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            assert text == ANSWER
            tools: Any = [TOOL]
            called = client.responses.create(model="fake", input="hi", tools=tools)
            assert called.output[0].type == "function_call"
            with client.responses.stream(model="fake", input="hi", tools=tools) as stream:
                final = stream.get_final_response()
            assert final.output[0].type == "function_call"

    def answer(prompt: list[int]) -> bytes | None:
        return f"<tool_call>{CALL}</tool_call>".encode() if len(prompt) > 10 else None

    async with open_server(answer=answer) as server:
        await trio.to_thread.run_sync(work, server.url)
