"""Chats as the reference has them; contents that stay contents; templates that cannot reach out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequestError, ModelFileError
from engine.text_guard import ControlGuard
from tests.engine.test_tokenizer import make_tokenizer
from tests.tiny_models import CONTROLS, TEMPLATE

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint

HELLO = [{"role": "user", "content": "hello"}]
PIECES = ["<|im_end|>", "<|im_start|>", "<|", "|", "im_end", "|>", ">", "<", "a", " ", "\n", "é", "\U000f0000"]
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def test_chats_are_those_of_the_reference(checkpoint: Checkpoint, reference: dict[str, Any]) -> None:
    """Rendered text and ids of all chats."""
    template = checkpoint.chat_template
    assert template is not None
    for case in reference["chat"]:
        assert template.render(case["messages"]) == case["rendered"]
        assert template.encode(case["messages"], checkpoint.tokenizer) == case["ids"]


@given(st.lists(CONTENTS, min_size=1, max_size=3))
def test_contents_never_become_control_tokens(contents: list[str]) -> None:
    """The controls are those of the same chat with harmless contents; the text is what was written."""
    tokenizer, template = make_tokenizer(), ChatTemplate(TEMPLATE)
    messages = [{"role": "user", "content": content} for content in contents]
    harmless = [{"role": "user", "content": "a"} for _ in contents]
    ids = template.encode(messages, tokenizer)
    expected = [i for i in template.encode(harmless, tokenizer) if tokenizer.is_control(i)]
    assert [i for i in ids if tokenizer.is_control(i)] == expected
    assert tokenizer.decode(ids) == template.render(messages)


@given(st.lists(CONTENTS, min_size=1, max_size=4))
def test_not_even_where_a_template_joins_them(contents: list[str]) -> None:
    """A spelling cut over several contents, with nothing but trimming between, stays text."""
    tokenizer = make_tokenizer()
    template = ChatTemplate("{% for message in messages %}{{ message.content | trim }}{% endfor %}")
    ids = template.encode([{"role": "user", "content": content} for content in contents], tokenizer)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == "".join(content.strip() for content in contents)


@given(CONTENTS)
def test_the_guard_takes_nothing_away(text: str) -> None:
    """Lengths stay, and turning the stand-ins back gives the value."""
    guarded, back = ControlGuard(CONTROLS).protect({"key": [text], "n": 1, text: None})
    assert not any(control in guarded["key"][0] for control in CONTROLS)
    assert len(guarded["key"][0]) == len(text)
    assert guarded["key"][0].translate(back) == text


@pytest.mark.parametrize("text", ["hello", "", "user", "a < b", "| table |"])
def test_plain_text_passes_the_guard_as_it_is(text: str) -> None:
    """Only a spelling, or a part of one at an edge, is touched: templates may compare contents."""
    assert ControlGuard(CONTROLS).protect(text)[0] == text


def test_overlapping_and_single_letter_spellings() -> None:
    """Breaking one spelling leaves no other behind."""
    guarded, back = ControlGuard(["aXa", "#"]).protect("aXaXa #")
    assert "aXa" not in guarded
    assert "#" not in guarded
    assert guarded.translate(back) == "aXaXa #"


def test_names_and_arguments_are_guarded_too() -> None:
    """Whatever part of a message a template writes."""
    tokenizer = make_tokenizer()
    template = ChatTemplate("{{ messages[0].name }}{{ messages[0].arguments | tojson }}")
    messages = [{"name": "<|im_end|>", "arguments": {"<|im_start|>": ["<|endoftext|>"]}}]
    ids = template.encode(messages, tokenizer)
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == '<|im_end|>{"<|im_start|>": ["<|endoftext|>"]}'


def test_definitions_of_tools_are_guarded_too() -> None:
    """They come from a request as the messages do."""
    tokenizer = make_tokenizer()
    template = ChatTemplate("{{ tools | tojson }}{{ messages[0].content }}")
    ids = template.encode(HELLO, tokenizer, tools=[{"name": "<|im_end|>", "<|im_start|>": 1}])
    assert not any(map(tokenizer.is_control, ids))
    assert tokenizer.decode(ids) == '[{"name": "<|im_end|>", "<|im_start|>": 1}]hello'


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}t{% endif %}", True),
        ("tools {{ message.tools }}{{ messages[0]['tools'] }}{# tools #}", False),
    ],
)
def test_what_a_template_looks_at(source: str, known: bool) -> None:
    """Its variables, wherever in its code, but neither attributes nor its text."""
    assert ("tools" in ChatTemplate(source).variables) is known


def test_adjacent_text_is_encoded_as_one_piece() -> None:
    """Merges cross the border between template and content, as in training."""
    tokenizer = make_tokenizer()
    template = ChatTemplate("{{ messages[0].content }}ell{{ messages[1].content }}")
    ids = template.encode([{"content": "h"}, {"content": "o"}], tokenizer)
    assert ids == tokenizer.encode("hello", parse_control=False)
    assert len(ids) == 1


def test_without_a_prompt_for_the_answer() -> None:
    """The last turn is closed and no new one begun."""
    rendered = ChatTemplate(TEMPLATE).render(HELLO, add_generation_prompt=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"


def test_what_templates_rely_on() -> None:
    """Special tokens by name, loop controls, JSON as a model knows it, the date, trimmed blocks."""
    source = (
        "{{ bos_token }}{% for m in messages %}\n{{ m.content | tojson }}\n    {% break %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{% if tools is none %}-{% endif %}"
    )
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    assert template.render([{"content": "<é>&'"}]) == '<s>"<é>&\'"\n4-'


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ raise_exception('Roles must\nalternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[7].content.x }}", "has no element 7"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_is_one_line_about_the_messages(source: str, cause: str) -> None:
    """Whether it refuses the messages or reaches for what it may not have."""
    with pytest.raises(InvalidRequestError, match=cause) as caught:
        ChatTemplate(source).render(HELLO)
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_a_template_that_does_not_parse() -> None:
    """Known when the model is opened."""
    with pytest.raises(ModelFileError, match="does not parse"):
        ChatTemplate("{% for %}")


def test_half_a_surrogate_pair_is_about_the_messages() -> None:
    """The text cannot be encoded."""
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(TEMPLATE).encode([{"role": "user", "content": "\ud83d"}], make_tokenizer())
    assert caught.value.param == "messages"


def test_messages_with_every_private_use_character() -> None:
    """Somebody will try."""
    everything = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    with pytest.raises(InvalidRequestError, match="private-use"):
        ChatTemplate(TEMPLATE).encode([{"role": "user", "content": everything}], make_tokenizer())
