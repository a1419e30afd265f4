"""RMSNorm in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, out_stride, num_columns, eps, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    """Normalize row `program_id(0)`; BLOCK is a power of two and covers the whole row."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2³¹
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    result = x * scale * weight
    tl.store(out_ptr + row * out_stride + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


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
    out = torch.empty_like(x) if out is None else out
    if x.shape[0] > 0:
        block = triton.next_power_of_2(x.shape[1])
        # A warp per 512 elements keeps a row in registers.
        num_warps = min(max(block // 512, 1), 16)
        rms_norm_kernel[(x.shape[0],)](
            x, weight, out, x.stride(0), out.stride(0), x.shape[1], eps, BLOCK=block, num_warps=num_warps
        )
    return out
