"""Reading a request's body, JSON or a form, within bounds: in bytes, in values, and in bytes of all together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl

import trio
from quart import current_app, request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from app.api.schemas import parse_json_object
from app.call_scope import CROWDED, UPLOAD
from app.errors import ApiError
from app.room import CROWDED_SECONDS
from engine.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.http1 import Http1
    from engine.engine import Engine

T = TypeVar("T")
BODIES: Final = "RELEVO_BODIES"
BODY_TIMEOUT_SECONDS: Final = 15.0
# A token is seldom more than 16 bytes of JSON, escapes included.
BYTES_PER_TOKEN: Final = 16
# What may stand beside a context full of text: schemas, tools, further prompts.
OTHER_BYTES: Final = 1 << 20
OTHER_VALUES: Final = 32_768
# The longest reason of a change, each of its letters in twelve, and every setting beside it.
MAX_FORM_BYTES: Final = 16_384
FORM_TYPE: Final = "application/x-www-form-urlencoded"
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

    async def read_json(self) -> dict[str, Any]:
        """The JSON object of the current request's body; see the function of this name."""
        return await self.read(partial(parse_json_object, max_values=self._max_values), self.max_bytes)

    async def read(self, parse: Callable[[bytearray], T], max_bytes: int) -> T:
        """What `parse` makes of the current request's body."""
        data = bytearray()
        try:
            if (request.content_length or 0) > max_bytes:
                raise RequestEntityTooLarge  # before it is asked for
            seconds = CROWDED_SECONDS if request.scope.get(CROWDED) else BODY_TIMEOUT_SECONDS
            with trio.move_on_after(seconds) as scope:
                await _ask_for_body()
                async for piece in request.body:
                    if len(data) + len(piece) > max_bytes:
                        raise RequestEntityTooLarge
                    self._check(len(piece))
                    data += piece
                    self._num_bytes += len(piece)
            if scope.cancelled_caught:
                raise RequestTimeout
            return parse(data) if len(data) <= INLINE_BYTES else await trio.to_thread.run_sync(parse, data)
        except RequestEntityTooLarge:
            message = f"The body is larger than {max_bytes:,} bytes, the most that this server takes."
            raise ApiError(413, message) from None
        finally:
            self._num_bytes -= len(data)

    def _check(self, num_new: int) -> None:
        """Raise where that would be more than may be held of all bodies that are being read."""
        if self._num_bytes + num_new > MAX_BYTES_AT_ONCE:
            self._engine.count_refusal(BusyError.code)
            message = f"More than {MAX_BYTES_AT_ONCE >> 20} MiB of requests are being read; try again in a moment."
            raise BusyError(message, retry_after_seconds=BUSY_RETRY_SECONDS)


async def _ask_for_body() -> None:
    """Have the client send it, where it waits for that."""
    upload: Http1 | None = request.scope.get(UPLOAD)  # type: ignore[assignment]
    if upload is not None:
        await upload.ask_for_body()


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
    return await bodies.read_json()


async def read_fields(max_bytes: int = MAX_FORM_BYTES) -> dict[str, str]:
    """The fields of a page's form; what is no form has none.

    Args:
        max_bytes: of the form as it is sent.

    Raises:
        ApiError: 413, it is too large.
        BusyError: too much is being read.
        HTTPException: 408, it came too slowly.
    """
    bodies: Bodies = current_app.config[BODIES]
    data = await bodies.read(bytes, max_bytes)
    if request.mimetype != FORM_TYPE:
        return {}
    return dict(parse_qsl(data.decode(errors="replace"), keep_blank_values=True))
