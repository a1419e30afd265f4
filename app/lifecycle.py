"""The life of the process: how late its event loop is, how it is asked to end, and how it ends."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Protocol

import trio

from app.logs import flush_logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.engine import Engine

log = logging.getLogger("relevo.server")

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
LAG_SLEEP_SECONDS: Final = 0.05
LAG_WINDOW: Final = 40  # sleeps: two seconds
# Running requests get the drain timeout; what was ended then has so long to tell its client.
FAREWELL_SECONDS: Final = 5.0


class Watchers(Protocol):
    """The dashboards' streams."""

    def close(self) -> None:
        """Let them all go."""


class LoopLag:
    """Overshoot of a short sleep: what every stream on this event loop suffers too.

    Attributes:
        num_beats: sleeps that are over; the loop hangs while there are no more of them.
    """

    def __init__(self) -> None:
        self.num_beats = 0
        self._overshoots: deque[float] = deque([0.0], maxlen=LAG_WINDOW)

    @property
    def seconds(self) -> float:
        """The worst of the last two seconds."""
        return max(self._overshoots)

    async def run(self) -> None:
        """Measure, for ever."""
        while True:
            due = trio.current_time() + LAG_SLEEP_SECONDS
            await trio.sleep_until(due)
            self._overshoots.append(max(0.0, trio.current_time() - due))
            self.num_beats += 1


class Lifecycle:
    """Where the server is in its life.

    Attributes:
        draining: it was asked to end and takes nothing new.
        stopped: set when the HTTP server may close its connections.
        finished: set when it has.
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopped = trio.Event()
        self.finished = trio.Event()
        self.lag = LoopLag()

    def stats(self) -> dict[str, float]:
        """What the process adds to the engine's numbers."""
        return {"loop_lag_seconds": round(self.lag.seconds, 6)}

    async def drain(self, engine: Engine, watchers: Watchers, timeout_seconds: float) -> None:
        """Finish what runs within the limit, end the rest, let the dashboards go. New requests get 503 meanwhile."""
        self.draining = True
        engine.drain(timeout_seconds)
        with trio.move_on_after(timeout_seconds):
            await engine.wait_idle()
        if engine.num_open:
            log.warning("%d requests did not end within %g s and are cut", engine.num_open, timeout_seconds)
            engine.abort_all("shutdown")
            with trio.move_on_after(FAREWELL_SECONDS):
                await engine.wait_idle()
        watchers.close()
        self.stopped.set()

    async def watch_signals(
        self, drain: Callable[[], object], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Call `drain` on the first SIGTERM or SIGINT and leave the process at once on the second."""
        with trio.open_signal_receiver(*ENDING) as signals, _heeding_the_second():
            task_status.started()
            async for number in signals:
                log.info("%s: finishing what runs; a second signal ends it now", signal.Signals(number).name)
                self.draining = True
                drain()


@contextmanager
def _heeding_the_second() -> Iterator[None]:
    """Of the signals in the body the second ends the process at once, also where the event loop hangs.

    Python runs handlers on the main thread alone, between two of its instructions. Where it hangs in a system call that
    is only once the call is interrupted; and while the first signal is on its way to the main thread the kernel hands
    the second to another, which interrupts nothing. So a thread waits for what Python writes of every signal, whichever
    thread took it, and passes it on to trio.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_hear, args=(reader, before), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)  # as trio had it
        writer.close()
        thread.join()
        reader.close()


def _hear(reader: socket.socket, relay: int) -> None:
    """Take in the numbers of signals until the other end is closed.

    Args:
        relay: the descriptor that is told of each; -1 for none.
    """
    num_ending = 0
    while numbers := reader.recv(64):
        num_ending += sum(number in ENDING for number in numbers)
        if num_ending > 1:
            leave_now(1, b"relevo: second signal, leaving now\n")
        if relay != -1:
            with suppress(BlockingIOError):  # full: who reads it is told already
                os.write(relay, numbers)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A SIGTERM ends the process at once, and well, where nothing else looks after it: nobody is served there.

    That is while the model is loaded, and when all is drained. Only the main thread may say so.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: leave_now(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_now(code: int, words: bytes = b"") -> None:
    """End the process without any clean-up: a hung step must not be able to hold it. The log is written, if it can be.

    A signal may have come in the midst of anything, so nothing here waits for a lock.
    """
    flush_logs()
    if words and select.select([], [2], [], 0)[1]:  # else nobody reads
        os.write(2, words)
    os._exit(code)
