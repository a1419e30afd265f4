"""What fields of a body can be beside plain texts and numbers: how they are read, and their JSON schemas.

Where a field is `Any`, the module that works with it checks it; the schema here is for the OpenAPI document.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.api.tools import MAX_TOOLS
from engine.grammar.spec import MAX_CHOICES as MAX_GUIDED_CHOICES

MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_BIAS_ENTRIES: Final = 300
MAX_CHOICES: Final = 16
MAX_PROMPTS: Final = 64


def _read_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise PydanticCustomError("stop", f"has {len(stops)} entries; at most {MAX_STOP_STRINGS} are taken")
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise PydanticCustomError("stop", f"must have strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(stops)


def _read_stop_tokens(value: Any) -> Any:
    if not isinstance(value, list) or not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in value):
        raise PydanticCustomError("stop_token_ids", "must be a list of token ids, which are whole numbers")
    if len(value) > MAX_STOP_TOKENS:
        raise PydanticCustomError("stop_token_ids", f"has {len(value)} entries; at most {MAX_STOP_TOKENS} are taken")
    return tuple(value)


def _read_bias(value: Any) -> Any:
    """`{"15": -100}` as pairs, in the order of token ids."""
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object from token ids to numbers")
    if len(value) > MAX_BIAS_ENTRIES:
        raise PydanticCustomError("logit_bias", f"has {len(value)} entries; at most {MAX_BIAS_ENTRIES} are taken")
    pairs = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise PydanticCustomError("logit_bias", "must have token ids, written as decimal strings, for its keys")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "must have numbers from -100 to 100 for its values")
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def false_is_none(value: Any) -> Any:
    """For a number that used to be a switch."""
    return None if value is False else value


def _read_as(kind: str, **schema: Any) -> WithJsonSchema:
    """A JSON schema for what a validator reads; `kind` says it in words."""
    return WithJsonSchema({"x-kind": kind, **schema})


_STOP: Final = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TEXT: Final = {"type": "string", "minLength": 1}
_ID: Final = {"type": "integer", "minimum": 0}
_IDS: Final = {"type": "array", "items": _ID, "minItems": 1}
_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL: Final = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_MESSAGE: Final = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_call_id": {"type": "string"},
        "reasoning_content": {"type": "string"},
    },
    "required": ["role"],
}
_TOOL: Final = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}

Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_read_stops),
    _read_as(
        f"text, or at most {MAX_STOP_STRINGS} of them, of 1 to {MAX_STOP_LENGTH} characters",
        anyOf=[_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}],
    ),
]
StopTokens = Annotated[
    tuple[int, ...],
    BeforeValidator(_read_stop_tokens),
    _read_as(f"at most {MAX_STOP_TOKENS} token ids", type="array", items=_ID, maxItems=MAX_STOP_TOKENS),
]
Bias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_read_bias),
    _read_as(
        f"at most {MAX_BIAS_ENTRIES} token ids, each with a number, -100 to 100",
        type="object",
        propertyNames={"pattern": "^[0-9]{1,9}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        maxProperties=MAX_BIAS_ENTRIES,
    ),
]
Prompt = Annotated[
    Any,
    _read_as(
        f"text, token ids, or at most {MAX_PROMPTS} of either",
        anyOf=[
            _TEXT,
            {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
        ],
    ),
]
Tools = Annotated[Any, _read_as(f"at most {MAX_TOOLS} functions", type="array", items=_TOOL, maxItems=MAX_TOOLS)]
ToolChoice = Annotated[
    Any,
    _read_as(
        "none, auto, required, or one function",
        anyOf=[{"enum": ["none", "auto", "required"]}, {"type": "object", "required": ["type"]}],
    ),
]
TemplateOptions = Annotated[Any, _read_as("object", type="object")]
Messages = Annotated[Any, _read_as("list of messages", type="array", items=_MESSAGE, minItems=1)]


_SCHEMA: Final = {"type": "object"}
Format = Annotated[
    Any,
    _read_as(
        "type text, json_object, or json_schema with a name and a schema",
        type="object",
        properties={
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                    "description": {"type": "string"},
                    "schema": _SCHEMA,
                    "strict": {"type": "boolean"},
                },
                "required": ["name", "schema"],
            },
        },
        required=["type"],
    ),
]
GuidedJson = Annotated[Any, _read_as("a JSON schema, or its text", anyOf=[_SCHEMA, _TEXT])]
GuidedText = Annotated[Any, _read_as("text", **_TEXT)]
GuidedChoice = Annotated[
    Any,
    _read_as(f"at most {MAX_GUIDED_CHOICES} texts", type="array", items=_TEXT, minItems=1, maxItems=MAX_GUIDED_CHOICES),
]
Structured = Annotated[
    Any,
    _read_as("one of json, regex, choice, grammar, json_object", type="object", minProperties=1),
]

# How long a request may take, when it is served, and what of the cache it shares: the same on every route that
# generates, whatever the rest of its body is like.
Timeout = Annotated[float | None, Field(gt=0, description="seconds from arrival; then 408, or an error in the stream")]
QueueTimeout = Annotated[
    float | None,
    Field(gt=0, description="seconds from arrival without a seat; then 503, or an error in the stream"),
]
Priority = Annotated[
    int,
    Field(ge=-(2**31), lt=2**31, description="the lower goes first among the waiting requests of the same key"),
]
Tier = Annotated[
    Literal["auto", "default", "flex"] | None,
    Field(description="flex is background work, which waits for the interactive"),
]
Salt = Annotated[
    str | None,
    Field(min_length=1, max_length=256, description="cached prompts are shared only with the same salt"),
]
SERVING: Final = ("timeout", "queue_timeout", "priority", "service_tier", "cache_salt")
