"""The API: OpenAI's and Anthropic's under `/v1`, and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quart import Blueprint

from app.api.anthropic import COUNT_URL, MESSAGES_URL, count_tokens, plan_messages
from app.api.generation import generate
from app.api.models import list_models, retrieve_model
from app.api.planning import CHAT_URL, COMPLETION_URL, plan_chat, plan_completion
from app.api.responses import RESPONSES_URL, plan_response
from app.api.tokenize import detokenize, tokenize

if TYPE_CHECKING:
    from quart import Response

    from app.http import Context


def api_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    api = Blueprint("api", __name__)

    @api.post(CHAT_URL)
    async def chat_completions() -> Response:
        return await generate(context, plan_chat)

    @api.post(COMPLETION_URL)
    async def completions() -> Response:
        return await generate(context, plan_completion)

    @api.post(RESPONSES_URL)
    async def responses() -> Response:
        return await generate(context, plan_response)

    @api.post(MESSAGES_URL)
    async def messages() -> Response:
        return await generate(context, plan_messages)

    @api.post(COUNT_URL)
    async def count_message_tokens() -> dict[str, Any]:
        return await count_tokens(context)

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
