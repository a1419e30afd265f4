"""Attention over the paged KV cache on a CPU, for a batch that mixes prefill and decode.

A plan is made once a step and serves every layer. Rows that compute one token are handled together, a thousand or two
of tokens at a time: their blocks are gathered so that each head's keys lie one after the other, then one call computes
all of them. Rows that compute several tokens come one by one; each is large enough to fill the cores by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

# Padding up to this many tokens costs less than another pass.
SHORT_TOKENS = 128

# Keys and values gathered at a time. More would leave the cache between the gathering and the arithmetic.
GROUP_ELEMENTS = 512 * 1024


class AttentionRows(NamedTuple):
    """Which tokens attend to which blocks. On a GPU all three are int32.

    Attributes:
        block_tables: [R, blocks] int64; entries beyond a row's length name the null block, which is all zeros.
        query_start_loc: [R + 1] int64; row r's tokens are query_start_loc[r] to query_start_loc[r + 1].
        seq_lens: [R] int64; tokens of each row in the cache, the new ones included.
    """

    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring rows of one token each and of similar length.

    Attributes:
        first, last: their tokens, a half-open range.
        pieces: [2 * rows * KVH * blocks_per_row] int64; the head-sized pieces of blocks, in the order in which they
            are gathered.
        mask: [rows, 1, 1, T] in the cache's dtype; 0 where a key counts, else -inf.
    """

    first: int
    last: int
    pieces: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row of several tokens.

    Attributes:
        first, last: its tokens, a half-open range.
        pieces: [2 * KVH * blocks] int64, as in a `DecodeGroup`.
        seq_len: its tokens in the cache, the new ones included.
        mask: [n, seq_len], or `None` where nothing precedes the new tokens.
    """

    first: int
    last: int
    pieces: torch.Tensor
    seq_len: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class Workspace:
    """The buffer that gathered blocks are copied into: memory that was touched before is faster than fresh one."""

    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def rows(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized [count, width]; the last one given out is overwritten."""
        if self.buffer.dtype != dtype or self.buffer.numel() < count * width:
            self.buffer = torch.empty(count * width, dtype=dtype)
        return self.buffer[: count * width].view(count, width)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The rows of a step, sorted by how they are computed.

    Attributes:
        workspace: reused from layer to layer and from step to step.
    """

    decode_groups: tuple[DecodeGroup, ...]
    chunk_rows: tuple[ChunkRow, ...]
    workspace: Workspace


def plan_attention(rows: AttentionRows, kv_cache: torch.Tensor, workspace: Workspace) -> AttentionPlan:
    """Prepare the attention of one step.

    Args:
        rows: rows of one token come first, the longest of them foremost.
        kv_cache: [blocks, 2, KVH, block_size, D] of any layer.
    """
    block_tables, query_start_loc, seq_lens = rows
    _, _, kv_heads, block_size, head_size = kv_cache.shape
    dtype = kv_cache.dtype
    lengths, starts = seq_lens.tolist(), query_start_loc.tolist()
    num_decodes = sum(1 for first, last in pairwise(starts) if last - first == 1)
    groups = []
    for first, last in split_rows(lengths[:num_decodes], GROUP_ELEMENTS // (2 * kv_heads * head_size)):
        blocks = -(-lengths[first] // block_size)
        beyond = torch.arange(blocks * block_size) >= seq_lens[first:last, None, None, None]
        pieces = pieces_of(block_tables[first:last, :blocks], kv_heads)
        groups.append(DecodeGroup(first, last, pieces, _mask(beyond, dtype)))
    chunks = []
    for row in range(num_decodes, len(lengths)):
        first, last, seq_len = starts[row], starts[row + 1], lengths[row]
        before = seq_len - (last - first)
        later = torch.arange(seq_len) > torch.arange(before, seq_len)[:, None]
        pieces = pieces_of(block_tables[row : row + 1, : -(-seq_len // block_size)], kv_heads)
        chunks.append(ChunkRow(first, last, pieces, seq_len, _mask(later, dtype) if before else None))
    return AttentionPlan(tuple(groups), tuple(chunks), workspace)


def pieces_of(block_tables: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Indices of a cache seen as [blocks * 2 * KVH, block_size * D].

    Args:
        block_tables: [R, blocks] int64.

    Returns:
        [2 * R * KVH * blocks] int64: keys before values, then row by row, head by head, block by block.
    """
    sides = torch.arange(2).view(2, 1, 1, 1) * kv_heads
    heads = torch.arange(kv_heads).view(1, 1, kv_heads, 1)
    return (block_tables[None, :, None] * (2 * kv_heads) + sides + heads).flatten()


def split_rows(lengths: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Half-open ranges of a descending list of lengths.

    Nobody is padded to more than twice its length, unless to no more than `SHORT_TOKENS`; and a range holds
    `max_tokens` at most, padding included, unless it is a single row.
    """
    ranges, first = [], 0
    for index, length in enumerate(lengths):
        padded = (index + 1 - first) * lengths[first]
        if index > first and (max(length * 2, SHORT_TOKENS) < lengths[first] or padded > max_tokens):
            ranges.append((first, index))
            first = index
    if lengths:
        ranges.append((first, len(lengths)))
    return ranges


def paged_attention(query: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Causal attention of each row's new tokens over all of its tokens in the paged cache.

    Args:
        query: [N, H, D]; the rows' tokens one row after the other.
        kv_cache: [blocks, 2, KVH, block_size, D]; holds the new tokens already.
        plan: of the rows.

    Returns:
        [N, H, D] float32.
    """
    num_heads, head_size = query.shape[1:]
    kv_heads = kv_cache.shape[2]
    out = torch.empty(query.shape, dtype=torch.float32)
    # The query heads that share a key head take the place of query positions: K and V are read once a group.
    shape = (query.shape[0], kv_heads, num_heads // kv_heads, head_size)
    query, grouped_out = query.to(kv_cache.dtype).view(shape), out.view(shape)
    for group in plan.decode_groups:
        tokens = slice(group.first, group.last)
        gathered = _gather(kv_cache, group.pieces, plan.workspace)
        keys, values = gathered.view(2, group.last - group.first, kv_heads, -1, head_size)
        grouped_out[tokens] = F.scaled_dot_product_attention(query[tokens], keys, values, attn_mask=group.mask)
    for row in plan.chunk_rows:
        tokens = slice(row.first, row.last)
        gathered = _gather(kv_cache, row.pieces, plan.workspace).view(2, kv_heads, 1, -1, head_size)
        keys, values = gathered[:, :, :, : row.seq_len].expand(-1, -1, shape[2], -1, -1)
        chunk = query[tokens].permute(1, 2, 0, 3)  # [KVH, G, n, D]
        causal = row.mask is None
        result = F.scaled_dot_product_attention(chunk, keys, values, attn_mask=row.mask, is_causal=causal)
        grouped_out[tokens] = result.permute(2, 0, 1, 3)
    return out


def _mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """-inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


def _gather(kv_cache: torch.Tensor, pieces: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """[pieces, block_size * D]: contiguous runs of the cache, one after the other."""
    runs = kv_cache.view(-1, kv_cache.shape[3] * kv_cache.shape[4])
    rows = workspace.rows(pieces.shape[0], runs.shape[1], kv_cache.dtype)
    return torch.index_select(runs, 0, pieces, out=rows)
