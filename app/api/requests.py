"""Reading a request's body as JSON."""

from __future__ import annotations

from typing import Any

from quart import current_app, request
from werkzeug.exceptions import RequestEntityTooLarge

from app.api.errors import ApiError
from app.api.schemas import parse_json_object


async def read_json() -> dict[str, Any]:
    """The JSON object of the current request's body.

    Raises:
        ApiError: 413, it is too large; 415, it is declared to be something else.
        InvalidRequestError: it is not a JSON object.
        HTTPException: 408, it came too slowly.
    """
    # A page of another site can send forms and plain text without asking, but not this type.
    kind = request.mimetype
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"The body is {kind}; send application/json.", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "The body is compressed; send it as it is.", code="unsupported_media_type")
    try:
        data = await request.get_data(cache=False, as_text=False)
    except RequestEntityTooLarge:
        most = current_app.config["MAX_CONTENT_LENGTH"]
        raise ApiError(413, f"The body is larger than {most:,} bytes, the most that this server takes.") from None
    return parse_json_object(data)
