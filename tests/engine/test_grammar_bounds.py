"""Hostile grammars: refused by their size, or tried in a process that may die of them; nobody else notices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from engine.errors import InvalidRequestError
from engine.grammar import trial
from engine.grammar.compiler import MAX_REMEMBERED, GrammarCompiler
from engine.grammar.spec import (
    MAX_CHOICES,
    MAX_CHOICES_LENGTH,
    MAX_GRAMMAR_LENGTH,
    MAX_REGEX_LENGTH,
    MAX_SCHEMA_DEPTH,
    MAX_SCHEMA_LENGTH,
    GrammarSpec,
    choice_spec,
    lark_spec,
    regex_spec,
    schema_spec,
)
from engine.grammar.trial import TOO_LARGE, Verdict
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import FinishReason, SamplingParams
from tests.fakes import FakeTokenizer, expected_output, fake_config, open_fake_engine, read_deltas
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.handle import Handle


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """May take its time: what ends a trial here is what it takes of the processor's time."""
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 10 * PATIENCE_SECONDS)


def chain(length: int) -> dict[str, object]:
    """References that lead from one to the next: deep for whoever follows them, flat to look at."""
    definitions: dict[str, object] = {
        f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}]} for index in range(length)
    }
    return {"$defs": definitions | {f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def product(factors: int, choices: int) -> dict[str, object]:
    """All of some, each of them one of some: to be multiplied out."""
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {}}, "required": [f"k{i}_{j}"]}
                       for j in range(choices)]}
            for i in range(factors)
        ]
    }  # fmt: skip


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 101, 103, 107)]}
RULES = "start: a3000\na0: /a/\n" + "\n".join([f'a{i}: a{i - 1} "x"' for i in range(1, 3001)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: schema_spec({"enum": ["x" * MAX_SCHEMA_LENGTH]}, "p"),
        lambda: schema_spec({"enum": list(range(2 * MAX_SCHEMA_LENGTH))}, "p"),
        lambda: schema_spec(nested(MAX_SCHEMA_DEPTH), "p"),
        lambda: schema_spec(nested(100_000), "p"),
        lambda: schema_spec({"const": "\ud800"}, "p"),
        lambda: schema_spec([], "p"),
        lambda: schema_spec(None, "p"),
        lambda: regex_spec("a" * (MAX_REGEX_LENGTH + 1), "p"),
        lambda: regex_spec("", "p"),
        lambda: regex_spec(7, "p"),
        lambda: regex_spec("\ud800", "p"),
        lambda: lark_spec("a" * (MAX_GRAMMAR_LENGTH + 1), "p"),
        lambda: choice_spec(["a"] * (MAX_CHOICES + 1), "p"),
        lambda: choice_spec(["a" * MAX_CHOICES_LENGTH], "p"),
        lambda: choice_spec(["a", ""], "p"),
        lambda: choice_spec([], "p"),
        lambda: choice_spec("ab", "p"),
    ],
)
def test_what_is_too_large_is_refused_before_it_costs_anything(make: Callable[[], GrammarSpec]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert caught.value.param == "p"


def test_the_largest_ones_are_taken() -> None:
    schema_spec(nested(MAX_SCHEMA_DEPTH - 1), "p")
    regex_spec("a" * MAX_REGEX_LENGTH, "p")
    lark_spec("a" * MAX_GRAMMAR_LENGTH, "p")
    choice_spec([str(number) for number in range(MAX_CHOICES)], "p")


def test_only_small_and_simple_schemas_are_not_tried_first() -> None:
    assert schema_spec({"type": "object", "properties": {"a": {"enum": ["b"]}}}, "p").plain
    for schema in (chain(1), product(2, 2), MULTIPLES, {"pattern": "a"}, {"patternProperties": {}}, {"anyOf": [{}]},
                   {"$dynamicRef": "#a"}, {"enum": ["x" * 5000]}):  # fmt: skip
        assert not schema_spec(schema, "p").plain
    assert not regex_spec("a", "p").plain
    assert not lark_spec('start: "a"', "p").plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(schema_spec(chain(1200), "p"), id="a chain of references, which overflows the stack"),
        pytest.param(lark_spec(RULES[:MAX_GRAMMAR_LENGTH].replace("a3000", "a1500", 1), "p"), id="a chain of rules"),
        pytest.param(schema_spec(MULTIPLES, "p"), id="multiples, which take minutes"),
        pytest.param(schema_spec(product(4, 16), "p"), id="a product of choices"),
    ],
)
async def test_what_kills_the_library_kills_another_process(spec: GrammarSpec) -> None:
    compiler = GrammarCompiler(FakeTokenizer())
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="cannot be used") as caught:
            await compiler.compile(spec)
        assert caught.value.param == "p"
        assert compiler.knows(spec)


@pytest.mark.slow
async def test_others_go_on_while_a_hostile_grammar_is_tried() -> None:
    """A stream beside it gets its tokens, and another grammar its answer, before the hostile one is given up."""
    ended: list[str] = []

    async def run(name: str, request: GenerationRequest) -> None:
        handle = engine.submit(request)
        if name == "hostile":
            with pytest.raises(InvalidRequestError, match=TOO_LARGE):
                await handle.accepted()
            ended.append(name)
            return
        async for delta in read_deltas(handle):
            last = delta
        assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        ended.append(name)

    async with open_fake_engine(step_seconds=0.0) as engine, trio.open_nursery() as nursery:
        text = TextPrompt("hi")
        for index in range(2):
            hostile = {**MULTIPLES, "title": str(index)}
            nursery.start_soon(run, "hostile", GenerationRequest("h", text, grammar=schema_spec(hostile, "p")))
        nursery.start_soon(run, "free", GenerationRequest("f", text, SamplingParams(max_tokens=50)))
        bound = GenerationRequest("b", text, SamplingParams(), grammar=choice_spec(["yes"], "p"))
        nursery.start_soon(run, "bound", bound)
    assert sorted(ended[:2]) == ["bound", "free"]


@pytest.mark.slow
async def test_an_answer_whose_grammar_takes_too_long_ends_alone() -> None:
    """Compiled in no time, and ever slower to follow."""
    spec = lark_spec('start: e\ne: e e e e e e e e | /[a-z ]/ | e "a" e | ', "p")
    text = TextPrompt("hi")
    async with open_fake_engine(step_seconds=0.0) as engine:
        handle = engine.submit(GenerationRequest("h", text, SamplingParams(max_tokens=400), grammar=spec))
        other = engine.submit(GenerationRequest("f", text, SamplingParams(max_tokens=100)))
        *_, last = [delta async for delta in read_deltas(handle)]
        assert last.finish_reason is FinishReason.ERROR
        assert "grammar" in (last.error or "")
        pieces = [delta async for delta in read_deltas(other)]
        assert "".join([delta.text for delta in pieces]) == bytes(expected_output(b"hi", 100)).decode()


async def test_a_request_that_is_aborted_while_its_grammar_is_compiled_leaves_nothing() -> None:
    async with open_fake_engine() as engine:
        handle = engine.submit(GenerationRequest("r", TextPrompt("hi"), grammar=regex_spec("a+", "p")))
        await trio.sleep(0.02)
        handle.abort("client")
        await engine.wait_idle()
        assert engine.snapshot()["requests"]["running"] == 0


class Trials:
    """Stands in for the processes that try grammars: the first ones never end."""

    def __init__(self, num_endless: int) -> None:
        self.num_endless = num_endless
        self.all_begun = trio.Event()

    async def try_it(self, source: str) -> Verdict:
        self.num_endless -= 1
        if self.num_endless == 0:
            self.all_begun.set()
        if self.num_endless >= 0:
            await trio.sleep_forever()
        return Verdict("", source)


async def test_who_leaves_holds_no_place_until_its_grammar_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is being tried, waits for its turn, for another's compilation, or for the leader of its choices."""
    trials = Trials(num_endless=2)
    monkeypatch.setattr("engine.grammar.compiler.try_it", trials.try_it)
    async with open_fake_engine(fake_config(max_waiting=8)) as engine:

        def submit(index: int, after: Handle | None = None) -> Handle:
            grammar = regex_spec(f"[a-z]{{1,{index}}}", "p")
            return engine.submit(GenerationRequest("r", TextPrompt("hi"), grammar=grammar), after)

        leaving = [submit(1 + index) for index in range(4)]
        leaving += [submit(1), submit(1, after=leaving[0])]
        await trials.all_begun.wait()
        for handle in leaving:
            handle.abort("timeout")
        staying = submit(1)
        with trio.fail_after(PATIENCE_SECONDS):
            while engine.num_open > 1:
                await trio.sleep(0.001)
            *_, last = [delta async for delta in read_deltas(staying)]
            assert last.finish_reason is FinishReason.STOP
            await engine.wait_idle()
        assert engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"timeout": {"door": 6}}


async def test_the_same_grammar_is_compiled_once_and_the_oldest_is_forgotten() -> None:
    compiler = GrammarCompiler(FakeTokenizer())
    first = choice_spec(["0"], "p")
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(compiler.compile, first)
    grammar = await compiler.compile(first)
    assert await compiler.compile(choice_spec(["0"], "another")) is grammar
    for number in range(1, MAX_REMEMBERED + 1):
        assert compiler.knows(first)
        await compiler.compile(choice_spec([str(number)], "p"))
    assert not compiler.knows(first)
    assert await compiler.compile(first) is not grammar


async def test_ignoring_the_end_does_not_go_with_a_grammar() -> None:
    async with open_fake_engine() as engine:
        spec = choice_spec(["a"], "p")
        handle = engine.submit(GenerationRequest("r", TextPrompt("hi"), ignore_eos=True, grammar=spec))
        with pytest.raises(InvalidRequestError) as caught:
            await handle.accepted()
        assert caught.value.param == "ignore_eos"
