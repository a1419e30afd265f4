"""A search that is ended from outside: how that is heard, what was measured by then, and the exit code.

A signal is heard as the key that interrupts is: it unwinds what runs, so that what was started is ended and what was
changed is put back. On its way it takes up what was measured (`Interrupted`). Another one meanwhile ends everything
without a word.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.limit.summary import Outcome

# As shells tell of a process that a signal has ended.
SIGNALLED: Final = 128
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interrupted(Ended):
    """The same, with what was measured until then."""

    def __init__(self, number: int, outcome: Outcome) -> None:
        super().__init__(number)
        self.outcome = outcome


def number_of(key: KeyboardInterrupt) -> int:
    """The signal behind it; the key itself is SIGINT."""
    return key.number if isinstance(key, Ended) else signal.SIGINT


def code_of(key: KeyboardInterrupt) -> int:
    """The exit code: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
    return SIGNALLED + number_of(key)


def words_of(key: KeyboardInterrupt) -> str:
    """What a result says of it, a sentence without its full stop."""
    return f"The search was interrupted ({signal.Signals(number_of(key)).name})"


@contextmanager
def ended_like_a_key() -> Iterator[None]:
    """Whoever ends this process, or closes its terminal, ends what it started: as the key that interrupts does."""

    def interrupt(number: int, _frame: object) -> None:
        raise Ended(number)

    with _hearing((signal.SIGTERM, signal.SIGHUP), interrupt):
        yield


@contextmanager
def uninterrupted(*, first_only: bool = False) -> Iterator[None]:
    """What would end this process waits until it is through; signals come to the main thread alone.

    Args:
        first_only: a second one ends it at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)
        if first_only and len(came) > 1:
            raise Ended(number)

    with _hearing(ENDING, note):
        yield
    if came:
        raise Ended(came[0])


@contextmanager
def _hearing(numbers: Sequence[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have these signals handled so; what is ignored stays so: `nohup` is to outlive its terminal."""
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
