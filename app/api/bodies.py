"""The bodies of generation requests: what each field may be, and what it becomes for the engine.

The descriptions stand in `/openapi.json`, on `/docs` and in the README's table of parameters.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.kinds import (
    MAX_CHOICES,
    Bias,
    Format,
    GuidedChoice,
    GuidedJson,
    GuidedText,
    Messages,
    Priority,
    Prompt,
    QueueTimeout,
    Salt,
    Stops,
    StopTokens,
    Structured,
    TemplateOptions,
    Tier,
    Timeout,
    ToolChoice,
    Tools,
    false_is_none,
)
from app.api.schemas import Body, Object, fault
from engine.sequence import MAX_LOGPROBS, SamplingParams

# Longer than any context, and still a number that every column of the batch can hold.
MAX_TOKENS_CEILING: Final = 2**31 - 1
# OpenAI's default for completions; a chat without a limit runs until it ends or the context is full.
DEFAULT_COMPLETION_TOKENS: Final = 16


class StreamOptions(Object):
    """`stream_options` of a streamed request."""

    include_usage: bool = Field(False, description="one more chunk at the end, with usage and timing")
    continuous_usage_stats: Literal[False] = Field(False, description="usage in every chunk is not supported")
    include_obfuscation: Literal[False] = Field(False, description="padding against eavesdroppers is not supported")

    @model_validator(mode="before")
    @classmethod
    def _an_object(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("object", "must be an object")
        return value

    @field_validator("continuous_usage_stats", "include_obfuscation", mode="before")
    @classmethod
    def _not_supported(cls, value: Any) -> Any:
        if value is not False:
            raise PydanticCustomError("unsupported", "is not supported here; leave it out")
        return value


class GenerationBody(Body):
    """What chat and completion requests share."""

    temperature: float = Field(1.0, ge=0, le=2, description="0 always takes the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that make up this share")
    top_k: int = Field(0, ge=-1, description="draw from the k likeliest tokens; 0 and -1 draw from all")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens below this share of the likeliest one's probability")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**64, description="the same random numbers again, for each choice its own"
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices for each prompt; the prompt is computed once")
    stop: Stops = Field((), description="strings that end the answer and are not part of it")
    stop_token_ids: StopTokens = Field((), description="tokens that end the answer")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; the context ends it in any case")
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of max_tokens; wins over it")
    min_tokens: int = Field(0, ge=0, description="nothing ends the answer before so many tokens")
    ignore_eos: bool = Field(False, description="the model's own end tokens do not end the answer")
    skip_special_tokens: bool = Field(True, description="false shows the control tokens that the model writes")
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken from a token's logit for each time it was generated"
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken once from the logit of what was generated")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="divides the logits of what stands in prompt or answer (multiplies below 0)"
    )
    logit_bias: Bias = Field((), description="added to the logits of these token ids")
    response_format: Format = Field(None, description="JSON of any form, or of a schema's, strict or not")
    guided_json: GuidedJson = Field(None, description="the answer is JSON of this form")
    guided_regex: GuidedText = Field(
        None, description=r"the whole answer matches it; `\d` is one of ten digits, `\w` and `\s` are Unicode's"
    )
    guided_choice: GuidedChoice = Field(None, description="the answer is one of them")
    guided_grammar: GuidedText = Field(None, description="the answer follows a grammar, in Lark's or GBNF's spelling")
    structured_outputs: Structured = Field(None, description="vLLM's newer spelling of the guided fields")
    stream: bool = Field(False, description="server-sent events as the answer is written")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    timeout: Timeout = None
    queue_timeout: QueueTimeout = None
    priority: Priority = 0
    service_tier: Tier = None
    cache_salt: Salt = None
    user: str | None = Field(None, description="accepted; nothing is done with it")
    metadata: dict[str, Any] | None = Field(None, description="accepted; nothing is done with it")
    store: Literal[False] | None = Field(None, description="nothing is stored; true is refused")

    @field_validator("store", mode="before")
    @classmethod
    def _nothing_is_stored(cls, value: Any) -> Any:
        if value is True:
            raise PydanticCustomError("unsupported", "is true, but nothing is stored here; leave it out")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        limit = self.token_limit
        if limit is not None and self.min_tokens > limit:
            raise fault("min_tokens", f"is {self.min_tokens}, more than the {limit} tokens that may be generated")
        if self.stream_options is not None and not self.stream:
            raise fault("stream_options", "is only for streamed answers; set 'stream' to true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The longest answer asked for, in tokens; the newer name wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are told beside the chosen one; `None`: not even that one."""
        return None

    def sampling_params(self, *, default_max_tokens: int | None) -> SamplingParams:
        """The engine's parameters; without a seed a fresh one is drawn for this call."""
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
            stop_token_ids=frozenset(self.stop_token_ids),
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
        )


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`; the messages are checked by `messages.py`."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages"]})

    messages: Messages = Field(None, description="contents are text, whole or in parts")
    logprobs: bool = Field(False, description="the log-probability of each token of the answer")
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="and of so many likeliest tokens beside it")
    tools: Tools = Field(None, description="told to the model by its template, or in plain words")
    tool_choice: ToolChoice = Field(None, description="required and a named function bind the answer by a grammar")
    parallel_tool_calls: bool | None = Field(
        None, description="false takes one call at most; with required, true asks for a list of calls"
    )
    chat_template_kwargs: TemplateOptions = Field(
        None, description="enable_thinking, thinking, preserve_thinking, thinking_budget, where the template knows them"
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="where the template knows it, or can switch its thinking; else only none"
    )

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise fault("top_logprobs", "is only for answers with log-probabilities; set 'logprobs' to true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As `top_logprobs` says."""
        return self.top_logprobs if self.logprobs else None


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`; the prompt is checked by `planning.py`."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    prompt: Prompt = Field(None, description="the choices of the first come first, then those of the next")
    echo: bool = Field(False, description="the prompt before the answer; not together with logprobs")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="must equal n: all choices are returned")
    logprobs: Annotated[int | None, BeforeValidator(false_is_none)] = Field(
        None, ge=0, le=5, description="the log-probability of each token, and of so many likeliest ones beside it"
    )

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of not in (None, self.n):
            raise fault("best_of", f"is {self.best_of} and 'n' is {self.n}; only equal numbers are supported here")
        if self.echo and self.logprobs is not None:
            raise fault("logprobs", "are not told for a prompt that is echoed; leave out 'echo' or 'logprobs'")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs
