"""No request on a GPU waits for a compiler."""

from __future__ import annotations

import re

import pytest

from tests.alone import needs_triton, run_alone


@pytest.mark.long
@needs_triton
def test_all_that_requests_can_ask_for_is_compiled_when_the_server_is_ready() -> None:
    run = run_alone("tests.engine.compiled_gpu")
    assert run.returncode == 0, run.stderr
    first, _, rest = run.stdout.partition("\n")
    assert re.fullmatch(r"0 late of \d+, \d+ kernels, 300 steps", first), run.stdout
    asked_for = "add_biases penalize count_tokens apply_token_mask find_likeliest drawn_logprobs combine_segments"
    assert {f"{name}_kernel" for name in asked_for.split()} <= {*rest.split()}, "not all was asked for"
