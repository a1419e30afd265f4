"""Calls that a request demands: bound by a grammar, over the whole server, on every route that knows tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.app import test_anthropic, test_responses
from tests.app.serving import CHAT, chat_body, open_server
from tests.app.test_tools import ask, joined, shape
from tests.fakes import FakeChatTemplate

UNIT = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}, "warm": {"type": "boolean"}},
    "required": ["unit", "warm"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "heat", "parameters": UNIT}},
    {"type": "function", "function": {"name": "rest"}},
]
NAMED = {"type": "function", "function": {"name": "heat"}}


def check(calls: list[Any], names: set[str]) -> None:
    assert calls
    for name, arguments in calls:
        assert name in names
        value = json.loads(arguments)
        if name == "heat":
            assert set(value) == {"unit", "warm"}
            assert value["unit"] in ("celsius", "fahrenheit")
            assert isinstance(value["warm"], bool)
        else:
            assert value == {}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_the_model_calls_whatever_it_would_rather_say(choice: Any, seed: int) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed}
    whole, chunks = await ask(None, **fields)
    assert shape(whole) == joined(chunks)
    assert shape(whole)["content"] == ""
    assert shape(whole)["reason"] == "tool_calls"
    assert len(shape(whole)["calls"]) == 1
    check(shape(whole)["calls"], {"heat"} if choice == NAMED else {"heat", "rest"})


async def test_several_calls_are_a_list_where_they_are_asked_for() -> None:
    whole, chunks = await ask(None, tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
    assert shape(whole) == joined(chunks)
    check(shape(whole)["calls"], {"heat", "rest"})


@pytest.mark.parametrize("max_tokens", range(1, 60, 6))
async def test_a_call_that_is_cut_off(max_tokens: int) -> None:
    whole, chunks = await ask(None, tools=TOOLS, tool_choice=NAMED, max_tokens=max_tokens)
    assert shape(whole) == joined(chunks)
    text = shape(whole)["content"] + "".join(arguments for _, arguments in shape(whole)["calls"])
    if shape(whole)["reason"] == "length":
        assert len(text) <= max_tokens


@pytest.mark.parametrize("cut", ["max_tokens", "stop"])
async def test_half_a_call_is_no_text(cut: str) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": CITY}}]
    for kept, calls in (
        ('{"na', []),
        ('{"name": "fi', []),
        ('{"name": "find"', [["find", ""]]),
        ('{"name": "find", "argum', [["find", ""]]),
        ('{"name": "find", "arguments": {"city": "New', [["find", '{"city": "New']]),
    ):
        fields: dict[str, Any] = {"max_tokens": len(kept), "logprobs": True}  # without them whole texts are forced
        whole, chunks = await ask(
            TO_YORK,
            tools=tools,
            tool_choice="required",
            **(fields if cut == "max_tokens" else {"stop": TO_YORK[len(kept) :]}),
        )
        assert shape(whole) == joined(chunks)
        assert (shape(whole)["content"], shape(whole)["calls"]) == ("", calls)
        assert shape(whole)["reason"] == ("length" if cut == "max_tokens" else "stop")


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TO_YORK = '{"name": "find", "arguments": {"city": "New York"}}'


async def test_a_call_that_a_stop_string_has_cut_off_is_not_to_be_carried_out() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": CITY}}]
    for stop, arguments, reason in (
        ([" York"], '{"city": "New', "stop"),
        (["}}"], '{"city": "New York"', "stop"),
        (["Boston"], '{"city": "New York"}', "tool_calls"),
    ):
        whole, chunks = await ask(TO_YORK, tools=tools, tool_choice="required", stop=stop)
        assert shape(whole) == joined(chunks)
        assert shape(whole)["calls"] == [["find", arguments]]
        assert shape(whole)["reason"] == reason
    request = test_anthropic.body(
        tools=[{"name": "find", "input_schema": CITY}], tool_choice={"type": "any"}, max_tokens=100
    )
    async with open_server(answer=lambda prompt: TO_YORK.encode()) as server:
        cut = (await server.client.post("/v1/messages", json=request | {"stop_sequences": [" York"]})).json()
        complete = (await server.client.post("/v1/messages", json=request)).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", " York")
    assert (complete["stop_reason"], complete["content"][0]["input"]) == ("tool_use", {"city": "New York"})


async def test_thinking_comes_before_a_demanded_call() -> None:
    template = FakeChatTemplate(["tools"], opening="<think>")
    async with open_server(chat_template=template) as server:
        body = chat_body(tools=TOOLS, tool_choice="required", max_tokens=60)
        message = (await server.client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert message["reasoning_content"]  # the fake model never ends its thinking by itself
    assert "tool_calls" not in message


@pytest.mark.parametrize("opening", ["<think>", ""])
async def test_a_call_that_was_thought_about(opening: str) -> None:
    """Whether the prompt begins the thinking or the model itself does."""
    template = FakeChatTemplate(["tools"], opening=opening)
    template.source = "<think>"
    begin = "" if opening else "<think>"
    call = '{"name": "heat", "arguments": {"unit": "celsius", "warm": true}}'
    whole, chunks = await ask(
        f"{begin}It is {{warm}}.</think>{call}", template=template, tools=TOOLS, tool_choice="required"
    )
    assert shape(whole) == joined(chunks)
    assert shape(whole)["reasoning_content"] == "It is {warm}."
    assert shape(whole)["calls"] == [["heat", '{"unit": "celsius", "warm": true}']]
    assert shape(whole)["reason"] == "tool_calls"


async def test_a_demanded_call_and_another_form_are_two_things() -> None:
    async with open_server() as server:
        body = chat_body(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
        response = await server.client.post(CHAT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_a_schema_that_no_grammar_can_hold_names_the_tools() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools = [{"type": "function", "function": {"name": "bad", "parameters": bad}}]
    async with open_server() as server:
        body = chat_body(tools=tools, tool_choice="required", max_tokens=5)
        response = await server.client.post(CHAT, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("tools")
        body = chat_body(tools=tools, max_tokens=5)
        assert (await server.client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
async def test_of_several_tools_the_one_at_fault_is_named(choice: Any) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    async with open_server() as server:
        answer = await server.client.post(CHAT, json=chat_body(tools=tools, tool_choice=choice, max_tokens=5))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[2].function.parameters")
    assert error["message"] == "'tools[2].function.parameters' cannot be used: Invalid type: nonsense."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "heat"}])
async def test_anthropics_form(choice: Any) -> None:
    tools = [{"name": "heat", "input_schema": UNIT}, {"name": "rest", "input_schema": {"type": "object"}}]
    request = test_anthropic.body(tools=tools[:1], tool_choice=choice, max_tokens=300)
    whole = await test_anthropic.ask(request)
    assert whole["stop_reason"] == "tool_use"
    check([[block["name"], json.dumps(block["input"])] for block in whole["content"]], {"heat"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "heat"}])
async def test_responses_form(choice: Any) -> None:
    tools = [{"type": "function", "name": "heat", "parameters": UNIT}]
    whole = await test_responses.ask(test_responses.body(tools=tools, tool_choice=choice, max_output_tokens=None))
    assert whole.status == "completed"
    check([[item.name, item.arguments] for item in whole.output if item.type == "function_call"], {"heat"})


async def test_responses_with_a_schema() -> None:
    text = {"format": {"type": "json_schema", "name": "unit", "schema": UNIT, "strict": True}}
    whole = await test_responses.ask(test_responses.body(text=text, max_output_tokens=None))
    check([["heat", whole.output_text]], {"heat"})
