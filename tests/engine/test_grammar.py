"""Answers under a grammar: right for every schema; the same alone, in a crowd, after a preemption, forced or drawn."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import jsonschema
import pytest

from engine.errors import ConstraintError, InvalidRequestError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.matcher import (
    MAX_SLOW,
    SECONDS_AHEAD,
    SECONDS_PER_TOKEN,
    SLOW_ANSWER,
    TOO_SLOW,
    CompiledGrammar,
)
from engine.grammar.spec import GrammarSpec, Thinking, any_object, choice_spec, lark_spec, regex_spec, schema_spec
from engine.grammar.tool_call import MAX_PARALLEL_CALLS, tool_call_spec
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import FinishReason, SamplingParams
from tests.engine.tiny_engine import EOS, SCHEMAS, answer, answer_all, ask, make_tokenizer, open_tiny_engine
from tests.fakes import CONTROL, FakeTokenizer, open_fake_engine
from tests.fakes import EOS as FAKE_EOS

SOME = range(3, 200, 8)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": {
        "type": "object", "properties": {"key": {"$ref": "#/$defs/key"}}, "required": ["key"],
        "additionalProperties": False, "$defs": {"key": {"enum": ["a", "b"]}}}}},
    {"type": "function", "function": {"name": "get_all"}},
]  # fmt: skip


def harmless(spec: GrammarSpec) -> GrammarSpec:
    """Without the process that tries a grammar first: the tests of its limits are elsewhere. It alone reads GBNF."""
    return spec if "::=" in spec.text else replace(spec, plain=True)


def calls(count: int) -> str:
    return "[" + ", ".join(['{"name": "get_all", "arguments": {}}'] * count) + "]"


async def compiled(spec: GrammarSpec):  # type: ignore[no-untyped-def]
    return await GrammarCompiler(FakeTokenizer()).compile(harmless(spec))


async def takes(spec: GrammarSpec, text: str) -> bool:
    """Whether the text is a whole answer."""
    state = (await compiled(spec)).begin(())
    try:
        for byte in text.encode():
            state.consume(byte)
    except ConstraintError:
        return False
    return bool(state.allowed()[FAKE_EOS >> 3] >> (FAKE_EOS & 7) & 1)


@pytest.mark.slow
async def test_two_hundred_schemas_give_valid_json() -> None:
    """From random logits, beside each other, with forced tokens, and with too little memory for all of them."""
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 200
    async with open_tiny_engine(max_waiting=300, num_blocks=80) as engine:
        requests = [ask(schema_spec(schema, "p"), seed) for seed, schema in enumerate(SCHEMAS)]
        answers = await answer_all(engine, requests)
        assert engine.snapshot()["preemptions"] > 0
    for schema, found in zip(SCHEMAS, answers, strict=True):
        assert found.reason is FinishReason.STOP, (schema, found)
        jsonschema.validate(json.loads(found.text), schema)
        assert found.token_ids[-1] == EOS


@pytest.mark.slow
async def test_an_answer_is_the_same_alone_in_a_crowd_preempted_and_without_forced_tokens() -> None:
    requests = [ask(schema_spec(SCHEMAS[index], "p"), index, max_tokens=120) for index in SOME]
    async with open_tiny_engine(max_waiting=300) as engine:
        crowd = await answer_all(engine, requests)
        alone = [await answer(engine, request) for request in requests]
        num_forced_steps = engine.snapshot()["step"]["count"]
        drawn = [
            await answer(engine, replace(request, params=replace(request.params, num_logprobs=0)))
            for request in requests
        ]
        assert engine.snapshot()["step"]["count"] - num_forced_steps == sum(len(found.token_ids) for found in drawn)
    async with open_tiny_engine(max_waiting=300, num_blocks=36, enable_prefix_caching=False) as engine:
        preempted = await answer_all(engine, [*requests, *requests])
        assert engine.snapshot()["preemptions"] > 0
    assert crowd == alone == drawn == preempted[: len(requests)] == preempted[len(requests) :]


@pytest.mark.slow
async def test_neighbours_are_not_changed_and_do_no_more_steps() -> None:
    free = [ask(None, seed, max_tokens=40) for seed in range(4)]
    bound = [ask(schema_spec(SCHEMAS[index], "p"), index, max_tokens=40) for index in SOME[:8]]
    async with open_tiny_engine() as engine:
        before = await answer_all(engine, free)
    async with open_tiny_engine() as engine:
        assert (await answer_all(engine, [*bound[:4], *free, *bound[4:]]))[4:8] == before


async def test_an_answer_that_is_cut_ends_with_length() -> None:
    whole = ask(schema_spec(PERSON, "p"), 1)
    async with open_fake_engine(step_seconds=0.0) as engine:
        spec = schema_spec(PERSON, "p")
        texts = {}
        for limit in range(1, 40):
            params = replace(whole.params, max_tokens=limit, logit_bias=())
            found = await answer(engine, GenerationRequest("r", TextPrompt("hi"), params, grammar=spec))
            texts[limit] = found.text
            assert len(found.token_ids) <= limit
            if found.reason is FinishReason.STOP:
                jsonschema.validate(json.loads(found.text), PERSON)
            else:
                assert found.reason is FinishReason.LENGTH
                assert len(found.token_ids) == limit
        assert all(texts[limit + 1].startswith(texts[limit]) for limit in range(1, 39))
        assert json.loads(texts[39])


async def test_forced_tokens_cost_no_steps() -> None:
    async with open_fake_engine(step_seconds=0.0) as engine:
        request = GenerationRequest(
            "r", TextPrompt("hi"), SamplingParams(), grammar=choice_spec(["a long text that can only be this"], "p")
        )
        found = await answer(engine, request)
        assert found.text == "a long text that can only be this"
        assert found.token_ids[-1] == FAKE_EOS
        assert engine.snapshot()["step"]["count"] == 1


async def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer()
    grammar = await GrammarCompiler(tokenizer).compile(choice_spec(["hello world", "hello wood"], "p"))
    state = grammar.begin(())
    # "hello" is one token here, and so is " w"; "o" is not forced, for "or" is one as well.
    assert state.force() == tuple(tokenizer.encode("hello w", parse_control=False))
    assert len(tokenizer.encode("hello w", parse_control=False)) == 2


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (any_object("p"), ['{}', '{"a": {"b": [1, null]}}'], ["[]", '{"a":1}', '{"a":  1}', '{ }', '{"a": 1} ']),
        (regex_spec("^[0-9]{3}$", "p"), ["123"], ["12", "1234", "^123$", "abc"]),
        (regex_spec(r"a\$", "p"), ["a$"], ["a", "a\\"]),
        (regex_spec(r"\d{2}[\d-][^\d]\D\\d", "p"), ["123ab\\d", "12-..\\d"], ["\u0661\u06623ab\\d", "12-1.\\d"]),
        (regex_spec("(yes|no)", "p"), ["yes", "no"], ["yesno", ""]),
        (choice_spec(["a", "ab", 'c"\\\n', "日本"], "p"), ["a", "ab", 'c"\\\n', "日本"], ["b", "", "日"]),
        (choice_spec(["a\x7fb", "\x01"], "p"), ["a\x7fb", "\x01"], ["a", "ab", "\\u007f"]),
        (lark_spec('start: "x" y+\ny: /[0-9]/', "p"), ["x1", "x123"], ["x", "1"]),
        (lark_spec('root ::= "x" y+\ny ::= [0-9]', "p"), ["x1", "x123"], ["x", "1"]),
        (schema_spec({"type": "string", "format": "password"}, "p"), ['"a"'], ["1"]),
        (schema_spec({"type": "array", "x-guidance": {"whitespace_flexible": True}}, "p"),
         ["[1, 2]"], ["[1,2]", "[ ]"]),
        (tool_call_spec(TOOLS), ['{"name": "get", "arguments": {"key": "a"}}', '{"name": "get_all", "arguments": {}}'],
         ['{"name": "get", "arguments": {}}', '{"name": "get_all", "arguments": {"x": 1}}', "{}"]),
        (tool_call_spec(TOOLS, name="get_all"), ['{"name": "get_all", "arguments": {}}'],
         ['{"name": "get", "arguments": {"key": "a"}}']),
        (tool_call_spec(TOOLS[1:], parallel=True),
         [calls(1), calls(2), calls(MAX_PARALLEL_CALLS)], [calls(0), calls(MAX_PARALLEL_CALLS + 1)]),
        (replace(choice_spec(["42"], "p"), thinking=Thinking("<think>", "</think>")),
         ["42", "<think>so 41 </ or?</think>42", "<think>x</think>\n\n42"],
         ["so</think>42", "<think>42", "<think>42</think>"]),
        (replace(choice_spec(["42"], "p"), thinking=Thinking("", "</think>")), ["so</think>42"], ["42", "so"]),
    ],
)  # fmt: skip
async def test_what_grammars_take(spec: GrammarSpec, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert await takes(spec, text), text
    for text in bad:
        assert not await takes(spec, text), text


async def test_marks_of_thinking_can_be_control_tokens() -> None:
    opening, closing = CONTROL[257], CONTROL[258]
    spec = replace(choice_spec(["42"], "p"), thinking=Thinking(opening, closing))
    state = (await compiled(spec)).begin((257, *b"so", 258, *b"42"))
    assert state.allowed()[FAKE_EOS >> 3] >> (FAKE_EOS & 7) & 1
    with pytest.raises(ConstraintError):
        (await compiled(spec)).begin(tuple(f"{opening}so{closing}42".encode()))


async def test_control_tokens_are_no_text() -> None:
    state = (await compiled(regex_spec(r"[^a]*", "p"))).begin(tuple(b"<|user"))
    mask = int.from_bytes(state.allowed(), "little")
    assert [token_id for token_id in CONTROL if mask >> token_id & 1] == [FAKE_EOS]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (schema_spec({"type": "strin"}, "p"), "strin"),
        (schema_spec({"not": {"type": "string"}}, "p"), "not"),
        (schema_spec({"enum": []}, "p"), "nsatisfiable"),
        (schema_spec({"type": "integer", "minimum": 5, "maximum": 3}, "p"), "nsatisfiable"),
        (schema_spec({"$ref": "https://relevo.example/other"}, "p"), "not present"),
        (schema_spec({"$ref": "#/$defs/none"}, "p"), "none"),
        (schema_spec({"$ref": "#"}, "p"), "nothing satisfies it"),
        (schema_spec({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "p"), "anyOf"),
        (schema_spec({"type": "string", "pattern": "("}, "p"), "unclosed group"),
        (schema_spec({"type": "integer", "minimum": 10**400}, "p"), "number out of range"),
        (regex_spec("a(", "p"), "unclosed group"),
        (regex_spec("(?=a)b", "p"), "look-around"),
        (lark_spec("hello", "p"), "Expected"),
        (lark_spec("start: nobody", "p"), "nobody"),
        (lark_spec('root ::= "a" | )', "p"), "Expected"),
        (lark_spec("root ::= " + "(" * 3000, "p"), "recursion"),
    ],
)
async def test_a_bad_grammar_is_refused_by_its_name_twice(spec: GrammarSpec, why: str) -> None:
    compiler = GrammarCompiler(FakeTokenizer())
    spec = harmless(spec)
    for name in ("first", "second"):
        with pytest.raises(InvalidRequestError, match=why) as caught:
            await compiler.compile(replace(spec, param=name))
        assert caught.value.param == name
        assert str(caught.value).startswith(f"'{name}' ")
        assert len(str(caught.value)) < 400
        assert compiler.knows(spec)


async def test_a_model_without_an_end_cannot_be_bound() -> None:
    class Endless(FakeTokenizer):
        stop_token_ids = frozenset()

    with pytest.raises(InvalidRequestError, match="no token that ends"):
        await GrammarCompiler(Endless()).compile(any_object("p"))


async def test_a_token_that_the_grammar_forbids_ends_that_answer_alone() -> None:
    grammar = await compiled(choice_spec(["ab", "ac"], "p"))
    state, other = grammar.begin((ord("a"),)), grammar.begin((ord("a"),))
    with pytest.raises(ConstraintError, match="does not allow"):
        state.consume(ord("x"))
    other.consume(ord("b"))
    assert other.force() == (FAKE_EOS,)


async def test_a_vocabulary_with_several_ends_takes_any_of_them() -> None:
    class Many(FakeTokenizer):
        stop_token_ids = frozenset({FAKE_EOS, 257})

    grammar = await GrammarCompiler(Many()).compile(harmless(regex_spec("a+", "p")))
    state = grammar.begin((ord("a"),))
    assert {i for i in range(259) if int.from_bytes(state.allowed(), "little") >> i & 1} == {ord("a"), FAKE_EOS, 257}
    begun = grammar.begin(())
    assert {i for i in range(259) if int.from_bytes(begun.allowed(), "little") >> i & 1} == {ord("a")}


async def test_a_vocabulary_that_puts_a_space_first_forces_none() -> None:
    class Spaced(FakeTokenizer):
        def encode(self, text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
            return list(b" " + text.encode())

    grammar = await GrammarCompiler(Spaced()).compile(choice_spec(["abc"], "p"))
    assert grammar.begin(()).force() == (*b"abc", FAKE_EOS)


class Slow:
    """A matcher that spends more of the processor's time on every mask than a whole answer has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        monkeypatch.setattr(time, "thread_time", lambda: self._now)

    def deep_copy(self) -> Slow:
        return self

    def compute_bitmask(self) -> bytes:
        self._now += SECONDS_AHEAD + SECONDS_PER_TOKEN
        return bytes(64)

    def consume_tokens(self, token_ids: list[int]) -> bool:
        return bool(token_ids)


def end_slowly(grammar: CompiledGrammar) -> None:
    state = grammar.begin(())
    for _ in range(2):  # it counts once
        with pytest.raises(ConstraintError, match=SLOW_ANSWER):
            state.allowed()


def test_a_grammar_is_given_up_after_several_slow_answers_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = CompiledGrammar(Slow(monkeypatch), (FAKE_EOS,))  # type: ignore[arg-type]
    for _ in range(2):
        for _ in range(MAX_SLOW - 1):
            end_slowly(grammar)
        assert not grammar.is_too_slow
        grammar.begin((*b"ab", FAKE_EOS))  # one that reached its end
    for _ in range(MAX_SLOW):
        end_slowly(grammar)
    assert grammar.is_too_slow
    with pytest.raises(ConstraintError, match=TOO_SLOW):
        grammar.begin(())


def test_a_plain_grammar_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = CompiledGrammar(Slow(monkeypatch), (FAKE_EOS,), plain=True)  # type: ignore[arg-type]
    for _ in range(MAX_SLOW + 1):
        end_slowly(grammar)
    assert not grammar.is_too_slow


async def test_a_grammar_that_was_given_up_is_refused_at_the_door() -> None:
    compiler = GrammarCompiler(FakeTokenizer())
    for spec in (regex_spec("a+", "p"), any_object("p")):
        grammar = await compiler.compile(spec)
        for _ in range(MAX_SLOW):
            grammar.note_end(slow=True)
        if spec.plain:
            assert await compiler.compile(spec) is grammar
        else:
            with pytest.raises(InvalidRequestError, match=TOO_SLOW):
                await compiler.compile(spec)


BAD_GBNF = ["root ::= foo", 'x ::= "a"', 'root ::= "a"{²}', 'root ::= "\\', "root ::= " + "(" * 50]


@pytest.mark.parametrize("text", BAD_GBNF)
async def test_a_grammar_that_its_converter_trips_over_fails_alone(text: str) -> None:
    async with open_fake_engine() as engine:
        spec = GrammarSpec("lark", text, "guided_grammar")
        request = GenerationRequest("bad", TextPrompt("hello"), SamplingParams(max_tokens=4), grammar=spec)
        with pytest.raises(InvalidRequestError):
            await engine.submit(request).accepted()
        good = engine.submit(GenerationRequest("good", TextPrompt("hello"), SamplingParams(max_tokens=4)))
        assert await good.accepted() == 5
