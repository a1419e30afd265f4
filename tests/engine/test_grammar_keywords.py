"""Every keyword that a draft of JSON Schema knows is enforced, refused by its name, or says nothing of the answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from engine.errors import ConstraintError, InvalidRequestError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import schema_spec
from engine.grammar.tool_call import tool_call_spec
from tests.fakes import EOS, FakeTokenizer

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
A = {"type": "integer"}
# Keyword: a schema with it, an answer that follows it, and one that does not.
ENFORCED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "type": ({"type": "integer"}, 1, "a"),
    "enum": ({"enum": [1, "a"]}, "a", 2),
    "const": ({"const": {"not": 1}}, {"not": 1}, {"not": 2}),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, 6, 4),
    "minimum": ({"minimum": 3}, 3, 2),
    "maximum": ({"maximum": 3}, 3, 4),
    "exclusiveMinimum": ({"exclusiveMinimum": 3}, 4, 3),
    "exclusiveMaximum": ({"exclusiveMaximum": 3}, 2, 3),
    "minLength": ({"minLength": 2}, "ab", "a"),
    "maxLength": ({"maxLength": 2}, "ab", "abc"),
    "pattern": ({"pattern": "b"}, "abc", "ac"),
    "items": ({"items": A}, [1], ["a"]),
    "prefixItems": ({"prefixItems": [A], "items": False}, [1], [1, 2]),
    "additionalItems": ({"$schema": DRAFT_7, "items": [A], "additionalItems": False}, [1], [1, 2]),
    "minItems": ({"minItems": 2}, [1, 1], [1]),
    "maxItems": ({"maxItems": 2}, [1, 1], [1, 1, 1]),
    "properties": ({"properties": {"a": A, "not": A}}, {"a": 1, "not": 1}, {"not": "x"}),
    "patternProperties": ({"patternProperties": {"^a": A}}, {"ab": 1}, {"ab": "x"}),
    "additionalProperties": ({"additionalProperties": A}, {"b": 1}, {"b": "x"}),
    "required": ({"required": ["a"]}, {"a": 1}, {"b": 1}),
    "minProperties": ({"minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({"maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "allOf": ({"allOf": [A, {"minimum": 3}]}, 3, 2),
    "anyOf": ({"anyOf": [A, {"type": "null"}]}, None, "a"),
    "oneOf": ({"oneOf": [A, {"type": "null"}]}, None, "a"),
    "$ref": ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": A}}, 3, 2),
    "$anchor": ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", **A}}}, 1, "a"),
    "$id": ({"$id": "https://relevo.example/x", "$ref": "y", "$defs": {"a": {"$id": "y", **A}}}, 1, "a"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": A}}, 1, "a"),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": A}}, 1, "a"),
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": A},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "then": {"then": A},
    "else": {"else": A},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "contains": {"contains": A},
    "minContains": {"contains": A, "minContains": 2},
    "maxContains": {"contains": A, "maxContains": 2},
    "uniqueItems": {"uniqueItems": True},
    "propertyNames": {"propertyNames": {"maxLength": 1}},
    "$dynamicRef": {"properties": {"a": {"$dynamicRef": "#here"}}},
    "$dynamicAnchor": {"$dynamicAnchor": "here"},
    "$recursiveRef": {"properties": {"a": {"$recursiveRef": "#"}}},
    "$recursiveAnchor": {"$recursiveAnchor": True},
}
REMARKS = {
    "$schema", "$comment", "$vocabulary", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "format", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
# Of drafts before the sixth; later ones know nothing of them, so they are words like any other.
GONE = {"id", "divisibleBy", "disallow", "extends"}
# Where a schema can stand, and whether it has others beside it.
PLACES: dict[str, Any] = {
    "alone": lambda inner: inner,
    "in a property": lambda inner: {"type": "object", "properties": {"a": inner}},
    "in an optional branch": lambda inner: {"anyOf": [A, {"type": "object", "properties": {"a": inner}}]},
    "in all of": lambda inner: {"allOf": [inner, {"title": "x"}]},
    "in one of": lambda inner: {"oneOf": [inner]},
    "in items": lambda inner: {"items": inner, "maxItems": 0},
    "in more properties": lambda inner: {"type": "object", "additionalProperties": inner},
    "behind a reference": lambda inner: {"$ref": "#/$defs/x", "$defs": {"x": inner}},
    "beside a reference": lambda inner: {**inner, "$ref": "#/$defs/x", "$defs": {"x": {}}},
    "beside a list of values": lambda inner: {**inner, "enum": [1, {"a": 1}]},
    "beside one value": lambda inner: {**inner, "const": {"a": 1}},
}


async def takes(schema: dict[str, Any], text: str) -> bool:
    """Whether the text is a whole answer."""
    spec = replace(schema_spec(schema, "p"), plain=True)
    state = (await GrammarCompiler(FakeTokenizer()).compile(spec)).begin(())
    try:
        for byte in text.encode():
            state.consume(byte)
    except ConstraintError:
        return False
    return bool(state.allowed()[EOS >> 3] >> (EOS & 7) & 1)


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(judge(schema).is_valid(value))


def test_no_keyword_is_forgotten() -> None:
    known: set[str] = set()
    for uri in REGISTRY:
        known |= set(REGISTRY.contents(uri).get("properties", ()))
    assert known == {*ENFORCED, *REFUSED, *REMARKS, *GONE}


@pytest.mark.parametrize("keyword", ENFORCED)
async def test_a_keyword_is_enforced(keyword: str) -> None:
    schema, good, bad = ENFORCED[keyword]
    assert is_valid(schema, good)
    assert not is_valid(schema, bad)
    assert await takes(schema, json.dumps(good))
    assert not await takes(schema, json.dumps(bad))


@pytest.mark.parametrize("place", PLACES)
async def test_what_is_not_enforced_is_refused_by_name_wherever_it_stands(place: str) -> None:
    compiler = GrammarCompiler(FakeTokenizer())
    for keyword, inner in REFUSED.items():
        spec = replace(schema_spec(PLACES[place](inner), "p"), plain=True)
        with pytest.raises(InvalidRequestError) as caught:
            await compiler.compile(spec)
        assert f'"{keyword}"' in str(caught.value), (keyword, str(caught.value))
        assert "cannot be enforced here" in str(caught.value)
        assert caught.value.param == "p"


async def test_it_is_refused_in_the_parameters_of_a_tool() -> None:
    parameters = {"type": "object", **REFUSED["if"]}
    spec = tool_call_spec([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    with pytest.raises(InvalidRequestError, match='what "if", "then" says cannot be enforced'):
        await GrammarCompiler(FakeTokenizer()).compile(spec)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": A}}, r'{"\u0061": "x"}'),
        ({"properties": {"a": A}, "additionalProperties": {"type": "string"}}, r'{"a": 1, "\u0061": "x"}'),
        ({"patternProperties": {"^a": A}}, r'{"\u0061": "x"}'),
        ({"properties": {'"\n': A}}, r'{"\u0022\n": "x"}'),
        ({"properties": {"a": A}}, '{"a": 1, "a": "x"}'),
        ({"required": ["a"], "minProperties": 2}, '{"a": 1, "a": 2}'),
    ],
)  # fmt: skip
async def test_no_second_spelling_of_a_property_gets_around_its_schema(schema: dict[str, Any], text: str) -> None:
    schema = {"type": "object", **schema}
    assert not is_valid(schema, json.loads(text))
    assert not await takes(schema, text)


async def test_characters_are_written_as_they_are() -> None:
    text = json.dumps('é😀"\\/\n\t\r\b\f', ensure_ascii=False)
    for schema in ({"type": "string"}, {"const": json.loads(text)}):
        assert await takes(schema, text)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minProperties": 2}, "minProperties"),
        ({"items": {"required": ["a"], "minProperties": 3}}, "minProperties"),
        ({"const": "\x01"}, "control characters"),
        ({"properties": {"\\\x7f": {}}}, "control characters"),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "string"}, "draft 3"),
    ],
)
def test_what_the_library_would_not_notice_is_refused_here(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        schema_spec(schema, "p")
    assert caught.value.param == "p"


def test_what_looks_like_a_control_character_is_taken() -> None:
    schema_spec({"pattern": r"^[^\x00-\x1f\u007f]*$", "description": "\\u0001\n\t", "minProperties": 1}, "p")
