"""A model whose weights stay quantized on a GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.alone import needs_triton, run_interpreted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
@needs_triton
def test_logits_are_those_of_the_dequantized_weights_but_for_rounding(tmp_path: Path) -> None:
    told = run_interpreted("tests.engine.interpreted_quantized", str(tmp_path))
    assert told.splitlines()[-1] == "3 cases agree"
