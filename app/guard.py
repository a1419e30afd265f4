"""The outermost layer of the application: what must hold however a call begins and ends."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

import trio
from werkzeug.exceptions import HTTPException

from app.api.errors import describe
from app.request_id import HEADER, choose_request_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from app.limits import Permit
    from engine.handle import Handle

log = logging.getLogger("relevo.http")

HANDLES: Final = "relevo.handles"
PERMITS: Final = "relevo.permits"
BODY_READ: Final = "relevo.body_read"
# A client that is refused in the middle of its upload reads the refusal only when it has sent everything.
LINGER_SECONDS: Final = 3.0


class Guard:
    """Wraps an ASGI application.

    *Nothing leaks.* Every generation that a call started is ended when the call is over, and its place among the
    requests of its API key is free again. A client may leave between the answer's headers and its body; then no handler
    and no generator is left to run a `finally`.

    *Connections close.* At the end of an answer the server tells the application that the client is gone, which cancels
    the very task that is about to close the connection. The last message is therefore sent under a shield. Without it
    clients that read to the end of the connection (HTTP/1.0, `Connection: close`) would wait for ever.

    *Errors have a shape*, also those from before there is a request to handle (an impossible Host header).
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
        scope[BODY_READ] = body_read = trio.Event()
        sender = _Sender(send)

        async def receive_body() -> Any:
            message = await receive()
            if not message.get("more_body", False):
                body_read.set()
            return message

        failed = False
        try:
            await self._app(scope, receive_body, sender)
        except Exception as error:
            failed = True
            if sender.started:
                raise
            await _send_error(sender, error)
        finally:
            # What is open behind a whole answer was given up by it: it tells of an error.
            cause = "error" if failed or sender.ended else "client"
            for handle in handles:
                handle.abort(cause)
            for permit in permits:
                permit.close(trio.current_time())


async def linger(scope: Any) -> None:
    """Let a client finish the upload that is being thrown away, for a moment."""
    with trio.move_on_after(LINGER_SECONDS):
        await scope[BODY_READ].wait()


class _Sender:
    """Passes messages on, the last one under a shield."""

    def __init__(self, send: Callable[[Any], Awaitable[None]]) -> None:
        self._send = send
        self.started = False
        self.ended = False

    async def __call__(self, message: Any) -> None:
        self.started = True
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        with trio.CancelScope(shield=self.ended):
            await self._send(message)


async def _send_error(send: _Sender, error: Exception) -> None:
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if not isinstance(cause, HTTPException):
        log.error("a request failed outside its handler", exc_info=error)
    answer = describe(cause if isinstance(cause, Exception) else error)
    headers = [(b"content-type", b"application/json"), (HEADER.lower().encode(), choose_request_id(None).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer.body).encode(), "more_body": False})
