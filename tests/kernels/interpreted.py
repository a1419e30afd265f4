"""Runs the Triton kernels beside their references; to be started with TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools

import torch

from kernels import reference
from kernels.rms_norm import rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check_rms_norm() -> int:
    """Odd and ragged shapes, rows that lie apart, outputs that start as NaN; gives the number of cases."""
    cases = list(itertools.product([(0, 8), (1, 1), (3, 37), (5, 576)], [0, 5], TOLERANCE))
    for (rows, columns), gap, dtype in cases:
        x = torch.randn(rows, columns + gap).to(dtype)[:, :columns]
        weight = torch.randn(columns).to(dtype)
        around = torch.full((rows, columns + 3), float("nan"), dtype=dtype)
        result = rms_norm(x, weight, 1e-5, around[:, :columns])
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(result, reference.rms_norm(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
        assert around[:, columns:].isnan().all(), "wrote beyond the row"
    return len(cases)


if __name__ == "__main__":
    print(f"rms_norm: {check_rms_norm()} cases agree")
