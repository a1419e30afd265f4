"""Numbers that no float can hold, and nesting without end: refused where they come in, or taken as text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from app.api.json_values import depth, find_non_finite
from app.api.messages import parse_messages
from app.api.tools import MAX_TOOL_DEPTH
from engine.text_guard import strings_in
from tests.app.serving import CHAT, COMPLETIONS, chat_body, open_server
from tests.fakes import FakeChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping

USER = {"role": "user", "content": "x"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "r"}


class Walking(FakeChatTemplate):
    """Looks at every string that it is given, as the guard of a real template does."""

    def encode(self, messages: list[dict[str, Any]], tokenizer: Any, **kwargs: Any) -> list[int]:
        assert list(strings_in([messages, kwargs]))
        return super().encode(messages, tokenizer, **kwargs)


def called(arguments: str) -> list[dict[str, Any]]:
    """A chat in which a call had these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]


def nested(levels: int) -> str:
    """An object of so many levels."""
    return '{"a":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


def test_depth_and_numbers_are_found_wherever_they_are() -> None:
    assert [depth(value) for value in (1, [], {}, [1, {"a": [2]}])] == [0, 1, 1, 3]
    inf = float("inf")
    assert find_non_finite({"a": [1, 2.5, {"b": "inf"}], "c": None, "d": 10**400}) is None
    assert find_non_finite({"a": [1, {"b": -inf}]}) == ("a", 1, "b")
    assert find_non_finite(inf) == ()
    value: list[Any] = [inf]
    for _ in range(1999):
        value = [value]
    assert find_non_finite(value) == (0,) * 2000


@pytest.mark.parametrize(
    ("arguments", "is_text"),
    [
        ('{"a": 1}', False),
        (nested(MAX_TOOL_DEPTH), False),
        (nested(MAX_TOOL_DEPTH + 1), True),
        (nested(1000), True),
        (nested(200_000), True),
        ('{"a": 1e999}', True),
        ('{"a": NaN}', True),
        ('{"a": ' + "9" * 5000 + "}", True),
    ],
)
def test_arguments_that_could_do_harm_stay_text(arguments: str, is_text: bool) -> None:
    told = parse_messages(called(arguments), 100)[1]["tool_calls"][0]["function"]["arguments"]
    assert told == (arguments if is_text else json.loads(arguments))


@pytest.mark.parametrize("levels", [480, 1000, 1500])
async def test_arguments_nested_without_end_are_answered_as_others_are(levels: int) -> None:
    body = {"messages": [*called(nested(levels)), USER], "max_tokens": 1}
    async with open_server(chat_template=Walking(variables=["tools"])) as server:
        for url in (CHAT, "/tokenize"):
            response = await server.client.post(url, json=body)
            assert response.status_code == 200, response.text


SCHEMA = {"type": "object", "properties": {"x": {"type": "number", "maximum": "NUMBER"}}}


def written(body: object, number: str = "1e999") -> str:
    """A body as JSON, with a number that Python would not write."""
    return json.dumps(body).replace('"NUMBER"', number)


BODIES = {
    "temperature": written({"messages": [], "temperature": "NUMBER"}, "-1e999"),
    "response_format.json_schema.schema.properties.x.maximum": written(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    ),
    "tools[0].function.parameters.properties.x.maximum": written(
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}, "1" + "0" * 400 + ".0"
    ),
    "metadata.a[1]": written({"metadata": {"a": [0, "NUMBER"]}, "stream": True}),
}


@pytest.mark.parametrize(("param", "text"), BODIES.items())
async def test_a_number_that_no_float_can_hold_is_refused_by_name(param: str, text: str) -> None:
    async with open_server() as server:
        for url in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"):
            response = await server.client.post(url, content=text, headers={"content-type": "application/json"})
            assert (response.status_code, param in response.text) == (400, True), (url, response.text)


async def test_in_a_schema_that_is_sent_as_text_it_is_refused_too() -> None:
    fields: Mapping[str, Any] = {"guided_json": written(SCHEMA)}
    async with open_server() as server:
        response = await server.client.post(CHAT, json=chat_body(**fields))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "guided_json")
        assert "number" in error["message"]
