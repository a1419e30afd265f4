"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from app.api.aside import run_aside
from app.api.bodies import ChatBody
from app.api.conversation import read_conversation
from app.api.planning import check_model, parse_token_ids
from app.api.requests import read_json
from app.api.schemas import DetokenizeBody, TokenizeBody, parse_body
from app.api.unsupported import TOKENIZE_CHAT, TOKENIZE_TEXT, refuse_unsupported
from engine.errors import InvalidRequestError
from engine.loaded import require_chat_template
from engine.text_guard import strings_in

if TYPE_CHECKING:
    from app.http import Context
    from engine.engine import Engine

# What a turn costs beside its content.
TURN_SIZE: Final = 64
# What of a chat's body makes up its prompt.
PROMPT_FIELDS: Final = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")


async def tokenize(context: Context) -> dict[str, Any]:
    """Token ids of a prompt, or of messages laid out by the chat template."""
    data = await read_json()
    body = parse_body(TokenizeBody, data)
    engine = context.engine
    check_model(engine, body)
    if body.messages is not None and body.prompt is not None:
        raise InvalidRequestError("Send a 'prompt' or 'messages', not both.", param="prompt")
    refuse_unsupported(data, TOKENIZE_TEXT if body.messages is None else TOKENIZE_CHAT)
    if body.messages is not None:
        tokens = await encode_chat(engine, data, add_generation_prompt=body.add_generation_prompt)
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


async def encode_chat(engine: Engine, data: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
    """Token ids of the prompt that a chat's body makes.

    Raises:
        RelevoError: the body's messages, tools or switches are not right, or too long.
    """
    template = require_chat_template(engine.chat_template)
    chat: dict[str, Any] = {name: data[name] for name in PROMPT_FIELDS if name in data}
    prompt = read_conversation(engine, template, parse_body(ChatBody, chat)).prompt
    messages = list(prompt.messages)
    engine.check_text(sum(len(message["content"]) for message in messages), "messages")
    length = sum(map(len, strings_in([messages, prompt.options]))) + TURN_SIZE * len(messages)
    options = {"add_generation_prompt": add_generation_prompt, **prompt.options}
    return await run_aside(partial(template.encode, messages, engine.tokenizer, **options), length)


async def detokenize(context: Context) -> dict[str, Any]:
    """The text of token ids."""
    data = await read_json()
    body = parse_body(DetokenizeBody, data)
    engine = context.engine
    check_model(engine, body)
    tokens = parse_token_ids(body.tokens, engine.model.context_length, "tokens")
    return {"prompt": await run_aside(partial(engine.tokenizer.decode, tokens), len(tokens))}
