"""Triton kernels in Triton's interpreter, which needs no GPU. It must be chosen before triton is imported: a process
of its own runs `interpreted.py`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel for this platform")
def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    wanted = {
        "rms_norm": 12, "add_rms_norm": 12, "silu_mul": 12, "rope_kv_write": 27, "paged_attention": 15,
        "gather_inputs": 2, "copy_blocks": 3, "sample": 7, "apply_token_mask": 1, "add_biases": 1,
        "penalize": 1, "top_logprobs": 5,
        "apply_changes": 1, "append_tokens": 1, "quantized_linear": 26, "quantized_rows": 12,
    }  # fmt: skip
    for kernel, least in wanted.items():
        agreed = re.search(rf"^{kernel}: (\d+) cases agree$", run.stdout, re.MULTILINE)
        assert agreed, f"{kernel} was not run"
        assert int(agreed[1]) >= least
