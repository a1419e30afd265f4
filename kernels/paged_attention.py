"""Attention over the paged KV cache on a CPU, for a batch that mixes prefill and decode.

A plan is made once a step and serves every layer. Rows that compute one token are handled together: their blocks are
gathered with one copy of long contiguous runs, then one call computes all of them. Rows that compute several tokens
come one after the other; each is large enough to fill the cores by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F

# Padding up to this many tokens costs less than another pass.
SHORT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring rows of one token each and of similar length.

    Attributes:
        first, last: their tokens, a half-open range.
        block_ids: [rows * blocks_per_row] int64, padded with the null block.
        mask: [rows, 1, 1, T] in the cache's dtype; 0 where a key counts, else -inf.
    """

    first: int
    last: int
    block_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A row of several tokens.

    Attributes:
        first, last: its tokens, a half-open range.
        block_ids: [blocks] int64.
        seq_len: its tokens in the cache, the new ones included.
        mask: [n, seq_len], or `None` where nothing precedes the new tokens.
    """

    first: int
    last: int
    block_ids: torch.Tensor
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
    """Which tokens attend to which blocks.

    Attributes:
        block_tables: [R, blocks] int64; entries beyond a row's length name the null block, which is all zeros.
        query_start_loc: [R + 1] int64; row r's tokens are query_start_loc[r] to query_start_loc[r + 1].
        seq_lens: [R] int64; tokens of each row in the cache, the new ones included.
        workspace: reused from layer to layer and from step to step.
    """

    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    decode_groups: tuple[DecodeGroup, ...]
    chunk_rows: tuple[ChunkRow, ...]
    workspace: Workspace


def plan_attention(
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    dtype: torch.dtype,
    workspace: Workspace,
) -> AttentionPlan:
    """Prepare the attention of one step.

    Args:
        block_tables: [R, blocks] int64. Rows of one token come first, the longest of them foremost.
        query_start_loc: [R + 1] int64.
        seq_lens: [R] int64.
        dtype: of the cache.
    """
    lengths, starts = seq_lens.tolist(), query_start_loc.tolist()
    num_decodes = sum(1 for first, last in pairwise(starts) if last - first == 1)
    groups = []
    for first, last in split_by_length(lengths[:num_decodes]):
        blocks = -(-lengths[first] // block_size)
        positions = torch.arange(blocks * block_size)
        shorter = positions >= seq_lens[first:last, None, None, None]
        padding = torch.zeros(shorter.shape, dtype=dtype).masked_fill_(shorter, -math.inf)
        groups.append(DecodeGroup(first, last, block_tables[first:last, :blocks].flatten(), padding))
    chunks = []
    for row in range(num_decodes, len(lengths)):
        first, last, seq_len = starts[row], starts[row + 1], lengths[row]
        mask: torch.Tensor | None = None
        if seq_len > last - first:
            later = torch.arange(seq_len) > torch.arange(seq_len - (last - first), seq_len)[:, None]
            mask = torch.zeros(later.shape, dtype=dtype).masked_fill_(later, -math.inf)
        chunks.append(ChunkRow(first, last, block_tables[row, : -(-seq_len // block_size)], seq_len, mask))
    return AttentionPlan(block_tables, query_start_loc, seq_lens, tuple(groups), tuple(chunks), workspace)


def split_by_length(lengths: list[int]) -> list[tuple[int, int]]:
    """Half-open ranges of a descending list in which nobody is padded to more than twice its length.

    Short lists of tokens are not worth a pass of their own: up to `SHORT_TOKENS` padding is free.
    """
    ranges, first = [], 0
    for index, length in enumerate(lengths):
        if max(length * 2, SHORT_TOKENS) < lengths[first]:
            ranges.append((first, index))
            first = index
    if lengths:
        ranges.append((first, len(lengths)))
    return ranges


def paged_attention(query: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Causal attention of each row's new tokens over all of its tokens in the paged cache.

    Args:
        query: [N, H, D]; the rows' tokens one row after the other, as `plan.query_start_loc` says.
        kv_cache: [blocks, block_size, 2, KVH, D]; holds the new tokens already.
        plan: block tables and lengths of the rows.

    Returns:
        [N, H, D] float32.
    """
    num_heads, head_size = query.shape[1:]
    kv_heads = kv_cache.shape[3]
    group_size = num_heads // kv_heads
    out = torch.empty(query.shape, dtype=torch.float32)
    query = query.to(kv_cache.dtype)
    for group in plan.decode_groups:
        rows = group.last - group.first
        kv = _gather(kv_cache, group.block_ids, plan.workspace).view(rows, -1, 2, kv_heads, head_size)
        keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)  # [rows, KVH, T, D]
        # The query heads that share a key head take the place of query positions: K and V are read once a group.
        grouped = query[group.first : group.last].view(rows, kv_heads, group_size, head_size)
        result = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
        out[group.first : group.last].view(rows, kv_heads, group_size, head_size).copy_(result)
    for row in plan.chunk_rows:
        count = row.last - row.first
        kv = _gather(kv_cache, row.block_ids, plan.workspace).view(-1, 2, kv_heads, head_size)[: row.seq_len]
        shape = (kv_heads, group_size, row.seq_len, head_size)
        keys, values = (kv[:, i].transpose(0, 1)[:, None].expand(shape) for i in (0, 1))
        grouped = query[row.first : row.last].view(count, kv_heads, group_size, head_size).permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=row.mask, is_causal=row.mask is None
        )  # [KVH, G, n, D]
        out[row.first : row.last].view(count, kv_heads, group_size, head_size).copy_(result.permute(2, 0, 1, 3))
    return out


def _gather(kv_cache: torch.Tensor, block_ids: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """[block_ids, block_size * 2 * KVH * D]: the blocks one after the other. Each is one contiguous run."""
    blocks = kv_cache.view(kv_cache.shape[0], -1)
    rows = workspace.rows(block_ids.shape[0], blocks.shape[1], kv_cache.dtype)
    return torch.index_select(blocks, 0, block_ids, out=rows)
