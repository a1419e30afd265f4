"""How much memory there is to take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import EngineConfig

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes that can be allocated now: what the kernel calls available, within the container's own limit."""
    return min(_system_available(), _cgroup_available())


def _system_available() -> int:
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> int:
    """What a control group (a container) leaves; as good as infinite where there is none."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


def num_cache_blocks(
    config: EngineConfig, max_model_len: int, bytes_per_token: int, *, available: int, share: float, where: str = "here"
) -> int:
    """Blocks for the memory that was given, or for what is useful within the share that may be taken.

    Args:
        available: bytes that can be had.
        share: of them, unless the configuration says how many.
        where: in words.

    Raises:
        ConfigError: there is less than was given, or less than a block takes.
    """
    available = max(0, available)
    block_bytes = bytes_per_token * config.block_size
    given = config.cache_memory_bytes
    if given is not None:
        if given > available:
            raise ConfigError(f"cache.memory is {given} bytes, but only {available} are free {where}: give it less.")
        num_blocks = given // block_bytes
        if num_blocks < 1:
            raise ConfigError(f"cache.memory is too small: one block takes {block_bytes} bytes, give at least as many.")
        return num_blocks
    useful = config.capacity_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(useful, int(available * share) // block_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"Only {available} bytes are free {where} for the KV cache, and one block takes {block_bytes}: free more, "
            "or take a smaller model."
        )
    return num_blocks
