"""The client, a process of its own: `python -m tests.bench.versus.client < JOB`, where `JOB` is JSON.

It shares the machine with the server that it measures. So while requests run it only notes when which bytes came
(`app/limit/exchange.py`); what they say is read afterwards. Closed loop: each stream sends its next request when its
last answer is complete.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from app.limit import exchange
from app.limit.exchange import NOT_FINISHED, EventReader, Exchange, make_post, read_whole

__all__ = ["NOT_FINISHED", "Answer", "EventReader", "make_request", "read_whole", "run_job", "run_request"]

HOST: Final = "127.0.0.1"
NOT_SENT: Final = "not sent in time"


@dataclass(slots=True)
class Answer(exchange.Answer):
    """What one request saw. Times are seconds from the start of the run.

    Attributes:
        asked_tokens: length that was asked for.
    """

    asked_tokens: int = 0


def make_request(port: int, path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST."""
    return make_post(f"{HOST}:{port}", path, body)


async def run_request(port: int, request: bytes, answer: Answer, pieces: list[tuple[float, bytes]]) -> None:
    """Send it and wait for the end of its response."""
    ended = asyncio.Event()

    def end(error: str) -> None:
        answer.error = answer.error or error
        ended.set()

    try:
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(request, pieces, end), HOST, port
        )
    except OSError as error:
        answer.error = f"cannot connect: {error}"
        return
    try:
        await ended.wait()
    except asyncio.CancelledError:
        answer.error = NOT_FINISHED
        raise
    finally:
        transport.close()


async def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run all requests of a job.

    Args:
        job: `port`, `path`, `streams`, `timeout` (seconds for all of it) and `bodies`.

    Returns:
        `wall_seconds` and `cpu_seconds` of this client while requests ran, and the `answers`, each an `Answer`.
    """
    requests = [make_request(job["port"], job["path"], body) for body in job["bodies"]]
    answers = [Answer(asked_tokens=body["max_tokens"], error=NOT_SENT) for body in job["bodies"]]
    pieces: list[list[tuple[float, bytes]]] = [[] for _ in requests]
    left = iter(range(len(requests)))

    async def stream() -> None:
        for i in left:
            answers[i].sent, answers[i].error = time.perf_counter(), ""
            await run_request(job["port"], requests[i], answers[i], pieces[i])

    begin, begin_cpu = time.perf_counter(), time.process_time()
    with suppress(TimeoutError):
        async with asyncio.timeout(job["timeout"]):
            await asyncio.gather(*[stream() for _ in range(job["streams"])])
    end, end_cpu = time.perf_counter(), time.process_time()
    for answer, received in zip(answers, pieces, strict=True):
        if not answer.error:
            read_whole(answer, received)
        for name in ("sent", "first", "finished"):
            setattr(answer, name, max(0.0, getattr(answer, name) - begin))
    return {
        "wall_seconds": end - begin,
        "cpu_seconds": end_cpu - begin_cpu,
        "answers": [asdict(answer) for answer in answers],
    }


if __name__ == "__main__":
    json.dump(asyncio.run(run_job(json.load(sys.stdin))), sys.stdout)
