"""Hypercorn's connection, mended."""

from __future__ import annotations

import hypercorn.trio.run
from hypercorn.trio.tcp_server import TCPServer


class Connection(TCPServer):
    """A connection that ends when its client has closed it.

    Hypercorn's own would wait for its idle timeout first and hold socket and tasks for that long: a thousand clients
    that make one request each would use up the process's file descriptors.
    """

    _gone = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._gone = True
        await self.idle_task.stop()

    async def _idle_timeout(self) -> None:
        if not self._gone:  # the end of an answer may start it again
            await super()._idle_timeout()


def use_connections() -> None:
    """Have hypercorn make these; it offers no other way to say so."""
    hypercorn.trio.run.TCPServer = Connection  # type: ignore[attr-defined]
