"""One generation over HTTP: submitted, accepted, then answered whole or as a stream."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio
from quart import Response, request

from app.api import sse
from app.api.errors import ApiError, ModelNameError, describe
from app.guard import HANDLES
from engine.errors import DrainingError, EngineError
from engine.handle import GenerationRequest
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from app.api.schemas import Body, GenerationBody
    from app.http import Context
    from engine.handle import ChatPrompt, Handle, TextPrompt, TokensPrompt
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


def check_model(context: Context, body: Body) -> None:
    """Raise `ModelNameError` when the request names another model than the served one."""
    served = context.engine.model.name
    if body.model is not None and body.model != served:
        raise ModelNameError(body.model, served)


def submit(
    context: Context,
    body: GenerationBody,
    prompt: TextPrompt | TokensPrompt | ChatPrompt,
    envelope: Callable[..., sse.Envelope],
    *,
    prefix: str,
    default_max_tokens: int | None,
) -> Generation:
    """Hand a checked request to the engine. Never waits.

    Raises:
        UnavailableError: the queue is full, or the server is draining.
    """
    answer_id = f"{prefix}-{secrets.token_hex(12)}"
    params = body.sampling_params(default_max_tokens=default_max_tokens)
    handle = context.engine.submit(GenerationRequest(answer_id, prompt, params, body.stop, body.ignore_eos))
    # From here on the guard around the app ends it with the ASGI call, however that ends.
    request.scope[HANDLES].append(handle)  # type: ignore[typeddict-item]
    seconds = context.settings.server.request_timeout_seconds
    if body.timeout is not None:
        seconds = min(seconds, body.timeout)
    made = envelope(answer_id, context.engine.model.name, int(time.time()), with_usage=body.include_usage)
    return Generation(handle, made, trio.current_time() + seconds, body.include_usage)


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


async def _read(generation: Generation) -> Delta | None:
    """The next piece, or `None` when it is time for a heartbeat. Past the deadline the request is ended."""
    now = trio.current_time()
    until = now + HEARTBEAT_SECONDS
    if now < generation.deadline:
        until = min(until, generation.deadline)
    else:
        generation.handle.abort("timeout")
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
    envelope = generation.envelope
    yield envelope.opening()
    while True:
        delta = await _read(generation)
        if delta is None:
            yield sse.HEARTBEAT
            continue
        if delta.text:
            yield envelope.text(delta.text)
        if delta.finish_reason is not None:
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
