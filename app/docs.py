"""`GET /openapi.json` and `GET /docs`: what the API takes and gives, for programs and for people."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING

import trio
from quart import Blueprint, Response

from app.api.openapi import make_document
from app.render.api_docs import docs_variables
from app.render.templates import make_environment

if TYPE_CHECKING:
    from app.http import Context


class Docs:
    """Both forms, made when somebody asks for the first time; they do not change while the server runs."""

    def __init__(self, model: str) -> None:
        self._model = model

    @cached_property
    def document(self) -> str:
        """For programs."""
        return json.dumps(make_document())

    @cached_property
    def page(self) -> str:
        """For people."""
        template = make_environment().get_template("docs.html")
        return template.render(page="api", model=self._model, **docs_variables(make_document()))


def docs_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    docs = Blueprint("docs", __name__)
    made = Docs(context.engine.model.name)

    @docs.get("/openapi.json")
    async def openapi() -> Response:
        # On a thread: the first time takes long enough to be felt in a stream.
        return Response(await trio.to_thread.run_sync(lambda: made.document), content_type="application/json")

    @docs.get("/docs")
    async def show() -> Response:
        html = await trio.to_thread.run_sync(lambda: made.page)
        return Response(html, content_type="text/html; charset=utf-8", headers={"Cache-Control": "no-store"})

    return docs
