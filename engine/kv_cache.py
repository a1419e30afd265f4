"""The paged KV cache as the scheduler sees it (PagedAttention, vLLM): block tables that grow and are given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks by state; they add up to `total`."""

    total: int
    used: int
    cached: int
    free: int


class KVCache:
    """Block tables of all sequences over one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the first `num_tokens` tokens of a sequence.

        Returns:
            The blocks appended to its table (often none), or `None` when the pool cannot give them now;
            then nothing has changed.
        """
        missing = self.blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return ()
        block_ids = self.pool.allocate(missing)
        if block_ids is not None:
            sequence.block_ids.extend(block_ids)
        return block_ids

    def release(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds."""
        self.pool.free(sequence.block_ids)
        sequence.block_ids.clear()

    @property
    def usage(self) -> KVUsage:
        """Blocks by state, now."""
        free = self.pool.num_free
        return KVUsage(total=self.pool.num_blocks, used=self.pool.num_blocks - free, cached=0, free=free)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Hold the pool against the tables of all live sequences.

        Raises:
            RuntimeError: they differ.
        """
        self.pool.check_integrity([sequence.block_ids for sequence in sequences])
