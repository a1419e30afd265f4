"""Sends cases of `raw_cases` to a server, many connections at a time, and looks at what comes back.

    python -m tests.app.raw_fuzz --port 8000 --cases 1000 [--first 0] [--connections 32]

Prints as JSON what came of them; `faults` names by their numbers the cases that a server must not answer like that.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final

import hpack
import trio

from tests.app.raw_cases import make_case

if TYPE_CHECKING:
    from tests.app.raw_cases import Case

QUIET_SECONDS: Final = 0.03
HELD_SECONDS: Final = 60.0
CASES_A_PROBE: Final = 100
# What the server may say; everything else of 5xx is a slip of its own.
ALLOWED_5XX: Final = (501, 503, 505)
NO_CONTENT: Final = (204, 304)
HEADERS_FRAME, MAX_FRAME_KIND, PADDED_OR_PRIORITY = 1, 9, 0x28


class WrongAnswerError(Exception):
    """What came back is no answer that a server may give."""


def http1_statuses(data: bytes) -> list[int]:
    """Final statuses of what came back, the last of which may have broken off.

    Raises:
        WrongAnswerError: it is not HTTP/1.1.
    """
    statuses = []
    while data:
        head, found, rest = data.partition(b"\r\n\r\n")
        line = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
        if line is None:
            raise WrongAnswerError(f"no status line: {data[:60]!r}")
        if not found:
            return statuses
        status = int(line[1])
        if status >= 200:
            statuses.append(status)
            rest = _behind_body(status, head.lower(), rest)
        data = rest
    return statuses


def _behind_body(status: int, head: bytes, rest: bytes) -> bytes:
    """What follows the body. Answers to HEAD have none, though they tell of one."""
    if status in NO_CONTENT or rest.startswith(b"HTTP/1.1 "):
        return rest
    length = re.search(rb"\r\ncontent-length: (\d+)", head)
    if length is not None:
        return rest[int(length[1]) :]
    while (size := re.match(rb"([0-9a-f]+)\r\n", rest)) is not None:
        num_bytes = int(size[1], 16)
        rest = rest[size.end() + num_bytes + 2 :]
        if num_bytes == 0:
            return rest
    return b""  # it broke off


def http2_statuses(data: bytes) -> list[int]:
    """The same of HTTP/2."""
    statuses, decoder = [], hpack.Decoder()
    while len(data) >= 9 and len(data) >= 9 + (length := int.from_bytes(data[:3])):
        kind, flags, body, data = data[3], data[4], data[9 : 9 + length], data[9 + length :]
        if kind > MAX_FRAME_KIND:
            raise WrongAnswerError(f"an unknown frame: {kind}")
        if kind == HEADERS_FRAME:
            if flags & PADDED_OR_PRIORITY:
                raise WrongAnswerError("a head that is padded or has a priority")
            fields = dict(decoder.decode(body))
            if ":status" in fields:
                statuses.append(int(fields[":status"]))
    return [status for status in statuses if status >= 200]


class Fuzz:
    """A run.

    Attributes:
        faults: number, family and why of each case that was answered as it must not be.
        probe_seconds: how long each `/healthz` took, connection and all, while the cases came.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.families: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: list[tuple[int, str, str]] = []
        self.probe_seconds: list[float] = []

    async def run(self, numbers: range, connections: int) -> None:
        """Play all cases."""
        left = iter(numbers)

        async def work() -> None:
            for number in left:
                await self._play(make_case(number))
                if number % CASES_A_PROBE == 0:
                    await self._probe(number)

        async with trio.open_nursery() as nursery:
            for _ in range(connections):
                nursery.start_soon(work)

    async def _play(self, case: Case) -> None:
        self.families[case.family] += 1
        try:
            received = await self._talk(case)
            is_http1 = received.startswith(b"HTTP/")
            statuses = http1_statuses(received) if is_http1 else http2_statuses(received)
            self.statuses.update(statuses)
            if wrong := [status for status in statuses if status >= 500 and status not in ALLOWED_5XX]:
                raise WrongAnswerError(f"answered {wrong}")
            if len(statuses) > case.most_answers:
                raise WrongAnswerError(f"{len(statuses)} answers, {case.most_answers} are right: {statuses}")
        except trio.TooSlowError:
            self.faults.append((case.number, case.family, "the connection does not end"))
        except (WrongAnswerError, hpack.HPACKError) as error:
            self.faults.append((case.number, case.family, str(error)))

    async def _talk(self, case: Case) -> bytes:
        """Send the pieces, listen until it is quiet, close, and listen to the end."""
        rng = random.Random(case.number)
        # Closed connections keep their addresses for a while, and there are more cases than ports.
        stream = await self._connect(f"127.0.{rng.randrange(256)}.{rng.randrange(1, 255)}")
        received = bytearray()
        with trio.fail_after(HELD_SECONDS):
            async with trio.open_nursery() as nursery:
                is_quiet = trio.Event()
                nursery.start_soon(self._send, stream, case, is_quiet)
                if not case.resets:
                    await self._listen(stream, received, is_quiet)
                    nursery.cancel_scope.cancel()
                elif rng.random() < 0.5:  # perhaps in the middle
                    nursery.cancel_scope.cancel()
        if case.resets:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await trio.aclose_forcefully(stream)
        return bytes(received)

    async def _send(self, stream: trio.SocketStream, case: Case, is_quiet: trio.Event) -> None:
        with suppress(trio.BrokenResourceError):
            for piece in case.pieces:
                await stream.send_all(piece)
            if not case.resets:
                await is_quiet.wait()
                await stream.send_eof()

    async def _listen(self, stream: trio.SocketStream, received: bytearray, is_quiet: trio.Event) -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                with trio.move_on_after(inf if is_quiet.is_set() else QUIET_SECONDS) as scope:
                    data = await stream.receive_some(65536)
                    if not data:
                        return
                    received += data
                if scope.cancelled_caught:
                    is_quiet.set()

    async def _connect(self, source: str) -> trio.SocketStream:
        connection = trio.socket.socket()
        await connection.bind((source, 0))
        await connection.connect(("127.0.0.1", self.port))
        return trio.SocketStream(connection)

    async def _probe(self, number: int) -> None:
        """Somebody else asks whether the server lives."""
        began = time.perf_counter()
        try:
            with trio.fail_after(HELD_SECONDS):
                stream = await self._connect("127.0.0.1")
                await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                received = b""
                while data := await stream.receive_some(65536):
                    received += data
                await stream.aclose()
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            self.faults.append((number, "healthz", repr(error)))
        else:
            if not received.startswith(b"HTTP/1.1 200 "):
                self.faults.append((number, "healthz", received[:60].decode("latin-1")))
            self.probe_seconds.append(time.perf_counter() - began)

    def told(self) -> dict[str, Any]:
        """What came of it."""
        probes = sorted(self.probe_seconds)
        return {
            "cases": self.families.total(),
            "families": self.families,
            "statuses": self.statuses,
            "probes": len(probes),
            "probe_p50_seconds": probes[len(probes) // 2] if probes else None,
            "probe_p99_seconds": probes[len(probes) * 99 // 100] if probes else None,
            "probe_max_seconds": max(probes, default=None),
            "num_faults": len(self.faults),
            "faults": self.faults[:50],
        }


async def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    fuzz, began = Fuzz(options.port), time.perf_counter()
    await fuzz.run(range(options.first, options.first + options.cases), options.connections)
    print(json.dumps({**fuzz.told(), "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    trio.run(main)
