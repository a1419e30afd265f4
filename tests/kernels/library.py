"""The native kernels, for tests."""

from __future__ import annotations

import os

import pytest

from engine.precision import kernels_dir
from kernels.build import BuildError
from kernels.native import Library, load


def kernels_or_skip() -> Library:
    """The kernels; where they cannot be made, a skip with the reason, or a failure if `REQUIRE_KERNELS` is set."""
    try:
        return load(kernels_dir())
    except BuildError as error:
        if os.environ.get("REQUIRE_KERNELS"):
            raise
        pytest.skip(f"no native kernels: {error}")
