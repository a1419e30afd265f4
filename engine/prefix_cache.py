"""Full KV blocks that may be read again, found by what they hold: exact by construction.

A block's key is (uid of the block before it, its token ids). The uid stands for everything that came before, so equal
keys mean equal prefixes; there is no hash of our own that could collide. A uid is never used twice, so that a key that
names an evicted block can never be found again.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

Uid = int
Key = tuple["Uid | Hashable", tuple[int, ...]]


class PrefixCache:
    """Which blocks are cached, and in which order those that nobody refers to are given up.

    A chain starts at a root: whoever shares a root shares its blocks, and nobody else.
    """

    def __init__(self) -> None:
        self._found: dict[Key, tuple[int, Uid]] = {}
        self._keys: dict[int, Key] = {}
        # Blocks without a reference, the first to be evicted first.
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._uids = count(1)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._keys

    @property
    def num_unreferenced(self) -> int:
        """Cached blocks that nobody refers to."""
        return len(self._unreferenced)

    def find(self, parent: Uid | Hashable, token_ids: tuple[int, ...]) -> tuple[int, Uid] | None:
        """Block id and uid of the cached block with these tokens after `parent`."""
        return self._found.get((parent, token_ids))

    def add(self, block_id: int, parent: Uid | Hashable, token_ids: tuple[int, ...]) -> Uid:
        """Remember a full block; gives the uid that stands for it as a parent.

        Where an equal block is cached already that one stays, and its uid is given.
        """
        key = (parent, token_ids)
        found = self._found.get(key)
        if found is not None:
            return found[1]
        uid = next(self._uids)
        self._found[key] = (block_id, uid)
        self._keys[block_id] = key
        return uid

    def release(self, block_id: int) -> None:
        """Nobody refers to this cached block any more: it is the last to be evicted."""
        self._unreferenced[block_id] = None

    def take(self, block_id: int) -> None:
        """Somebody refers to it again."""
        self._unreferenced.pop(block_id, None)

    def evict(self) -> int:
        """Forget the block that was not used for longest, and give its id.

        Tables are released from their end, so a block goes before the one it follows.

        Raises:
            KeyError: every cached block is referred to.
        """
        block_id, _ = self._unreferenced.popitem(last=False)
        del self._found[self._keys.pop(block_id)]
        return block_id

    def clear(self) -> list[int]:
        """Forget everything; gives the ids of the blocks that nobody referred to."""
        free = list(self._unreferenced)
        for known in (self._found, self._keys, self._unreferenced):
            known.clear()
        return free

    def unreferenced(self) -> set[int]:
        """Ids of the cached blocks that nobody refers to."""
        return set(self._unreferenced)
