"""Structured output over HTTP: OpenAI's and vLLM's words for it, checked and followed."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from app.api.structured import read_grammar
from engine.errors import InvalidRequestError
from tests.app.serving import CHAT, COMPLETIONS, chat_body, events, open_server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def named(schema: Any = SCHEMA, **members: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **members}}}


def valid(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def matches(pattern: str):  # type: ignore[no-untyped-def]
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


FORMS = [
    (named(strict=True, description="A thing"), valid),
    (named(strict=False), valid),
    (named(strict=None), valid),
    ({"guided_json": SCHEMA}, valid),
    ({"guided_json": json.dumps(SCHEMA)}, valid),
    ({"guided_regex": "[0-9]{4}"}, matches("[0-9]{4}")),
    ({"guided_choice": ["yes", "no"]}, matches("yes|no")),
    ({"guided_grammar": 'start: "a" | "b"'}, matches("a|b")),
    ({"guided_grammar": 'root ::= "a" | "b"'}, matches("a|b")),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, valid),
    ({"structured_outputs": {"regex": "x{3}", "disable_any_whitespace": True}}, matches("xxx")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, matches("yes|no")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, matches("a")),
]


@pytest.mark.parametrize(("fields", "check"), FORMS)
async def test_an_answer_has_the_form_that_was_asked_for(fields: dict[str, Any], check: Any) -> None:
    """On both routes, whole and streamed, which agree."""
    async with open_server() as server:
        for url, body in ((CHAT, chat_body()), (COMPLETIONS, {"model": "fake", "prompt": "hi", "max_tokens": 200})):
            whole = (await server.client.post(url, json=body | fields)).json()
            choice = whole["choices"][0]
            text = choice["message"]["content"] if url == CHAT else choice["text"]
            check(text)
            assert choice["finish_reason"] == "stop"
            streamed = events((await server.client.post(url, json=body | fields | {"stream": True})).text)
            pieces = [chunk["choices"][0] for chunk in streamed[:-1]]
            assert text == "".join(
                piece["delta"].get("content") or "" if url == CHAT else piece["text"] for piece in pieces
            )
            assert pieces[-1]["finish_reason"] == "stop"
        await server.settle()


async def test_any_object_is_an_object_or_cut() -> None:
    async with open_server() as server:
        body = chat_body(response_format={"type": "json_object"}, max_tokens=30)
        choice = (await server.client.post(CHAT, json=body)).json()["choices"][0]
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert choice["finish_reason"] == "length"


async def test_log_probabilities_are_told_of_every_token_of_a_bound_answer() -> None:
    async with open_server() as server:
        body = chat_body(**named(), seed=1)
        plain = (await server.client.post(CHAT, json=body)).json()
        told = (await server.client.post(CHAT, json=body | {"logprobs": True})).json()
        content = told["choices"][0]["message"]["content"]
        assert content == plain["choices"][0]["message"]["content"]
        assert told["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert "".join(entry["token"] for entry in told["choices"][0]["logprobs"]["content"]) == content


async def test_several_choices_are_each_of_the_form() -> None:
    async with open_server() as server:
        choices = (await server.client.post(CHAT, json=chat_body(**named(), n=3))).json()["choices"]
        assert len(choices) == 3
        for choice in choices:
            valid(choice["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        (named() | named(name=""), "response_format.json_schema.name"),
        (named(name="a b"), "response_format.json_schema.name"),
        (named(name="a" * 65), "response_format.json_schema.name"),
        (named(name=None), "response_format.json_schema.name"),
        (named(description=5), "response_format.json_schema.description"),
        (named(strict="yes"), "response_format.json_schema.strict"),
        (named(None), "response_format.json_schema.schema"),
        (named("{}"), "response_format.json_schema.schema"),
        (named({"type": "strin"}), "response_format.json_schema.schema"),
        (named({"not": {}}), "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": True}, "guided_json"),
        ({"guided_json": " " * 100_000}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar"),
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        (named() | {"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        (named() | {"ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
async def test_a_bad_form_is_400_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    async with open_server() as server:
        answer = await server.client.post(CHAT, json=chat_body(**fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["type"] == "invalid_request_error"
        await server.settle()


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None},
     {"structured_outputs": None}],
)  # fmt: skip
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert read_grammar(fields) is None


def test_where_two_are_asked_for_both_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"'guided_regex' and 'structured_outputs\.choice'"):
        read_grammar({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}})


async def test_a_bad_schema_fails_its_request_alone() -> None:
    async with open_server() as server:
        good = (await server.client.post(CHAT, json=chat_body(max_tokens=20, seed=3))).json()
        bad = await server.client.post(CHAT, json=chat_body(**named({"type": "strin"})))
        assert bad.status_code == 400
        again = (await server.client.post(CHAT, json=chat_body(max_tokens=20, seed=3))).json()
        assert again["choices"] == good["choices"]


async def test_a_demanded_call_and_a_form_of_the_answer_do_not_go_together() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with open_server() as server:
        body = chat_body(**named(), tools=tools, tool_choice="required")
        answer = await server.client.post(CHAT, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format.json_schema.schema"


@pytest.mark.parametrize("grammar", ['root ::= "a" root', 'start: /[a-c]/ x\nx: "ab" x'])
async def test_a_grammar_that_never_ends_is_the_requests_fault(grammar: str) -> None:
    """A client would try a 500 again, and for ever."""
    async with open_server() as server:
        answer = await server.client.post(CHAT, json=chat_body(max_tokens=3, guided_grammar=grammar))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].endswith("see that it comes to an end, or simplify it")
        streamed = await server.client.post(CHAT, json=chat_body(max_tokens=3, guided_grammar=grammar, stream=True))
        assert events(streamed.text)[-1]["error"] == error
        await server.settle()


def test_a_regex_ends_behind_its_last_escape() -> None:
    for regex in ("\\", "a\\", "a\\\\\\"):
        with pytest.raises(InvalidRequestError, match="'guided_regex' ends with a backslash"):
            read_grammar({"guided_regex": regex})
    assert read_grammar({"guided_regex": "a\\\\"}) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"guided_regex": "(?=x" + "y" * 500},
            "'guided_regex' cannot be used: invalid regex \"(?=x" + "y" * 36 + '…" (in regex): regex parse error: '
            "look-around, including look-ahead and look-behind, is not supported.",
        ),
        (
            {"guided_grammar": "root ::= [z-a]"},  # whose place would be one in what it was converted to
            "'guided_grammar' cannot be used: invalid regex \"[z-a]\" (in regex): regex parse error: "
            "invalid character class range, the start must be <= the end.",
        ),
        ({"guided_grammar": "start: foo"}, "'guided_grammar' cannot be used: at 1(8): unknown name: \"foo\"."),
    ],
)
async def test_what_cannot_be_used_is_said_without_texts_that_nobody_sent(fields: dict[str, Any], message: str) -> None:
    async with open_server() as server:
        answer = await server.client.post(CHAT, json=chat_body(max_tokens=5, **fields))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
