"""The OpenAPI 3.1 document, made from the schemas that requests are checked with and answers are held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic.json_schema import models_json_schema

from app.api import answers, translated_answers
from app.api.anthropic import ConversationBody, MessagesBody
from app.api.bodies import ChatBody, CompletionBody
from app.api.responses import ResponsesBody
from app.api.schemas import DetokenizeBody, TokenizeBody
from app.version import package_version

if TYPE_CHECKING:
    from pydantic import BaseModel

TITLE: Final = "Relevo"
DESCRIPTION: Final = (
    "Answers are written as OpenAI's, with an object `relevo` beside them. In a body `null` is as good as absent and "
    "fields that nobody knows are ignored; what is known and cannot be done is refused with a 400 that names it. An "
    "`X-Request-Id` of at most 128 plain characters comes back with the answer; without one it is made."
)
# Why a status comes, beside 200. What an error looks like is the same for all.
ERRORS: Final = {
    400: "The body is not JSON, or a field is not what it must be; `param` names it.",
    401: "A key is needed, and none or a wrong one was sent.",
    403: "Open to the server's own machine only, sent from a page of another site, or ended by the operator.",
    404: "The model that is named is not served here.",
    408: "The request reached its deadline, or its body came too slowly.",
    413: "The body is larger than this server takes.",
    415: "The body is declared to be something else than JSON, or is compressed.",
    429: "The key has had what it may have for now; `Retry-After` says when to come back.",
    500: "An accepted request could not be finished.",
    503: "The queue is full or takes too long, or the server is shutting down; `Retry-After` says when to come back.",
    529: "The same, where the form is Anthropic's.",
}
READ_ERRORS: Final = (401, 403, 429, 500, 503)
PARAMETER_ERRORS: Final = tuple(status for status in ERRORS if status != 529)
MESSAGE_ERRORS: Final = tuple(status for status in ERRORS if status != 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """A route as the document has it.

    Attributes:
        path: with `{name}` where the address has a part of its own.
        body: what it takes; `None`: nothing.
        answer: what it gives.
        event: what each event of a streamed answer holds; `None`: it cannot be streamed.
        errors: the statuses beside 200.
        error: the shape of its errors.
    """

    method: str
    path: str
    summary: str
    answer: type[BaseModel]
    body: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    errors: tuple[int, ...] = PARAMETER_ERRORS
    error: type[BaseModel] = answers.Error

    @property
    def name(self) -> str:
        """A name for generated clients: `post_v1_chat_completions`."""
        words = self.path.replace("{", "").replace("}", "").strip("/").replace("/", "_")
        return f"{self.method}_{words}"

    @property
    def models(self) -> list[type[BaseModel]]:
        """Every schema it speaks of."""
        return [model for model in (self.body, self.answer, self.event, self.error) if model is not None]


OPERATIONS: Final = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answers a conversation",
        answers.ChatCompletion,
        body=ChatBody,
        event=answers.ChatChunk,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continues one text or several",
        answers.Completion,
        body=CompletionBody,
        event=answers.CompletionChunk,
    ),
    Operation(
        "post",
        "/v1/responses",
        "OpenAI's newer form, without state",
        translated_answers.ResponseAnswer,
        body=ResponsesBody,
        event=translated_answers.ResponseEvent,
    ),
    Operation(
        "post",
        "/v1/messages",
        "Anthropic's form",
        translated_answers.MessageAnswer,
        body=MessagesBody,
        event=translated_answers.MessageEvent,
        errors=MESSAGE_ERRORS,
        error=translated_answers.MessageError,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "How long the prompt of such a request is",
        translated_answers.TokenCount,
        body=ConversationBody,
        errors=MESSAGE_ERRORS,
        error=translated_answers.MessageError,
    ),
    Operation("get", "/v1/models", "The model that is served", answers.ModelList, errors=READ_ERRORS),
    Operation("get", "/v1/models/{name}", "The same, by its name", answers.Model, errors=(404, *READ_ERRORS)),
    Operation("post", "/tokenize", "Token ids of a text or of a conversation", answers.Tokens, body=TokenizeBody),
    Operation("post", "/detokenize", "The text of token ids", answers.Detokenized, body=DetokenizeBody),
)


def make_document() -> dict[str, Any]:
    """The document, as JSON."""
    models = list(dict.fromkeys(model for operation in OPERATIONS for model in operation.models))
    names, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    refs = {model: names[model, "validation"] for model in models}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": package_version(), "description": DESCRIPTION},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(operation: Operation, refs: dict[type[BaseModel], Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": refs[operation.answer]}}
    if operation.event is not None:
        # What one event's data may be; OpenAPI 3.1 cannot say that there are many.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": refs[operation.event]}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "The answer.", "headers": _REQUEST_ID, "content": content},
            **{str(status): _error(status, refs[operation.error]) for status in sorted(operation.errors)},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": refs[operation.body]}},
        }
    if "{name}" in operation.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


_REQUEST_ID: Final = {"X-Request-Id": {"description": "The request's own, or made.", "schema": {"type": "string"}}}


def _error(status: int, schema: Any) -> dict[str, Any]:
    headers: dict[str, Any] = dict(_REQUEST_ID)
    if status in (429, 503, 529):
        headers["Retry-After"] = {"description": "Whole seconds.", "schema": {"type": "integer", "minimum": 1}}
    content = {"application/json": {"schema": schema}}
    return {"description": ERRORS[status], "headers": headers, "content": content}
