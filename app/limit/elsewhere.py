"""What else takes the CPUs of this machine while a server on it is measured: other processes, and its host.

Told by /proc, so on Linux alone, and of a server whose processes may be looked at.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from app.config_schema import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC: Final = Path("/proc")
LISTENING: Final = "0A"
# Of the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal.
BUSY, STOLEN, ALL = (0, 1, 2, 5, 6), 7, 8
# Where others take more than this share of all CPUs, it is said.
MUCH: Final = 0.1


class Share(NamedTuple):
    """Of the time of all CPUs: what other processes took, and what the host gave to other machines."""

    others: float
    stolen: float


@dataclass(frozen=True, slots=True)
class Taken:
    """Ticks of all CPUs since the machine was started.

    Attributes:
        known: by the server, by this process, and by all that they have started.
    """

    every: int
    busy: int
    stolen: int
    known: int


def look(host: str, port: int, proc: Path = PROC) -> Taken | None:
    """What was taken until now; `None` where the server is elsewhere, or cannot be looked at."""
    if not is_loopback(host):
        return None
    try:
        ticks = [int(word) for word in (proc / "stat").read_text().split("\n", 1)[0].split()[1 : ALL + 1]]
        servers = _holders(_sockets(port, proc), proc)
        busy = sum([ticks[place] for place in BUSY])
        return Taken(sum(ticks), busy, ticks[STOLEN], _ticks_of({*servers, os.getpid()}, proc)) if servers else None
    except (OSError, ValueError, IndexError):
        return None


def share_between(before: Taken | None, after: Taken | None) -> Share | None:
    """What others took between the two."""
    if before is None or after is None or after.every <= before.every:
        return None
    every = after.every - before.every
    others = (after.busy - before.busy) - (after.known - before.known)
    return Share(min(1.0, max(0, others) / every), max(0, after.stolen - before.stolen) / every)


def _sockets(port: int, proc: Path) -> set[str]:
    """Those that listen at a port, as links to them read."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{words[9]}]")
    return found


def _holders(sockets: set[str], proc: Path) -> set[int]:
    """Who has one of these open, as far as this user may see."""
    found = set()
    for folder in _processes(proc):
        with suppress(OSError):  # it has ended, or is another's
            for link in (folder / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(link) in sockets:
                        found.add(int(folder.name))
                        break
    return found


def _ticks_of(roots: set[int], proc: Path) -> int:
    """What these and all below them took, with those of them that have ended."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in _processes(proc):
        with suppress(OSError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(words[1]), []).append(int(folder.name))
            ticks[int(folder.name)] = sum([int(word) for word in words[11:15]])
    seen: set[int] = set()
    left = [*roots]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            left += children.get(one, [])
    return sum([ticks.get(one, 0) for one in seen])


def _processes(proc: Path) -> Iterator[Path]:
    return (folder for folder in proc.iterdir() if folder.name.isdigit())
