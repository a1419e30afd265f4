"""The tools that a request offers: checked, chosen, and told to the model."""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from app.api.json_values import depth
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.loaded import ChatTemplateLike

MAX_TOOLS: Final = 128
# Of one definition, as JSON, in characters; and how deep its schema may be nested.
MAX_TOOL_LENGTH: Final = 65_536
MAX_TOOL_DEPTH: Final = 64
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# What Mistral's template demands of an id, and OpenAI's clients accept.
_SHORT_ID_LENGTH: Final = 9
_LETTERS: Final = string.ascii_letters + string.digits

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask for.

    Attributes:
        parameters: JSON schema of its arguments, an object.
        index: where it stands among the request's tools.
    """

    name: str
    description: str | None
    parameters: dict[str, Any]
    index: int = 0

    @property
    def definition(self) -> dict[str, Any]:
        """In the form that chat templates expect, which is OpenAI's."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Tooling:
    """What a request says about tools.

    Attributes:
        tools: those that may be called; empty where none may.
        mode: whether the model may, must, or must not call one; `named` is one tool that it must call.
        parallel: whether an answer may hold several calls; `None` leaves that to the model.
    """

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    parallel: bool | None = None

    @property
    def is_forced(self) -> bool:
        """Whether nothing but calls will do."""
        return self.mode in ("required", "named")

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """For the chat template."""
        return [tool.definition for tool in self.tools]


def parse_tooling(tools: object, choice: object, parallel: bool | None) -> Tooling:
    """Check `tools` and `tool_choice`; `parallel` is `parallel_tool_calls`.

    Raises:
        InvalidRequestError: naming the field at fault.
    """
    known = {tool.name: tool for tool in _parse_tools(tools)}
    mode, names = _parse_choice(choice, tuple(known))
    if mode == "none" or not known:
        return Tooling()
    return Tooling(tuple(known[name] for name in names), mode, parallel)


def _parse_tools(value: object) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequestError("'tools' must be a list of tools.", param="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"'tools' has {len(value)} entries; at most {MAX_TOOLS} are taken.", param="tools")
    tools: list[Tool] = []
    for index, entry in enumerate(value):
        tool = replace(_parse_tool(entry, f"tools[{index}]"), index=index)
        if any(tool.name == other.name for other in tools):
            param = f"tools[{index}].function.name"
            raise InvalidRequestError(f"'{param}' is {tool.name!r}, as that of an earlier tool.", param=param)
        tools.append(tool)
    return tools


def _parse_tool(value: object, where: str) -> Tool:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{where}' must be an object of type 'function'.", param=where)
    kind = value.get("type")
    if kind != "function":
        param = f"{where}.type"
        said = f"is {kind[:64]!r}" if isinstance(kind, str) else "is missing" if kind is None else "is no text"
        message = f"'{param}' {said}; only tools of type 'function' are supported here."
        raise InvalidRequestError(message, param=param, code="unsupported_parameter")
    function = value.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidRequestError(f"'{where}' must be an object with a name.", param=where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = f"{where}.name"
        raise InvalidRequestError(f"'{param}' must be 1 to 64 letters, digits, '_' or '-'.", param=param)
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"'{where}.description' must be a string.", param=f"{where}.description")
    return Tool(name, description, _parse_parameters(function, where))


def _parse_parameters(function: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = function.get("parameters")
    param = f"{where}.parameters"
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"'{param}' must be a JSON schema of type 'object'.", param=param)
    if depth(parameters) > MAX_TOOL_DEPTH:
        raise InvalidRequestError(f"'{param}' is nested deeper than {MAX_TOOL_DEPTH} levels.", param=param)
    if len(json.dumps(function)) > MAX_TOOL_LENGTH:
        raise InvalidRequestError(f"'{where}' is longer than {MAX_TOOL_LENGTH} characters of JSON.", param=where)
    return parameters


def _parse_choice(value: object, names: tuple[str, ...]) -> tuple[Mode, tuple[str, ...]]:
    """The mode, and the names that may be called."""
    if value in (None, "auto"):
        return "auto", names
    if value == "none":
        return "none", ()
    if not names:
        raise InvalidRequestError("'tool_choice' is only for requests that offer 'tools'.", param="tool_choice")
    if value == "required":
        return "required", names
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", _check_names([name], names, "tool_choice.function.name")
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*entries]}}:
            allowed = [_name_of(entry) for entry in entries]
            chosen = _check_names(allowed, names, "tool_choice.allowed_tools.tools")
            return ("required" if mode == "required" else "auto"), chosen
    message = "'tool_choice' must be 'none', 'auto', 'required', or name a function of 'tools'."
    raise InvalidRequestError(message, param="tool_choice")


def _name_of(entry: object) -> object:
    match entry:
        case {"type": "function", "function": {"name": name}}:
            return name
    return None


def _check_names(chosen: Sequence[object], names: tuple[str, ...], param: str) -> tuple[str, ...]:
    for name in chosen:
        if name not in names:
            shown = name[:64] if isinstance(name, str) else None
            raise InvalidRequestError(f"'{param}' names {shown!r}, which is not among 'tools'.", param=param)
    if not chosen:
        raise InvalidRequestError(f"'{param}' is empty; name a tool at least.", param=param)
    return tuple(name for name in names if name in chosen)


def id_maker(template: ChatTemplateLike) -> Callable[[], str]:
    """Makes fresh ids of calls, in the form that the model's template takes back in the next turn."""
    if "[TOOL_CALLS]" in template.source:
        return lambda: "".join(secrets.choice(_LETTERS) for _ in range(_SHORT_ID_LENGTH))
    return lambda: f"call_{secrets.token_hex(12)}"


def tell_tools(
    messages: tuple[dict[str, Any], ...], tooling: Tooling, template: ChatTemplateLike
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Bring definitions, calls and results to the model: by its template where that knows tools, else in plain words.

    Returns:
        The messages, and what else the template is given.
    """
    if "tools" in template.variables:
        return messages, {"tools": tooling.definitions} if tooling.tools else {}
    plain = _in_plain_words(messages)
    if not tooling.tools:
        return tuple(plain), {}
    instruction = instruct(tooling)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{instruction}"}
        return (first, *plain[1:]), {}
    return ({"role": "system", "content": instruction}, *plain), {}


def instruct(tooling: Tooling) -> str:
    """How to call, for a model whose template says nothing about it."""
    functions = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tooling.tools)
    end = "" if tooling.is_forced else "\nIf no function helps, reply in plain words."
    return (
        f"You can call these functions:\n{functions}\n"
        'To call one, reply with nothing but JSON: {"name": the function\'s name, "arguments": {its arguments}}' + end
    )


def _in_plain_words(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and results as ordinary turns.

    Results, and what the user says to them, are one turn: many templates want the two sides to alternate.
    """
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        content = message["content"]
        said = message
        if message["role"] == "tool":
            content = f"Result of {message['name']}: {content}"
            said = {"role": "user", "content": content}
        elif calls := message.get("tool_calls"):
            lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            content = "\n".join([*([content] if content else []), *lines])
            said = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
        if said["role"] == "user" and after_result:
            said = {"role": "user", "content": f"{plain.pop()['content']}\n{content}"}
        plain.append(said)
        after_result = message["role"] == "tool"
    return plain
