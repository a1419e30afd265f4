"""The KV blocks of one cache group: who holds which, and which are free."""

from __future__ import annotations


class BlockPool:
    """Hands out block ids and counts who refers to them.

    A block is free, or referred to by one or more block tables. The pool knows numbers only; the memory
    behind a block id belongs to the runner.

    Args:
        num_blocks: how many blocks there are; ids run from 0.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # Used as a stack, lowest ids on top: recently freed blocks are warm in the CPU's caches.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Take `num_blocks` blocks, each referred to once, or `None` when there are not as many."""
        if num_blocks > len(self._free):
            return None
        block_ids = tuple(self._free.pop() for _ in range(num_blocks))
        for block_id in block_ids:
            self.ref_counts[block_id] = 1
        return block_ids

    def free(self, block_ids: list[int]) -> None:
        """Drop one reference to each block; a block without references is free.

        Raises:
            ValueError: a block was free already.
        """
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is free already")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self, block_tables: list[list[int]]) -> None:
        """Compare the reference counts with the tables that hold the blocks.

        Raises:
            RuntimeError: a count is off, or free and used blocks do not add up.
        """
        expected = [0] * self.num_blocks
        for table in block_tables:
            for block_id in table:
                expected[block_id] += 1
        if expected != self.ref_counts:
            wrong = [i for i in range(self.num_blocks) if expected[i] != self.ref_counts[i]]
            raise RuntimeError(f"reference counts of blocks {wrong[:8]} differ from the tables that hold them")
        if len(self._free) != expected.count(0) or len(set(self._free)) != len(self._free):
            raise RuntimeError(f"{len(self._free)} blocks on the free list, {expected.count(0)} without a reference")
