"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from app.api.messages import parse_messages
from app.api.planning import check_model, parse_token_ids, require_chat_template
from app.api.requests import read_json
from app.api.schemas import DetokenizeBody, TokenizeBody, parse_body
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.http import Context

T = TypeVar("T")
# Beyond this many characters or ids the work is long enough to be felt by the other requests' streams.
INLINE_SIZE: Final = 4096
# What a turn costs beside its content.
TURN_SIZE: Final = 64


async def tokenize(context: Context) -> dict[str, Any]:
    """Token ids of a prompt, or of messages laid out by the chat template."""
    data = await read_json()
    body = parse_body(TokenizeBody, data)
    engine = context.engine
    check_model(engine, body)
    if body.messages is not None:
        messages = [*parse_messages(body.messages, engine.model.context_length)]
        template = require_chat_template(engine)
        encode = partial(template.encode, messages, engine.tokenizer, add_generation_prompt=body.add_generation_prompt)
        length = sum(len(message["content"]) for message in messages)
        engine.check_text(length, "messages")
        tokens = await run_aside(encode, length + TURN_SIZE * len(messages))
    elif body.prompt is not None:
        engine.check_text(len(body.prompt), "prompt")
        encode = partial(engine.tokenizer.encode, body.prompt, parse_control=True, add_special=body.add_special_tokens)
        tokens = await run_aside(encode, len(body.prompt))
    else:
        raise InvalidRequestError("Send a 'prompt' or 'messages'.", param="prompt")
    texts = None
    if body.return_token_strs:
        texts = await run_aside(lambda: [engine.tokenizer.decode([token]) for token in tokens], 8 * len(tokens))
    return {
        "count": len(tokens),
        "max_model_len": engine.model.context_length,
        "tokens": tokens,
        "token_strs": texts,
    }


async def detokenize(context: Context) -> dict[str, Any]:
    """The text of token ids."""
    data = await read_json()
    body = parse_body(DetokenizeBody, data)
    engine = context.engine
    check_model(engine, body)
    tokens = parse_token_ids(body.tokens, engine.model.context_length, "tokens")
    return {"prompt": await run_aside(partial(engine.tokenizer.decode, tokens), len(tokens))}


async def run_aside(work: Callable[[], T], size: int) -> T:
    """Do some work, on another thread where its `size` in characters or ids says that it is long."""
    return work() if size <= INLINE_SIZE else await trio.to_thread.run_sync(work)
