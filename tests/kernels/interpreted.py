"""Runs the Triton kernels beside their references; to be started with TRITON_INTERPRET=1.

Each kernel's small cases, and what stands in an `interpreted_….py` beside this file.
"""

from __future__ import annotations

from collections import Counter

import torch

from kernels.bench.registry import small_cases
from tests.kernels import interpreted_attention as attention
from tests.kernels.interpreted_cache import check_far_copies, check_far_keys_and_values
from tests.quick_interpreter import stay_dressed

if __name__ == "__main__":
    stay_dressed()
    agreed = Counter[str]()
    for case in small_cases():
        print(f"{case.kernel}: {case.shape}", flush=True)
        case.make(torch.device("cpu")).check()
        agreed[case.kernel] += 1
    agreed["paged_attention"] += attention.check_huge_block_ids() + attention.check_many_rows()
    agreed["paged_attention"] += attention.check_eight_bit_floats()
    agreed["cuts"] += attention.check_cuts()
    print("blocks that lie far away", flush=True)
    agreed["rope_kv_write"] += check_far_keys_and_values()
    agreed["copy_blocks"] += check_far_copies()
    for kernel, count in agreed.items():
        print(f"{kernel}: {count} cases agree")
