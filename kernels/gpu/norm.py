"""RMSNorm in Triton, alone and behind the sum of the residual stream: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalize row `program_id(0)`, or with ADDS its sum with the residual; BLOCK, a power of two, covers the row."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2³¹
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        places = residual_ptr + row * residual_stride + columns
        x += tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, x.to(residual_ptr.dtype.element_ty), mask=inside)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    tl.store(out_ptr + row * out_stride + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Divide each row by its root mean square and scale it.

    Args:
        x: [N, E]; rows may lie apart, elements of a row may not.
        weight: [E].
        eps: added to the mean square.
        out: [N, E], where to write; made when it is not given.

    Returns:
        [N, E] in x's dtype.
    """
    return _normalize(x, None, weight, eps, out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add x to the residual stream, in place, and normalize the sum before it is rounded.

    Args:
        x: [N, E]; rows may lie apart, elements of a row may not.
        residual: [N, E], changed in place.
        weight: [E].
        eps: added to the mean square.
        out: [N, E], where to write; may be x itself; made when it is not given.

    Returns:
        [N, E] in x's dtype.
    """
    return _normalize(x, residual, weight, eps, out)


def _normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> torch.Tensor:
    out = torch.empty_like(x) if out is None else out
    stream = x if residual is None else residual
    if x.shape[0] > 0:
        block = triton.next_power_of_2(x.shape[1])
        # A warp per 512 elements keeps a row in registers.
        num_warps = min(max(block // 512, 1), 16)
        rms_norm_kernel[(x.shape[0],)](
            x, stream, weight, out, x.stride(0), stream.stride(0), out.stride(0), x.shape[1], eps,
            ADDS=residual is not None, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return out
