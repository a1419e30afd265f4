"""The gated activation in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_up_stride: tl.tensor,
    out_stride: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (row, part): BLOCK outputs of a row."""
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2³¹
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + num_columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [N, 2F], gate first; rows may lie apart, elements of a row may not.
        out: [N, F], where to write; made when it is not given.

    Returns:
        [N, F] in gate_up's dtype.
    """
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        block = min(1024, triton.next_power_of_2(num_columns))
        silu_mul_kernel[(num_rows, triton.cdiv(num_columns, block))](
            gate_up, out, gate_up.stride(0), out.stride(0), num_columns, BLOCK=block, num_warps=4
        )
    return out
