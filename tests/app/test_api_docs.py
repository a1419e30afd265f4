"""The OpenAPI document, the docs page and the README's table of parameters say what the server does."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from app.api import unsupported
from app.api.bodies import ChatBody, CompletionBody
from app.api.openapi import ERRORS, OPERATIONS, make_document
from app.api.parameters import IGNORED, REFUSED, TAKEN, Compatibility, compatibility
from app.http import create_app
from app.render.templates import code
from tests.app.serving import CHAT, COMPLETIONS, chat_body, make_settings, open_app, open_server
from tests.readme import parameter_row, parameter_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def schemas_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "schema" in value:
            yield value["schema"]
        for inner in value.values():
            yield from schemas_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas_in(inner)


def test_every_schema_of_the_document_is_one_and_every_reference_leads_somewhere() -> None:
    document = make_document()
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for schema in schemas_in(document["paths"]):
        Draft202012Validator.check_schema(schema)
    for name in re.findall(r"#/components/schemas/(\w+)", repr(document)):
        assert name in document["components"]["schemas"], name


async def test_the_document_has_every_route_of_the_api_and_no_other() -> None:
    async with open_app() as (_, context):
        app = create_app(context)
        routes = {
            (method.lower(), re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule.rule))
            for rule in app.url_map.iter_rules()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
            if rule.rule.startswith(("/v1/", "/tokenize", "/detokenize"))
        }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes


async def test_it_is_served_as_it_is_and_as_a_page() -> None:
    async with open_server() as server:
        served = await server.client.get("/openapi.json")
        assert served.headers["content-type"] == "application/json"
        assert served.json() == make_document()
        page = html.unescape((await server.client.get("/docs")).text)
        for operation in OPERATIONS:
            assert f"{operation.method.upper()} {operation.path}" in page
        for kind in (ChatBody, CompletionBody):
            for name in kind.model_fields:
                assert f"<code>{name}</code>" in page, name
        for status, why in ERRORS.items():
            assert str(status) in page
            assert html.unescape(code(why)) in page
        assert "<script" not in page.partition("</head>")[2]


async def test_they_need_a_key_where_the_api_needs_one() -> None:
    async with open_server(make_settings(security={"api_keys": ["me=secret"]})) as server:
        assert (await server.client.get("/openapi.json")).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await server.client.get("/openapi.json", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_that_the_schema_refuses_is_refused(path: str) -> None:
    """For each field something that its schema does not take."""
    body: dict[str, Any] = chat_body(max_tokens=1) if path == CHAT else {"prompt": "hi", "max_tokens": 1}
    document = make_document()
    name = "ChatBody" if path == CHAT else "CompletionBody"
    schema = document["components"]["schemas"][name]
    async with open_server() as server:
        for field in schema["properties"]:
            validator = Draft202012Validator({**document, **schema["properties"][field]})
            for value in (-(2**80), 2**80, 1.5, "a", {"a": []}, [{}], True, [[-1]]):
                if not validator.is_valid(value):
                    response = await server.client.post(path, json=body | {field: value})
                    assert response.status_code in (400, 404), (field, value, response.text)
                    assert response.json()["error"]["param"].partition(".")[0].partition("[")[0] == field


def test_the_table_of_parameters_stands_in_the_readme() -> None:
    """To write it anew: `python -m tests.readme`."""
    for row in compatibility():
        assert parameter_row(row) in README.splitlines(), row.name
    assert re.findall(r"^\| `(\w+)` \| (?:yes|refused|–) \|", README, re.MULTILINE) == [
        row.name for row in compatibility()
    ]
    assert len(parameter_rows()) == len(compatibility())


def test_the_table_knows_every_field_and_every_refusal() -> None:
    rows = {row.name: row for row in compatibility()}
    for route, kind, refused in (
        ("chat", ChatBody, unsupported.CHAT),
        ("completions", CompletionBody, unsupported.COMPLETION),
    ):
        for name in rows:
            way = getattr(rows[name], route)
            wanted = TAKEN if name in kind.model_fields else REFUSED if name in refused else IGNORED
            assert way == wanted, (route, name)
        assert set(kind.model_fields) <= set(rows)
        assert not set(kind.model_fields) & set(refused), "what is taken is not refused"


def test_every_field_says_what_it_is() -> None:
    def walk(kind: type[BaseModel]) -> Iterator[tuple[str, Any]]:
        for name, field in kind.model_fields.items():
            yield f"{kind.__name__}.{name}", field

    for kind in (operation.body for operation in OPERATIONS):
        if kind is not None:
            for name, field in walk(kind):
                assert field.description, name


REFUSED_ROWS = [row for row in compatibility() if REFUSED in (row.chat, row.completions)]


async def test_what_is_refused_is_refused_by_name_and_passes_at_rest() -> None:
    async with open_server() as server:

        async def check(row: Compatibility, path: str, at_rest: tuple[Any, ...]) -> None:
            body: dict[str, Any] = chat_body(max_tokens=1) if path == CHAT else {"prompt": "hi", "max_tokens": 1}
            refused = await server.client.post(path, json=body | {row.name: "something nobody can do"})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, row.name), refused.text
            assert error["code"] == "unsupported_parameter"
            assert row.name in error["message"]
            for value in (None, *at_rest):
                accepted = await server.client.post(path, json=body | {row.name: value})
                assert accepted.status_code == 200, (row.name, value, accepted.text)

        for row in REFUSED_ROWS:
            if row.chat == REFUSED:
                await check(row, CHAT, unsupported.CHAT[row.name])
            if row.completions == REFUSED:
                await check(row, COMPLETIONS, unsupported.COMPLETION[row.name])
