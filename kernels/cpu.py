"""The small operations of a layer on a CPU: as few torch calls as can be."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square and scale it: x [N, E] float32, weight [E] → [N, E]."""
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def rope(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours, in place: x [N, heads, D] float32, rotation [N, D/2] complex64 → x."""
    torch.view_as_complex(x.view(*x.shape[:2], -1, 2)).mul_(rotation[:, None])
    return x


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [N, 2F] → [N, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def kv_write(kv: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor, offsets: torch.Tensor) -> None:
    """Put kv [N, 2, KVH, D] into blocks [N] at offsets [N] of kv_cache [blocks, 2, KVH, block_size, D], in place."""
    kv_cache[block_ids, :, :, offsets] = kv.to(kv_cache.dtype)
