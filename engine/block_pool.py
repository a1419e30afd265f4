"""The KV blocks of one cache group: who holds which, which are cached, and which are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Iterable


class BlockPool:
    """Hands out block ids and counts who refers to them.

    A block is *used* while one or more block tables refer to it, *cached* when none does but what it holds may be read
    again, else *free*. The pool knows numbers only; the memory behind a block id belongs to the runner.

    Args:
        num_blocks: how many blocks there are; ids run from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.cache = PrefixCache()
        self.num_evictions = 0
        self.num_flushed = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """All blocks are free and none is cached, whatever was held before."""
        self.cache.clear()
        self.ref_counts = [0] * self.num_blocks
        # Used as a stack, lowest ids on top: recently freed blocks are warm in the CPU's caches.
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones after their eviction."""
        return len(self._free) + self.cache.num_unreferenced

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Take `num_blocks` blocks, each referred to once, or `None` when there are not as many.

        Cached blocks are evicted only when nothing is free.
        """
        if num_blocks > self.num_available:
            return None
        block_ids = tuple([self._free.pop() if self._free else self._evict() for _ in range(num_blocks)])
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Refer once more to blocks that are used or cached."""
        for block_id in block_ids:
            self.cache.take(block_id)
            self.ref_counts[block_id] += 1

    def free(self, block_ids: list[int]) -> None:
        """Drop one reference to each block; one without references is cached if it is known, else free.

        Raises:
            ValueError: a block was free already.
        """
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is free already")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id]:
                continue
            if block_id in self.cache:
                self.cache.release(block_id)
            else:
                self._free.append(block_id)

    def flush(self) -> None:
        """Forget what the cache holds: cached blocks are free, used ones are not found any more."""
        free = self.cache.clear()
        self.num_flushed += len(free)
        self._free = sorted([*self._free, *free], reverse=True)

    def check_sums(self, num_held: int) -> None:
        """Compare totals alone: much cheaper than `check_integrity`, and blind for faults that balance each other.

        Args:
            num_held: entries of all block tables together.

        Raises:
            RuntimeError: they differ.
        """
        num_references, num_idle = sum(self.ref_counts), self.ref_counts.count(0)
        if num_references != num_held:
            raise RuntimeError(f"{num_references} references are counted, the tables hold {num_held} blocks")
        if num_idle != self.num_available:
            raise RuntimeError(
                f"{num_idle} blocks are not used, but {self.num_free} are free and {self.cache.num_unreferenced} cached"
            )

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Compare the reference counts with the tables that hold the blocks.

        Raises:
            RuntimeError: a count is off, or used, cached and free blocks do not add up.
        """
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                expected[block_id] += 1
        if expected != self.ref_counts:
            wrong = [i for i in range(self.num_blocks) if expected[i] != self.ref_counts[i]]
            raise RuntimeError(f"reference counts of blocks {wrong[:8]} differ from the tables that hold them")
        idle = sorted([*self._free, *self.cache.unreferenced()])
        if idle != [i for i in range(self.num_blocks) if expected[i] == 0]:
            raise RuntimeError(f"{len(self._free)} free and {self.cache.num_unreferenced} cached blocks do not add up")

    def _evict(self) -> int:
        self.num_evictions += 1
        return self.cache.evict()
