"""The outermost layer of the application: what must hold however a call begins and ends."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import trio
from werkzeug.exceptions import HTTPException

from app.api.errors import describe
from app.call_scope import CROWDED, HANDLES, PERMITS, UPLOAD
from app.errors import ApiError
from app.request_id import HEADER, choose_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from app.http1 import Http1
    from app.limits import Permit
    from engine.handle import Handle

log = logging.getLogger("relevo.http")

# For the rest of the body of a request that was refused.
LINGER_SECONDS: Final = 3.0
# Here it is too long, or was waited for long enough.
HOPELESS: Final = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class Guard:
    """Wraps an ASGI application.

    *Nothing leaks.* Every generation that a call started is ended when the call is over, and its place among the
    requests of its API key is free again. A client may leave between the answer's headers and its body; then no handler
    and no generator is left to run a `finally`.

    *What is refused is read to its end*, for a moment, and thrown away: a client in the middle of its upload reads the
    refusal only when it has sent everything, and its next request would follow on the same connection. Where the body
    does not come to its end, `Connection: close` says that there will be no next one. A body that is too large to be
    read, and one that its client has not begun to send (`Expect: 100-continue`), are not waited for at all. Who has one
    of the last places (`Room`) has it for one answer.

    *Connections close.* At the end of an answer the server tells the application that the client is gone, which cancels
    the very task that is about to close the connection. The last message is therefore sent under a shield. Without it
    clients that read to the end of the connection (HTTP/1.0, `Connection: close`) would wait for ever. How long the
    client may take over it is the connection's to say (`stall_seconds`); the shield ends with it.

    *Errors have a shape*, also those from before there is a request to handle (an impossible Host header).

    *It is HTTP alone.* Who asks for a WebSocket, at whatever address, is told so before anything else is looked at.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        handles: list[Handle] = []
        scope[HANDLES] = handles
        permits: list[Permit] = []
        scope[PERMITS] = permits
        body_read = trio.Event()
        # HTTP/2 ends the one stream, and the connection goes on.
        one_way = scope["http_version"].startswith("1")
        sender = _Sender(send, body_read if one_way else None, scope.get(UPLOAD), is_last=scope.get(CROWDED, False))

        async def receive_body() -> Any:
            message = await receive()
            if not message.get("more_body", False):
                body_read.set()
            return {**message, "body": b""} if sender.started and message["type"] == "http.request" else message

        failed = False
        try:
            check_head(scope)
            await self._app(scope, receive_body, sender)
        except Exception as error:
            failed = True
            if sender.started:
                raise
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_read_on, receive_body, body_read)
                await _send_error(sender, error)
                nursery.cancel_scope.cancel()
        finally:
            # What is open behind a whole answer was given up by it: it tells of an error.
            cause = "error" if failed or sender.ended else "client"
            for handle in handles:
                handle.abort(cause)
            for permit in permits:
                permit.close(trio.current_time())


def check_head(scope: Any) -> None:
    """Look at what the application could only stumble over.

    Raises:
        ApiError: 400, the target is no address, or a WebSocket is wanted.
    """
    path = scope["path"]
    if not path.startswith("/"):
        try:
            urlsplit(path)
        except ValueError:  # an impossible host
            path = ""
    if not path:
        raise ApiError(400, "The request's target is no address.", code="bad_target")
    if any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]):
        raise ApiError(400, "There are no WebSockets here; streams are server-sent events.", code="no_websockets")


class _Sender:
    """Passes messages on, the first one when the request's body was read, the last one under a shield.

    Args:
        body_read: set when it was; `None` where nothing has to wait for that.
        upload: knows whether the client waits with its body; `None` where nobody does.
        is_last: on HTTP/1.1 the connection ends with this answer in any case.
    """

    def __init__(
        self,
        send: Callable[[Any], Awaitable[None]],
        body_read: trio.Event | None,
        upload: Http1 | None,
        *,
        is_last: bool,
    ) -> None:
        self._send = send
        self._body_read = body_read
        self._upload = upload
        self._is_last = is_last
        self.started = False
        self.ended = False

    async def __call__(self, message: Any) -> None:
        self.started = True
        if message["type"] == "http.response.start" and not await self._has_read(message["status"]):
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        with trio.CancelScope(shield=self.ended):
            await self._send(message)

    async def _has_read(self, status: int) -> bool:
        """Whether the connection can go on behind this answer."""
        if self._body_read is None:
            return True
        if status not in HOPELESS and not (self._upload is not None and self._upload.holds_body_back):
            with trio.move_on_after(LINGER_SECONDS):
                await self._body_read.wait()
        return self._body_read.is_set() and not self._is_last


async def _read_on(receive: Callable[[], Awaitable[Any]], over: trio.Event) -> None:
    """What the application does while it lives."""
    while not over.is_set():
        await receive()


async def _send_error(send: _Sender, error: Exception) -> None:
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if not isinstance(cause, (HTTPException, ApiError)):
        log.error("a request failed outside its handler", exc_info=error)
    answer = describe(cause if isinstance(cause, Exception) else error)
    body = json.dumps(answer.body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (HEADER.lower().encode(), choose_request_id(None).encode()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
