"""Attention over the paged KV cache in Triton, for any mix of prefill and decode in one launch.

A program computes up to BLOCK_Q neighbouring tokens of one row, for all query heads that share a key head: line m of
its tile is token m // GROUP, query head m % GROUP, so that each key and value is read once a group. It walks over the
keys in tiles that begin at absolute positions and keeps the softmax's running maximum and sum (Milakov and Gimelshein,
2018; Dao et al., FlashAttention, 2022). With few rows of one token each, a row's keys are split into segments, one
program each, and a second kernel combines them (Flash-Decoding).
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

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


@triton.jit
def _row_of_tile(
    tile: tl.tensor, query_start_loc_ptr: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr, SEARCH: tl.constexpr
) -> tl.tensor:
    """The row whose tokens a tile holds.

    Row r has the tiles from `query_start_loc[r] // BLOCK_Q + r` on: room for all of its own, whatever the others'
    lengths are, so nobody has to sum them up. These numbers grow with r: the row is the last that begins by `tile`.
    """
    begun = tl.full((), 0, tl.int32)
    for start in range(0, num_rows, SEARCH):
        rows = start + tl.arange(0, SEARCH)
        inside = rows < num_rows
        firsts = tl.load(query_start_loc_ptr + rows, mask=inside, other=0) // BLOCK_Q + rows
        begun += tl.sum((inside & (firsts <= tile)).to(tl.int32), axis=0)
    return begun - 1


@triton.jit
def _unpack(pairs: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """The eight-bit floats (e4m3) in the low halves of whole numbers, and those in the high halves.

    Two by two because products' operands come out of shared memory in 16 bits; eight would be fetched one by one.

    Args:
        pairs: int16.
        NATIVE: with the instruction that NVIDIA has from sm_89 on.

    Returns:
        Two tensors of float16.
    """
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            .reg .b32 wide_first, wide_second;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 wide_first, first;
            cvt.rn.f16x2.e4m3x2 wide_second, second;
            prmt.b32 $0, wide_first, wide_second, 0x5410;
            prmt.b32 $1, wide_first, wide_second, 0x7632;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        # Sign, exponent and mantissa in their places; the exponents' biases differ by eight.
        low = (((pairs << 8) & -32768) | ((pairs << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
        high = ((pairs & -32768) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0
    return low, high


@triton.jit
def _attend(
    query: tl.tensor,
    query_odd: tl.tensor,
    total: tl.tensor,
    total_odd: tl.tensor,
    maximum: tl.tensor,
    norm: tl.tensor,
    first_tile: tl.tensor,
    last_tile: tl.tensor,
    key_limit: tl.tensor,
    positions: tl.tensor,
    table_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Take the tiles from `first_tile` up to `last_tile` into total, total_odd, maximum and norm.

    Not MASKED promises that every line sees every key of these tiles. Scores times `scale`, which is positive, are
    logarithms to base 2; so is the maximum. PAIRS: the cache has pairs of eight-bit floats, `query` and `total` are
    columns of even number, and `query_odd` and `total_odd` the others; else those two are left alone.
    """
    columns = tl.arange(0, PADDED_SIZE)
    inside = columns[None, :] < HEAD_SIZE
    keys = first_tile * KEYS + tl.arange(0, KEYS)
    # Tiles begin where blocks do, unless a block holds several.
    slots = tl.arange(0, KEYS) % BLOCK_SIZE * slot_stride
    within = slots[:, None] + columns[None, :]
    block_ids = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < key_limit, other=0)
    for _ in range(first_tile, last_tile):
        if KEYS < BLOCK_SIZE:
            within = (keys % BLOCK_SIZE * slot_stride)[:, None] + columns[None, :]
        # A block id times the stride may pass 2³¹.
        places = (block_ids.to(tl.int64) * block_stride)[:, None] + within
        # What no row has written may be anything, NaN too: zero times NaN would not be zero.
        if MASKED:
            owned = keys[:, None] < key_limit
            if HEAD_SIZE != PADDED_SIZE:
                owned = owned & inside
            key = tl.load(key_ptr + places, mask=owned, other=0.0)
            value = tl.load(value_ptr + places, mask=owned, other=0.0)
        elif HEAD_SIZE != PADDED_SIZE:
            key = tl.load(key_ptr + places, mask=inside, other=0.0)
            value = tl.load(value_ptr + places, mask=inside, other=0.0)
        else:
            key = tl.load(key_ptr + places)
            value = tl.load(value_ptr + places)
        if PAIRS:
            key_even, key_odd = _unpack(key, NATIVE)
            scores = tl.dot(query, tl.trans(key_even))
            scores = tl.dot(query_odd, tl.trans(key_odd), scores)
        else:
            scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
        if MASKED:
            seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] < key_limit)
            scores = tl.where(seen, scores, float("-inf"))
        # The next tile's blocks are looked up while this tile's keys are under way.
        keys += KEYS
        block_ids = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < key_limit, other=0)
        higher = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
        chances = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(maximum - higher)
        norm = norm * fade + tl.sum(chances, axis=1)
        total = total * fade[:, None]
        chances = chances.to(query.dtype)
        if PAIRS:
            value_even, value_odd = _unpack(value, NATIVE)
            total = tl.dot(chances, value_even, total)
            total_odd = tl.dot(chances, value_odd, total_odd * fade[:, None])
        else:
            total = tl.dot(chances, value.to(query.dtype), total, input_precision=PRECISION)
        maximum = higher
    return total, total_odd, maximum, norm


# The number of rows changes with every step, and must not make the compiler start anew.
@triton.jit(do_not_specialize=["num_rows"])
def paged_attention_kernel(
    query_ptr: tl.tensor,
    kv_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    query_start_loc_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    values_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    side_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    KEYS: tl.constexpr,
    DECODE: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    SCALED: tl.constexpr,
    SEARCH: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Program (tile of tokens, key head, segment). DECODE: tile r is row r, which has one token, token r."""
    kv_head = tl.program_id(1)
    if DECODE:
        row = tl.program_id(0)
        first_token, num_tokens = row, 1
    else:
        tile = tl.program_id(0)
        row = _row_of_tile(tile, query_start_loc_ptr, num_rows, BLOCK_Q, SEARCH)
        start = tl.load(query_start_loc_ptr + row)
        done = (tile - (start // BLOCK_Q + row)) * BLOCK_Q  # the row's tokens in tiles before this one
        first_token = start + done
        num_tokens = tl.load(query_start_loc_ptr + row + 1) - first_token
        if num_tokens <= 0:
            return
    seq_len = tl.load(seq_lens_ptr + row)
    if seq_len == 0:
        return

    first_position = seq_len - num_tokens  # of the tile's tokens: those after them in the row count in num_tokens too
    key_limit = tl.minimum(first_position + BLOCK_Q, seq_len)
    if DECODE:
        key_limit = seq_len
    num_tiles = tl.cdiv(key_limit, KEYS)
    first_tile, last_tile = 0, num_tiles
    if NUM_SEGMENTS > 1:
        segment = tl.program_id(2)
        tiles_each = tl.cdiv(num_tiles, NUM_SEGMENTS)
        first_tile = segment * tiles_each
        last_tile = tl.minimum(first_tile + tiles_each, num_tiles)
        if first_tile >= last_tile:
            return

    lines = tl.arange(0, LINES)
    token = lines // GROUP
    head = kv_head * GROUP + lines % GROUP
    columns = tl.arange(0, PADDED_SIZE)
    wanted = (token < tl.minimum(num_tokens, BLOCK_Q))[:, None]
    if HEAD_SIZE != PADDED_SIZE:
        wanted = wanted & (columns[None, :] < HEAD_SIZE)
    tokens = (first_token + token).to(tl.int64)
    places = (tokens * query_token_stride + head * query_head_stride)[:, None] + columns[None, :]
    query = tl.load(query_ptr + places, mask=wanted, other=0.0)
    query = query.to(PRODUCT)
    query_odd = query
    if PAIRS:
        query, query_odd = tl.split(tl.reshape(query, (LINES, PADDED_SIZE // 2, 2)))
    positions = first_position + token

    value_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + tl.num_programs(1) + kv_head)
    key_ptr = kv_cache_ptr + kv_head * kv_head_stride
    value_ptr = key_ptr + side_stride
    table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    PARTS: tl.constexpr = 2 if PAIRS else 1  # of a head, in the cache's elements
    total = tl.zeros([LINES, PADDED_SIZE // PARTS], tl.float32)
    total_odd = total
    maximum = tl.full([LINES], float("-inf"), tl.float32)
    norm = tl.zeros([LINES], tl.float32)
    if not DECODE:
        # Tiles that all lines see as a whole come first, and pay for no masks.
        whole = (first_position + 1) // KEYS
        total, total_odd, maximum, norm = _attend(
            query, query_odd, total, total_odd, maximum, norm, first_tile, whole, key_limit, positions, table_ptr,
            key_ptr, value_ptr, block_stride, slot_stride, scale, False, HEAD_SIZE // PARTS, PADDED_SIZE // PARTS,
            BLOCK_SIZE, KEYS, PRECISION, PAIRS, NATIVE,
        )  # fmt: skip
        first_tile = whole
    total, total_odd, maximum, norm = _attend(
        query, query_odd, total, total_odd, maximum, norm, first_tile, last_tile, key_limit, positions, table_ptr,
        key_ptr, value_ptr, block_stride, slot_stride, scale, True, HEAD_SIZE // PARTS, PADDED_SIZE // PARTS,
        BLOCK_SIZE, KEYS, PRECISION, PAIRS, NATIVE,
    )  # fmt: skip
    if PAIRS:
        total = tl.interleave(total, total_odd)
    result = total * (value_scale / norm)[:, None]

    if NUM_SEGMENTS > 1:
        parts = (tokens * (tl.num_programs(1) * GROUP) + head) * NUM_SEGMENTS + segment
        tl.store(values_ptr + parts[:, None] * HEAD_SIZE + columns[None, :], result, mask=wanted)
        tl.store(weights_ptr + parts, maximum + tl.log2(norm), mask=token < 1)
    else:
        places = (tokens * out_token_stride + head * out_head_stride)[:, None] + columns[None, :]
        tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def combine_segments_kernel(
    values_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
) -> None:
    """Program (token, head): the mean of the segments' results, weighted by their sums of exponentials."""
    token, head = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + token)
    if seq_len == 0:
        return
    num_tiles = tl.cdiv(seq_len, KEYS)
    segments = tl.arange(0, NUM_SEGMENTS)
    used = segments < tl.cdiv(num_tiles, tl.cdiv(num_tiles, NUM_SEGMENTS))
    columns = tl.arange(0, PADDED_SIZE)
    parts = (token.to(tl.int64) * tl.num_programs(1) + head) * NUM_SEGMENTS + segments
    weights = tl.load(weights_ptr + parts, mask=used, other=float("-inf"))
    weights = tl.exp2(weights - tl.max(weights, axis=0))
    wanted = used[:, None] & (columns[None, :] < HEAD_SIZE)
    values = tl.load(values_ptr + parts[:, None] * HEAD_SIZE + columns[None, :], mask=wanted, other=0.0)
    result = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    places = token.to(tl.int64) * out_token_stride + head * out_head_stride + columns
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=columns < HEAD_SIZE)


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


def choose_tiles(group: int, head_size: int, cache_dtype: torch.dtype, *, decode: bool, arch: int) -> Tiles:
    """The cut for a shape: large tiles that compile without spills, see kernels/RESULTS.md.

    Args:
        group: query heads of a key head.
        head_size: elements.
        cache_dtype: of the keys.
        decode: the rows have one token each.
        arch: of an NVIDIA device, 90 for a Hopper; 0 of others.
    """
    least, padded_size = max(16, triton.next_power_of_2(group)), triton.next_power_of_2(head_size)
    # Three products of a float32 each fill the registers soon.
    if decode or cache_dtype == torch.float32:
        keys = 16384 // (padded_size * max(2, cache_dtype.itemsize))
        wide = cache_dtype == torch.float32 and (padded_size > 128 or least > 16)
        return Tiles(least, min(max(16, keys), 128), 8 if wide else 4, 3)
    if padded_size > 128:
        return Tiles(max(64, least), 32, 8, 2)
    return Tiles(max(64, least), 64 if arch >= 90 else 32, 4, 3)


def _arch(device: torch.device) -> int:
    """Of the current device, as in `choose_tiles`; 0 for the interpreter."""
    return 0 if device.type == "cpu" else _arch_of(triton.runtime.driver.active.get_current_device())


@cache
def _arch_of(current_device: int) -> int:
    """Asked for at every launch: each device is looked at once."""
    del current_device
    target = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


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
    arch = _arch(query.device)
    tiles = tiles or choose_tiles(group, head_size, kv_cache.dtype, decode=decode, arch=arch)
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
