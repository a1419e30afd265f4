"""A model whose weights stay quantized on a GPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel for this platform")
def test_logits_are_those_of_the_dequantized_weights_but_for_rounding(tmp_path: Path) -> None:
    script = Path(__file__).with_name("interpreted_quantized.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "3 cases agree"
