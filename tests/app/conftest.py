"""Fixtures for the tests of `app`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; give exit code, stdout and stderr."""

    def run_(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_
