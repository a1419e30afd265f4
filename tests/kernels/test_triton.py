"""Triton kernels in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import re

import pytest

from tests.alone import needs_triton, run_interpreted


@pytest.mark.long
@needs_triton
def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    told = run_interpreted("tests.kernels.interpreted")
    wanted = {
        "rms_norm": 12, "add_rms_norm": 12, "silu_mul": 12, "rope_kv_write": 28, "paged_attention": 18,
        "gather_inputs": 2, "copy_blocks": 4, "sample": 7, "apply_token_mask": 1, "add_biases": 1,
        "penalize": 3, "top_logprobs": 5,
        "apply_changes": 1, "append_tokens": 1, "quantized_linear": 26, "quantized_rows": 12,
    }  # fmt: skip
    for kernel, least in wanted.items():
        agreed = re.search(rf"^{kernel}: (\d+) cases agree$", told, re.MULTILINE)
        assert agreed, f"{kernel} was not run"
        assert int(agreed[1]) >= least
