"""However many come at once, who is being answered waits for one of them and not for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

# That a token takes from the end of its step to its socket: it wakes the engine, that wakes the reader, and that sends.
TOKEN_ROUNDS: Final = 3


class Turnstile:
    """Lets one through in each round of the event loop, in the order in which they came; in fewer while answers go out.

    A round runs every task that is ready, and a token passes through a few of them, one a round, on its way from the
    step to its socket. If a hundred newcomers were ready at the same time, the token would wait for all of them in each
    of those rounds. While there are answers, one comes in while a token would go all its way, so that most tokens wait
    for one of them at most. Nothing is lost by it: where nobody else has anything to do, rounds follow each other at
    once (one takes 50 µs).

    Args:
        is_answering: whether there are answers.
    """

    def __init__(self, is_answering: Callable[[], bool] = lambda: False) -> None:
        self._is_answering = is_answering
        self._lock = trio.Lock()

    async def turn(self) -> None:
        """Wait for one's turn; what is done then until the next checkpoint is done in a round of its own."""
        # The next in line is woken when this one passes, and so runs in the next round.
        async with self._lock:
            if self._is_answering():
                for _ in range(TOKEN_ROUNDS - 1):
                    await trio.lowlevel.checkpoint()
