"""The client, a process of its own: `python -m tests.bench.versus.client < JOB`, where `JOB` is JSON.

It shares the machine with the server that it measures. So while requests run it only notes when which bytes came; what
they say is read afterwards. Closed loop: each stream sends its next request when its last answer is complete. A
connection carries one request, since some servers give an open connection a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST: Final = "127.0.0.1"
LAST_CHUNK: Final = b"0\r\n\r\n"
MAX_ERROR_CHARS: Final = 300
NOT_FINISHED: Final = "not finished in time"
NOT_SENT: Final = "not sent in time"


@dataclass(slots=True)
class Answer:
    """What one request saw. Times are seconds from the start of the run.

    Attributes:
        asked_tokens: length that was asked for.
        prompt_tokens, output_tokens: as the server's `usage` says.
        first: when the first text came.
        finished: when the stream ended.
        gaps: seconds between one piece of text and the next.
        error: why the answer does not count; empty where it does.
    """

    asked_tokens: int
    sent: float = 0.0
    first: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    error: str = ""


class EventReader:
    """Reads an HTTP/1.1 response that may be chunked, and the events in it."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self._raw = bytearray()
        self._chunked = False
        self._data: list[bytes] = []
        self._read = 0  # bytes of `body` that were read as lines

    def feed(self, data: bytes) -> list[bytes]:
        """More bytes; gives the data of the events that they complete."""
        self._raw += data
        if not self.status and not self._read_head():
            return []
        if self._chunked:
            self._read_chunks()
        else:
            self.body += self._raw
            self._raw.clear()
        return list(self._read_events())

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *headers = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        names = {name.strip().lower(): value.strip().lower() for name, _, value in (h.partition(":") for h in headers)}
        self._chunked = "chunked" in names.get("transfer-encoding", "")
        del self._raw[: end + 4]
        return True

    def _read_chunks(self) -> None:
        while (end := self._raw.find(b"\r\n")) >= 0:
            size = int(bytes(self._raw[:end]).partition(b";")[0], 16)
            if len(self._raw) < end + 2 + size + 2:
                return
            self.body += self._raw[end + 2 : end + 2 + size]
            del self._raw[: end + 2 + size + 2]

    def _read_events(self) -> Iterator[bytes]:
        while (end := self.body.find(b"\n", self._read)) >= 0:
            line = bytes(self.body[self._read : end]).rstrip(b"\r")
            self._read = end + 1
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


def read_answer(answer: Answer, pieces: list[tuple[float, bytes]]) -> None:
    """Fill in what the pieces of a response, each with its time, say; without usage nothing can be counted."""
    reader, texts, done = EventReader(), list[float](), False
    for moment, data in pieces:
        answer.finished = moment
        for event in reader.feed(data):
            if event == b"[DONE]":
                done = True
                continue
            said = json.loads(event)
            if said.get("error"):
                answer.error = answer.error or f"in the stream: {json.dumps(said['error'])[:MAX_ERROR_CHARS]}"
            if any(choice.get("text") for choice in said.get("choices") or ()):
                texts.append(moment)
            if usage := said.get("usage"):
                answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if reader.status != 200:
        said = bytes(reader.body[:MAX_ERROR_CHARS]).decode(errors="replace")
        answer.error = answer.error or (f"HTTP {reader.status}: {said}" if reader.status else "no answer came")
    elif not done:
        answer.error = answer.error or "the stream ended without [DONE]"
    elif not answer.output_tokens or not texts:
        answer.error = answer.error or "the stream held no usage, or no text"
    if texts:
        answer.first = texts[0]
        answer.gaps = [later - earlier for earlier, later in pairwise(texts)]


class Exchange(asyncio.Protocol):
    """Sends one request, and notes in `pieces` when which bytes of the response came."""

    def __init__(self, request: bytes, pieces: list[tuple[float, bytes]]) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._request, self._pieces = request, pieces
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send it."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note it, nothing more; servers that keep the connection open are seen to end by their last chunk."""
        self._pieces.append((time.perf_counter(), data))
        self._tail = (self._tail + data[-5:])[-5:]
        if self._tail == LAST_CHUNK:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """The other side is done."""
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def make_request(port: int, path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def run_request(port: int, request: bytes, answer: Answer, pieces: list[tuple[float, bytes]]) -> None:
    """Send it and wait for the end of its response."""
    try:
        transport, exchange = await asyncio.get_running_loop().create_connection(
            lambda: Exchange(request, pieces), HOST, port
        )
    except OSError as error:
        answer.error = f"cannot connect: {error}"
        return
    try:
        await exchange.ended
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
    answers = [Answer(body["max_tokens"], error=NOT_SENT) for body in job["bodies"]]
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


def read_whole(answer: Answer, pieces: list[tuple[float, bytes]]) -> None:
    """Fill in an answer; what cannot be read is its error."""
    try:
        read_answer(answer, pieces)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        answer.error = f"not understood: {error!r}"


if __name__ == "__main__":
    json.dump(asyncio.run(run_job(json.load(sys.stdin))), sys.stdout)
