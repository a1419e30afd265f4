"""What a request says about the form of its answer, in OpenAI's words and in vLLM's, as one grammar.

    response_format          {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name", "schema", …}}
    guided_json …            `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`: vLLM's older spelling
    structured_outputs       {"json": …}, {"regex": …}, {"choice": …}, {"grammar": …}, {"json_object": true}

At most one of them. A schema binds the answer whether it is called strict or not.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json

from engine.errors import InvalidRequestError
from engine.grammar.spec import (
    MAX_SCHEMA_LENGTH,
    GrammarSpec,
    any_object,
    choice_spec,
    lark_spec,
    regex_spec,
    schema_spec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.grammar.spec import Thinking

    Maker = Callable[[object, str], GrammarSpec]

NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_DESCRIPTION: Final = 4096
# Of `structured_outputs`: what other servers can be told beside the form, and the value that asks for nothing.
_AT_REST: Final = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
}


def read_grammar(data: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar that a body asks for, if any.

    Args:
        data: the fields of the body; others than the ones above are passed over.

    Raises:
        InvalidRequestError: naming the field at fault, down to the member.
    """
    found = [
        spec
        for spec in (
            _read_format(data.get("response_format")),
            *[_read(name, data.get(name), maker) for name, maker in _GUIDED.items()],
            _read_structured(data.get("structured_outputs")),
        )
        if spec is not None
    ]
    if len(found) > 1:
        fields = " and ".join([f"'{spec.param}'" for spec in found])
        raise InvalidRequestError(f"{fields} say both what the answer looks like; send one.", param=found[1].param)
    return found[0] if found else None


def join_grammars(form: GrammarSpec | None, calls: GrammarSpec | None, thinking: Thinking | None) -> GrammarSpec | None:
    """The one grammar of a chat's answer.

    Args:
        form: what the request says about it.
        calls: of tools that the model has to call.
        thinking: what may come before.

    Raises:
        InvalidRequestError: there are two.
    """
    if form is not None and calls is not None:
        message = f"The answer has to be a call of a tool, so '{form.param}' cannot say what it looks like."
        raise InvalidRequestError(message, param=form.param)
    grammar = calls if form is None else form
    return None if grammar is None else replace(grammar, thinking=thinking)


def _read(param: str, value: object, maker: Maker) -> GrammarSpec | None:
    return None if value is None else maker(value, param)


def _read_format(value: object) -> GrammarSpec | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError("'response_format' must be an object with a type.", param="response_format")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return any_object("response_format")
        case "json_schema":
            return read_named_schema(value.get("json_schema"), "response_format.json_schema")
    message = "'response_format.type' must be text, json_object or json_schema."
    raise InvalidRequestError(message, param="response_format.type")


def read_named_schema(value: object, where: str) -> GrammarSpec:
    """The schema in an object with `name`, `schema`, and perhaps `description` and `strict`.

    Args:
        where: the object's own place in the body.

    Raises:
        InvalidRequestError: a member is missing or of another kind.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{where}' must be an object with a name and a schema.", param=where)
    name, description, strict = value.get("name"), value.get("description"), value.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"'{where}.name' must have 1 to 64 letters, digits, underscores or dashes."
        raise InvalidRequestError(message, param=f"{where}.name")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        message = f"'{where}.description' must be a string of at most {MAX_DESCRIPTION} characters."
        raise InvalidRequestError(message, param=f"{where}.description")
    if not isinstance(strict, bool | None):
        raise InvalidRequestError(f"'{where}.strict' must be true or false.", param=f"{where}.strict")
    return schema_spec(value.get("schema"), f"{where}.schema")


def _read_structured(value: object) -> GrammarSpec | None:
    where = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"'{where}' must be an object.", param=where)
    found: list[GrammarSpec] = []
    for name, setting in value.items():
        param = f"{where}.{name[:64]}"
        if setting is None or setting in _AT_REST.get(name, ()) or (name == "json_object" and setting is False):
            continue
        maker = _STRUCTURED.get(name)
        if maker is None:
            raise InvalidRequestError(f"'{param}' is not supported here.", param=param, code="unsupported_parameter")
        found.append(maker(setting, param))
    if len(found) != 1:
        message = f"'{where}' must say one thing about the answer: {', '.join(_STRUCTURED)}."
        raise InvalidRequestError(message, param=where)
    return found[0]


def _json_spec(value: object, param: str) -> GrammarSpec:
    """A schema as an object, or as text that holds one."""
    if not isinstance(value, str):
        return schema_spec(value, param)
    if len(value) > MAX_SCHEMA_LENGTH:
        message = f"'{param}' has {len(value)} characters; at most {MAX_SCHEMA_LENGTH} are taken."
        raise InvalidRequestError(message, param=param)
    try:
        return schema_spec(from_json(value, allow_inf_nan=False), param)
    except ValueError as error:
        raise InvalidRequestError(f"'{param}' is text, but not of JSON: {error}.", param=param) from None


def _object_spec(value: object, param: str) -> GrammarSpec:
    if value is not True:
        raise InvalidRequestError(f"'{param}' must be true or false.", param=param)
    return any_object(param)


_GUIDED: Final[dict[str, Maker]] = {
    "guided_json": _json_spec,
    "guided_regex": regex_spec,
    "guided_choice": choice_spec,
    "guided_grammar": lark_spec,
}
_STRUCTURED: Final[dict[str, Maker]] = {
    "json": _json_spec,
    "regex": regex_spec,
    "choice": choice_spec,
    "grammar": lark_spec,
    "json_object": _object_spec,
}
