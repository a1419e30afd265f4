"""One generation over HTTP: submitted, accepted, then answered whole or as a stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import Response, g, request

from app import sse
from app.api.aside import dump_in_pieces, run_aside
from app.api.deadlines import deadlines_of
from app.api.errors import describe
from app.api.gathering import TOKEN_SIZE, Choices, Gathering, Whole, size_of, submit_choices
from app.api.requests import read_json
from app.call_scope import WRITE_NOW
from app.endings import this_request
from app.errors import ApiError
from app.logs import FIELDS
from engine.errors import (
    CutError,
    EngineError,
    InvalidRequestError,
    OwnFault,
    QueueFullError,
    QueueTimeoutError,
)
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from app.api.planning import Plan, Planner
    from app.http import Context
    from engine.outbox import Delta

log = logging.getLogger("relevo.http")

# Proxies close what is silent for a minute; a vanished client shows itself only when something is sent to it.
HEARTBEAT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation that was submitted.

    Attributes:
        retry_after: when to come back who found no seat, in whole seconds.
    """

    plan: Plan
    gathering: Gathering
    retry_after: Callable[[], int]


async def generate(context: Context, planner: Planner) -> Response:
    """Answer a request, streamed or whole; `planner` checks its body.

    Where the queue is full the body is not even read. Which class of work it asks for is not known then: that of its
    key counts.
    """
    caller = context.callers.of(g.who)
    context.engine.check_open(background=caller.background, key=caller.key_identity)
    planned = planner(context.engine, await read_json(), caller)
    return await respond(submit(context, planned))


def submit(context: Context, planned: Plan) -> Generation:
    """Hand a checked request to the engine. Never waits.

    Raises:
        UnavailableError: the queue is full, or the server is draining.
    """
    deadlines = deadlines_of(planned.body, context.settings.server, g.arrived)
    # From here on the guard around the app ends it with the ASGI call, however that ends.
    handles = submit_choices(context.engine, planned, deadlines, context.endings.opening())
    retry_after = partial(context.engine.retry_after, background=planned.requests[0].background)
    context.deadlines.add(deadlines, handles)
    return Generation(planned, Gathering(handles), retry_after)


async def respond(generation: Generation) -> Response:
    """Wait for acceptance, then answer in the form that was asked for.

    Raises:
        RelevoError: what went wrong before the first byte.
    """
    gathering = generation.gathering
    await _accept(generation)
    for handle in gathering.handles:
        if handle.abort_cause is not None:
            raise ending_error(FinishReason.ABORT, handle.abort_cause, generation.retry_after)
    if not generation.plan.body.stream:
        return await _respond_whole(generation)
    call: dict[str, Any] = request.scope  # type: ignore[assignment]
    return sse.response(EventStream(generation, this_request(), call.get(WRITE_NOW)).run())


async def _accept(generation: Generation) -> None:
    """Wait until every choice was looked at, or ended.

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
        for index, delta in await generation.gathering.take():
            error = failure_of(delta, generation.retry_after)
            if error is not None:
                raise error
            whole.add(index, delta)
    written, usage = whole.written(), whole.choices.usage()
    envelope = generation.plan.envelope
    text = await run_aside(lambda: dump_in_pieces(envelope.whole(written, usage)), sum(map(size_of, written)))
    return Response(text, content_type="application/json")


class EventStream:
    """A streamed answer. A heartbeat is due when nothing was sent for a while, whatever was generated.

    What is nothing but a piece of text is written as soon as it comes up, by the engine's own task, where the
    connection takes it: that spares a turn of this stream's task and the way through the server's layers. Beginning and
    end, heartbeats, and what follows on a full socket, are the task's.

    Args:
        about: which HTTP request this answers, for the log.
        write_now: sends bytes without waiting and says whether all were sent; `None` where there is no such way.
    """

    def __init__(
        self, generation: Generation, about: Mapping[str, Any], write_now: Callable[[bytes], bool] | None
    ) -> None:
        self._generation = generation
        self._about = about
        self._envelope = generation.plan.envelope
        self._choices = Choices(generation.plan)
        self._write_now = write_now
        self._sent = trio.current_time()
        self._is_stuck = False
        self._error: Exception | None = None

    async def run(self) -> AsyncIterator[bytes]:
        """All bytes that were not written at once.

        After a failure there is no `[DONE]`: half an answer must not pass for a whole.

        Raises:
            Exception: not even the failure could be written. Then the connection breaks.
        """
        envelope, choices, generation = self._envelope, self._choices, self._generation
        try:
            opening = envelope.opening([handle.num_prompt_tokens for handle in generation.gathering.handles])
            if opening:
                yield opening
            self._sent = trio.current_time()
            at_once = None
            while not choices.all_ended:
                data = b""
                news = await generation.gathering.take(self._sent + HEARTBEAT_SECONDS, at_once)
                if self._error is not None:
                    raise self._error
                for index, delta in news:
                    data += envelope.piece(index, *choices.take(index, delta))
                    error = failure_of(delta, generation.retry_after)
                    if error is not None:
                        yield data + envelope.failure(describe(error))
                        return
                    if delta.finish_reason is not None:
                        data += envelope.finish(index, choices.ending(index, delta))
                if not data:
                    if not self._is_stuck and trio.current_time() < self._sent + HEARTBEAT_SECONDS:
                        continue
                    data = envelope.heartbeat
                yield data
                self._sent, self._is_stuck = trio.current_time(), False
                # Not before: the headers go ahead of the first piece.
                at_once = None if self._write_now is None else self._piece_at_once
            usage = choices.usage()
            # Some count the tokens of a part of their answer once more.
            yield await run_aside(partial(envelope.closing, usage), usage.completion_tokens * TOKEN_SIZE)
        except Exception as fault:
            yield self._break_off(fault)

    def _break_off(self, fault: Exception) -> bytes:
        """What ends the stream at a fault of the server's own: the client is told that there was one, the log which."""
        log.error("an answer failed", extra={FIELDS: self._about}, exc_info=fault)
        self._generation.gathering.abort("error")
        return self._envelope.failure(describe(fault))

    def _piece_at_once(self, index: int) -> bool:
        """Write what has come of a choice; false where the task has something to do."""
        outbox = self._generation.gathering.handles[index].outbox
        delta = outbox.take_now() if outbox.last is None else None
        if delta is None:
            return False
        try:
            data = self._envelope.piece(index, *self._choices.take(index, delta))
        except Exception as error:  # the engine's task goes on; this stream's raises it
            self._error = error
            return False
        if data and self._write_now is not None:
            self._sent = trio.current_time()
            self._is_stuck = not self._write_now(data)
        return not self._is_stuck


def failure_of(delta: Delta, retry_after: Callable[[], int] | None = None) -> Exception | None:
    """The error of a choice that was accepted and did not reach its end; `None` while there is none.

    Args:
        retry_after: asked where it is one that may be tried again, and then.
    """
    reason = delta.finish_reason
    if reason is None or (reason in (FinishReason.STOP, FinishReason.LENGTH) and delta.usage is not None):
        return None
    return ending_error(reason, delta.error, retry_after)


def ending_error(
    reason: FinishReason | None, cause: str | None, retry_after: Callable[[], int] | None = None
) -> Exception:
    """The error of a request that was accepted and did not reach its end; see `failure_of`."""
    if reason is FinishReason.ABORT:
        match cause:
            case "timeout":
                return ApiError(408, "The request reached its deadline.", param="timeout", code="timeout")
            case "queue_timeout" if retry_after is not None:
                return QueueTimeoutError(retry_after_seconds=retry_after())
            case "shutdown":
                return CutError()
            case "admin":  # not a status that clients take for a reason to ask again
                return ApiError(403, "The operator of this server ended the request.", code="aborted")
            case _:
                return ApiError(500, f"The request was ended ({cause}).", code="aborted")
    if isinstance(cause, OwnFault):
        return InvalidRequestError(cause)
    return EngineError(cause or "The request could not be finished.")
