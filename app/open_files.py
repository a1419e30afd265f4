"""How many files this process may have open; each connection is one."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import Final

MOST_OPEN_FILES: Final = 1 << 16
# What macOS gives at most, though it may call its own limit infinite.
_MOST_ON_MACOS: Final = 10_240
# Of a server that has loaded its model, where the system does not tell.
_USUALLY_OPEN: Final = 64


def raise_open_files() -> None:
    """Take as many as this process may have, up to `MOST_OPEN_FILES`: systems begin with 1,024, or with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (MOST_OPEN_FILES, _MOST_ON_MACOS):
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return


def most_open_files() -> int:
    """How many this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_OPEN_FILES)


def count_open_files() -> int:
    """How many it has open."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return _USUALLY_OPEN
