"""The same requests and the same engine as the server's, without a server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import trio

from app.api.gathering import Gathering, Whole
from app.api.generation import ending_error, failure_of
from app.api.planning import CHAT_URL, COMPLETION_URL, plan_chat, plan_completion
from app.api.responses import RESPONSES_URL, plan_response
from app.callers import NOBODY
from engine.errors import InvalidRequestError, LateError, QueueFullError
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.api.planning import Plan
    from engine.engine import Engine
    from engine.handle import Handle
    from engine.outbox import Delta

RETRY_SECONDS: Final = 0.1
# The routes whose requests may stand in a file.
PLANS: Final = {CHAT_URL: plan_chat, COMPLETION_URL: plan_completion, RESPONSES_URL: plan_response}


def plan_whole(engine: Engine, url: str, data: dict[str, Any]) -> Plan:
    """Check a request body as the route `url` does; streams have no place in files.

    Raises:
        RelevoError: what the route would have answered instead.
    """
    planned = PLANS[url](engine, data, NOBODY)
    if planned.body.stream:
        raise InvalidRequestError("'stream' has no place in a batch file; leave it out.", param="stream")
    return planned


async def follow(engine: Engine, job: Plan, take: Callable[[int, Delta], object]) -> None:
    """Answer one request, handing over each piece with the index of its choice. A full queue is waited for.

    Raises:
        RelevoError: it could not be served, or not to its end.
    """
    seconds = math.inf if job.body.timeout is None else job.body.timeout
    handles: list[Handle] = []
    num_open = len(job.requests)
    gathering = Gathering(())
    cause = "error"
    with trio.move_on_after(seconds) as scope:
        try:
            while num_open:
                # Choices that came in are read while the others wait for room, or they would count as slow readers.
                while len(handles) < len(job.requests) and await _hand_in(engine, job, handles):
                    gathering.add(handles[-1])
                some_wait = len(handles) < len(job.requests)
                until = trio.current_time() + RETRY_SECONDS if some_wait else math.inf
                for index, delta in await gathering.take(until):
                    take(index, delta)
                    error = failure_of(delta)
                    if error is not None:
                        raise error
                    num_open -= delta.finish_reason is not None
        except trio.Cancelled:
            cause = "timeout" if scope.cancel_called else "client"
            raise
        finally:
            for handle in handles:
                handle.abort(cause)  # harmless after the last piece
    if num_open:
        raise ending_error(FinishReason.ABORT, "timeout")


async def _hand_in(engine: Engine, job: Plan, handles: list[Handle]) -> bool:
    """Hand in the next choice and add it to `handles`; false when the queue is full.

    Raises:
        RequestError: it can never be served as it stands.
    """
    index = len(handles)
    first = index - index % job.body.n
    try:
        handles.append(engine.submit(job.requests[index], after=handles[first] if first < index else None))
    except QueueFullError:
        return False
    try:
        await handles[-1].accepted()
    except (QueueFullError, LateError):
        handles.pop()
        return False
    return True


async def stream(engine: Engine, job: Plan, write: Callable[[str], object]) -> None:
    """Answer one request, handing over its text as it comes; see `follow`."""
    await follow(engine, job, lambda _index, delta: write(delta.text))


async def answer(
    engine: Engine, job: Plan, *, watch: Callable[[Delta], object] = lambda _delta: None
) -> dict[str, Any]:
    """Answer one request whole, as the route would, with `watch` told of each piece; see `follow`."""
    whole = Whole(job)

    def take(index: int, delta: Delta) -> None:
        whole.add(index, delta)
        watch(delta)

    await follow(engine, job, take)
    return job.envelope.whole(whole.written(), whole.choices.usage())
