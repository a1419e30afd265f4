"""Thinking told apart from the answer, and the switches of a request."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.parts import Message, join_parts
from app.api.reasoning import PAIRS, ThinkingReader, parse_template_options, thinking_before
from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequestError


def read(text: str, closing: str | None = None) -> Message:
    """The message that a text makes up, a character at a time."""
    reader = ThinkingReader(closing)
    parts = [part for character in text for part in reader.push(character)]
    return join_parts([*parts, *reader.finish()])


@pytest.mark.parametrize("opening", PAIRS)
def test_each_pair_of_marks(opening: str) -> None:
    text = f"\n{opening}\nHow so?\n{PAIRS[opening]}\n\nBecause."
    assert read(text) == Message("Because.", "How so?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Plain.", Message("Plain.")),
        (" Plain.\n", Message(" Plain.\n")),
        ("Not <think>first</think>", Message("Not <think>first</think>")),
        ("<thin", Message("<thin")),
        ("<think>cut of", Message("", "cut of")),
        ("<think>cut of</thi", Message("", "cut of</thi")),
        ("<think>\n\n</think>\n\nAt once.", Message("At once.")),
        ("<think>a < b </b> c</think>d", Message("d", "a < b </b> c")),
        ("<think>a</think>b</think>", Message("b</think>", "a")),
        ("<think>a</think> \n", Message("", "a")),
        ("", Message()),
        ("  ", Message("  ")),
    ],
)
def test_where_thinking_begins_and_ends(text: str, message: Message) -> None:
    assert read(text) == message


def test_thinking_that_the_prompt_began() -> None:
    assert read("\nHm.\n</think>\nYes.", "</think>") == Message("Yes.", "Hm.")
    assert read("Hm", "</think>") == Message("", "Hm")
    assert read("  ", "</think>") == Message()


def test_thinking_leaves_as_it_comes() -> None:
    reader = ThinkingReader()
    reader.push("<think>one")
    assert join_parts(reader.push(" two")).thinking == " two"


QWEN = "{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}{{ messages[0].content }}"
EFFORT = "{{ reasoning_effort or 'medium' }}{{ message.thinking }}{{ thinking_budget }}"


@pytest.mark.parametrize(
    ("source", "kwargs", "effort", "options"),
    [
        (QWEN, None, None, {}),
        (QWEN, {"enable_thinking": False}, None, {"enable_thinking": False}),
        (QWEN, {}, "none", {"enable_thinking": False}),
        (QWEN, {}, "high", {"enable_thinking": True}),
        (QWEN, {"enable_thinking": True}, "none", {"enable_thinking": True}),
        (QWEN, {"thinking": False}, None, {}),
        (EFFORT, None, "low", {"reasoning_effort": "low"}),
        (EFFORT, {"thinking_budget": 10}, None, {"thinking_budget": 10}),
        ("x", None, "none", {}),
    ],
)
def test_what_reaches_the_template(source: str, kwargs: Any, effort: Any, options: dict[str, Any]) -> None:
    assert parse_template_options(kwargs, effort, ChatTemplate(source)) == options


@pytest.mark.parametrize(
    ("kwargs", "effort", "param"),
    [
        ([], None, "chat_template_kwargs"),
        ({"tools": []}, None, "chat_template_kwargs.tools"),
        ({"messages": []}, None, "chat_template_kwargs.messages"),
        ({"enable_thinking": 1}, None, "chat_template_kwargs.enable_thinking"),
        ({"enable_thinking": "no"}, None, "chat_template_kwargs.enable_thinking"),
        ({"thinking": True}, None, "chat_template_kwargs.thinking"),
        ({"thinking_budget": 2**40}, None, "chat_template_kwargs.thinking_budget"),
        ({"thinking_budget": True}, None, "chat_template_kwargs.thinking_budget"),
        ({"reasoning_effort": []}, None, "chat_template_kwargs.reasoning_effort"),
        ({"x" * 9999: 1}, None, f"chat_template_kwargs.{'x' * 64}"),
    ],
)
def test_what_does_not(kwargs: Any, effort: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_template_options(kwargs, effort, ChatTemplate(QWEN))
    assert caught.value.param == param


def test_an_effort_needs_a_template_that_knows_it() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_template_options(None, "high", ChatTemplate("{{ messages[0].thinking }}"))
    assert caught.value.param == "reasoning_effort"


PAIR = ("<think>", "</think>")


def test_whether_the_prompt_begins_to_think() -> None:
    source = "{{ messages[0].content }}\n{% if enable_thinking is not false %}<think>\n{% endif %}"
    template = ChatTemplate(source)
    assert thinking_before(template, {}) == ("", "</think>")
    assert thinking_before(template, {"enable_thinking": False}) == ("<think>", "</think>")
    assert thinking_before(ChatTemplate("<think>\n\n</think>\n"), {}) is None
    assert thinking_before(ChatTemplate("{{ messages[0].content.split('<think>')[0] }}"), {}) == PAIR
    assert thinking_before(ChatTemplate("{{ raise_exception('no <think>') }}"), {}) is None
    assert thinking_before(ChatTemplate("{{ messages[0].content }}"), {}) is None
