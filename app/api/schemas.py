"""What all request bodies have in common, how they are read, and the bodies of the tokenizer's routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError, from_json

from app.api.json_values import find_non_finite, is_small
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


class Object(BaseModel):
    """Base of every object in a body: unknown fields are ignored, and `null` is as good as absent.

    A whole number may be written as `1.0`, as clients write it that know only floats.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = [name for name in cls.model_fields if data.get(name) is not None]
            return {name: cls._whole(name, data[name]) for name in known}
        return data

    @classmethod
    def _whole(cls, name: str, value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            field = cls.model_fields.get(name)
            if field is not None and field.annotation in (int, int | None):
                return int(value)
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Says of every field that may be absent that it may be `null`."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        required = schema.get("required", [])
        fields = schema.get("properties", {})
        schema["properties"] = {name: _describe(field, name in required) for name, field in fields.items()}
        return reference


_NULL: Final = {"type": "null"}


def _describe(field: dict[str, Any], required: bool) -> dict[str, Any]:
    """A field's JSON schema without what says nothing, and with `null` unless it is required."""
    about = {key: field[key] for key in ("description", "default", "x-kind") if field.get(key) is not None}
    kind = {key: value for key, value in field.items() if key not in ("description", "default", "x-kind", "title")}
    if required:
        return {**kind, **about}
    kinds = kind.get("anyOf", [kind])
    return {"anyOf": [*(one for one in kinds if one != _NULL), _NULL], **about}


class Body(Object):
    """Base of every body."""

    model: str | None = Field(None, description="the served model's name, or left out")


B = TypeVar("B", bound=Body)
# What pydantic says, in words of JSON.
_WORDS: Final = {
    "Input should ": "must ",
    "String should ": "must ",
    "Field required": "is required",
    "a valid boolean": "true or false",
    "a valid dictionary": "an object",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "a string",
    "must be False": "must be false",
}
# To read so many takes about as long as any other body may hold up the event loop: some milliseconds.
MAX_CONTAINERS: Final = 6144
# A key may be as long as the body.
MAX_PARAM_LENGTH: Final = 256


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a `prompt`, or `messages` to be laid out by the chat template."""

    prompt: str | None = Field(None, description="a text, in which control tokens are parsed")
    messages: Annotated[Any, WithJsonSchema({"type": "array", "x-kind": "list of messages"})] = Field(
        None, description="or a conversation"
    )
    tools: Annotated[Any, WithJsonSchema({"type": "array"})] = Field(None, description="with messages, as in a chat")
    chat_template_kwargs: Annotated[Any, WithJsonSchema({"type": "object"})] = Field(
        None, description="with messages, as in a chat"
    )
    add_special_tokens: bool = Field(True, description="what the tokenizer puts around a text that stands alone")
    add_generation_prompt: bool = Field(True, description="what the template puts before an answer")
    return_token_strs: bool = Field(False, description="the text of each token, too")


class DetokenizeBody(Body):
    """Body of `POST /detokenize`; the ids are checked by `planning.py`."""

    model_config = ConfigDict(json_schema_extra={"required": ["tokens"]})

    tokens: Annotated[
        Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "x-kind": "token ids"})
    ] = Field(None, description="what the text is made of")


def fault(param: str, message: str) -> PydanticCustomError:
    """What a validator raises when fields contradict each other; `param` is the one to blame."""
    return PydanticCustomError("together", message, {"param": param})


def parse_json_object(data: bytes | bytearray, max_values: int) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        InvalidRequestError: too many values, not JSON, nested too deeply, not an object, or with a number that no float
            can hold.
    """
    if not is_small(data, max_values, MAX_CONTAINERS):
        message = f"The body has more than {max_values:,} values, or more than {MAX_CONTAINERS:,} lists and objects."
        raise InvalidRequestError(message, code="invalid_json")
    value = load_json_object(data)
    check_numbers(value)
    return value


def load_json_object(data: bytes | bytearray, *, what: str = "body") -> dict[str, Any]:
    """A JSON object, in which numbers may be infinite; errors call it `what`.

    Raises:
        InvalidRequestError: not JSON, nested too deeply, or not an object.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The {what} is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"The {what} must be a JSON object.", code="invalid_json")
    return value


def check_numbers(body: dict[str, Any]) -> None:
    """Raise `InvalidRequestError` where a number was written that no float can hold: `1e999`."""
    path = find_non_finite(body)
    if path is not None:
        param = _path(path)[:MAX_PARAM_LENGTH]
        raise InvalidRequestError(f"'{param}' is a number that is too large.", param=param, code="invalid_json")


def parse_body(kind: type[B], data: dict[str, Any]) -> B:
    """Check `data` against `kind`.

    Raises:
        InvalidRequestError: naming the first field at fault.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = first.get("ctx", {}).get("param") or _path(first["loc"])
        message = first["msg"]
        for theirs, ours in _WORDS.items():
            message = message.replace(theirs, ours)
        raise InvalidRequestError(f"'{param}' {message}.", param=param) from None


def _path(loc: tuple[int | str, ...]) -> str:
    """`("tokens", 3)` as `tokens[3]`, the way OpenAI writes it."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
