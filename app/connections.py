"""Hypercorn's connection, mended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import hypercorn.trio.run
import trio
from hypercorn.events import Closed
from hypercorn.trio.tcp_server import TCPServer

if TYPE_CHECKING:
    from hypercorn.events import Event

log = logging.getLogger("relevo.http")


class Connection(TCPServer):
    """A connection whose end is nobody else's.

    *It ends when its client has closed it.* Hypercorn's own would wait for its idle timeout first and hold socket and
    tasks for that long: a thousand clients that make one request each would use up the process's file descriptors.

    *It ends alone.* Closing and sending may meet on the socket, when a client hangs up in the middle of an upload that
    is being refused. Hypercorn lets that error out, and with it the whole server.
    """

    _gone = False

    async def run(self) -> None:
        """Serve the connection; whatever goes wrong with it, the server goes on."""
        try:
            await super().run()
        except* Exception as errors:
            log.warning("a connection broke down", exc_info=errors)

    async def protocol_send(self, event: Event) -> None:
        """Send; a socket that another task is closing at this moment is as good as closed."""
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:
            await self.protocol.handle(Closed())

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
