"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.api import unsupported
from app.api.errors import ApiError
from app.api.generation import check_model, respond, submit
from app.api.messages import parse_messages
from app.api.requests import read_json
from app.api.schemas import ChatBody, parse_body
from app.api.sse import ChatEnvelope
from engine.errors import ContextLengthError
from engine.handle import ChatPrompt

if TYPE_CHECKING:
    from quart import Response

    from app.http import Context
    from engine.loaded import ChatTemplateLike


async def create_chat_completion(context: Context) -> Response:
    """Answer a conversation, streamed or whole."""
    data = await read_json()
    body = parse_body(ChatBody, data)
    check_model(context, body)
    unsupported.refuse_unsupported(data, unsupported.CHAT)
    messages = parse_messages(body.messages)
    require_chat_template(context)
    capacity = context.engine.model.context_length
    if len(messages) > capacity:
        # Every turn is a token at least: no need to lay them out.
        raise ContextLengthError(len(messages), capacity, param="messages", at_least=True)
    prompt = ChatPrompt(messages)
    generation = submit(context, body, prompt, ChatEnvelope, prefix="chatcmpl", default_max_tokens=None)
    return await respond(generation, stream=body.stream)


def require_chat_template(context: Context) -> ChatTemplateLike:
    """The model's chat template; without one it cannot lay out a conversation, and this raises."""
    template = context.engine.chat_template
    if template is None:
        message = "This model has no chat template, so it cannot chat; /v1/completions works."
        raise ApiError(400, message, param="messages", code="no_chat_template")
    return template
