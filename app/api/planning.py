"""From a request's body to a request for the engine: one way for the routes and for batch files."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from app.api import unsupported
from app.api.errors import ApiError, ModelNameError
from app.api.messages import parse_messages
from app.api.schemas import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody, parse_body
from app.api.sse import ChatEnvelope, CompletionEnvelope, Envelope
from app.callers import NOBODY
from engine.errors import ContextLengthError, InvalidRequestError
from engine.handle import ChatPrompt, GenerationRequest, TextPrompt, TokensPrompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.api.schemas import Body, GenerationBody
    from app.callers import Caller
    from engine.engine import Engine
    from engine.loaded import ChatTemplateLike

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked body: what the engine is asked, and how the answer is wrapped."""

    body: GenerationBody
    request: GenerationRequest
    envelope: Envelope


def plan(engine: Engine, url: str, data: dict[str, Any], *, caller: Caller = NOBODY) -> Plan:
    """Check the body of a request to the route `url`.

    Args:
        caller: whose key it is, which class of work that is, and who shares its cached prompts.

    Raises:
        RelevoError: it cannot be served as it stands.
    """
    return _plan_chat(engine, data, caller) if url == CHAT_URL else _plan_completion(engine, data, caller)


def _plan_chat(engine: Engine, data: dict[str, Any], caller: Caller) -> Plan:
    body = parse_body(ChatBody, data)
    check_model(engine, body)
    unsupported.refuse_unsupported(data, unsupported.CHAT)
    messages = parse_messages(body.messages, engine.model.context_length)
    require_chat_template(engine)
    return _make_plan(engine, caller, body, ChatPrompt(messages), ChatEnvelope, "chatcmpl", None)


def _plan_completion(engine: Engine, data: dict[str, Any], caller: Caller) -> Plan:
    body = parse_body(CompletionBody, data)
    check_model(engine, body)
    unsupported.refuse_unsupported(data, unsupported.COMPLETION)
    prompt = parse_prompt(body.prompt, engine.model.context_length)
    return _make_plan(engine, caller, body, prompt, CompletionEnvelope, "cmpl", DEFAULT_COMPLETION_TOKENS)


def _make_plan(
    engine: Engine,
    caller: Caller,
    body: GenerationBody,
    prompt: TextPrompt | TokensPrompt | ChatPrompt,
    envelope: Callable[..., Envelope],
    prefix: str,
    default_max_tokens: int | None,
) -> Plan:
    answer_id = f"{prefix}-{secrets.token_hex(12)}"
    params = body.sampling_params(default_max_tokens=default_max_tokens)
    background = caller.background or body.service_tier == "flex"
    request = GenerationRequest(
        answer_id,
        prompt,
        params,
        body.stop,
        body.ignore_eos,
        cache_root=caller.cache_root(body.cache_salt),
        key_name=caller.key_name,
        background=background,
        priority=body.priority,
    )
    # As OpenAI does: who asks for a tier is told which one it was.
    tier = None if body.service_tier is None else "flex" if background else "default"
    wrap = envelope(answer_id, engine.model.name, int(time.time()), with_usage=body.include_usage, service_tier=tier)
    return Plan(body, request, wrap)


def check_model(engine: Engine, body: Body) -> None:
    """Raise `ModelNameError` when the request names another model than the served one."""
    served = engine.model.name
    if body.model is not None and body.model != served:
        raise ModelNameError(body.model, served)


def require_chat_template(engine: Engine) -> ChatTemplateLike:
    """The model's chat template; without one it cannot lay out a conversation, and this raises."""
    if engine.chat_template is None:
        message = "This model has no chat template, so it cannot chat; /v1/completions works."
        raise ApiError(400, message, param="messages", code="no_chat_template")
    return engine.chat_template


def parse_prompt(value: object, capacity: int) -> TextPrompt | TokensPrompt:
    """A prompt is a string, a list of token ids, or a list that holds one of either.

    Raises:
        InvalidRequestError: it is missing, several, or holds something else.
        ContextLengthError: there are more than `capacity` ids.
    """
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            message = f"'prompt' holds {len(value)} prompts; send one in each request."
            raise InvalidRequestError(message, param="prompt", code="unsupported_parameter")
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not value:
        raise InvalidRequestError("'prompt' must be a string or a list of token ids.", param="prompt")
    return TokensPrompt(parse_token_ids(value, capacity, "prompt"))


def parse_token_ids(value: object, capacity: int, param: str) -> tuple[int, ...]:
    """A list of whole numbers; whether the vocabulary has them is for the engine to say.

    Raises:
        InvalidRequestError: it is no list, or holds something else.
        ContextLengthError: there are more than `capacity`; then none is looked at.
    """
    if isinstance(value, list) and len(value) > capacity:
        raise ContextLengthError(len(value), capacity, param=param)
    # `type` and not `isinstance`: true and false are no ids.
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise InvalidRequestError(f"'{param}' must be a list of token ids, which are whole numbers.", param=param)
    return tuple(value)
