"""The request bodies: what each field may be, and what it becomes for the engine."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError, from_json

from engine.errors import InvalidRequestError
from engine.sequence import SamplingParams

MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 256
# Longer than any context, and still a number that every column of the batch can hold.
MAX_TOKENS_CEILING: Final = 2**31 - 1
# OpenAI's default for completions; a chat without a limit runs until it ends or the context is full.
DEFAULT_COMPLETION_TOKENS: Final = 16


class Object(BaseModel):
    """Base of every object in a body: unknown fields are ignored, and `null` is as good as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class StreamOptions(Object):
    """`stream_options` of a streamed request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @field_validator("continuous_usage_stats")
    @classmethod
    def _not_supported(cls, value: bool) -> bool:
        if value:
            raise PydanticCustomError("unsupported", "is not supported here; leave it out")
        return value


class Body(Object):
    """Base of every body."""

    model: str | None = None


B = TypeVar("B", bound=Body)


class GenerationBody(Body):
    """What chat and completion requests share.

    Attributes:
        timeout: deadline on the server, in seconds from arrival.
        min_tokens: no end before this many tokens.
        cache_salt: cached prompts are shared only with requests of the same salt.
        service_tier: `flex` is background work, which waits for the interactive.
        priority: the lower goes first among the waiting requests of the same key.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise PydanticCustomError("stop", "must be a string or a list of strings")
        if len(stops) > MAX_STOP_STRINGS:
            raise PydanticCustomError("stop", f"has {len(stops)} entries; at most {MAX_STOP_STRINGS} are taken")
        if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise PydanticCustomError("stop", f"must have strings of 1 to {MAX_STOP_LENGTH} characters")
        return tuple(stops)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise _fault("min_tokens", f"is {self.min_tokens}, more than the {limit} tokens that may be generated")
        if self.stream_options is not None and not self.stream:
            raise _fault("stream_options", "is only for streamed answers; set 'stream' to true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The longest answer asked for, in tokens; the newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, *, default_max_tokens: int | None) -> SamplingParams:
        """The engine's parameters; without a seed a fresh one is drawn for this request."""
        limit = self.token_limit
        if limit is None and default_max_tokens is not None:
            limit = max(default_max_tokens, self.min_tokens)
        return SamplingParams(
            temperature=self.temperature,
            top_k=min(max(self.top_k, 0), MAX_TOKENS_CEILING),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            max_tokens=None if limit is None else min(limit, MAX_TOKENS_CEILING),
            min_tokens=min(self.min_tokens, MAX_TOKENS_CEILING),
        )


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`; the messages are checked by `messages.py`."""

    messages: Any = None


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`; the prompt is checked by `planning.py`."""

    prompt: Any = None


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a `prompt`, or `messages` to be laid out by the chat template."""

    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """Body of `POST /detokenize`; the ids are checked by `planning.py`."""

    tokens: Any = None


def _fault(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("together", message, {"param": param})


def parse_json_object(data: bytes | str) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        InvalidRequestError: not JSON, nested too deeply, or not an object.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("The body must be a JSON object.", code="invalid_json")
    return value


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
        message = first["msg"].replace("Input should ", "must ").replace("Field required", "is required")
        raise InvalidRequestError(f"'{param}' {message}.", param=param) from None


def _path(loc: tuple[int | str, ...]) -> str:
    """`("tokens", 3)` as `tokens[3]`, the way OpenAI writes it."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
