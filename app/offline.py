"""The same requests and the same engine as the server's, without a server: from files to files."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

import trio

from app.api.errors import describe
from app.api.gathering import Gathering, Whole
from app.api.generation import ending_error, failure_of
from app.api.planning import CHAT_URL, COMPLETION_URL, plan
from app.api.schemas import parse_json_object
from engine.errors import InvalidRequestError, QueueFullError, RelevoError
from engine.sequence import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from app.api.planning import Plan
    from engine.engine import Engine
    from engine.handle import GenerationRequest, Handle
    from engine.outbox import Delta

RETRY_SECONDS: Final = 0.1


@dataclass(slots=True)
class Counts:
    """How a batch went, in lines."""

    answered: int = 0
    failed: int = 0

    @property
    def total(self) -> int:
        """Lines that have a result."""
        return self.answered + self.failed


def plan_whole(engine: Engine, url: str, data: dict[str, Any]) -> Plan:
    """Check a request body as the route `url` does; streams have no place in files.

    Raises:
        RelevoError: what the route would have answered instead.
    """
    planned = plan(engine, url, data)
    if planned.body.stream:
        raise InvalidRequestError("'stream' has no place in a batch file; leave it out.", param="stream")
    return planned


async def submit_patiently(engine: Engine, request: GenerationRequest) -> Handle:
    """Hand in a request, again and again while the queue is full.

    Raises:
        RequestError: it can never be served as it stands.
    """
    while True:
        try:
            handle = engine.submit(request)
            try:
                await handle.accepted()
            except trio.Cancelled:
                handle.abort("timeout")
                raise
        except QueueFullError:
            await trio.sleep(RETRY_SECONDS)
        else:
            return handle


async def follow(engine: Engine, job: Plan, take: Callable[[int, Delta], object]) -> None:
    """Answer one request, handing over each piece with the index of its choice.

    Raises:
        RelevoError: it could not be served, or not to its end.
    """
    seconds = math.inf if job.body.timeout is None else job.body.timeout
    handles: list[Handle] = []
    num_open = len(job.requests)
    with trio.move_on_after(seconds):
        try:
            for request in job.requests:
                handles.append(await submit_patiently(engine, request))
            gathering = Gathering(handles)
            while num_open:
                for index, delta in await gathering.take():
                    take(index, delta)
                    error = failure_of(delta)
                    if error is not None:
                        raise error
                    num_open -= delta.finish_reason is not None
        finally:
            # Harmless after the last piece; before it, the deadline or the caller has ended the reading.
            for handle in handles:
                handle.abort("timeout")
    if num_open:
        raise ending_error(FinishReason.ABORT, "timeout")


async def stream(engine: Engine, job: Plan, write: Callable[[str], object]) -> None:
    """Answer one request, handing over its text as it comes; see `follow`."""
    await follow(engine, job, lambda _index, delta: write(delta.text))


async def answer(engine: Engine, job: Plan) -> dict[str, Any]:
    """Answer one request whole, as the route would; see `follow`."""
    whole = Whole(job)
    await follow(engine, job, whole.add)
    return job.envelope.whole(whole.written(), whole.choices.usage())


async def run_batch(
    engine: Engine, lines: Iterable[bytes], target: TextIO, *, progress: Callable[[int], object] = lambda _done: None
) -> Counts:
    """Answer an OpenAI batch file. Results are written as they come, which is not the order of the lines.

    Args:
        lines: one JSON object each, in UTF-8, with `custom_id`, `method`, `url` and `body`; blank ones are skipped.
        target: gets one JSON object a line: `id`, `custom_id`, `response` and `error`.
        progress: told the number of lines done.

    Returns:
        How many lines were answered and how many were not.
    """
    counts = Counts()
    # Twice the seats: whoever leaves finds a successor waiting, and the queue stays short.
    places = trio.Semaphore(2 * engine.config.max_num_seqs)
    taken: set[str] = set()

    async def work(line: bytes) -> None:
        try:
            result = await _answer_line(engine, line, taken)
        finally:
            places.release()
        target.write(json.dumps(result, ensure_ascii=False) + "\n")
        target.flush()
        response = result["response"]
        ok = response is not None and response["status_code"] == 200
        counts.answered += ok
        counts.failed += not ok
        progress(counts.total)

    async with trio.open_nursery() as nursery:
        for line in lines:
            if line.strip():
                await places.acquire()
                nursery.start_soon(work, line)
    return counts


async def _answer_line(engine: Engine, line: bytes, taken: set[str]) -> dict[str, Any]:
    """The result of one line. What is wrong with the line itself is its `error`, all else is its `response`.

    Args:
        taken: the `custom_id` of every line before; this line's is added.
    """
    result: dict[str, Any] = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": None, "response": None}
    try:
        custom_id, url, body = _read_line(line)
        if custom_id in taken:
            result["custom_id"] = custom_id
            raise InvalidRequestError(f"The 'custom_id' {custom_id!r} is that of an earlier line.", param="custom_id")
        taken.add(custom_id)
    except InvalidRequestError as error:
        return result | {"error": {"code": "invalid_line", "message": str(error)}}
    request_id = f"req_{secrets.token_hex(12)}"
    try:
        job = plan_whole(engine, url, body)
        status, content = 200, await answer(engine, job)
    except RelevoError as error:
        described = describe(error)
        status, content = described.status, described.body
    response = {"status_code": status, "request_id": request_id, "body": content}
    return result | {"custom_id": custom_id, "response": response, "error": None}


def _read_line(line: bytes) -> tuple[str, str, dict[str, Any]]:
    entry = parse_json_object(line)
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str):
        raise InvalidRequestError("'custom_id' must be a string.", param="custom_id")
    if entry.get("method", "POST") != "POST":
        raise InvalidRequestError("'method' must be POST.", param="method")
    if url not in (CHAT_URL, COMPLETION_URL):
        raise InvalidRequestError(f"'url' must be {CHAT_URL} or {COMPLETION_URL}.", param="url")
    if not isinstance(body, dict):
        raise InvalidRequestError("'body' must be an object.", param="body")
    return custom_id, url, body
