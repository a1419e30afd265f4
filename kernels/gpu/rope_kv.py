"""Rotary positions and the way into the paged cache in one launch: one program a token and a few heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr: tl.tensor,
    rotations_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    block_stride: tl.tensor,
    side_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Program (token, part): HEADS heads of query, key and value in this order."""
    token = tl.program_id(0).to(tl.int64)  # token * stride may pass 2³¹
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, PADDED_SIZE)
    pairs = tl.arange(0, PADDED_SIZE // 2)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (columns < HEAD_SIZE)[None, :]
    places = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_SIZE + columns[None, :]
    lines = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(lines, [HEADS, PADDED_SIZE // 2, 2]))

    position = tl.load(positions_ptr + token).to(tl.int64)
    angles = rotations_ptr + position * HEAD_SIZE + 2 * pairs
    known = pairs < HEAD_SIZE // 2
    cos = tl.load(angles, mask=known, other=1.0)[None, :]
    sin = tl.load(angles + 1, mask=known, other=0.0)[None, :]
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    rotated = tl.reshape(rotated, [HEADS, PADDED_SIZE])
    tl.store(places, rotated.to(qkv_ptr.dtype.element_ty), mask=inside & (heads < NUM_HEADS)[:, None])

    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    line = heads - NUM_HEADS  # keys, then values
    side, kv_head = line // NUM_KV_HEADS, line % NUM_KV_HEADS
    new = tl.where((side == 0)[:, None], rotated, lines)
    if SCALED:
        scales = tl.load(scales_ptr + line, mask=(line >= 0) & (line < 2 * NUM_KV_HEADS), other=1.0)
        # Beyond the largest eight-bit float there is only NaN.
        new = tl.minimum(tl.maximum(new / scales[:, None], -448.0), 448.0)
    # A block id times the stride may pass 2³¹.
    start = (slot // BLOCK_SIZE).to(tl.int64) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    targets = kv_cache_ptr + start + (side * side_stride + kv_head * kv_head_stride)[:, None] + columns[None, :]
    tl.store(targets, new.to(kv_cache_ptr.dtype.element_ty), mask=inside & (line >= 0)[:, None])


def rope_kv_write(
    qkv: torch.Tensor,
    rotations: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """Rotate queries in place, and put rotated keys and values into their slots of the paged cache.

    Args:
        qkv: [N, H + 2 * KVH, D], queries, keys, values; elements 2i and 2i+1 of a head are a pair. Tokens may lie
            apart, what belongs to one may not. Keys and values stay as they are.
        rotations: [P, D/2, 2] float32, cosine and sine of each position's angles.
        positions: [N] int32.
        kv_cache: [blocks, 2, KVH, block_size, D], changed in place; elements of a line lie side by side.
        slots: [N] int32, block id times block size plus the place in the block; -1 writes nothing. None comes twice.
        scales: [2, KVH] float32, what the cache's numbers will be multiplied with; for a cache of eight-bit floats.
    """
    num_tokens, num_lines, head_size = qkv.shape
    kv_heads, block_size = kv_cache.shape[2:4]
    if num_tokens == 0:
        return
    padded_size = triton.next_power_of_2(head_size)
    heads = max(1, min(triton.next_power_of_2(num_lines), 2048 // padded_size))
    rope_kv_write_kernel[(num_tokens, triton.cdiv(num_lines, heads))](
        qkv, rotations, positions, kv_cache, slots, rotations if scales is None else scales, qkv.stride(0),
        *kv_cache.stride()[:4],
        NUM_HEADS=num_lines - 2 * kv_heads, NUM_KV_HEADS=kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        HEADS=heads, PADDED_SIZE=padded_size, SCALED=scales is not None, num_warps=4,
    )  # fmt: skip
