"""The plain version of each operation: what the fast ones are compared with.

Every function here has the name and the signature of its fast version. Arithmetic is in float32 whatever the
operands' dtype is, as in the kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kernels.byte_lines import from_lines, to_lines

if TYPE_CHECKING:
    from kernels.blocks import Blocks
    from kernels.packed_blocks import PackedBlocks
    from kernels.paged_attention import AttentionRows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square and scale it.

    Args:
        x: [N, E].
        weight: [E].
        eps: added to the mean square.

    Returns:
        [N, E] in x's dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to the residual stream [N, E], in place; gives the sum normalized before it is rounded, in x's dtype."""
    total = x.float() + residual.float()
    residual.copy_(total)
    return rms_norm(total, weight, eps).to(x.dtype)


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of neighbouring elements of each head by the position's angle.

    Args:
        x: [N, heads, D] float32; elements 2i and 2i+1 are a pair.
        rotation: [N, D/2] complex64, unit length.

    Returns:
        [N, heads, D].
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = rotation.real[:, None], rotation.imag[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gated activation silu(gate) * up.

    Args:
        gate_up: [N, 2F]; gate first.

    Returns:
        [N, F] in gate_up's dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def quantize_activations(x: torch.Tensor) -> torch.Tensor:
    """Round each 32 of a row to 255 steps of equal size, up to the largest of them: [N, E] float32 → [N, E]."""
    groups = x.view(x.shape[0], -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    # A division by the scale, and not the product with a reciprocal that `127 / largest` would be.
    steps = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    codes = (groups * steps).round()
    return (codes * (largest / 127)).view(x.shape)


def multiply_blocks(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The product with a quantized matrix [rows, cols]; activations are quantized too: x [N, cols] → [N, rows]."""
    return (quantize_activations(x).double() @ blocks.dequantize().double().T).float()


def quantized_linear(x: torch.Tensor, matrix: PackedBlocks) -> torch.Tensor:
    """The product with a quantized matrix [rows, cols]: x [N, cols] → [N, rows] in x's dtype."""
    return (x.float() @ matrix.dequantize().T).to(x.dtype)


def quantized_rows(matrix: PackedBlocks, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a quantized matrix [rows, cols]: ids [N] → [N, cols] float32."""
    return matrix.dequantize()[ids.long()]


def kv_write(kv: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor, offsets: torch.Tensor) -> None:
    """Put new keys and values into their slots of the paged cache.

    Args:
        kv: [N, 2, KVH, D]; keys first.
        kv_cache: [blocks, 2, KVH, block_size, D], changed in place; of int8 as in kernels/byte_lines.py.
        block_ids: [N] int64, each token's block.
        offsets: [N] int64, its place in the block. No place comes twice.
    """
    for token, (block_id, offset) in enumerate(zip(block_ids.tolist(), offsets.tolist(), strict=True)):
        new = kv[token].float()
        kv_cache[block_id, :, :, offset] = to_lines(new) if kv_cache.dtype == torch.int8 else new.to(kv_cache.dtype)


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
        qkv: [N, H + 2 * KVH, D], queries, keys, values; elements 2i and 2i+1 of a head are a pair.
        rotations: [P, D/2, 2] float32, cosine and sine of each position's angles.
        positions: [N] int32.
        kv_cache: [blocks, 2, KVH, block_size, D], changed in place.
        slots: [N] int32, block id times block size plus the place in the block; -1 writes nothing.
        scales: [2, KVH] float32, what the cache's numbers will be multiplied with; for a cache of eight-bit floats.
    """
    kv_heads, block_size = kv_cache.shape[2:4]
    num_heads = qkv.shape[1] - 2 * kv_heads
    rotation = torch.view_as_complex(rotations.contiguous())[positions.long()]
    rotated = rope(qkv[:, : num_heads + kv_heads].float(), rotation)
    new = torch.stack((rotated[:, num_heads:], qkv[:, num_heads + kv_heads :].float()), dim=1)  # [N, 2, KVH, D]
    if scales is not None:
        new = (new / scales[:, :, None]).clamp(-448, 448)
    qkv[:, :num_heads] = rotated[:, :num_heads].to(qkv.dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, :, :, slot % block_size] = new[token].to(kv_cache.dtype)


def copy_blocks(kv_cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy blocks of a cache [blocks, …], in place: ids [C] int32, of which no destination is a source."""
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        kv_cache[destination] = kv_cache[source]


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, rows: AttentionRows, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention of each row's new tokens over all of its tokens in the paged cache.

    Args:
        query: [N, H, D]; the rows' tokens one row after the other, as `rows.query_start_loc` says.
        kv_cache: [blocks, 2, KVH, block_size, D]; holds the new tokens already. Of int8 as in kernels/byte_lines.py.
        rows: their block tables and lengths.
        scales: [2, KVH] float32, what the cache's numbers are to be multiplied with: keys, then values.

    Returns:
        [N, H, D] float32.
    """
    heads, size = query.shape[1:]
    kv_heads = kv_cache.shape[2]
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    starts = rows.query_start_loc.tolist()
    for row, seq_len in enumerate(rows.seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        blocks = kv_cache[rows.block_tables[row]].permute(0, 3, 1, 2, 4)
        lines = blocks.flatten(0, 1)[:seq_len]
        kv = from_lines(lines) if lines.dtype == torch.int8 else lines.float()  # [T, 2, KVH, D]
        kv = kv if scales is None else kv * scales[..., None]
        keys, values = kv.repeat_interleave(heads // kv_heads, dim=2).unbind(1)  # [T, H, D] each
        scores = torch.einsum("nhd,thd->hnt", query[first:last].float(), keys) / math.sqrt(size)
        positions = torch.arange(seq_len - (last - first), seq_len, device=query.device)
        later = torch.arange(seq_len, device=query.device)[None, :] > positions[:, None]  # [n, T]
        weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
        out[first:last] = torch.einsum("hnt,thd->nhd", weights, values)
    return out
