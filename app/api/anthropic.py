"""`POST /v1/messages` and its count of tokens: Anthropic's Messages, translated to a chat and back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema

from app.api.anthropic_answer import MessageEnvelope
from app.api.bodies import MAX_TOKENS_CEILING
from app.api.kinds import SERVING, Priority, QueueTimeout, Salt, Stops, Timeout
from app.api.own_names import OwnNames
from app.api.planning import check_model, plan_chat
from app.api.requests import read_json
from app.api.schemas import Body, parse_body
from app.api.tokenize import encode_chat
from app.api.unsupported import chat_fields_at_rest, refuse_unsupported
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from app.api.planning import Plan
    from app.callers import Caller
    from app.http import Context
    from engine.engine import Engine

MESSAGES_URL: Final = "/v1/messages"
COUNT_URL: Final = "/v1/messages/count_tokens"
_ARRAY: Final = WithJsonSchema({"type": "array", "items": {"type": "object"}})
_OBJECT: Final = WithJsonSchema({"type": "object"})
_TEXT_OR_BLOCKS: Final = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
# What the fields of a chat are called here.
_FIELDS: Final = {
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice\.function": "tool_choice",
    r"chat_template_kwargs\.thinking_budget": "thinking.budget_tokens",
    r"chat_template_kwargs(?:\.\w+)?": "thinking",
}
_MEMBERS: Final = {
    ".tool_call_id": ".tool_use_id",
    ".function.name": ".name",
    ".reasoning_content": ".content",
    ".tool_calls": ".content",
}
_PHRASES: Final = {
    "an assistant's 'tool_calls'": "an assistant's 'tool_use' blocks",
    "a tool's message with its result": "a 'tool_result' in the next message",
    "calls of the same id": "'tool_use' blocks of the same id",
}
# A message of the chat, with the place of what it is made of; then the places of its calls.
Placed = tuple[dict[str, Any], tuple[str, ...]]
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class ConversationBody(Body):
    """What both routes read."""

    messages: Annotated[Any, _ARRAY] = Field(None, description="turns of user and assistant; the last is the user's")
    system: Annotated[Any, _TEXT_OR_BLOCKS] = Field(None, description="a text, or blocks of text")
    tools: Annotated[Any, _ARRAY] = Field(None, description="functions, each with a name and an input_schema")
    tool_choice: Annotated[Any, _OBJECT] = Field(None, description="auto, any, none, or tool with a name")
    thinking: Annotated[Any, _OBJECT] = Field(None, description="enabled, adaptive or disabled, for models that can")


class MessagesBody(ConversationBody):
    """Body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS_CEILING, description="longest answer; required")
    stop_sequences: Stops = Field((), description="texts that end the answer and are not part of it")
    temperature: float = Field(1.0, ge=0, le=2, description="0 always takes the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that make up this share")
    top_k: int = Field(0, ge=-1, description="draw from the k likeliest tokens")
    stream: bool = Field(False, description="server-sent events as the answer is written")
    metadata: dict[str, Any] | None = Field(None, description="accepted; nothing is done with it")
    timeout: Timeout = None
    queue_timeout: QueueTimeout = None
    priority: Priority = 0
    service_tier: Literal["auto", "standard_only", "flex"] | None = Field(
        None, description="flex is background work, which waits for the interactive; the others are Anthropic's"
    )
    cache_salt: Salt = None


_AT_REST: Final = chat_fields_at_rest(
    MessagesBody,
    {
        "container": (),
        "context_management": (),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": (),
    },
)
_CALLED: Final = {"max_completion_tokens": "max_tokens", "reasoning_effort": "thinking", "stop": "stop_sequences"}


def plan_messages(engine: Engine, data: dict[str, Any], caller: Caller) -> Plan:
    """Check a body of `/v1/messages`; see `planning.plan_chat`.

    Raises:
        RelevoError: it cannot be served as it stands.
    """
    body = parse_body(MessagesBody, data)
    refuse_unsupported(data, _AT_REST, _CALLED)
    names = _own_names()
    chat = conversation_to_chat(engine, body, names) | {
        "max_tokens": body.max_tokens,
        "stop": list(body.stop_sequences),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
        **{name: getattr(body, name) for name in SERVING},
        "service_tier": "flex" if body.service_tier == "flex" else None,
    }
    with names.told():
        plan = names.put_into(plan_chat(engine, chat, caller))
    return replace(plan, envelope=MessageEnvelope(plan.answer_id.replace("chatcmpl-", "msg_"), engine.model.name))


async def count_tokens(context: Context) -> dict[str, Any]:
    """`POST /v1/messages/count_tokens`: how long the prompt of such a request is, in tokens."""
    engine = context.engine
    body = parse_body(ConversationBody, await read_json())
    check_model(engine, body)
    names = _own_names()
    chat = conversation_to_chat(engine, body, names)
    with names.told():
        return {"input_tokens": len(await encode_chat(engine, chat))}


def _own_names() -> OwnNames:
    return OwnNames(_FIELDS, members=_MEMBERS, phrases=_PHRASES)


def conversation_to_chat(engine: Engine, body: ConversationBody, names: OwnNames) -> dict[str, Any]:
    """The part of a chat's body that makes up its prompt; `names` are told where each message comes from."""
    messages = _system(body.system)
    if messages:
        names.add("messages[0]", "system")
    if not isinstance(body.messages, list) or not body.messages:
        raise InvalidRequestError("'messages' must be a list of at least one message.", param="messages")
    for index, entry in enumerate(body.messages):
        for told, places in _message(entry, f"messages[{index}]"):
            where = f"messages[{len(messages)}]"
            names.add(where, places[0])
            for number, place in enumerate(places[1:]):
                names.add(f"{where}.tool_calls[{number}]", place)
            messages.append(told)
    if messages[-1]["role"] == "assistant":
        message = "The last of 'messages' must be the user's: an answer that has begun cannot be continued here."
        raise InvalidRequestError(message, param="messages", code="unsupported_parameter")
    choice, parallel = _choice(body.tool_choice)
    chat: dict[str, Any] = {"model": body.model, "messages": messages, "tools": _tools(body.tools)}
    if chat["tools"] or choice not in (None, "auto"):
        chat |= {"tool_choice": choice, "parallel_tool_calls": parallel}
    return chat | {"chat_template_kwargs": _thinking(engine, body.thinking)}


def _system(value: object) -> list[dict[str, Any]]:
    if value is None or value in ("", []):
        return []
    return [{"role": "system", "content": _text(value, "system")}]


def _text(value: object, where: str) -> str:
    """A text, or the text of blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"'{where}' must be a string or a list of text blocks.", param=where)
    return "\n".join([_block_text(block, f"{where}[{index}]") for index, block in enumerate(value)])


def _block_text(block: object, where: str) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    raise _unsupported(block, where, "text")


def _unsupported(block: object, where: str, known: str) -> InvalidRequestError:
    kind = block.get("type") if isinstance(block, dict) else None
    shown = kind[:64] if isinstance(kind, str) else None
    message = f"'{where}' is a block of type {shown!r} or misses something; these are supported here: {known}."
    return InvalidRequestError(message, param=where, code="unsupported_content")


def _message(entry: object, where: str) -> list[Placed]:
    """One message as the chat's messages: results of tools are messages of their own there."""
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or role not in ("user", "assistant"):
        raise InvalidRequestError(f"'{where}.role' must be user or assistant.", param=f"{where}.role")
    content = entry.get("content")
    whole, where = where, f"{where}.content"
    if isinstance(content, str):
        return [({"role": role, "content": content}, (whole,))]
    if not isinstance(content, list):
        raise InvalidRequestError(f"'{where}' must be a string or a list of blocks.", param=where)
    return [_assistant(content, whole)] if role == "assistant" else _user(content, whole)


def _user(blocks: list[Any], whole: str) -> list[Placed]:
    where = f"{whole}.content"
    messages: list[Placed] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                if texts:
                    message = f"'{where}' must have its results of tools before its texts."
                    raise InvalidRequestError(message, param=f"{where}[{index}]")
                text = _text(block.get("content") or "", f"{where}[{index}].content")
                if block.get("is_error") is True:
                    text = f"Error: {text}"
                result = {"role": "tool", "tool_call_id": call_id, "content": text}
                messages.append((result, (f"{where}[{index}]",)))
            case _:
                raise _unsupported(block, f"{where}[{index}]", "text and tool_result")
    if texts or not messages:
        messages.append(({"role": "user", "content": "\n".join(texts)}, (whole,)))
    return messages


def _assistant(blocks: list[Any], whole: str) -> Placed:
    where = f"{whole}.content"
    places = [whole]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass  # nobody here can read it
            case {"type": "tool_use", "id": str(call_id), "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
                places.append(f"{where}[{index}]")
            case _:
                raise _unsupported(block, f"{where}[{index}]", "text, thinking and tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {}), tuple(places)


def _tools(value: object) -> list[dict[str, Any]]:
    """Anthropic's definitions as OpenAI's; what is wrong inside is found by the chat's own check."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequestError("'tools' must be a list of tools.", param="tools")
    tools = []
    for index, entry in enumerate(value):
        if not isinstance(entry, dict) or entry.get("type", "custom") != "custom" or "input_schema" not in entry:
            message = f"'tools[{index}]' must have a name and an input_schema; the server has no tools of its own."
            raise InvalidRequestError(message, param=f"tools[{index}]", code="unsupported_parameter")
        function = {"name": entry.get("name"), "description": entry.get("description")}
        tools.append({"type": "function", "function": function | {"parameters": entry["input_schema"]}})
    return tools


def _choice(value: object) -> tuple[Any, bool | None]:
    """OpenAI's `tool_choice` and `parallel_tool_calls`."""
    if value is None:
        return None, None
    parallel = False if isinstance(value, dict) and value.get("disable_parallel_tool_use") is True else None
    match value:
        case {"type": "auto" | "any" | "none" as kind}:
            return _CHOICES[kind], parallel
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, parallel
    message = "'tool_choice' must be of type auto, any, none, or tool with a name."
    raise InvalidRequestError(message, param="tool_choice")


def _thinking(engine: Engine, value: object) -> dict[str, Any]:
    """Thinking is off unless it is asked for, as Anthropic has it; a model without a switch does as it was trained."""
    known = frozenset[str]() if engine.chat_template is None else engine.chat_template.variables
    switch = next((name for name in ("enable_thinking", "thinking") if name in known), None)
    match value:
        case None | {"type": "disabled"}:
            return {} if switch is None else {switch: False}
        case {"type": "adaptive"}:
            return {}
        case {"type": "enabled", "budget_tokens": int(budget)} if switch is not None:
            return {switch: True} | ({"thinking_budget": budget} if "thinking_budget" in known else {})
        case {"type": "enabled"}:
            message = "'thinking' cannot be switched on: this model's chat template knows no such thing."
            raise InvalidRequestError(message, param="thinking", code="unsupported_parameter")
    message = "'thinking' must be of type enabled, with budget_tokens, adaptive or disabled."
    raise InvalidRequestError(message, param="thinking")
