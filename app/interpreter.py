"""Python's own settings: for a start, and for an event loop beside a thread that computes."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

COLLECT_AFTER: Final = (500, 5, 12)
SWITCH_SECONDS: Final = 0.0005


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage collection in the body, or until `tune_interpreter` is called there.

    What a start imports and loads stays. Looking through it again and again takes a fifth of the imports' time.
    """
    before = sys.getswitchinterval()
    # Loading comes back to Python after each matrix, and would each time wait for what is imported beside it.
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(before)


def tune_interpreter() -> None:
    """Set Python up for an event loop beside a thread that computes; called once everything is loaded.

    What lives until the end, torch above all, is taken out of what the garbage collector looks through.

    Each answer's tasks and scopes are garbage in cycles. Without this the collector took a quarter of the event loop's
    time at sixteen streams, walking through modules that never change. What it finds it frees in one go, and every
    token waits for that: so it looks often. A long answer is old when it ends, so the oldest are looked through as
    well, after some forty thousand new objects: at three times what a server of two cores can do that takes 8 to 27 ms
    every nine seconds, where five times as many took up to 75.
    """
    # Not collected before: that takes 0.2 s, and what it would free is less than a megabyte.
    gc.freeze()
    gc.enable()
    gc.set_threshold(*COLLECT_AFTER)
    # A step comes back to Python several times, and each time waits for the event loop to let go of the interpreter.
    sys.setswitchinterval(SWITCH_SECONDS)
