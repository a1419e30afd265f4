"""Ends this process with the one that started it, where that is wanted."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Final

STDIN: Final = 0


def end_with_input() -> None:
    """End this process as SIGTERM does when its standard input ends: whoever held the other end is gone.

    A thread waits for it, so that it holds while the model is loaded, too.
    """

    def watch() -> None:
        with suppress(OSError):
            while os.read(STDIN, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="input", daemon=True).start()
