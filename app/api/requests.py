"""Reading a request's body as JSON, within bounds: in bytes, in values, and in bytes of all bodies together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import current_app, request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from app.api.errors import ApiError
from app.api.schemas import parse_json_object
from engine.errors import BusyError

if TYPE_CHECKING:
    from engine.engine import Engine

BODIES: Final = "RELEVO_BODIES"
BODY_TIMEOUT_SECONDS: Final = 15.0
# A token is seldom more than 16 bytes of JSON, escapes included.
BYTES_PER_TOKEN: Final = 16
# What may stand beside a context full of text: schemas, tools, further prompts.
OTHER_BYTES: Final = 1 << 20
OTHER_VALUES: Final = 32_768
MAX_BYTES_AT_ONCE: Final = 64 << 20
# To read a longer one takes milliseconds, in which the event loop is to go on.
INLINE_BYTES: Final = 1 << 16
BUSY_RETRY_SECONDS: Final = 1


class Bodies:
    """Reads bodies, which may be as long as the context of the engine's model makes sense of.

    Attributes:
        max_bytes: of one body.
    """

    def __init__(self, engine: Engine) -> None:
        self.max_bytes = OTHER_BYTES + BYTES_PER_TOKEN * engine.model.context_length
        self._max_values = OTHER_VALUES + engine.model.context_length
        self._engine = engine
        self._num_bytes = 0

    async def read(self) -> dict[str, Any]:
        """The JSON object of the current request's body; see `read_json`."""
        data = bytearray()
        try:
            with trio.move_on_after(BODY_TIMEOUT_SECONDS) as scope:
                async for piece in request.body:
                    self._check(len(data) + len(piece), len(piece))
                    data += piece
                    self._num_bytes += len(piece)
            if scope.cancelled_caught:
                raise RequestTimeout
            parse = partial(parse_json_object, data, self._max_values)
            return parse() if len(data) <= INLINE_BYTES else await trio.to_thread.run_sync(parse)
        except RequestEntityTooLarge:
            message = f"The body is larger than {self.max_bytes:,} bytes, the most that this server takes."
            raise ApiError(413, message) from None
        finally:
            self._num_bytes -= len(data)

    def _check(self, num_bytes: int, num_new: int) -> None:
        """Raise where a body has become too long, or all that are being read have."""
        if num_bytes > self.max_bytes:
            raise RequestEntityTooLarge
        if self._num_bytes + num_new > MAX_BYTES_AT_ONCE:
            self._engine.count_refusal(BusyError.code)
            message = f"More than {MAX_BYTES_AT_ONCE >> 20} MiB of requests are being read; try again in a moment."
            raise BusyError(message, retry_after_seconds=BUSY_RETRY_SECONDS)


async def read_json() -> dict[str, Any]:
    """The JSON object of the current request's body.

    Raises:
        ApiError: 413, it is too large; 415, it is declared to be something else.
        BusyError: too much is being read.
        InvalidRequestError: it is not a JSON object, or has too many values.
        HTTPException: 408, it came too slowly.
    """
    # A page of another site can send forms and plain text without asking, but not this type.
    kind = request.mimetype
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"The body is {kind}; send application/json.", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "The body is compressed; send it as it is.", code="unsupported_media_type")
    bodies: Bodies = current_app.config[BODIES]
    return await bodies.read()
