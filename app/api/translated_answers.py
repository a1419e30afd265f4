"""The shapes of answers on the routes that are translated, for `/openapi.json`; see `answers.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.api.answers import Answer


class TextBlock(Answer):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """What it thought before; nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlock(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Tokens; those that were in the prefix cache are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int


class MessageAnswer(Answer):
    """Answer of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class Event(BaseModel):
    """Base of events whose further members depend on their type."""

    model_config = ConfigDict(extra="allow")


class MessageEvent(Event):
    """An event of a streamed message; its name is its type."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class MessageErrorObject(Answer):
    """What went wrong."""

    type: str = Field(description="the family of the error")
    message: str = Field(description="one line that says what is wrong and what to do about it")


class MessageError(Answer):
    """Every error of `/v1/messages`."""

    type: Literal["error"]
    error: MessageErrorObject


class TokenCount(Answer):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class OutputText(Answer):
    """What the model says."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[Any] = Field(max_length=0)


class OutputMessage(Answer):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(Answer):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Answer):
    """Its thinking, whole; there are no summaries."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any] = Field(max_length=0)
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """A call of a function; `arguments` is JSON."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(Answer):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(Answer):
    """Answer of `POST /v1/responses`; what the request said stands in it again."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="seconds since the epoch")
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | ReasoningItem | FunctionCallItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    service_tier: Literal["default", "flex"] = Field("default", description="for who asked for a tier")
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(Event):
    """An event of a streamed response; its name is its type."""

    type: str
    sequence_number: int
