"""What a model says about its cache: groups of layers that share block tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of cache; block tables belong to a group.

    Attributes:
        kind: `full` keeps every token's keys and values.
        layers: indices of the layers.
        num_kv_heads: key/value heads of a layer.
        head_size: elements of a head.
    """

    kind: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_size: int

    def bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of keys and values of one token over all layers of the group.

        Args:
            scale_bytes: beside the elements of each head's key, and of its value.
        """
        return 2 * len(self.layers) * self.num_kv_heads * (self.head_size * element_bytes + scale_bytes)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of a whole model."""

    groups: tuple[CacheGroup, ...]

    def bytes_per_token(self, element_bytes: int, scale_bytes: int = 0) -> int:
        """Bytes of one token over all groups."""
        return sum(group.bytes_per_token(element_bytes, scale_bytes) for group in self.groups)
