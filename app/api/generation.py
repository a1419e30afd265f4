"""One generation over HTTP: submitted, accepted, then answered whole or as a stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from quart import Response, g, request

from app.api import sse
from app.api.aside import dump_in_pieces, run_aside
from app.api.errors import ApiError, describe
from app.api.gathering import TOKEN_SIZE, Choices, Gathering, Whole, size_of, submit_choices
from app.api.requests import read_json
from app.call_scope import HANDLES
from engine.errors import DrainingError, EngineError, InvalidRequestError, OwnFault, QueueFullError
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.api.planning import Plan, Planner
    from app.http import Context
    from engine.outbox import Delta

# Proxies close what is silent for a minute; a vanished client shows itself only when something is sent to it.
HEARTBEAT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that was submitted.

    Attributes:
        deadline: on trio's clock, from the request's arrival; past it the request is ended with cause `timeout`.
    """

    plan: Plan
    gathering: Gathering
    deadline: float

    async def read(self, until: float = math.inf) -> list[tuple[int, Delta]]:
        """The next pieces by index of their choice, or none when `until` has come. Past the deadline it is ended."""
        if trio.current_time() >= self.deadline:
            self.gathering.abort("timeout")
        else:
            until = min(until, self.deadline)
        return await self.gathering.take(until)


async def generate(context: Context, planner: Planner) -> Response:
    """Answer a request, streamed or whole; `planner` checks its body."""
    planned = planner(context.engine, await read_json(), context.callers.of(g.who))
    return await respond(submit(context, planned))


def submit(context: Context, planned: Plan) -> Generation:
    """Hand a checked request to the engine. Never waits.

    Raises:
        UnavailableError: the queue is full, or the server is draining.
    """
    # From here on the guard around the app ends it with the ASGI call, however that ends.
    handles = submit_choices(context.engine, planned, request.scope[HANDLES].append)  # type: ignore[typeddict-item]
    seconds = context.settings.server.request_timeout_seconds
    if planned.body.timeout is not None:
        seconds = min(seconds, planned.body.timeout)
    return Generation(planned, Gathering(handles), g.arrived + seconds)


async def respond(generation: Generation) -> Response:
    """Wait for acceptance, then answer in the form that was asked for.

    Raises:
        RelevoError: what went wrong before the first byte.
    """
    gathering = generation.gathering
    with trio.move_on_at(generation.deadline) as scope:
        await _accepted(generation)
    if scope.cancelled_caught:
        gathering.abort("timeout")
    for handle in gathering.handles:
        if handle.abort_cause is not None:
            raise ending_error(FinishReason.ABORT, handle.abort_cause)
    if not generation.plan.body.stream:
        return await _respond_whole(generation)
    response = Response(_stream(generation), content_type=sse.CONTENT_TYPE, headers=sse.HEADERS)
    # Quart would cut the stream after its own response timeout; the deadline above is the limit.
    response.timeout = None
    return response


async def _accepted(generation: Generation) -> None:
    """Wait until every choice was looked at.

    Raises:
        RelevoError: one cannot be served. Where the queue is full of this answer's own prompts, trying again would
            never help, so that is the request's fault.
    """
    num_tokens = 0
    for handle in generation.gathering.handles:
        try:
            num_tokens += await handle.accepted()
        except QueueFullError as error:
            if num_tokens < error.depth:
                raise
            message = f"The prompts of all choices are more than the {error.limit} tokens that may wait."
            param = "prompt" if generation.plan.body.n == 1 else "n"
            raise InvalidRequestError(message, param=param) from None


async def _respond_whole(generation: Generation) -> Response:
    whole = Whole(generation.plan)
    while not whole.choices.all_ended:
        for index, delta in await generation.read():
            error = failure_of(delta)
            if error is not None:
                raise error
            whole.add(index, delta)
    written, usage = whole.written(), whole.choices.usage()
    envelope = generation.plan.envelope
    text = await run_aside(lambda: dump_in_pieces(envelope.whole(written, usage)), sum(map(size_of, written)))
    return Response(text, content_type="application/json")


async def _stream(generation: Generation) -> AsyncIterator[bytes]:
    """All bytes of a stream. A heartbeat is due when nothing was sent for a while, whatever was generated.

    After a failure there is no `[DONE]`: half an answer must not pass for a whole.
    """
    envelope = generation.plan.envelope
    choices = Choices(generation.plan)
    opening = envelope.opening([handle.num_prompt_tokens for handle in generation.gathering.handles])
    if opening:
        yield opening
    sent = trio.current_time()
    while not choices.all_ended:
        data = b""
        for index, delta in await generation.read(sent + HEARTBEAT_SECONDS):
            data += envelope.piece(index, *choices.take(index, delta))
            error = failure_of(delta)
            if error is not None:
                yield data + envelope.failure(describe(error))
                return
            if delta.finish_reason is not None:
                data += envelope.finish(index, choices.ending(index, delta))
        if not data:
            if trio.current_time() < sent + HEARTBEAT_SECONDS:
                continue
            data = envelope.heartbeat
        yield data
        sent = trio.current_time()
    usage = choices.usage()
    # Some count the tokens of a part of their answer once more.
    yield await run_aside(partial(envelope.closing, usage), usage.completion_tokens * TOKEN_SIZE)


def failure_of(delta: Delta) -> Exception | None:
    """The error of a choice that was accepted and did not reach its end; `None` while there is none."""
    reason = delta.finish_reason
    if reason is None or (reason in (FinishReason.STOP, FinishReason.LENGTH) and delta.usage is not None):
        return None
    return ending_error(reason, delta.error)


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
    if isinstance(cause, OwnFault):
        return InvalidRequestError(cause)
    return EngineError(cause or "The request could not be finished.")
