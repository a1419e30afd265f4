"""How processes that were started here come to their end."""

from __future__ import annotations

import subprocess


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Wait for a process that was asked to end, and kill it where it does not in time or nobody waits any longer."""
    try:
        process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    except BaseException:  # a second interruption, while the first is cleaned up after
        process.kill()
        process.wait()
        raise
