"""Tools over the chat route: offered, called, answered, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.api.messages import parse_messages
from app.api.tools import MAX_TOOLS, Tooling, id_maker, parse_tooling, tell_tools
from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequestError
from tests.app.serving import CHAT, chat_body, events, open_server
from tests.fakes import FakeChatTemplate

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


def call(name: str = "weather", call_id: str = "c1", arguments: str = '{"city": "Paris"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "How is it?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


async def ask(
    answer: str | None, *, template: FakeChatTemplate | None = None, **fields: Any
) -> tuple[ChatCompletion, list[ChatCompletionChunk]]:
    """A whole answer and a streamed one, both read strictly; without an `answer` the fake model writes its own."""
    body = chat_body(**{"tools": [tool()], **fields})
    fake: dict[str, Any] = {"answer": lambda prompt: None if answer is None else answer.encode()}
    fake |= {"max_model_len": 2048, "num_blocks": 1024}
    if template is not None:
        fake["chat_template"] = template
    async with open_server(**fake) as server:
        response = await server.client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        whole = ChatCompletion.model_validate(response.json(), strict=True)
        streamed = await server.client.post(CHAT, json=body | {"stream": True})
        *chunks, done = events(streamed.text)
        assert done == "[DONE]"
        await server.settle()
    return whole, [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]


def joined(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """What a client makes of the chunks."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "reason": None}
    for chunk in chunks:
        choice = chunk.choices[0]
        found["content"] += choice.delta.content or ""
        found["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        found["reason"] = choice.finish_reason or found["reason"]
        for delta in choice.delta.tool_calls or ():
            assert delta.function is not None
            if delta.id is not None:
                assert (delta.index, delta.type) == (len(found["calls"]), "function")
                found["calls"].append([delta.function.name, ""])
            found["calls"][delta.index][1] += delta.function.arguments or ""
    return found


def shape(whole: ChatCompletion) -> dict[str, Any]:
    """A whole answer in the same form."""
    choice = whole.choices[0]
    calls: Any = choice.message.tool_calls or ()
    return {
        "content": choice.message.content or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [[one.function.name, one.function.arguments] for one in calls],
        "reason": choice.finish_reason,
    }


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", ""),
        (f"One moment.\n<tool_call>{CALL}</tool_call>", "One moment."),
        (f"[TOOL_CALLS][{CALL}]", ""),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', ""),
        (CALL, ""),
    ],
)
async def test_a_call_is_told_as_openai_tells_it(answer: str, content: str) -> None:
    whole, chunks = await ask(answer)
    expected = {
        "content": content,
        "reasoning_content": "",
        "calls": [["weather", '{"city":"Paris"}']],
        "reason": "tool_calls",
    }
    assert shape(whole) == expected
    assert joined(chunks) == expected
    assert whole.choices[0].message.content == (content or None)


async def test_an_answer_without_a_call_is_text() -> None:
    whole, chunks = await ask("It is <b>sunny</b>.")
    assert shape(whole) == joined(chunks)
    assert whole.choices[0].message.content == "It is <b>sunny</b>."
    assert whole.choices[0].message.tool_calls is None
    assert whole.choices[0].finish_reason == "stop"


FULL = '<think>H</think>S <tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>\nD'
LENGTHS = [*range(1, 41), *range(41, len(FULL), 7), len(FULL) + 1]


@pytest.mark.long
@pytest.mark.parametrize("stop", [None, ["weather"], ["</tool_call>\n"]])
async def test_streamed_and_whole_agree_for_every_length(stop: Any) -> None:
    async with open_server(answer=lambda prompt: FULL.encode(), limits={"enable_prefix_caching": False}) as server:
        for max_tokens in LENGTHS if stop is None else LENGTHS[::6]:
            body = chat_body(tools=[tool()], max_tokens=max_tokens, stop=stop, logprobs=True)
            response = await server.client.post(CHAT, json=body)
            whole = ChatCompletion.model_validate(response.json(), strict=True)
            streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
            streamed = await server.client.post(CHAT, json=streaming)
            *chunks, last, done = events(streamed.text)
            assert done == "[DONE]"
            assert last["usage"] == response.json()["usage"]
            parsed = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
            assert joined(parsed) == shape(whole)
            entries = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
            told = [entry["token"] for logprobs in entries for entry in logprobs["content"]]
            assert told == [entry["token"] for entry in response.json()["choices"][0]["logprobs"]["content"]]
    if stop is None:
        assert shape(whole)["reason"] == "tool_calls"
        assert shape(whole)["content"] == "SD"


@pytest.mark.parametrize("max_tokens", range(1, len(CALL) + 3, 5))
async def test_an_answer_that_is_cut_off_within_a_call_is_text(max_tokens: int) -> None:
    whole, chunks = await ask(CALL, max_tokens=max_tokens)
    assert shape(whole) == joined(chunks)
    assert whole.choices[0].finish_reason == ("length" if max_tokens <= len(CALL) else "tool_calls")
    if max_tokens < len(CALL):
        assert whole.choices[0].message.content == CALL[:max_tokens]


async def test_none_tells_the_model_nothing_and_reads_no_calls() -> None:
    whole, chunks = await ask(CALL, tool_choice="none")
    plain, _ = await ask(CALL, tools=None)
    assert shape(whole) == joined(chunks)
    assert whole.choices[0].message.content == CALL
    assert whole.usage is not None
    assert plain.usage is not None
    assert whole.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_thinking_comes_before_calls() -> None:
    whole, chunks = await ask(f"<think>\nHm.\n</think>\n\n<tool_call>{CALL}</tool_call>")
    assert shape(whole) == joined(chunks)
    assert shape(whole)["reasoning_content"] == "Hm."
    assert shape(whole)["content"] == ""


async def test_thinking_that_the_prompt_began() -> None:
    template = FakeChatTemplate(["enable_thinking"], opening="<think>")
    whole, chunks = await ask("Hm.</think>Yes.", template=template, tools=None)
    assert shape(whole) == joined(chunks)
    assert (shape(whole)["reasoning_content"], shape(whole)["content"]) == ("Hm.", "Yes.")
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    whole, _ = await ask("Yes.", template=template, tools=None, **off)
    assert (shape(whole)["reasoning_content"], shape(whole)["content"]) == ("", "Yes.")
    whole, _ = await ask("Yes.", template=template, tools=None, reasoning_effort="none")
    assert shape(whole)["content"] == "Yes."


async def test_definitions_reach_a_template_that_knows_tools() -> None:
    prompts: list[str] = []

    def answer(prompt: list[int]) -> bytes:
        prompts.append(bytes(token_id for token_id in prompt if token_id < 256).decode())
        return b"ok"

    for template in (FakeChatTemplate(["tools"]), FakeChatTemplate()):
        async with open_server(answer=answer, chat_template=template) as server:
            body = chat_body("hi", tools=[tool(description="of a city")], max_tokens=4)
            assert (await server.client.post(CHAT, json=body)).status_code == 200
    known, plain = prompts[0], prompts[-1]
    assert known.startswith('[{"type": "function", "function": {"name": "weather"')
    assert '"description": "of a city"' in known
    assert "reply with nothing but JSON" not in known
    assert '"name": "weather"' in plain
    assert "reply with nothing but JSON" in plain


async def test_results_go_back_to_the_model() -> None:
    async with open_server(answer=lambda prompt: b"ok") as server:
        messages = [USER, CALLED, RESULT]
        body = {"messages": messages, "tools": [tool()]}
        response = await server.client.post(CHAT, json=body)
        assert response.status_code == 200, response.text


async def test_the_tokenizers_route_counts_tools_as_the_chat_does() -> None:
    for template in (FakeChatTemplate(["tools"]), FakeChatTemplate()):
        async with open_server(chat_template=template) as server:
            messages = {"messages": [USER, CALLED, RESULT], "tools": [tool()]}
            counted = (await server.client.post("/tokenize", json=messages)).json()["count"]
            answer = (await server.client.post(CHAT, json={**messages, "max_tokens": 1})).json()
            assert counted == answer["usage"]["prompt_tokens"]


TEMPLATE = ChatTemplate("{{ messages[0].content }}")


def test_calls_and_results_in_plain_words() -> None:
    messages = parse_messages(
        [
            {"role": "system", "content": "Be brief."},
            USER,
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "tool_calls": [call(), call(call_id="c2")],
            },
            RESULT,
            {**RESULT, "tool_call_id": "c2"},
            USER,
            USER,
        ],
        100,
    )
    tooling = parse_tooling([tool()], "auto", None)
    told, options = tell_tools(messages, tooling, TEMPLATE)
    assert options == {}
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "user"]
    assert told[0]["content"].startswith("Be brief.\n\nYou can call these functions:")
    assert told[2]["reasoning_content"] == "Hm."
    assert told[2]["content"].splitlines() == ["Let me see.", CALL, CALL]
    assert told[3]["content"] == "Result of weather: sunny\nResult of weather: sunny\nHow is it?"
    assert tell_tools((USER,), Tooling(), TEMPLATE) == ((USER,), {})


def test_a_template_that_knows_tools_gets_arguments_as_objects() -> None:
    messages = parse_messages([USER, CALLED, RESULT], 100)
    template = ChatTemplate("{% if tools %}{% endif %}")
    told, options = tell_tools(messages, parse_tooling([tool()], None, None), template)
    assert told == messages
    assert options == {"tools": [tool()]}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert messages[2] == {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "weather"}


@pytest.mark.parametrize("arguments", ["", " ", "{}", "[1]", "not json", "{", '{"a": NaN}'])
def test_whatever_a_model_once_wrote_as_arguments_may_come_back(arguments: str) -> None:
    messages = [USER, {**CALLED, "tool_calls": [call(arguments=arguments)]}, RESULT]
    parse_messages(messages, 100)


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "names"),
    [
        (None, None, "none", []),
        ([], "auto", "none", []),
        ([tool()], None, "auto", ["weather"]),
        ([tool()], "none", "none", []),
        ([tool(), tool("b")], "required", "required", ["weather", "b"]),
        ([tool(), tool("b")], {"type": "function", "function": {"name": "b"}}, "named", ["b"]),
        (
            [tool(), tool("b"), tool("c")],
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("c"), tool()]}},
            "required",
            ["weather", "c"],
        ),
    ],
)
def test_what_may_be_called(tools: Any, choice: Any, mode: str, names: list[str]) -> None:
    tooling = parse_tooling(tools, choice, None)
    assert tooling.mode == mode
    assert [each.name for each in tooling.tools] == names


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ("x", None, "tools"),
        ([3], None, "tools[0]"),
        ([{}], None, "tools[0].type"),
        ([{"type": 5}], None, "tools[0].type"),
        ([{"type": "web_search"}], None, "tools[0].type"),
        ([{"type": "function", "function": 3}], None, "tools[0].function"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1].function.name"),
        ([tool(description=3)], None, "tools[0].function.description"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters"),
        ([tool(parameters=nested(40))], None, "tools[0].function.parameters"),
        ([tool(description="x" * 70_000)], None, "tools[0].function"),
        ([tool(f"t{index}") for index in range(MAX_TOOLS + 1)], None, "tools"),
        (None, "required", "tool_choice"),
        (None, {"type": "function", "function": {"name": "weather"}}, "tool_choice"),
        ([tool()], "maybe", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], 3, "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "x"}}, "tool_choice.function.name"),
        (
            [tool()],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            [tool()],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}},
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_bad_tools_are_named(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_tooling(tools, choice, None)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, RESULT], "messages[1].tool_call_id"),
        ([USER, CALLED], "messages"),
        ([USER, CALLED, USER], "messages[2]"),
        ([USER, CALLED, RESULT, RESULT], "messages[3].tool_call_id"),
        ([USER, CALLED, {**RESULT, "tool_call_id": "other"}], "messages[2].tool_call_id"),
        ([USER, CALLED, {"role": "tool", "content": "sunny"}], "messages[2].tool_call_id"),
        ([USER, CALLED, {**RESULT, "content": None}], "messages[2].content"),
        ([{**USER, "tool_calls": [call()]}], "messages[0].tool_calls"),
        ([USER, {**CALLED, "tool_calls": {}}], "messages[1].tool_calls"),
        ([USER, {**CALLED, "tool_calls": [call()] * 129}], "messages[1].tool_calls"),
        ([USER, {**CALLED, "tool_calls": [call(), call()]}], "messages[1].tool_calls"),
        ([USER, {**CALLED, "tool_calls": [call(call_id="")]}], "messages[1].tool_calls[0].id"),
        ([USER, {**CALLED, "tool_calls": [call(name="x" * 257)]}], "messages[1].tool_calls[0].function.name"),
        ([USER, {**CALLED, "tool_calls": [{**call(), "type": "custom"}]}], "messages[1].tool_calls[0]"),
        (
            [USER, {**CALLED, "tool_calls": [{**call(), "function": {"name": "a", "arguments": {}}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([USER, {"role": "assistant", "function_call": {"name": "a"}}], "messages[1].function_call"),
        ([USER, {"role": "assistant", "reasoning_content": 3}], "messages[1].reasoning_content"),
    ],
)
def test_bad_turns_are_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(messages, 100)
    assert caught.value.param == param


def test_ids_are_as_the_template_takes_them_back() -> None:
    short = id_maker(ChatTemplate("[TOOL_CALLS]"))()
    assert len(short) == 9
    assert short.isalnum()
    assert id_maker(TEMPLATE)().startswith("call_")
