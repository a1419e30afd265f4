"""`GET /openapi.json` and `GET /docs`: what the API takes and gives, for programs and for people."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import trio
from quart import Blueprint, Response

from app.api.openapi import make_document
from app.drawing import html_response
from app.render.api_docs import docs_variables
from app.render.templates import make_environment

if TYPE_CHECKING:
    from app.http import Context


class Docs:
    """Both forms, worked out when somebody asks for the first time; they do not change while the server runs."""

    def __init__(self, model: str) -> None:
        self._model = model

    @cached_property
    def document(self) -> str:
        """For programs."""
        return json.dumps(make_document())

    @cached_property
    def _variables(self) -> dict[str, Any]:
        return docs_variables(make_document())

    def page(self, state: str) -> str:
        """For people, below the server's state, which does change."""
        template = make_environment().get_template("docs.html")
        return template.render(page="api", model=self._model, state_html=state, **self._variables)


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
        state = context.telemetry.draw_part("state")
        html = await trio.to_thread.run_sync(made.page, state)
        return html_response(html)

    return docs
