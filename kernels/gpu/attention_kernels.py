"""Attention over the paged KV cache in Triton, for any mix of prefill and decode in one launch.

A program computes up to BLOCK_Q neighbouring tokens of one row, for all query heads that share a key head: line m of
its tile is token m // GROUP, query head m % GROUP, so that each key and value is read once a group. It walks over the
keys in tiles that begin at absolute positions and keeps the softmax's running maximum and sum (Milakov and Gimelshein,
2018; Dao et al., FlashAttention, 2022). With few rows of one token each, a row's keys are split into segments, one
program each, and a second kernel combines them (Flash-Decoding).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.float8 import unpack_pairs


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
            key_even, key_odd = unpack_pairs(key, NATIVE)
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
            value_even, value_odd = unpack_pairs(value, NATIVE)
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
