"""What an answer must look like, as a request says it. Its size is bounded here; it is compiled elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_SCHEMA_LENGTH: Final = 65_536
MAX_SCHEMA_DEPTH: Final = 64
MAX_REGEX_LENGTH: Final = 4096
MAX_GRAMMAR_LENGTH: Final = 32_768
MAX_CHOICES: Final = 1024
MAX_CHOICES_LENGTH: Final = 32_768

# One space behind commas and colons and no other whitespace: a small model would fill its answer with it, and what is
# fixed need not be generated. It is the spelling that most JSON in texts has.
#
# Of the escapes only those without which a character cannot be written: "\u0061" would be a second spelling of a
# property called "a", under which llguidance (version 1.9) takes it for another one and lets any value follow.
LAYOUT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": '"\\bfnrt',
}
LAYOUT_KEY: Final = "x-guidance"

# Of strings; llguidance knows these.
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
# In a schema's text: a character that only such an escape could give.
CONTROL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u00|\x7f")
# What stands under these is data and no schema.
DATA_KEYWORDS: Final = frozenset(("const", "enum", "default", "examples"))

# A schema of this length at most, without any of these in it, has nothing that multiplies while it is compiled.
PLAIN_LENGTH: Final = 4096
MULTIPLIES: Final = ('Of"', '$ref"', '$dynamicRef"', 'attern"', 'atternProperties"', "\\u")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Text before the part that is bound by a grammar: anything, up to a closing mark.

    Attributes:
        opening: the mark it begins with, if there is any thinking; empty where the prompt has begun it already.
        closing: the mark it ends with.
    """

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must look like.

    Attributes:
        kind: the language of `text`: a JSON schema, a regular expression, or a grammar in llguidance's kind of Lark.
        param: the request field to be named when it cannot be compiled.
        plain: nothing in it can make compiling it slow.
        places: the request's field that each line of `text` comes from, where that is not `param` alone.
        thinking: what may come before it; `None` is nothing.
    """

    kind: Literal["schema", "regex", "lark"]
    text: str
    param: str
    plain: bool = False
    thinking: Thinking | None = None
    places: tuple[str, ...] = ()


def any_object(param: str) -> GrammarSpec:
    """Any JSON object."""
    return schema_spec({"type": "object"}, param)


def schema_spec(schema: object, param: str) -> GrammarSpec:
    """JSON that a schema describes.

    Raises:
        InvalidRequestError: it is no object, too long or nested too deeply.
    """
    text = schema_text(schema, param)
    return GrammarSpec("schema", text, param, is_plain(text))


def schema_text(schema: object, param: str) -> str:
    """A schema as JSON, with our layout of the answer in place of its own.

    Raises:
        InvalidRequestError: it is no object, too long or nested too deeply, or says what cannot be enforced and what
            llguidance does not refuse itself.
    """
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"'{param}' must be a JSON schema, which is an object.", param=param)
    _check_depth(schema, param)
    ours = {key: value for key, value in _formatted(schema, param).items() if key != LAYOUT_KEY} | {LAYOUT_KEY: LAYOUT}
    try:
        text = json.dumps(ours, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # infinity, which is what 1e999 is read as; an integer of thousands of digits
        message = f"'{param}' holds a number that cannot be written as JSON: {error}."
        raise InvalidRequestError(message, param=param) from None
    _check_text(text, MAX_SCHEMA_LENGTH, param)
    if CONTROL.search(text):
        raise InvalidRequestError(
            f"'{param}' holds control characters other than tabs and line ends; no answer can have them.", param=param
        )
    if "/draft-03/" in str(schema.get("$schema")):
        message = f"'{param}' is of JSON Schema's draft 3; write it in a later one."
        raise InvalidRequestError(message, param=param)
    return text


def is_plain(text: str) -> bool:
    """Whether a schema can be compiled without asking first what that costs."""
    return len(text) <= PLAIN_LENGTH and not any(mark in text for mark in MULTIPLIES)


def regex_spec(regex: object, param: str) -> GrammarSpec:
    """Text that matches a regular expression from its first to its last character.

    Raises:
        InvalidRequestError: it is no string, empty, too long, or ends within an escape.
    """
    text = _check_string(regex, MAX_REGEX_LENGTH, param)
    if (len(text) - len(text.rstrip("\\"))) % 2:  # llguidance would pass over it
        raise InvalidRequestError(f"'{param}' ends with a backslash that escapes nothing.", param=param)
    return GrammarSpec("regex", text, param)


def lark_spec(grammar: object, param: str) -> GrammarSpec:
    """Text that a grammar describes; its first rule is called `start`.

    Raises:
        InvalidRequestError: it is no string, empty or too long.
    """
    return GrammarSpec("lark", _check_string(grammar, MAX_GRAMMAR_LENGTH, param), param)


def choice_spec(choices: object, param: str) -> GrammarSpec:
    """One of several texts.

    Raises:
        InvalidRequestError: they are no strings, or too many or too long together.
    """
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise InvalidRequestError(f"'{param}' must be a list of strings, none of them empty.", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequestError(
            f"'{param}' has {len(choices)} entries; at most {MAX_CHOICES} are taken.", param=param
        )
    text = "start: " + " | ".join([literal(each) for each in dict.fromkeys(choices)])
    _check_text(text, MAX_CHOICES_LENGTH, param)
    return GrammarSpec("lark", text, param, plain=True)


def literal(text: str) -> str:
    """A text as a string of a Lark grammar, which is written as one of JSON, but that U+007F needs an escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark_schema(schema: object, param: str) -> str:
    """A schema as a part of a Lark grammar, with references of its own.

    Raises:
        InvalidRequestError: see `schema_text`.
    """
    return "%json " + schema_text(schema, param)


def _check_string(value: object, longest: int, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"'{param}' must be a string that is not empty.", param=param)
    _check_text(value, longest, param)
    return value


def _check_text(text: str, longest: int, param: str) -> None:
    if len(text) > longest:
        raise InvalidRequestError(f"'{param}' has {len(text)} characters; at most {longest} are taken.", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"'{param}' holds half of a surrogate pair; send whole characters.", param=param
        ) from None


def _check_depth(schema: Mapping[str, Any], param: str) -> None:
    """Walk the schema level by level; what is too large is not walked to its end."""
    level: Sequence[Any] = [schema]
    num_values = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        num_values += len(level)
        if num_values > MAX_SCHEMA_LENGTH:
            raise InvalidRequestError(f"'{param}' holds more than {MAX_SCHEMA_LENGTH} values.", param=param)
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise InvalidRequestError(f"'{param}' is nested more than {MAX_SCHEMA_DEPTH} levels deep.", param=param)


def _formatted(value: Any, param: str) -> Any:
    """A schema without formats that cannot be held to: by its specification a format is a remark, no condition.

    Raises:
        InvalidRequestError: it asks for a number of properties that may have the same name in an answer.
    """
    if isinstance(value, list):
        return [_formatted(inner, param) for inner in value]
    if not isinstance(value, dict):
        return value
    least, required = value.get("minProperties"), value.get("required")
    if isinstance(least, int | float) and least > 1 + len(required if isinstance(required, list) else ()):
        message = f"'{param}' has a 'minProperties' that needs more than one property that is not 'required', which "
        raise InvalidRequestError(message + "cannot be enforced here; name them as required.", param=param)
    return {
        key: inner if key in DATA_KEYWORDS else _formatted(inner, param)
        for key, inner in value.items()
        if key != "format" or not isinstance(inner, str) or inner in FORMATS
    }


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
