"""One generation over HTTP: submitted, accepted, then answered whole or as a stream."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from quart import Response, g, request

from app.api import sse
from app.api.errors import ApiError, describe
from app.api.planning import plan
from app.api.requests import read_json
from app.guard import HANDLES
from engine.errors import DrainingError, EngineError
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.api.planning import Plan
    from app.http import Context
    from engine.handle import Handle
    from engine.outbox import Delta

# Proxies close what is silent for a minute; a vanished client shows itself only when something is sent to it.
HEARTBEAT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that was submitted.

    Attributes:
        deadline: on trio's clock; past it the request is ended with cause `timeout`.
    """

    handle: Handle
    envelope: sse.Envelope
    deadline: float
    include_usage: bool


async def generate(context: Context, url: str) -> Response:
    """Answer a request to the route `url`, streamed or whole."""
    planned = plan(context.engine, url, await read_json(), caller=context.callers.of(g.who))
    return await respond(submit(context, planned), stream=planned.body.stream)


def submit(context: Context, planned: Plan) -> Generation:
    """Hand a checked request to the engine. Never waits.

    Raises:
        UnavailableError: the queue is full, or the server is draining.
    """
    handle = context.engine.submit(planned.request)
    # From here on the guard around the app ends it with the ASGI call, however that ends.
    request.scope[HANDLES].append(handle)  # type: ignore[typeddict-item]
    body = planned.body
    seconds = context.settings.server.request_timeout_seconds
    if body.timeout is not None:
        seconds = min(seconds, body.timeout)
    return Generation(handle, planned.envelope, trio.current_time() + seconds, body.include_usage)


async def respond(generation: Generation, *, stream: bool) -> Response:
    """Wait for acceptance, then answer in the form that was asked for.

    Raises:
        RelevoError: what went wrong before the first byte.
    """
    handle = generation.handle
    with trio.move_on_at(generation.deadline) as scope:
        await handle.accepted()
    if scope.cancelled_caught:
        handle.abort("timeout")
    if handle.abort_cause is not None:
        raise ending_error(FinishReason.ABORT, handle.abort_cause)
    if not stream:
        return await _respond_whole(generation)
    response = Response(_stream(generation), content_type=sse.CONTENT_TYPE, headers=sse.HEADERS)
    # Quart would cut the stream after its own response timeout; the deadline above is the limit.
    response.timeout = None
    return response


async def _read(generation: Generation, until: float = math.inf) -> Delta | None:
    """The next piece, or `None` when `until` has come. Past the deadline the request is ended."""
    if trio.current_time() >= generation.deadline:
        generation.handle.abort("timeout")
    else:
        until = min(until, generation.deadline)
    with trio.move_on_at(until):
        return await generation.handle.take()
    return None


async def _respond_whole(generation: Generation) -> Response:
    texts: list[str] = []
    delta: Delta | None = None
    while delta is None or delta.finish_reason is None:
        delta = await _read(generation)
        if delta is not None:
            texts.append(delta.text)
    if delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or delta.usage is None:
        raise ending_error(delta.finish_reason, delta.error)
    answer = generation.envelope.whole("".join(texts), delta.finish_reason.value, delta.usage)
    return Response(json.dumps(answer), content_type="application/json")


async def _stream(generation: Generation) -> AsyncIterator[bytes]:
    """All bytes of a stream. A heartbeat is due when nothing was sent for a while, whatever was generated."""
    envelope = generation.envelope
    yield envelope.opening()
    sent = trio.current_time()
    while True:
        delta = await _read(generation, sent + HEARTBEAT_SECONDS)
        if delta is not None and delta.text:
            yield envelope.text(delta.text)
        elif delta is None or delta.finish_reason is None:
            if trio.current_time() < sent + HEARTBEAT_SECONDS:
                continue
            yield sse.HEARTBEAT
        sent = trio.current_time()
        if delta is not None and delta.finish_reason is not None:
            yield _ending(generation, delta)
            return


def _ending(generation: Generation, delta: Delta) -> bytes:
    """The last bytes of a stream. After a failure there is no `[DONE]`: half an answer must not pass for a whole."""
    reason = delta.finish_reason
    if reason not in (FinishReason.STOP, FinishReason.LENGTH) or delta.usage is None:
        return sse.event(describe(ending_error(reason, delta.error)).body)
    parts = [generation.envelope.finish(reason.value)]
    if generation.include_usage:
        parts.append(generation.envelope.usage(delta.usage))
    return b"".join((*parts, sse.DONE))


def ending_error(reason: FinishReason | None, cause: str | None) -> Exception:
    """The error of a request that was accepted and did not reach its end."""
    if reason is FinishReason.ABORT:
        match cause:
            case "timeout":
                return ApiError(408, "The request reached its deadline.", param="timeout", code="timeout")
            case "shutdown":
                return DrainingError()
            case _:
                return ApiError(500, f"The request was ended ({cause}).", code="aborted")
    return EngineError(cause or "The request could not be finished.")
