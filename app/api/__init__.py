"""The OpenAI-compatible API: `/v1`, and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint

from app.api.generation import generate
from app.api.models import list_models, retrieve_model
from app.api.planning import CHAT_URL, COMPLETION_URL
from app.api.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from quart import Response

    from app.http import Context


def api_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    api = Blueprint("api", __name__)

    @api.post(CHAT_URL)
    async def chat_completions() -> Response:
        return await generate(context, CHAT_URL)

    @api.post(COMPLETION_URL)
    async def completions() -> Response:
        return await generate(context, COMPLETION_URL)

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return list_models(context)

    @api.get("/v1/models/<path:name>")
    async def model(name: str) -> dict[str, Any]:
        return retrieve_model(context, name)

    @api.post("/tokenize")
    async def tokenize_() -> dict[str, Any]:
        return await tokenize(context)

    @api.post("/detokenize")
    async def detokenize_() -> dict[str, Any]:
        return await detokenize(context)

    return api
