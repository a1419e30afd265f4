"""`GET /openapi.json` and `GET /docs`: what the API takes and gives, for programs and for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from quart import Blueprint, Response

from app.api.openapi import make_document
from app.render.api_docs import docs_variables
from app.render.templates import make_environment

if TYPE_CHECKING:
    from app.http import Context


def docs_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`. Neither changes while the server runs."""
    docs = Blueprint("docs", __name__)
    document = make_document()
    text = json.dumps(document)
    page = make_environment().get_template("docs.html")
    html = page.render(page="docs", model=context.engine.model.name, **docs_variables(document))

    @docs.get("/openapi.json")
    async def openapi() -> Response:
        return Response(text, content_type="application/json")

    @docs.get("/docs")
    async def show() -> Response:
        return Response(html, content_type="text/html; charset=utf-8", headers={"Cache-Control": "no-store"})

    return docs
