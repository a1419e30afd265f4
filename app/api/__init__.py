"""The OpenAI-compatible API: `/v1`, and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint

from app.api.chat import create_chat_completion
from app.api.completions import create_completion
from app.api.models import list_models, retrieve_model
from app.api.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from quart import Response

    from app.http import Context


def api_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    api = Blueprint("api", __name__)

    @api.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await create_chat_completion(context)

    @api.post("/v1/completions")
    async def completions() -> Response:
        return await create_completion(context)

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
