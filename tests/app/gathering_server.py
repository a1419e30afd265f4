"""A server that answers nobody before so many have asked: `python -m tests.app.gathering_server NUMBER`.

Prints its port. It has no thread for a connection, so that thousands are no burden to it; it ends with its standard
input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final

from app.open_files import raise_open_files

EVENTS: Final = (
    {"choices": [{"index": 0, "delta": {"content": "word "}}]},
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}},
)
HEAD: Final = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
ANSWER: Final = (HEAD + "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n").encode()


class Asked(asyncio.Protocol):
    """One connection, which carries one request that comes in one piece or more.

    Args:
        gathered: all that have asked and wait, one list for everybody.
    """

    def __init__(self, gathered: list[asyncio.WriteTransport], wanted: int) -> None:
        self._gathered, self._wanted = gathered, wanted
        self._came = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, found, body = self._came.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(body) < length:
            return
        self._gathered.append(self._transport)
        if len(self._gathered) == self._wanted:
            for transport in self._gathered:
                transport.write(ANSWER)
                transport.close()


async def serve(wanted: int) -> None:
    gathered: list[asyncio.WriteTransport] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Asked(gathered, wanted), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), over.set)
    await over.wait()
    server.close()


if __name__ == "__main__":
    raise_open_files()
    asyncio.run(serve(int(sys.argv[1])))
