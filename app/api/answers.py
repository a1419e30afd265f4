"""The shapes of answers, for `/openapi.json`. The routes write plain JSON; tests hold what they write to these."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Base of every object in an answer: nothing is in it that is not named."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ErrorObject(Answer):
    """What went wrong."""

    message: str = Field(description="one line that says what is wrong and what to do about it")
    type: str = Field(description="the family of the error")
    param: str | None = Field(description="the field at fault")
    code: str | None = Field(description="a stable word for programs")
    prompt_tokens: int = Field(0, description="with context_length_exceeded")
    capacity: int = Field(0, description="with context_length_exceeded: the longest prompt, in tokens")
    depth: int = Field(0, description="with queue_full: how many wait")
    limit: int = Field(0, description="with queue_full: how many may wait")
    what: str = Field("", description="with queue_full: of what, requests or prompt_tokens")
    retry_after_seconds: int = Field(0, description="with 503: as the header Retry-After")
    predicted_ttft_seconds: float = Field(0, description="with late: when the first token would have come")
    allowed_ttft_seconds: float = Field(0, description="with late: when it had to come")
    predicted_queue_seconds: float = Field(0, description="with late: when a seat would have been free")
    allowed_queue_seconds: float = Field(0, description="with late: when one had to be")


class Error(Answer):
    """Every error of the API."""

    error: ErrorObject


class PromptDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="were in the prefix cache")


class UsageObject(Answer):
    """Tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Extension(Answer):
    """Where an answer's time went; of several choices the longest is told."""

    queue_seconds: float = Field(description="until it was seated")
    prefill_seconds: float = Field(description="from there to the first token")
    decode_seconds: float = Field(description="from there to the last token")
    cached_tokens: int = Field(description="tokens of the prompt that were in the prefix cache")
    preemptions: int = Field(description="how often it gave up its seat")


class Head(Answer):
    """What begins every answer and every chunk of one."""

    id: str
    created: int = Field(description="seconds since the epoch")
    model: str
    service_tier: Literal["default", "flex"] = Field("default", description="for who asked for a tier")


class TokenLogprob(Answer):
    """A token and its log-probability; -9999 stands for minus infinity."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """`logprobs` of a chat's choice."""

    content: list[ContentLogprob]
    refusal: None


class CompletionLogprobs(Answer):
    """`logprobs` of a completion's choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="in characters")


class Function(Answer):
    """A function that is called; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(Answer):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field("", description="what the model thought before it answered")
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    """One of the answers of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Head):
    """Answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageObject
    relevo: Extension


class FunctionDelta(Answer):
    """A piece of a called function."""

    name: str = ""
    arguments: str


class ToolCallDelta(Answer):
    """A piece of a call; only the first has the id and the name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """A piece of a chat's answer."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Answer):
    """A piece of one of the answers; its last one has the finish reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(Head):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageObject | None = Field(None, description="with include_usage: null in every chunk but the last")
    relevo: Extension | None = Field(None, description="with include_usage: in the last chunk")


class CompletionChoice(Answer):
    """One of the completions of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(Head):
    """Answer of `POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageObject
    relevo: Extension


class CompletionChunkChoice(Answer):
    """A piece of one of the completions; its last one has the finish reason."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(Head):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageObject | None = Field(None, description="with include_usage: null in every chunk but the last")
    relevo: Extension | None = Field(None, description="with include_usage: in the last chunk")


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int = Field(description="longest prompt plus answer, in tokens")


class ModelList(Answer):
    """Answer of `GET /v1/models`."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """Answer of `POST /detokenize`."""

    prompt: str
