"""Programs of the tests in which Triton interprets, or compiles for a device that is not there: it does so for a whole
process, and each has one of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 900
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel here")


def run_alone(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m module`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def run_interpreted(module: str, *arguments: str) -> str:
    """What it prints in Triton's interpreter, which must be chosen before triton is imported; it must not fail."""
    run = run_alone(module, *arguments, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr
    return run.stdout
