"""Three times too much, for seconds, on the fake engine: the same program that measures it on a real one."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests.bench import overload


@pytest.mark.long
def test_too_much_load_is_refused_at_once_and_the_rest_is_served() -> None:
    """Figures on a machine that does other things too are no promise; what must be is that all are answered."""
    fake = {"step_seconds": 0.01, "port": 0, "limits": {"slo_admission": True, "max_waiting": 500}}
    command = f"{sys.executable} -m tests.serve_fake {shlex.quote(json.dumps(fake)).replace('0,', '{port},', 1)}"
    assert "{port}" in command
    options = overload.parse([
        "--command", command, "--model", "fake", "--seats", "4", "--seconds", "4", "--lower-seconds", "1.5",
        "--capacity-seconds", "3", "--grace", "30", "--prompt", "8", "16", "--output", "10", "20",
    ])  # fmt: skip
    result = overload.run(options)
    over = result["overload"]
    assert over["refused"] > 0
    assert over["answered"] > 0
    assert over["answered"] + over["refused"] == over["requests"]
    for probe in ("healthz", "readyz"):
        assert over[f"{probe}_seconds"] is not None, "it was answered"
    assert list(overload.lines_of(result))
