"""Lines of a KV cache of eight bits: what one head keeps of a token is its D bytes and the float32 they are times.

A cache is [blocks, 2, KVH, block_size, D + 4] int8. Symmetric rounding to 255 steps up to the largest of the line; the
plain form of kernels/native/kv_cache.h.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4


def line_size(head_size: int, dtype: torch.dtype) -> int:
    """Elements of a line in a cache of `dtype`."""
    return head_size + SCALE_BYTES if dtype == torch.int8 else head_size


def to_lines(values: torch.Tensor) -> torch.Tensor:
    """Round keys or values: [..., D] float32 → [..., D + 4] int8. What is not finite makes the line's scale NaN."""
    largest = values.abs().amax(-1, keepdim=True)
    # The quotient and then the product, as in the kernels: the scale's reciprocal would round otherwise.
    inverse = torch.where(largest > 0, 127 / largest, 0)
    codes = torch.nan_to_num(values * inverse).round().clamp(-128, 127).to(torch.int8)
    scales = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return torch.cat((codes, scales.contiguous().view(torch.int8)), dim=-1)


def from_lines(lines: torch.Tensor) -> torch.Tensor:
    """What lines hold: [..., D + 4] int8 → [..., D] float32."""
    return lines[..., :-SCALE_BYTES].float() * scales_of(lines)


def scales_of(lines: torch.Tensor) -> torch.Tensor:
    """The scales of lines: [..., D + 4] int8 → [..., 1] float32."""
    return lines[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def without_nan(lines: torch.Tensor) -> torch.Tensor:
    """The same lines of any cache with zeros where something is no finite number."""
    if lines.dtype != torch.int8:
        return torch.nan_to_num(lines, nan=0.0, posinf=0.0, neginf=0.0)
    scales = torch.nan_to_num(scales_of(lines), nan=0.0, posinf=0.0, neginf=0.0)
    return torch.cat((lines[..., :-SCALE_BYTES], scales.view(torch.int8)), dim=-1)
