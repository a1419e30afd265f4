"""Answers that are calls of tools, and nothing else.

    tool_call_spec(tools)                     one call of any of them: {"name": "f", "arguments": {…}}
    tool_call_spec(tools, name="f")           one call of this one
    tool_call_spec(tools, parallel=True)      a list of one to `MAX_PARALLEL_CALLS` calls: [{…}, {…}]

`tools` are OpenAI's: `{"type": "function", "function": {"name", "parameters"}}`. A function without parameters takes
an empty object. What it gives goes to `GenerationRequest.grammar`; text before the call (thinking) is allowed with
`dataclasses.replace(spec, thinking=Thinking("<think>", "</think>"))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine.errors import InvalidRequestError
from engine.grammar.spec import MAX_SCHEMA_LENGTH, GrammarSpec, is_plain, lark_schema, literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_PARALLEL_CALLS: Final = 16


def tool_call_spec(
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    parallel: bool = False,
    param: str = "tools",
    indices: Sequence[int] | None = None,
) -> GrammarSpec:
    """What an answer looks like that calls tools.

    Args:
        tools: those there are; their names were checked.
        name: the only one that may be called.
        parallel: several calls may be made at once.
        param: the request field that holds the tools.
        indices: where each of them stands there, if not in this order.

    Raises:
        InvalidRequestError: there is no such tool, or a schema of parameters is too large.
    """
    rules: list[str] = []
    places = [param, param]
    for index, tool in enumerate(tools):
        function = tool["function"]
        if name is not None and function["name"] != name:
            continue
        opening = '{"name": ' + literal(function["name"]) + ', "arguments": '
        where = f"{param}[{index if indices is None else indices[index]}].function.parameters"
        places += [where, where]
        parameters = function.get("parameters")
        arguments = lark_schema(_arguments({} if parameters is None else parameters, where), where)
        rules += [f'call_{index}: {literal(opening)} arguments_{index} "}}"', f"arguments_{index}: {arguments}"]
    if not rules:
        raise InvalidRequestError(f"There is no tool called {name!r}.", param="tool_choice")
    call = " | ".join([rule.partition(":")[0] for rule in rules[::2]])
    more = MAX_PARALLEL_CALLS - 1
    start = f'"[" call (", " call){{0,{more}}} "]"' if parallel else "call"
    text = "\n".join([f"start: {start}", f"call: {call}", *rules])
    if len(text) > MAX_SCHEMA_LENGTH:
        message = f"The tools have {len(text)} characters together; at most {MAX_SCHEMA_LENGTH} are taken."
        raise InvalidRequestError(message, param=param)
    return GrammarSpec("lark", text, param, is_plain(text), places=tuple(places))


def _arguments(schema: object, param: str) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever else it says."""
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"'{param}' must be a JSON schema, which is an object.", param=param)
    if schema.get("type", "object") != "object":
        raise InvalidRequestError(f"'{param}.type' must be \"object\".", param=f"{param}.type")
    if schema:
        return {"type": "object", **schema}
    return {"type": "object", "properties": {}, "additionalProperties": False}
