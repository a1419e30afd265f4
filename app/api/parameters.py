"""What every parameter of the generating routes is, in words: for the docs page and the README's table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from app.api import unsupported
from app.api.bodies import ChatBody, CompletionBody

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.api.schemas import Body

TAKEN: Final = "yes"
REFUSED: Final = "refused"
IGNORED: Final = "–"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A field of a body.

    Attributes:
        kind: its type and range, in words.
        default: as JSON; empty when there is none.
    """

    name: str
    kind: str
    default: str
    description: str
    required: bool = False


def parameters_of(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Parameter]:
    """The fields of an object's JSON schema; `definitions` are what its references name."""
    required = schema.get("required", ())
    return [
        Parameter(
            name,
            kind_of(field, definitions),
            json.dumps(field["default"]) if field.get("default") not in (None, []) else "",
            field.get("description", ""),
            name in required,
        )
        for name, field in schema.get("properties", {}).items()
    ]


def kind_of(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A JSON schema's type and range in words (its own `x-kind` where it has one), without `null`."""
    if "x-kind" in schema:
        return str(schema["x-kind"])
    if "$ref" in schema:
        return kind_of(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [kind_of(entry, definitions) for entry in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys([kind for kind in kinds if kind != "null"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    match schema.get("type"):
        case "array":
            return f"list{_size(schema, 'Items')} of {kind_of(schema.get('items', {}), definitions)}"
        case "string":
            return f"text{_size(schema, 'Length', ' characters')}"
        case "boolean":
            return "true or false"
        case "integer":
            return f"whole number{_range(schema)}"
        case "number":
            return f"number{_range(schema)}"
        case "object":
            return f"object{_size(schema, 'Properties', ' entries')}"
        case "null":
            return "null"
    return "anything"


def _range(schema: Mapping[str, Any]) -> str:
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    above, below = "exclusiveMinimum" in schema, "exclusiveMaximum" in schema
    # Bounds that only say what fits into 32 or 64 bits are of no interest.
    if most is not None and abs(most) >= 2**31 - 1:
        return ""
    if least is not None and most is not None:
        return f", {'more than ' if above else ''}{least:g} to {'less than ' if below else ''}{most:g}"
    if least is not None:
        return f", more than {least:g}" if above else f", {least:g} or more" if least else ", not negative"
    return ""


def _size(schema: Mapping[str, Any], noun: str, unit: str = "") -> str:
    most = schema.get(f"max{noun}")
    return "" if most is None else f" of at most {most}{unit}" if unit else f" (at most {most})"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What becomes of a parameter on each route: `TAKEN`, `REFUSED` or `IGNORED`.

    Attributes:
        how: what it is and does, where it is taken.
        at_rest: which values pass where it is refused, as they ask for nothing.
    """

    name: str
    chat: str
    completions: str
    how: str
    at_rest: str


def compatibility() -> list[Compatibility]:
    """Every parameter that is known: those that are taken, then those that are refused."""
    chat, completions = _taken(ChatBody), _taken(CompletionBody)
    known = dict.fromkeys([*chat, *completions, *sorted({*unsupported.CHAT, *unsupported.COMPLETION})])
    rows = []
    for name in known:
        ways = (_way(name, chat, unsupported.CHAT), _way(name, completions, unsupported.COMPLETION))
        how = _how(chat.get(name), completions.get(name)) if TAKEN in ways else ""
        rows.append(Compatibility(name, *ways, how, _at_rest(name) if REFUSED in ways else ""))
    return rows


def _way(name: str, taken: Mapping[str, Parameter], refused: Mapping[str, Any]) -> str:
    return TAKEN if name in taken else REFUSED if name in refused else IGNORED


def _how(chat: Parameter | None, completion: Parameter | None) -> str:
    texts = [f"{one.kind}; {one.description}" for one in (chat, completion) if one is not None]
    return ". Completions: ".join(dict.fromkeys(texts))


def _at_rest(name: str) -> str:
    """Which values of a refused parameter ask for nothing, and pass."""
    values = dict.fromkeys(
        json.dumps(value) for table in (unsupported.CHAT, unsupported.COMPLETION) for value in table.get(name, ())
    )
    return f"passes as {' or '.join(values)}" if values else ""


def _taken(body: type[Body]) -> dict[str, Parameter]:
    schema = body.model_json_schema()
    found = parameters_of(schema, schema.get("$defs", {}))
    return {parameter.name: parameter for parameter in found}
