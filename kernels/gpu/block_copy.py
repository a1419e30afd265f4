"""Copies whole blocks of the paged cache.

The engine needs none of it so far: sequences share blocks that are full and never written again, and what stands in a
block that is not full is computed anew by whoever wants it. It is what copy-on-write would take: beams that part within
a block, or a prompt that leaves another one there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def copy_blocks_kernel(
    cache_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    destinations_ptr: tl.tensor,
    block_stride: tl.tensor,
    num_elements: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (copy, part): BLOCK elements of a block."""
    copy = tl.program_id(0)
    source = tl.load(sources_ptr + copy).to(tl.int64)  # times the stride it may pass 2³¹
    destination = tl.load(destinations_ptr + copy).to(tl.int64)
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < num_elements
    values = tl.load(cache_ptr + source * block_stride + elements, mask=inside)
    tl.store(cache_ptr + destination * block_stride + elements, values, mask=inside)


def copy_blocks(kv_cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy blocks of a cache, in place.

    Args:
        kv_cache: [blocks, 2, KVH, block_size, D] of any dtype; elements of a block lie side by side.
        sources: [C] int32, block ids.
        destinations: [C] int32, block ids; none comes twice, or is a source.
    """
    count = sources.shape[0]
    if count:
        num_elements = kv_cache[0].numel()
        block = min(4096, triton.next_power_of_2(num_elements))
        copy_blocks_kernel[(count, triton.cdiv(num_elements, block))](
            kv_cache, sources, destinations, kv_cache.stride(0), num_elements, BLOCK=block, num_warps=4
        )
