"""The processor, and how many of its cores there are to take."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Cores that this process may use: those it is allowed to run on, within the container's share of time.

    A share of two and a half cores is two: one thread too many is stopped again and again, and all others wait for it.

    Args:
        cgroups: where control groups are mounted.
        membership: names the group of this process in each hierarchy.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(int, _shares(cgroups, membership))]))


def _shares(cgroups: Path, membership: Path) -> Iterator[float]:
    """Cores' worth of time that each group around this process may take; only of groups with a limit."""
    for folder, version in _groups(cgroups, membership):
        try:
            if version == 2:
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
            # No limit is the word "max" in the one, -1 in the other.
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                yield int(quota) / int(period)
        except (OSError, ValueError):
            continue  # a group without these files sets no limit


def _groups(cgroups: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Folders of the groups that hold this process, each with all above it, and the version of their hierarchy.

    A container often sees its own group as the root, under a name that is not to be found there: the root counts then.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        number, controllers, name = [*line.split(":", 2), "", ""][:3]
        if (number, controllers) == ("0", ""):
            roots, version = [cgroups, cgroups / "unified"], 2
        elif "cpu" in controllers.split(","):
            roots, version = [cgroups / controllers, cgroups / "cpu"], 1
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for root in roots:
            for depth in range(len(parts) + 1):
                yield root.joinpath(*parts[:depth]), version


def processor_name() -> str:
    """The processor's own name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
