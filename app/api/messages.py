"""The `messages` of a chat: checked, and brought to one plain shape."""

from __future__ import annotations

from typing import Any, Final

from engine.errors import ContextLengthError, InvalidRequestError

# `developer` is OpenAI's newer word for `system`; chat templates know only the older one.
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED: Final = ("tool_calls", "function_call", "audio")


def parse_messages(value: object, capacity: int) -> tuple[dict[str, Any], ...]:
    """Check `messages` and return dicts of `role` and `content`, both strings.

    Raises:
        InvalidRequestError: naming the message and the field at fault.
        ContextLengthError: there are more than `capacity` messages, and each is a token at least.
    """
    if not isinstance(value, list):
        raise InvalidRequestError("'messages' must be a list of messages.", param="messages")
    if not value:
        raise InvalidRequestError("'messages' is empty; send at least one message.", param="messages")
    if len(value) > capacity:
        raise ContextLengthError(len(value), capacity, param="messages", at_least=True)
    return tuple(_parse_message(message, f"messages[{index}]") for index, message in enumerate(value))


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
    return {"role": _ROLES[role], "content": _parse_content(content, f"{where}.content")}


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
            raise InvalidRequestError(
                f"'{param}' is {kind!r}; only text parts are supported here.",
                param=param,
                code="unsupported_content",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"'{where}[{index}].text' must be a string.", param=f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)
