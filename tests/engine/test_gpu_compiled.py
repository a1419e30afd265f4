"""No request on a GPU waits for a compiler."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel for this platform")
def test_all_that_requests_can_ask_for_is_compiled_when_the_server_is_ready() -> None:
    """In a process of its own: the driver that stands for a device is Triton's for good."""
    command = [sys.executable, "-m", "tests.engine.compiled_gpu"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    first, _, rest = run.stdout.partition("\n")
    assert re.fullmatch(r"0 late of \d+, \d+ kernels, 300 steps", first), run.stdout
    asked_for = "add_biases penalize count_tokens apply_token_mask find_likeliest drawn_logprobs combine_segments"
    assert {f"{name}_kernel" for name in asked_for.split()} <= {*rest.split()}, "not all was asked for"
