"""Runs the Triton kernels beside their references; to be started with TRITON_INTERPRET=1.

Each kernel's small cases, and what stands in an `interpreted_….py` beside this file.
"""

from __future__ import annotations

import itertools
from collections import Counter

import torch

from kernels import reference
from kernels.bench.cases import TOLERANCE
from kernels.bench.registry import small_cases
from kernels.rms_norm import rms_norm
from tests.kernels.interpreted_attention import check_huge_block_ids, check_many_rows


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
    agreed = Counter[str]()
    for case in small_cases():
        print(f"{case.kernel}: {case.shape}", flush=True)
        case.make(torch.device("cpu")).check()
        agreed[case.kernel] += 1
    agreed["paged_attention"] += check_huge_block_ids() + check_many_rows()
    agreed["rms_norm"] += check_rms_norm()
    for kernel, count in agreed.items():
        print(f"{kernel}: {count} cases agree")
