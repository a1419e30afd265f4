"""From a request's body to requests for the engine: one way for all routes and for batch files."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from app.api import unsupported
from app.api.bodies import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from app.api.conversation import read_conversation
from app.api.envelope import ChatEnvelope, CompletionEnvelope, Envelope
from app.api.errors import ModelNameError
from app.api.kinds import MAX_PROMPTS
from app.api.parts import PlainReader, Reader
from app.api.schemas import parse_body
from app.api.structured import join_grammars, read_grammar
from engine.errors import ContextLengthError, InvalidRequestError
from engine.handle import ChatPrompt, GenerationRequest, TextPrompt, TokensPrompt
from engine.loaded import check_in_vocabulary, require_chat_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.api.bodies import GenerationBody
    from app.api.schemas import Body
    from app.callers import Caller
    from engine.engine import Engine

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"

Prompt = TextPrompt | TokensPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked body: what the engine is asked, and how the answer is wrapped.

    Attributes:
        answer_id: the answer's own name.
        requests: one for each choice, in the order of their indices; the `n` of a prompt stand together.
        make_reader: makes what tells the parts of a choice's text apart.
    """

    body: GenerationBody
    answer_id: str
    requests: tuple[GenerationRequest, ...]
    envelope: Envelope
    make_reader: Callable[[], Reader] = PlainReader


Planner = Callable[["Engine", dict[str, Any], "Caller"], Plan]


def plan_chat(engine: Engine, data: dict[str, Any], caller: Caller) -> Plan:
    """Check the body of a chat.

    Args:
        caller: whose key it is, which class of work that is, and who shares its cached prompts.

    Raises:
        RelevoError: it cannot be served as it stands.
    """
    body = parse_body(ChatBody, data)
    check_model(engine, body)
    unsupported.refuse_unsupported(data, unsupported.CHAT)
    conversation = read_conversation(engine, require_chat_template(engine.chat_template), body)
    answer_id = f"chatcmpl-{secrets.token_hex(12)}"
    grammar = join_grammars(read_grammar(data), conversation.grammar, conversation.thinking)
    shown = conversation.shown_token_ids
    requests = tuple(
        replace(request, shown_token_ids=shown, grammar=grammar)
        for request in _make_requests(engine, caller, body, answer_id, [conversation.prompt], None)
    )
    envelope = ChatEnvelope(answer_id, engine.model.name, int(time.time()), **_wrapping(engine, body, requests))
    return Plan(body, answer_id, requests, envelope, conversation.make_reader)


def plan_completion(engine: Engine, data: dict[str, Any], caller: Caller) -> Plan:
    """Check the body of a completion; see `plan_chat`."""
    body = parse_body(CompletionBody, data)
    check_model(engine, body)
    unsupported.refuse_unsupported(data, unsupported.COMPLETION)
    prompts = parse_prompts(body.prompt, engine.model.context_length)
    answer_id = f"cmpl-{secrets.token_hex(12)}"
    grammar = read_grammar(data)
    requests = tuple(
        replace(request, grammar=grammar)
        for request in _make_requests(engine, caller, body, answer_id, prompts, DEFAULT_COMPLETION_TOKENS)
    )
    echoes = [text for text in _spell_prompts(engine, prompts) for _ in range(body.n)] if body.echo else []
    envelope = CompletionEnvelope(
        answer_id, engine.model.name, int(time.time()), **_wrapping(engine, body, requests), echoes=echoes
    )
    return Plan(body, answer_id, requests, envelope)


def _make_requests(
    engine: Engine,
    caller: Caller,
    body: GenerationBody,
    answer_id: str,
    prompts: Sequence[Prompt],
    default_max_tokens: int | None,
) -> tuple[GenerationRequest, ...]:
    """A request for each choice of each prompt."""
    check_in_vocabulary(engine.tokenizer, body.stop_token_ids, "stop_token_ids")
    num_choices = len(prompts) * body.n
    most = engine.limits.max_waiting
    if num_choices > most:
        message = f"This asks for {num_choices} answers at once; no more than {most} may wait here."
        raise InvalidRequestError(message, param="n" if body.n > 1 else "prompt")
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        params = body.sampling_params(default_max_tokens=default_max_tokens)
        first = GenerationRequest(
            answer_id,
            prompt,
            params,
            body.stop,
            body.ignore_eos,
            cache_root=caller.cache_root(body.cache_salt),
            key_name=caller.key_name,
            key_identity=caller.key_identity,
            background=caller.background or body.service_tier == "flex",
            priority=body.priority,
            skip_special_tokens=body.skip_special_tokens,
            timeout_seconds=body.timeout,
        )
        for choice_index in range(body.n):
            # Names tell the seats apart on the dashboard; the first choice has the answer's own.
            name = f"{answer_id}-{len(requests)}" if requests else answer_id
            requests.append(replace(first, request_id=name, params=replace(params, choice_index=choice_index)))
    return tuple(requests)


def _wrapping(engine: Engine, body: GenerationBody, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """What both envelopes want to know."""
    return {
        "token_bytes": engine.tokenizer.token_bytes,
        "with_usage": body.include_usage,
        "with_logprobs": body.num_logprobs is not None,
        "service_tier": tier_of(body, requests),
    }


def tier_of(body: GenerationBody, requests: Sequence[GenerationRequest]) -> str | None:
    """The tier it is served in. As OpenAI does: who asks for one is told which one it was, and nobody else."""
    return None if body.service_tier is None else "flex" if requests[0].background else "default"


def _spell_prompts(engine: Engine, prompts: Sequence[TextPrompt | TokensPrompt]) -> list[str]:
    """The text of each prompt, to be repeated before the answers."""
    capacity = engine.model.context_length
    num_ids = sum(len(prompt.token_ids) for prompt in prompts if isinstance(prompt, TokensPrompt))
    if num_ids > capacity:
        message = f"'echo' spells at most {capacity} token ids, and the prompts have {num_ids}."
        raise InvalidRequestError(message, param="echo")
    texts = []
    for prompt in prompts:
        if isinstance(prompt, TokensPrompt):
            check_in_vocabulary(engine.tokenizer, prompt.token_ids, prompt.param)
            texts.append(engine.tokenizer.decode(prompt.token_ids))
        else:
            texts.append(prompt.text)
    return texts


def check_model(engine: Engine, body: Body) -> None:
    """Raise `ModelNameError` when the request names another model than the served one."""
    served = engine.model.name
    if body.model is not None and body.model != served:
        raise ModelNameError(body.model, served)


def parse_prompts(value: object, capacity: int) -> list[TextPrompt | TokensPrompt]:
    """A prompt is a string or a list of token ids; several are a list of either.

    Raises:
        InvalidRequestError: it is missing, too many, or holds something else.
        ContextLengthError: there are more than `capacity` ids in one.
    """
    if not isinstance(value, list) or not value or not isinstance(value[0], (str, list)):
        return [_parse_prompt(value, capacity, "prompt")]
    if len(value) > MAX_PROMPTS:
        message = f"'prompt' holds {len(value)} prompts; at most {MAX_PROMPTS} are taken."
        raise InvalidRequestError(message, param="prompt")
    if len(value) == 1:
        return [_parse_prompt(value[0], capacity, "prompt")]
    for index, prompt in enumerate(value):
        if type(prompt) is not type(value[0]):
            param = f"prompt[{index}]"
            raise InvalidRequestError(f"'{param}' is of another kind than the prompts before it.", param=param)
    return [_parse_prompt(prompt, capacity, f"prompt[{index}]") for index, prompt in enumerate(value)]


def _parse_prompt(value: object, capacity: int, param: str) -> TextPrompt | TokensPrompt:
    if isinstance(value, str):
        return TextPrompt(value, param)
    if value is None and param == "prompt":
        raise InvalidRequestError("'prompt' is missing; send a string or a list of token ids.", param=param)
    if not value or not isinstance(value, list):
        raise InvalidRequestError(f"'{param}' must be a string or a list of token ids.", param=param)
    return TokensPrompt(parse_token_ids(value, capacity, param), param)


def parse_token_ids(value: object, capacity: int, param: str) -> tuple[int, ...]:
    """A list of whole numbers; whether the vocabulary has them is for the engine to say.

    Raises:
        InvalidRequestError: it is no list, or holds something else.
        ContextLengthError: there are more than `capacity`; then none is looked at.
    """
    if value is None:
        raise InvalidRequestError(f"'{param}' is missing; send a list of token ids.", param=param)
    if isinstance(value, list) and len(value) > capacity:
        raise ContextLengthError(len(value), capacity, param=param)
    # `type` and not `isinstance`: true and false are no ids.
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise InvalidRequestError(f"'{param}' must be a list of token ids, which are whole numbers.", param=param)
    return tuple(value)
