"""Every error as a status, headers and one JSON shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quart import Response
from werkzeug.exceptions import HTTPException

from app.errors import ApiError
from engine.errors import ContextLengthError, RelevoError, RequestError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

# OpenAI's word for the family of a status; what is not listed is `invalid_request_error`.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_MESSAGES = {
    404: "There is nothing at this address.",
    405: "This address does not answer to this method.",
    408: "The request's body did not arrive in time.",
    413: "The request's body is larger than this server takes.",
    415: "Send the body as application/json, not compressed.",
}


class ModelNameError(ApiError):
    """A request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        message = f"The model {name!r} is not served here; this server has {served!r}."
        super().__init__(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error, ready to be sent as a response or inside a stream.

    Attributes:
        extra: further members of the error object, for programs.
        headers: response headers.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The family of errors, in OpenAI's words."""
        return _TYPES.get(self.status, "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code, **self.extra}
        }

    def response(self) -> Response:
        """The HTTP response."""
        answer = Response(json.dumps(self.body), self.status, content_type="application/json")
        answer.headers.update(self.headers)
        return answer


def describe(error: Exception) -> ErrorAnswer:
    """What a client is told about `error`; an unknown one tells nothing but that it happened."""
    match error:
        case ApiError():
            return ErrorAnswer(error.status, str(error), error.param, error.code, error.extra, error.headers)
        case ContextLengthError():
            extra = {"prompt_tokens": error.num_prompt_tokens, "capacity": error.capacity}
            return ErrorAnswer(400, str(error), error.param, error.code, extra)
        case RequestError():
            return ErrorAnswer(400, str(error), error.param, error.code)
        case UnavailableError():
            headers = {"Retry-After": str(error.retry_after_seconds)}
            return ErrorAnswer(503, str(error), None, error.code, error.facts, headers)
        case HTTPException():
            return _describe_http(error)
        case RelevoError():
            return ErrorAnswer(500, str(error), None, "engine_error")
    return ErrorAnswer(500, "The server made a mistake; its log says more.", None, "internal_error")


def _describe_http(error: HTTPException) -> ErrorAnswer:
    status = error.code or 500
    # Quart and Werkzeug phrase some of these for browsers; a client of the API gets a plain line.
    message = _MESSAGES.get(status) or error.description or error.name
    headers = {}
    allowed = getattr(error, "valid_methods", None)
    if status == 405 and allowed:
        headers["Allow"] = ", ".join(sorted(allowed))
    if status in (301, 302, 303, 307, 308):
        headers["Location"] = getattr(error, "new_url", "/")
    return ErrorAnswer(status, message, None, error.name.lower().replace(" ", "_"), {}, headers)
