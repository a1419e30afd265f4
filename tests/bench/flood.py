"""Sends what costs its sender next to nothing, as fast as it is taken, over many connections.

    python -m tests.bench.flood PORT pings|crumbs CONNECTIONS

`tests.bench.neighbour` looks at what somebody else notices of it.
"""

from __future__ import annotations

import selectors
import socket
import sys
from typing import Final

import hyperframe.frame as frames

from tests.app.wire import open_http2

PINGS, CRUMBS = "pings", "crumbs"
KINDS: Final = (PINGS, CRUMBS)
_NUM_AT_ONCE: Final = 4000
_HEAD: Final = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def flood(port: int, kind: str, num_connections: int) -> None:
    """For ever: frames of HTTP/2 that want an answer, or a body in pieces of a byte. Who is cut off comes again."""
    is_pings = kind == PINGS
    begin = open_http2(0).data_to_send() if is_pings else _HEAD
    one = frames.PingFrame(0, b"12345678").serialize() if is_pings else b"1\r\na\r\n"
    selector, more = selectors.DefaultSelector(), one * _NUM_AT_ONCE

    def connect() -> None:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, [begin])

    for _ in range(num_connections):
        connect()
    while True:
        for key, events in selector.select():
            connection, left = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            try:
                if events & selectors.EVENT_READ and not connection.recv(1 << 16):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE:
                    left[0] = left[0][connection.send(left[0]) :] or more
            except OSError:
                selector.unregister(connection)
                connection.close()
                connect()


if __name__ == "__main__":
    flood(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
