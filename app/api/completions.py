"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.api import unsupported
from app.api.generation import check_model, respond, submit
from app.api.requests import read_json
from app.api.schemas import DEFAULT_COMPLETION_TOKENS, CompletionBody, parse_body
from app.api.sse import CompletionEnvelope
from engine.errors import InvalidRequestError
from engine.handle import TextPrompt, TokensPrompt

if TYPE_CHECKING:
    from quart import Response

    from app.http import Context


async def create_completion(context: Context) -> Response:
    """Continue a text or a list of token ids, streamed or whole."""
    data = await read_json()
    body = parse_body(CompletionBody, data)
    check_model(context, body)
    unsupported.refuse_unsupported(data, unsupported.COMPLETION)
    prompt = parse_prompt(body.prompt, context.engine.tokenizer.vocab_size)
    default = DEFAULT_COMPLETION_TOKENS
    generation = submit(context, body, prompt, CompletionEnvelope, prefix="cmpl", default_max_tokens=default)
    return await respond(generation, stream=body.stream)


def parse_prompt(value: object, vocab_size: int) -> TextPrompt | TokensPrompt:
    """A prompt is a string, a list of token ids, or a list that holds one of either.

    Raises:
        InvalidRequestError: it is missing, several, or has ids that the model does not know.
    """
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            message = f"'prompt' holds {len(value)} prompts; send one in each request."
            raise InvalidRequestError(message, param="prompt", code="unsupported_parameter")
        value = value[0]
    if isinstance(value, str):
        return TextPrompt(value)
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("'prompt' must be a string or a list of token ids.", param="prompt")
    return TokensPrompt(check_token_ids(value, vocab_size, "prompt"))


def check_token_ids(value: list[object], vocab_size: int, param: str) -> tuple[int, ...]:
    """Raise `InvalidRequestError` unless all of `value` are ids of the vocabulary."""
    ids: list[int] = []
    for index, token_id in enumerate(value):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"'{param}[{index}]' is not a token id; ids go from 0 to {vocab_size - 1}.", param=param
            )
        ids.append(token_id)
    return tuple(ids)
