"""What runs beside the server for as long as it does, and cannot end it."""

from __future__ import annotations

import faulthandler
import logging
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from app.journal.journal import Journal
    from app.live_config import LiveConfig
    from engine.engine import Engine

log = logging.getLogger("relevo.server")

RESTART_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0
HUNG_LOOKS: Final = 5
MAX_STACK_BYTES: Final = 1 << 18


class Services:
    """Runs what serves nobody directly: the history, the keys on disk, the live settings.

    Attributes:
        num_faults: how often each of them ended with an error and was begun again.
    """

    def __init__(self) -> None:
        self.num_faults: Counter[str] = Counter()

    async def run(self, name: str, service: Callable[[], Awaitable[None]]) -> None:
        """Run one; after an error, which is logged and counted, again."""
        self.num_faults[name] = 0
        while True:
            try:
                await service()
                return
            except Exception:
                self.num_faults[name] += 1
                log.exception("%s failed and is begun again in %g s", name, RESTART_SECONDS)
            await trio.sleep(RESTART_SECONDS)


async def keep_notices(engine: Engine, journal: Journal, live: LiveConfig) -> None:
    """Write down what the engine did by itself: an event of each fault, a change of the settings where it made one."""
    async for notice in engine.notices:
        if notice.changes:
            live.note(notice.changes, who="the engine", reason=notice.text)
        else:
            journal.note(notice.kind, notice.text)


async def watch_stalls(engine: Engine) -> None:
    """Log where every thread is, once whenever the engine has stalled."""
    has_stalled = False
    while True:
        health = engine.health()
        stalls = (health.reason or "").startswith("stalled")
        if stalls and not has_stalled:
            tell_stacks(health.reason or "")
        elif has_stalled and not stalls:
            log.warning("the engine goes on")
        has_stalled = stalls
        await trio.sleep(LOOK_SECONDS)


@contextmanager
def watching_loop(num_beats: Callable[[], int]) -> Iterator[None]:
    """Log where every thread is, once whenever the event loop that the body runs on hangs: it cannot do so itself.

    Args:
        num_beats: more of them at each look, as long as the loop goes on.
    """
    over = threading.Event()
    thread = threading.Thread(target=_watch_loop, args=(num_beats, over), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch_loop(num_beats: Callable[[], int], over: threading.Event) -> None:
    seen, num_missed = num_beats(), 0
    # Looks are counted, not seconds: a process that is stopped looks at nothing.
    while not over.wait(LOOK_SECONDS):
        before, seen = seen, num_beats()
        if seen == before:
            num_missed += 1
            if num_missed == HUNG_LOOKS:
                tell_stacks(f"the event loop has hung for {HUNG_LOOKS * LOOK_SECONDS:g} s, and nobody is answered")
        elif num_missed >= HUNG_LOOKS:
            log.warning("the event loop goes on")
            num_missed = 0
        else:
            num_missed = 0


def tell_stacks(why: str) -> None:
    """Log where every thread is."""
    log.error("%s; this is where the threads are:", why)
    for line in stacks().splitlines():
        log.error("%s", line)


def stacks() -> str:
    """The stacks of all threads, the innermost call first.

    The module's one timer, which watches the end of the process, is left alone.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read(MAX_STACK_BYTES).decode(errors="replace")
