"""Attention over the paged KV cache on a GPU: how it is cut, and its launch. The kernels have a file of their own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.attention_kernels import combine_segments_kernel, paged_attention_kernel
from kernels.gpu.traits import traits_of

if TYPE_CHECKING:
    from kernels.paged_attention import AttentionRows

# More segments would leave each too few tiles to keep memory busy.
MAX_SEGMENTS = 32
# Row starts that a program looks at in one go when it seeks its row.
SEARCH = 256


class Tiles(NamedTuple):
    """How a program is cut.

    Attributes:
        lines: query lines of a program, a power of two from 16 on, no fewer than the group's heads.
        keys: keys that are read at a time, a power of two from 16 on.
        num_warps, num_stages: as Triton has them; stages are tiles under way plus one.
    """

    lines: int
    keys: int
    num_warps: int
    num_stages: int


class Segments(NamedTuple):
    """Where the parts of split rows meet.

    Attributes:
        values: [N, H, S, D] float32, each segment's result by itself.
        weights: [N, H, S] float32, the logarithm to base 2 of each segment's sum of exponentials.
    """

    values: torch.Tensor
    weights: torch.Tensor


def num_segments(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Into how many segments to split rows of one token each; 1 where they fill the device as they are.

    The most that leaves no multiprocessor more than two programs.
    """
    segments = 1
    while segments < MAX_SEGMENTS and num_rows * num_kv_heads * segments * 2 <= 2 * num_multiprocessors:
        segments *= 2
    return segments


def make_segments(query: torch.Tensor, count: int) -> Segments:
    """Room for `count` segments of each of these tokens."""
    shape = (*query.shape[:2], count)
    values = torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device)
    return Segments(values, torch.empty(shape, dtype=torch.float32, device=query.device))


def choose_tiles(group: int, head_size: int, cache_dtype: torch.dtype, *, decode: bool, shared_bytes: int) -> Tiles:
    """The cut for a shape: large tiles that compile without spills, see kernels/RESULTS.md.

    Args:
        group: query heads of a key head.
        head_size: elements.
        cache_dtype: of the keys.
        decode: the rows have one token each.
        shared_bytes: see `Traits`. Who has as much as a Hopper takes products from there, and has registers left.
    """
    least, padded_size = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(head_size)
    # Three products of a float32 each fill the registers soon.
    if decode or cache_dtype == torch.float32:
        keys = 16384 // (padded_size * max(2, cache_dtype.itemsize))
        wide = cache_dtype == torch.float32 and (padded_size > 128 or least > 16)
        return Tiles(least, min(max(16, keys), 128), 8 if wide else 4, 3)
    if padded_size > 128:
        return Tiles(max(64, least), 32, 8, 2)
    return Tiles(max(64, least), 64 if shared_bytes > 200_000 else 32, 4, 3)


def _product_dtype(query: torch.Tensor, kv_cache: torch.Tensor) -> tl.dtype:
    """What products are taken in: the cache's dtype; with a cache of eight-bit floats float16, which holds them all."""
    if kv_cache.dtype == torch.bfloat16 and query.device.type == "cpu":
        return tl.float32  # the interpreter takes bfloat16's bits for whole numbers
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}.get(kv_cache.dtype, tl.float16)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    rows: AttentionRows,
    *,
    max_query_len: int,
    scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    segments: Segments | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Causal attention of each row's new tokens over all of its tokens in the paged cache.

    Args:
        query: [N, H, D]; the rows' tokens one row after the other. Elements of a head lie side by side.
        kv_cache: [blocks, 2, KVH, block_size, D]; holds the new tokens already. block_size is a power of two. Products
            are taken in its dtype, but for eight-bit floats, with which they are taken in float16.
        rows: block tables, starts and lengths, int32 on the device. A row of length 0 reads and writes nothing.
        max_query_len: of the rows' new tokens. 1 promises that row r's only token is token r, and leaves
            `query_start_loc` unread.
        scales: [2, KVH] float32, positive, what the cache's numbers are to be multiplied with: keys, then values.
        out: [N, H, D], where to write; made when it is not given.
        segments: splits rows of one token, into as many parts as there is room for.
        tiles: how to cut instead of `choose_tiles`.

    Returns:
        [N, H, D] in the query's dtype.
    """
    out = torch.empty_like(query) if out is None else out
    num_tokens, num_heads, head_size = query.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    num_rows = rows.seq_lens.shape[0]
    decode = max_query_len == 1
    group = num_heads // num_kv_heads
    pairs = kv_cache.dtype == torch.float8_e4m3fn
    arch, shared_bytes = traits_of(query.device)
    tiles = tiles or choose_tiles(group, head_size, kv_cache.dtype, decode=decode, shared_bytes=shared_bytes)
    lines, keys, num_warps, num_stages = tiles
    block_q = lines // group
    count = 1 if segments is None else segments.weights.shape[2]
    if num_rows == 0:
        return out
    padded_size = triton.next_power_of_2(head_size)
    stored = kv_cache.view(torch.int16) if pairs else kv_cache
    grid = (num_rows if decode else num_tokens // block_q + num_rows, num_kv_heads, count)
    values, weights = segments or (out, out)
    paged_attention_kernel[grid](
        query, stored, out, rows.block_tables, rows.query_start_loc, rows.seq_lens,
        out if scales is None else scales, values, weights, num_rows, math.log2(math.e) / math.sqrt(head_size),
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), rows.block_tables.stride(0),
        *stored.stride()[:4],
        GROUP=group, HEAD_SIZE=head_size, PADDED_SIZE=padded_size, BLOCK_SIZE=block_size, LINES=lines, BLOCK_Q=block_q,
        KEYS=keys, DECODE=decode, NUM_SEGMENTS=count, PRODUCT=_product_dtype(query, kv_cache),
        SCALED=scales is not None, SEARCH=SEARCH, PRECISION="tf32x3" if arch else "ieee",
        PAIRS=pairs, NATIVE=pairs and arch >= 89,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if segments is not None:
        combine_segments_kernel[(num_tokens, num_heads)](
            values, weights, out, rows.seq_lens, out.stride(0), out.stride(1),
            HEAD_SIZE=head_size, PADDED_SIZE=padded_size, KEYS=keys, NUM_SEGMENTS=count,
        )  # fmt: skip
    return out
