"""Calls of tools found in text: every family's form, whatever the cuts; what is no call stays text."""

from __future__ import annotations

import json
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.parts import CallArguments, ChainedReader, Message, Part, Reader, Text, join_parts
from app.api.reasoning import PAIRS, ThinkingReader
from app.api.tool_calls import CallReader, HeldReader, JsonEnd

NAMES = ("weather", "time_of-day")
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def make_reader(*, parallel: bool = True, closing: str | None = None) -> Reader:
    ids = count()
    calls = CallReader(NAMES, make_id=lambda: f"id{next(ids)}", parallel=parallel)
    return ChainedReader(ThinkingReader(closing), calls)


def make_held() -> HeldReader:
    ids = count()
    return HeldReader(make_id=lambda: f"id{next(ids)}")


def read(text: str, *, reader: Reader | None = None, cuts: tuple[int, ...] = ()) -> Message:
    """The message that a text makes up when it comes in pieces that end at `cuts`."""
    reader = reader or make_reader()
    parts: list[Part] = []
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        parts += reader.push(text[start:end])
    return join_parts([*parts, *reader.finish()])


def calls_of(text: str) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in read(text).calls]


PARIS = ("weather", {"city": "Paris"})
ROME = ("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    ("text", "calls", "rest"),
    [
        # Hermes and Qwen
        (f"<tool_call>\n{CALL}\n</tool_call>", [PARIS], ""),
        (f"Let me see.\n\n<tool_call>{CALL}</tool_call>", [PARIS], "Let me see."),
        (f"<tool_call>{CALL}", [PARIS], ""),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL.replace('Paris', 'Rome')}</tool_call>\n", [PARIS, ROME], ""),
        (f"<tool_call>{CALL}</tool_call>\nThere.", [PARIS], "There."),
        ('<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
         [("weather", {"city": "</tool_call>"})], ""),
        # Llama 3
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS], ""),
        ('{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "weather", "parameters": {"city": "Rome"}}',
         [PARIS, ROME], ""),
        ('{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', [PARIS], ""),
        # Mistral
        (f"[TOOL_CALLS] [{CALL}]", [PARIS], ""),
        (f"[TOOL_CALLS][{CALL}, {CALL.replace('Paris', 'Rome')}]", [PARIS, ROME], ""),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]weather{"city": "Rome"}', [PARIS, ROME], ""),
        ('[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{"city": "Paris"}', [PARIS], ""),
        # plain JSON
        (CALL, [PARIS], ""),
        (f"  {CALL}\n", [PARIS], ""),
        (f"[{CALL}, {CALL.replace('Paris', 'Rome')}]", [PARIS, ROME], ""),
        ('{"function": {"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}}', [PARIS], ""),
        ('{"arguments": {}, "name": "time_of-day"}', [("time_of-day", {})], ""),
    ],
)  # fmt: skip
def test_the_forms_of_the_families(text: str, calls: list[tuple[str, object]], rest: str) -> None:
    assert calls_of(text) == calls
    assert read(text).text == rest


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.\n",
        "  spaces stay  ",
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        "[1, 2, 3]",
        "[]",
        "{}",
        "{",
        "[TOOL_",
        "<tool_call>",
        "a < b",
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call> so',
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"n": 1e999}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"n": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "nobody_offered_this", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather"}</tool_call>',
        "<tool_call>" + "[" * 3000,
        '{"name": "weather", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3001,
        f"Call it like this: {CALL}",
        f"[{CALL}, 3]",
        "[TOOL_CALLS]what is this {",
        "[TOOL_CALLS]" + "x" * 500 + '{"a": 1}',
        '[TOOL_CALLS]nobody[ARGS]{"a": 1}',
        "<|python_tag|>print(1)",
    ],
)
def test_what_is_no_call_stays_text_to_the_letter(text: str) -> None:
    message = read(text, cuts=tuple(range(len(text))))
    assert message == Message(text)
    reader = make_reader()
    reader.push(text)
    reader.finish()
    assert reader.reason("stop") == "stop"


def test_text_leaves_as_soon_as_it_is_certain() -> None:
    reader = make_reader()
    assert reader.push("Hel") == [Text("Hel")]
    assert reader.push("lo <") == [Text("lo")]
    assert reader.push("b> and") == [Text(" <b> and")]
    assert reader.push(" more") == [Text(" more")]


def test_a_json_answer_leaves_when_its_first_key_is_no_calls() -> None:
    reader = make_reader()
    assert reader.push('{"na') == []
    assert join_parts(reader.push('tion": ')).text == '{"nation":'


def test_one_call_is_the_end_where_only_one_is_wanted() -> None:
    message = read(f"Well. [TOOL_CALLS][{CALL}, {CALL}] more", reader=make_reader(parallel=False))
    assert message.text == "Well."
    assert len(message.calls) == 1


def test_the_reason_tells_of_calls_only_where_the_answer_ended_by_itself() -> None:
    reader = make_reader()
    reader.push(CALL)
    assert reader.reason("stop") == "tool_calls"
    assert reader.reason("length") == "length"


def test_ids_and_indexes_count_up() -> None:
    message = read(f"[{CALL}, {CALL}]")
    assert [call.call_id for call in message.calls] == ["id0", "id1"]


FRAGMENTS = [
    CALL, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "weather[ARGS]", '{"city": 1}',
    "[", "]", "{", "}", '"', "\\", ";", ",", " ", "\n", "a", "é🎉", '{"name": "weather", "arguments": ', '"name"',
    "<tool", "[TOOL", *[mark for pair in list(PAIRS.items())[:2] for mark in pair], "<thi", "</think",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12).map(tuple)


@given(TEXTS, CUTS, st.booleans(), st.sampled_from([None, "</think>"]))
def test_the_cuts_do_not_matter(text: str, cuts: tuple[int, ...], parallel: bool, closing: str | None) -> None:
    whole = read(text, reader=make_reader(parallel=parallel, closing=closing))
    assert read(text, reader=make_reader(parallel=parallel, closing=closing), cuts=cuts) == whole
    every = tuple(range(len(text)))
    assert read(text, reader=make_reader(parallel=parallel, closing=closing), cuts=every) == whole
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(TEXTS)
def test_nothing_is_lost_where_there_is_no_call_and_no_thinking(text: str) -> None:
    message = read(text)
    if not message.calls and not any(text.lstrip().startswith(opening) for opening in PAIRS):
        assert message.text == text


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=6), st.integers(), st.none()), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3), CUTS, st.booleans())
def test_calls_under_a_grammar_are_passed_on_as_they_come(
    calls: list[tuple[str, dict[str, object]]], cuts: tuple[int, ...], spaced: bool
) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    entries = [{"name": name, "arguments": arguments} for name, arguments in calls]
    text = json.dumps(entries if len(entries) > 1 else entries[0], ensure_ascii=False, separators=separators)
    message = read(text, reader=make_held(), cuts=cuts)
    assert message.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls


def test_arguments_under_a_grammar_leave_at_once() -> None:
    reader = make_held()
    reader.push('{"name": "weather", "arguments"')
    parts = reader.push(': {"city": "Par')
    assert parts[-1] == CallArguments(0, '{"city": "Par')
    assert reader.push('is"}') == [CallArguments(0, 'is"}')]
    assert reader.push("}") == []
    assert reader.finish() == []
    assert reader.reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("text", "rest", "arguments"),
    [
        ('{"na', "", []),
        ('{"name": "weather", "argum', "", [""]),
        ("no call", "no call", []),
        ('{"name": "weather", "arguments": {"ci', "", ['{"ci']),
        ('[{"name": "weather", "arguments": {}}, {"name": "ti', "", ["{}"]),
        ('[{"name": "weather", "arguments": {}}, {"name": "time", "arguments": {"a', "", ["{}", '{"a']),
    ],
)
def test_an_answer_that_was_cut_off_under_a_grammar(text: str, rest: str, arguments: list[str]) -> None:
    reader = make_held()
    message = read(text, reader=reader)
    assert message.text == rest
    assert [call.arguments for call in message.calls] == arguments
    assert reader.reason("length") == "length"
    is_complete = bool(arguments) and arguments[-1].endswith("}")
    assert reader.reason("stop") == ("tool_calls" if is_complete else "stop")


def test_the_end_of_a_value_is_not_inside_a_string() -> None:
    end = JsonEnd()
    assert end.feed('{"a": "}\\"}') is None
    assert end.feed('"} rest') == 2
