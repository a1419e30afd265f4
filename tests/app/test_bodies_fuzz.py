"""Whatever a body holds, it is planned or refused with a message for its sender; nothing else comes out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.anthropic import plan_messages
from app.api.planning import plan_chat
from app.api.responses import plan_response
from app.callers import NOBODY
from engine.errors import RelevoError
from tests.fakes import FakeChatTemplate, FakeTokenizer, fake_config

if TYPE_CHECKING:
    from app.api.planning import Planner

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "response_format": None,
}
MESSAGES = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Paris"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [], "is_error": True}]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "stop_sequences": ["x"],
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
    "instructions": "s",
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
}
ROUTES = [(plan_chat, CHAT), (plan_messages, MESSAGES), (plan_response, RESPONSES)]
JUNK: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3), st.just("x" * 70_000),
    st.just([]), st.just({}), st.lists(st.none(), max_size=2), st.just({"type": "text"}), st.just({"type": []}),
    st.just([{"type": "function"}]), st.just({"type": "function", "function": {"name": {}}}), st.just("\ud83d"),
)  # fmt: skip


def make_engine(template: FakeChatTemplate) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(name="fake", context_length=512),
        chat_template=template,
        tokenizer=FakeTokenizer(),
        config=(config := fake_config()),
        limits=config.limits,
    )


ENGINES = [make_engine(FakeChatTemplate()), make_engine(FakeChatTemplate(["tools", "enable_thinking"], "<think>"))]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside."""
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((*path, key), *places(value[key], (*path, key)))]


def put(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """A copy with something else in one place."""
    if not path:
        return junk
    if isinstance(value, dict):
        return {key: put(inner, path[1:], junk) if key == path[0] else inner for key, inner in value.items()}
    if isinstance(value, list):
        return [put(inner, path[1:], junk) if index == path[0] else inner for index, inner in enumerate(value)]
    return value


@pytest.mark.parametrize(("planner", "body"), ROUTES, ids=["chat", "messages", "responses"])
def test_the_bodies_themselves_are_right(planner: Planner, body: dict[str, Any]) -> None:
    planner(ENGINES[1], body, NOBODY)


@pytest.mark.parametrize(("planner", "body"), ROUTES, ids=["chat", "messages", "responses"])
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_wrong_value_anywhere_is_refused_or_means_nothing(
    planner: Planner, body: dict[str, Any], data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        body = put(body, data.draw(st.sampled_from(places(body))), data.draw(JUNK))
    for engine in ENGINES:
        try:
            plan = planner(engine, body, NOBODY)
        except RelevoError as error:
            assert len(str(error)) < 1000  # noqa: PT017
        else:
            plan.make_reader().push("x")
