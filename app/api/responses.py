"""`POST /v1/responses` without state: OpenAI's newer form of a request, translated to a chat and back."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, WithJsonSchema

from app.api.bodies import MAX_TOKENS_CEILING
from app.api.kinds import SERVING, Priority, QueueTimeout, Salt, Tier, Timeout
from app.api.own_names import OwnNames
from app.api.planning import plan_chat, tier_of
from app.api.responses_answer import ResponseEnvelope
from app.api.schemas import Body, parse_body
from app.api.unsupported import chat_fields_at_rest, refuse_unsupported
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from app.api.planning import Plan
    from app.callers import Caller
    from engine.engine import Engine

RESPONSES_URL: Final = "/v1/responses"
MAX_ITEMS: Final = 65_536
_ARRAY: Final = WithJsonSchema({"type": "array", "items": {"type": "object"}})
_OBJECT: Final = WithJsonSchema({"type": "object"})
_ITEMS: Final = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
_CHOICE: Final = WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})
# The kinds of text in a message's content.
_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# What the fields of a chat are called here.
_FIELDS: Final = {
    "messages": "input",
    r"response_format\.json_schema": "text.format",
    "response_format": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice\.(?:function|allowed_tools)": "tool_choice",
    "reasoning_effort": "reasoning.effort",
}
_MEMBERS: Final = {
    ".id": ".call_id",
    ".tool_call_id": ".call_id",
    ".function.name": ".name",
    ".reasoning_content": ".content",
    ".tool_calls": "",
}
_PHRASES: Final = {
    "an assistant's 'tool_calls'": "the 'function_call' items",
    "a tool's message with its result": "a 'function_call_output'",
    "in the assistant's message before": "right before",
}

# What an item of a type must have, as text.
_NEEDED: Final = {
    "message": ("role",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
}


class ResponsesBody(Body):
    """Body of `POST /v1/responses`."""

    input: Annotated[Any, _ITEMS] = Field(None, description="a text, or items: messages, calls of functions, results")
    instructions: str | None = Field(None, description="what the system says, before everything else")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS_CEILING, description="longest answer")
    temperature: float = Field(1.0, ge=0, le=2, description="0 always takes the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that make up this share")
    tools: Annotated[Any, _ARRAY] = Field(None, description="functions; the server has no tools of its own")
    tool_choice: Annotated[Any, _CHOICE] = Field(None, description="none, auto, required, or a function")
    parallel_tool_calls: bool | None = Field(None, description="whether an answer may hold several calls")
    text: Annotated[dict[str, Any] | None, _OBJECT] = Field(
        None, description="its format: text, json_object or json_schema"
    )
    reasoning: Annotated[dict[str, Any] | None, _OBJECT] = Field(
        None, description="its effort, for models that know it; summary may be auto, and there is none"
    )
    stream: bool = Field(False, description="server-sent events as the answer is written")
    metadata: dict[str, Any] | None = Field(None, description="comes back in the answer")
    user: str | None = Field(None, description="accepted; nothing is done with it")
    timeout: Timeout = None
    queue_timeout: QueueTimeout = None
    priority: Priority = 0
    service_tier: Tier = None
    cache_salt: Salt = None


# At OpenAI `store` is true unless it is said; not here.
_AT_REST: Final = chat_fields_at_rest(
    ResponsesBody,
    {
        "background": (False,),
        "context_management": (),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
    },
)
_CALLED: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}


def plan_response(engine: Engine, data: dict[str, Any], caller: Caller) -> Plan:
    """Check a body of `/v1/responses`; see `planning.plan_chat`.

    Raises:
        RelevoError: it cannot be served as it stands.
    """
    body = parse_body(ResponsesBody, data)
    refuse_unsupported(data, _AT_REST, _CALLED)
    names = OwnNames(_FIELDS, members=_MEMBERS, phrases=_PHRASES)
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body.instructions, body.input, names),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": _tools(body.tools),
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text),
        "reasoning_effort": _effort(body.reasoning),
        "stream": body.stream,
        **{name: getattr(body, name) for name in SERVING},
    }
    with names.told():
        plan = names.put_into(plan_chat(engine, chat, caller))
    tokenizer = engine.tokenizer
    envelope = ResponseEnvelope(
        plan.answer_id.removeprefix("chatcmpl-"),
        _echo(body, engine.model.name, tier_of(plan.body, plan.requests)),
        count_tokens=lambda text: len(tokenizer.encode(text, parse_control=False, add_special=False)),
    )
    return replace(plan, envelope=envelope)


def _echo(body: ResponsesBody, model: str, tier: str | None) -> dict[str, Any]:
    """What an answer repeats of its request; `tier` is the one it is served in, for who asked for one."""
    return {
        **({} if tier is None else {"service_tier": tier}),
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"strict": None, "parameters": None, **tool} for tool in body.tools or []],
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _messages(instructions: str | None, value: object, names: OwnNames) -> list[dict[str, Any]]:
    """Items as a chat's messages. What the assistant thought, said and called in a row is one message there."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        names.add("messages[0]", "instructions")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        said = "is missing; send" if value is None else "must be"
        raise InvalidRequestError(f"'input' {said} a string or a list of items.", param="input")
    if len(value) > MAX_ITEMS:
        raise InvalidRequestError(f"'input' has {len(value)} items; at most {MAX_ITEMS} are taken.", param="input")
    for index, item in enumerate(value):
        where = f"input[{index}]"
        message = _item(item, where)
        last = messages[-1] if messages else None
        if last is not None and message["role"] == last["role"] == "assistant" and _joins(last, message):
            messages[-1] = _join(last, message)
        else:
            messages.append(message)
            names.add(f"messages[{len(messages) - 1}]", where)
        if "tool_calls" in message:
            names.add(f"messages[{len(messages) - 1}].tool_calls[{len(messages[-1]['tool_calls']) - 1}]", where)
    return messages


def _joins(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Whether both belong to one turn: thinking, then text, then calls."""
    says_more = bool(message["content"]) or "reasoning_content" in message
    return not ("tool_calls" in last and says_more) and not (last["content"] and says_more)


def _join(last: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    joined = {**last, **message, "content": last["content"] + message["content"]}
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    return joined | ({"tool_calls": calls} if calls else {})


def _item(item: object, where: str) -> dict[str, Any]:
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": "function_call_output", "call_id": str(call_id), **rest}:
            return {"role": "tool", "tool_call_id": call_id, "content": _text(rest.get("output"), f"{where}.output")}
        case dict() if item.get("type") == "reasoning":
            thought = item.get("content") or item.get("summary") or ""
            return {"role": "assistant", "content": "", "reasoning_content": _text(thought, f"{where}.content")}
        case dict() if item.get("type", "message") == "message" and isinstance(role := item.get("role"), str):
            if role not in ("user", "assistant", "system", "developer"):
                message = f"'{where}.role' must be one of user, assistant, system, developer."
                raise InvalidRequestError(message, param=f"{where}.role")
            return {"role": role, "content": _text(item.get("content"), f"{where}.content")}
    raise _not_an_item(item, where)


def _not_an_item(item: object, where: str) -> InvalidRequestError:
    """What is wrong with an item that was not understood."""
    if not isinstance(item, dict):
        return InvalidRequestError(f"'{where}' must be an object: a message or another item.", param=where)
    kind = item.get("type", "message")
    for name in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
        if not isinstance(item.get(name), str):
            param = f"{where}.{name}"
            said = "is missing" if item.get(name) is None else "must be a string"
            return InvalidRequestError(f"'{param}' {said}; an item of type {kind!r} needs one.", param=param)
    said = f"is {kind[:64]!r}" if isinstance(kind, str) else "is no text"
    message = f"'{where}.type' {said}; message, reasoning, function_call and function_call_output are supported here."
    return InvalidRequestError(message, param=f"{where}.type", code="unsupported_content")


def _text(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"'{where}' must be a string or a list of texts.", param=where)
    texts = []
    for index, part in enumerate(value):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
                texts.append(text)
            case _:
                param = f"{where}[{index}]"
                message = f"'{param}' is no text; only texts are supported here."
                raise InvalidRequestError(message, param=param, code="unsupported_content")
    return "\n".join(texts)


def _tools(value: object) -> object:
    """OpenAI's newer definitions as the older ones; what is wrong inside is found by the chat's own check."""
    if not isinstance(value, list):
        return value
    return [_tool(entry, f"tools[{index}]") for index, entry in enumerate(value)]


def _tool(entry: object, where: str) -> object:
    if not isinstance(entry, dict) or entry.get("type") != "function":
        return entry
    if "name" not in entry and isinstance(entry.get("function"), dict):
        message = (
            f"'{where}.name' is missing: here 'name', 'description' and 'parameters' stand beside 'type', not inside "
            "'function' as in a chat's tools."
        )
        raise InvalidRequestError(message, param=f"{where}.name")
    function = {name: entry.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": function}


def _choice(value: object) -> object:
    match value:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [_choice(tool) for tool in tools]},
            }
    return value


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's older `response_format`."""
    text = text or {}
    if text.get("verbosity") not in (None, "medium"):
        message = "'text.verbosity' is not supported here. Leave it out."
        raise InvalidRequestError(message, param="text.verbosity", code="unsupported_parameter")
    match text.get("format"):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "schema": dict(schema)} as spec:
            named = {name: spec[name] for name in ("name", "description", "strict") if spec.get(name) is not None}
            return {"type": "json_schema", "json_schema": {**named, "schema": schema}}
    message = "'text.format' must be of type text, json_object, or json_schema with a schema."
    raise InvalidRequestError(message, param="text.format")


def _effort(reasoning: dict[str, Any] | None) -> Any:
    reasoning = reasoning or {}
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto"):
            message = f"'reasoning.{name}' is not supported here; the thinking itself is in the answer."
            raise InvalidRequestError(message, param=f"reasoning.{name}", code="unsupported_parameter")
    return reasoning.get("effort")
