"""A job that is killed. It stands alone: the process that takes it up imports nothing else."""

from __future__ import annotations

import os
import signal
from typing import Any


def be_killed(_policy: str) -> Any:
    """As by a system that is short of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
