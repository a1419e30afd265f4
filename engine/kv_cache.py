"""The paged KV cache as the scheduler sees it (PagedAttention, vLLM): block tables that grow and are given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from collections.abc import Sequence as Seq

    from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Blocks by state; they add up to `total`."""

    total: int
    used: int
    cached: int
    free: int


class Prefix(NamedTuple):
    """Cached blocks, and the uid of the last of them: what the next block of the chain hangs on."""

    block_ids: list[int]
    parent: Hashable


class KVCache:
    """Block tables of all sequences over one pool, and the prefix cache in it.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens of a block.
        enable_prefix_caching: whether full blocks are remembered and read again.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def num_tokens(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The cached blocks that hold the beginning of a sequence; see `find`."""
        return self.find(sequence.cache_root, sequence.token_ids)

    def find(self, root: Hashable, token_ids: Seq[int]) -> Prefix:
        """The cached blocks that hold the beginning of some tokens, from the first one on.

        The last token is never among them: it must be computed to know what follows, and its block is written.
        """
        found: list[int] = []
        parent = root
        if not self.enable_prefix_caching:
            return Prefix(found, parent)
        size = self.block_size
        for start in range(0, len(token_ids) - size, size):
            hit = self.pool.cache.find(parent, tuple(token_ids[start : start + size]))
            if hit is None:
                break
            block_id, parent = hit
            found.append(block_id)
        return Prefix(found, parent)

    def num_cached(self, root: Hashable, token_ids: Seq[int]) -> int:
        """How many of some tokens need not be computed now."""
        return len(self.find(root, token_ids).block_ids) * self.block_size

    def fits(self, num_blocks: int, prefix: Prefix, num_promised: int) -> bool:
        """Whether a newcomer of `num_blocks` blocks finds room beside `num_promised` more that others will need.

        Args:
            prefix: what `find_prefix` found. Blocks of it that others use cost nothing.
        """
        shared = sum(1 for block_id in prefix.block_ids if self.pool.ref_counts[block_id])
        return num_blocks - shared + num_promised <= self.pool.num_available

    def num_freed(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that could be had if a sequence left: its own, without those that `prefix` would hold on to."""
        wanted, ref_counts = set(prefix.block_ids), self.pool.ref_counts
        return sum([ref_counts[block_id] == 1 and block_id not in wanted for block_id in sequence.block_ids])

    def seat(self, sequence: Sequence, prefix: Prefix) -> tuple[int, ...] | None:
        """Begin a block table with a cached prefix and make room for all known tokens.

        Returns:
            The whole table, or `None` when there is no room; then nothing has changed.
        """
        block_ids, sequence.cache_parent = prefix
        self.pool.share(block_ids)
        sequence.block_ids.extend(block_ids)
        new_blocks = self.allocate(sequence, len(sequence.token_ids))
        if new_blocks is None:
            self.release(sequence)
            return None
        sequence.num_remembered_blocks = len(block_ids)
        sequence.num_computed_tokens = len(block_ids) * self.block_size
        self.remember(sequence, sequence.num_computed_tokens)
        return (*block_ids, *new_blocks)

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
            sequence.room = len(sequence.block_ids) * self.block_size
        return block_ids

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Put the blocks that have become full into the prefix cache; to be called when one has.

        Args:
            num_tokens: the first tokens of the sequence, which are known and were computed without a failure.
        """
        size = self.block_size
        if not self.enable_prefix_caching:
            sequence.next_full = sequence.end_length + size
            return
        for index in range(sequence.num_remembered_blocks, num_tokens // size):
            token_ids = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.cache_parent = self.pool.cache.add(sequence.block_ids[index], sequence.cache_parent, token_ids)
            sequence.num_remembered_blocks = index + 1
        sequence.next_full = (sequence.num_remembered_blocks + 1) * size

    def flush(self, running: Iterable[Sequence]) -> None:
        """Forget all that is cached; those that run keep their blocks, and remember no more of them.

        What would be remembered after a block that is forgotten could never be found.
        """
        self.pool.flush()
        for sequence in running:
            sequence.next_full = sequence.end_length + self.block_size

    def begin_anew(self, sequences: Iterable[Sequence]) -> None:
        """Forget every table and all that is cached, whatever has become of them; these hold nothing then."""
        self.pool.begin_anew()
        for sequence in sequences:
            sequence.block_ids = []
            sequence.room = sequence.num_remembered_blocks = sequence.num_computed_tokens = 0

    def release(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds."""
        self.pool.free(sequence.block_ids)
        sequence.block_ids.clear()
        sequence.room = 0
        sequence.num_remembered_blocks = 0

    @property
    def usage(self) -> KVUsage:
        """Blocks by state, now."""
        total, free, cached = self.pool.num_blocks, self.pool.num_free, self.pool.cache.num_unreferenced
        return KVUsage(total=total, used=total - free - cached, cached=cached, free=free)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Hold the pool against the tables of all live sequences.

        Raises:
            RuntimeError: they differ.
        """
        self.pool.check_integrity([sequence.block_ids for sequence in sequences])
