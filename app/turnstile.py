"""However many come at once, who is being answered waits for one of them and not for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

# That a token takes from the end of its step to its socket: it wakes the engine, that wakes the reader, and that sends.
TOKEN_ROUNDS: Final = 3
# Of so many in line, or more, one has its turn in each round: a probe among thousands must not wait three times that.
CROWD: Final = 32


class Turnstile:
    """Lets one through in each round of the event loop, in the order in which they came; in fewer while somebody waits.

    A round runs every task that is ready, and a token passes through a few of them, one a round, on its way from the
    step to its socket. If a hundred newcomers were ready at the same time, the token would wait for all of them in each
    of those rounds. While there are requests, one comes in while a token would go all its way, so that most tokens wait
    for one of them at most. Little is lost by it: where nobody else has anything to do, rounds follow each other at
    once, some 50 µs each.

    Args:
        is_busy: whether there are requests that have not ended.
    """

    def __init__(self, is_busy: Callable[[], bool] = lambda: False) -> None:
        self._is_busy = is_busy
        self._lock = trio.Lock()

    async def turn(self) -> None:
        """Wait for one's turn; what is done then until the next checkpoint is done in a round of its own."""
        # The next in line is woken when this one passes, and so runs in the next round.
        async with self._lock:
            for _ in range(TOKEN_ROUNDS - 1):
                if not self._is_busy() or self._lock.statistics().tasks_waiting >= CROWD:
                    break
                await trio.lowlevel.checkpoint()
