"""The `messages` of a chat: checked, and brought to one plain shape."""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import from_json

from app.api.json_values import depth, find_non_finite
from app.api.tools import MAX_TOOL_DEPTH
from engine.errors import ContextLengthError, InvalidRequestError

# `developer` is OpenAI's newer word for `system`; chat templates know only the older one.
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNSUPPORTED: Final = ("function_call", "audio")
MAX_CALLS: Final = 128
MAX_NAME_LENGTH: Final = 256


def parse_messages(value: object, capacity: int) -> tuple[dict[str, Any], ...]:
    """Check `messages` and return dicts of `role` and `content`, both strings.

    An assistant's message may have `tool_calls` beside them, with arguments parsed, and `reasoning_content`; a tool's
    has `tool_call_id` and the `name` of the tool.

    Raises:
        InvalidRequestError: naming the message and the field at fault.
        ContextLengthError: there are more than `capacity` messages, and each is a token at least.
    """
    if value is None:
        raise InvalidRequestError("'messages' is missing; send at least one message.", param="messages")
    if not isinstance(value, list):
        raise InvalidRequestError("'messages' must be a list of messages.", param="messages")
    if not value:
        raise InvalidRequestError("'messages' is empty; send at least one message.", param="messages")
    if len(value) > capacity:
        raise ContextLengthError(len(value), capacity, param="messages", at_least=True)
    messages: list[dict[str, Any]] = []
    open_calls: dict[str, str] = {}
    for index, entry in enumerate(value):
        where = f"messages[{index}]"
        message = _parse_message(entry, where)
        if message["role"] == "tool":
            _match_result(message, entry, open_calls, where)
        elif open_calls:
            raise _unanswered(open_calls, where)
        for call in message.get("tool_calls", ()):
            open_calls[call["id"]] = call["function"]["name"]
        messages.append(message)
    if open_calls:
        raise _unanswered(open_calls, "messages")
    return tuple(messages)


def _parse_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"'{where}' must be an object with a role and a content.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        known = ", ".join(_ROLES)
        raise InvalidRequestError(f"'{where}.role' must be one of {known}.", param=f"{where}.role")
    for name in _UNSUPPORTED:
        if message.get(name):
            param = f"{where}.{name}"
            raise InvalidRequestError(f"'{param}' is not supported here.", param=param, code="unsupported_parameter")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""  # OpenAI's own answers have no text here when they called a tool or refused
    parsed = {"role": _ROLES[role], "content": _parse_content(content, f"{where}.content")}
    if role == "assistant":
        return parsed | _parse_assistant(message, where)
    if message.get("tool_calls"):
        param = f"{where}.tool_calls"
        raise InvalidRequestError(f"'{param}' is only for messages of the assistant.", param=param)
    return parsed


def _parse_assistant(message: dict[str, Any], where: str) -> dict[str, Any]:
    """What only the assistant's own messages have."""
    found: dict[str, Any] = {}
    thinking = message.get("reasoning_content")
    if thinking is not None:
        if not isinstance(thinking, str):
            param = f"{where}.reasoning_content"
            raise InvalidRequestError(f"'{param}' must be a string.", param=param)
        if thinking:
            found["reasoning_content"] = thinking
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return found
    where = f"{where}.tool_calls"
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequestError(f"'{where}' must be a list of at most {MAX_CALLS} calls.", param=where)
    parsed = [_parse_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]
    ids = {call["id"] for call in parsed}
    if len(ids) < len(parsed):
        raise InvalidRequestError(f"'{where}' has two calls of the same id.", param=where)
    return found | {"tool_calls": parsed}


def _parse_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise InvalidRequestError(f"'{where}' must be a call of type 'function'.", param=where)
    function = call.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"'{where}.function' must be an object.", param=f"{where}.function")
    for holder, name, path in ((call, "id", "id"), (function, "name", "function.name")):
        text = holder.get(name)
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME_LENGTH:
            param = f"{where}.{path}"
            message = f"'{param}' must be a string of 1 to {MAX_NAME_LENGTH} characters."
            raise InvalidRequestError(message, param=param)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        param = f"{where}.function.arguments"
        raise InvalidRequestError(f"'{param}' must be a string of JSON.", param=param)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": _load_arguments(arguments)},
    }


def _load_arguments(text: str) -> Any:
    """As the object that chat templates expect.

    What a model once wrote and is no object stays a string; so does what is nested deeper than any tool may ask for,
    because templates and what guards them walk through it by recursion.
    """
    if not text.strip():
        return {}
    try:
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):  # the latter where a half of a surrogate pair stands in it
        return text
    fits = isinstance(value, dict) and depth(value) <= MAX_TOOL_DEPTH and find_non_finite(value) is None
    return value if fits else text


def _match_result(message: dict[str, Any], entry: dict[str, Any], open_calls: dict[str, str], where: str) -> None:
    """A tool's message answers one of the calls before it, once."""
    call_id = entry.get("tool_call_id")
    param = f"{where}.tool_call_id"
    if not isinstance(call_id, str):
        raise InvalidRequestError(f"'{param}' must be the id of a call.", param=param)
    if call_id not in open_calls:
        text = f"'{param}' is not the id of a call that waits for its result in the assistant's message before."
        raise InvalidRequestError(text, param=param)
    message["tool_call_id"] = call_id
    message["name"] = open_calls.pop(call_id)


def _unanswered(open_calls: dict[str, str], where: str) -> InvalidRequestError:
    shown = ", ".join(call_id[:64] for call_id in list(open_calls)[:4])
    return InvalidRequestError(
        f"Each of an assistant's 'tool_calls' must be followed by a tool's message with its result; {shown} has none.",
        param=where,
    )


def _parse_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"'{where}' must be a string or a list of text parts.", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            param = f"{where}[{index}].type"
            said = f"is {kind[:64]!r}" if isinstance(kind, str) else "is missing" if kind is None else "is no text"
            raise InvalidRequestError(
                f"'{param}' {said}; only parts of type 'text' are supported here.",
                param=param,
                code="unsupported_content",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"'{where}[{index}].text' must be a string.", param=f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)
