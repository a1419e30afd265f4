"""However many come at once, who is being answered waits for one of them and not for all."""

from __future__ import annotations

import trio


class Turnstile:
    """Lets one through in each round of the event loop, in the order in which they came.

    A round runs every task that is ready, and a token passes through a few of them, one a round, on its way from the
    step to its socket. If a hundred newcomers were ready at the same time, the token would wait for all of them in each
    of those rounds. Nothing is lost by it: where nobody else has anything to do, rounds follow each other at once.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def turn(self) -> None:
        """Wait for one's turn; what is done then until the next checkpoint is done in a round of its own."""
        # The next in line is woken now, and so runs in the next round.
        async with self._lock:
            pass
