"""The process that sends requests: `python -m app.limit.generator`, a job as a line of JSON on its standard input.

Open loop: each request leaves when it is due, whatever the server does. Closed loop: each of so many streams sends its
next request when its last has ended. What came is read when all is over (`app/limit/exchange.py`); before that a
request is looked at once or twice, when it should have had its first text, or its end, to see whether the run is lost.

The process ends when its standard input does, so that it never outlives whoever started it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import socket
import ssl
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from app.limit.exchange import (
    NO_CONNECTION,
    NOT_FINISHED,
    STOPPED,
    UNREADABLE,
    Answer,
    Exchange,
    has_text,
    read_whole,
)
from app.open_files import raise_open_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.limit.exchange import Pieces

PROGRESS_SECONDS: Final = 0.5
# Between starting the clock and the first request, so that it is not late already.
LEAD_SECONDS: Final = 0.05
CONNECT_SECONDS: Final = 5.0
CANNOT_CONNECT: Final = "cannot connect"
# This process may open no more files, nor the machine; or it has no port left to send from.
OWN_WANTS: Final = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)


@dataclass(slots=True)
class Call:
    """One request on its way. Times are on this process's clock."""

    request: bytes
    first_within: float | None
    end_within: float | None
    work_class: int
    due: float = 0.0
    sent: float = 0.0
    pieces: Pieces = field(default_factory=list)
    is_over: bool = False
    error: str = ""
    transport: asyncio.Transport | None = None


class Generator:
    """Runs one job.

    Args:
        job: see `app.limit.dispatch.Job`, as JSON.
        report: told how many counted requests have ended, twice a second.
    """

    def __init__(self, job: dict[str, Any], report: Callable[[int], object]) -> None:
        self._job = job
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._calls = [
            Call(entry["request"].encode(), entry["within"][0], entry["within"][1], entry["class"])
            for entry in job["calls"]
        ]
        first, last = job["counted"]
        self._counted = range(first, last)
        self._num_left = last - first
        self._late: Counter[tuple[int, str]] = Counter()
        self._num_failed = 0
        self._next = deque(range(len(self._calls)))
        self._over = asyncio.Event()
        self._stopped_at: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._scrapes: list[tuple[float, Pieces]] = []
        self._tls = ssl.create_default_context() if job["tls"] else None
        self._address = _address_of(job["host"], job["port"])

    async def run(self) -> dict[str, Any]:
        """Send everything, wait for what counts, and tell what came; see `app.limit.dispatch.Told`."""
        begin, begin_cpu = time.perf_counter() + LEAD_SECONDS, time.process_time()
        start = self._loop.time() + LEAD_SECONDS
        if self._job["streams"]:
            for _ in range(self._job["streams"]):
                self._loop.call_at(start, self._send_next)
            self._loop.call_at(start + self._job["seconds"], self._stop)
        else:
            for index, (call, entry) in enumerate(zip(self._calls, self._job["calls"], strict=True)):
                call.due = begin + entry["due"]
                self._loop.call_at(start + entry["due"], self._send, index)
        if self._job["scrape"]:
            self._loop.call_at(start, self._scrape)
        self._loop.call_later(PROGRESS_SECONDS, self._tell)
        await self._over.wait()
        end, end_cpu = time.perf_counter(), time.process_time()
        for call in self._calls:
            self._abort(call, STOPPED)
        answers = [self._answer(call, begin) for call in self._calls]
        return {
            "answers": [asdict(answer) for answer in answers],
            "scrapes": [(at - begin, _body(pieces)) for at, pieces in self._scrapes],
            "stopped_at": None if self._stopped_at is None else self._stopped_at - begin,
            "wall_seconds": end - begin,
            "cpu_seconds": end_cpu - begin_cpu,
        }

    def _tell(self) -> None:
        self._report(len(self._counted) - self._num_left)
        self._loop.call_later(PROGRESS_SECONDS, self._tell)

    def _send_next(self) -> None:
        if not self._next:
            self._stop()
            return
        index = self._next.popleft()
        self._calls[index].due = time.perf_counter()
        self._send(index)

    def _send(self, index: int) -> None:
        if self._over.is_set():
            return
        call = self._calls[index]
        call.sent = time.perf_counter()
        self._start(self._connect(call, index))
        late = call.sent - call.due
        self._loop.call_later(self._job["deadline"] - late, self._time_out, index)
        if index in self._counted and not self._job["streams"]:
            if call.first_within is not None:
                self._loop.call_later(call.first_within - late, self._look_for_text, call)
            if call.end_within is not None:
                self._loop.call_later(call.end_within - late, self._look_for_end, call)

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, call: Call, index: int) -> None:
        try:
            call.transport, _ = await self._open(call.request, call.pieces, lambda error: self._end(index, error))
        except (OSError, ssl.SSLError) as error:
            is_own = error.errno in OWN_WANTS
            self._end(index, f"{NO_CONNECTION if is_own else CANNOT_CONNECT}: {error}")
            if is_own and index in self._counted:
                self._stop()  # whatever comes, it tells nothing of the server
        else:
            if call.is_over:  # it was given up meanwhile
                call.transport.abort()

    async def _open(self, request: bytes, pieces: Pieces, ended: Callable[[str], object]) -> Any:
        name = self._job["host"] if self._tls else None
        host, port = self._address[:2]
        return await self._loop.create_connection(
            lambda: Exchange(request, pieces, ended), str(host), int(port), ssl=self._tls, server_hostname=name
        )

    def _end(self, index: int, error: str) -> None:
        """A request's answer is complete, or will never be."""
        call = self._calls[index]
        if call.is_over:
            return
        call.is_over = True
        call.error = error
        if call.transport is not None:
            call.transport.abort()
        if index in self._counted:
            self._num_left -= 1
            if error or _is_refusal(call.pieces):
                self._num_failed += 1
        if self._job["streams"]:
            self._loop.call_soon(self._send_next)
        elif not self._num_left:
            self._over.set()
        elif self._num_failed > self._job["allowed_errors"]:
            self._stop()

    def _time_out(self, index: int) -> None:
        self._end(index, NOT_FINISHED)

    def _look_for_text(self, call: Call) -> None:
        with suppress(*UNREADABLE):  # what cannot be read is told when all is over
            # Who has ended without any text by now is an error, and no miss.
            if not call.is_over and not has_text(call.pieces):
                self._count_late(call, "first")

    def _look_for_end(self, call: Call) -> None:
        if not call.is_over:
            self._count_late(call, "end")

    def _count_late(self, call: Call, what: str) -> None:
        """One more who missed a target; with so many it cannot be met any more, whatever comes."""
        self._late[call.work_class, what] += 1
        if self._late[call.work_class, what] > self._job["allowed_late"][call.work_class]:
            self._stop()

    def _stop(self) -> None:
        if not self._over.is_set():
            self._stopped_at = time.perf_counter()
            self._over.set()

    def _abort(self, call: Call, why: str) -> None:
        if not call.is_over:
            call.is_over, call.error = True, why
            if call.transport is not None:
                call.transport.abort()

    def _scrape(self) -> None:
        """Ask the server what it tells of itself, and again after a while."""
        if self._over.is_set():  # what begins while the loop ends is never waited for
            return
        pieces: Pieces = []
        self._scrapes.append((time.perf_counter(), pieces))
        self._start(self._ask(pieces))
        self._loop.call_later(self._job["scrape"]["every"], self._scrape)

    async def _ask(self, pieces: Pieces) -> None:
        with suppress(OSError):  # the requests tell what is wrong
            await self._open(self._job["scrape"]["request"].encode(), pieces, lambda _error: None)

    def _answer(self, call: Call, begin: float) -> Answer:
        answer = Answer(due=call.due, sent=call.sent)
        if call.sent and not call.error.startswith((CANNOT_CONNECT, NO_CONNECTION)):
            read_whole(answer, call.pieces)
        answer.error = call.error or answer.error
        for name in ("due", "sent", "first", "finished"):
            setattr(answer, name, max(0.0, getattr(answer, name) - begin))
        return answer


def _address_of(host: str, port: int) -> tuple[Any, ...]:
    """The address that somebody listens at, where a name has several: IPv4 first."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [info[4] for info in sorted(found, key=lambda info: info[0] != socket.AF_INET)]
    for address in addresses if len(addresses) > 1 else ():
        with suppress(OSError), socket.create_connection((str(address[0]), port), CONNECT_SECONDS):
            return address
    return addresses[0]


def _is_refusal(pieces: Pieces) -> bool:
    """Whether a response's first line is not that of a success."""
    return b" 200" not in b"".join(data for _, data in pieces[:4])[:16]


def _body(pieces: Pieces) -> str:
    """The body of a plain answer; empty where it did not come whole."""
    head, found, body = b"".join(data for _, data in pieces).partition(b"\r\n\r\n")
    if not found or b" 200 " not in head.split(b"\r\n", 1)[0]:
        return ""
    if b"chunked" not in head.lower():
        return body.decode(errors="replace")
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        parts.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(parts).decode(errors="replace")


def _go_first() -> None:
    """Ask the system to wake this process before others, where it lets one: what it is late by is not the server's."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)


async def _serve() -> None:
    def say(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # whoever started this is gone already
        return
    job = json.loads(line)
    generator = Generator(job, lambda ended: say({"ended": ended}))
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), task.cancel)
    say({"told": await generator.run()})


def main() -> None:
    """Run the job of the standard input."""
    _go_first()
    raise_open_files()
    gc.disable()  # a pause would be blamed on the server
    with suppress(asyncio.CancelledError, BrokenPipeError):
        asyncio.run(_serve())


if __name__ == "__main__":
    main()
