"""Fixtures for all tests."""

from __future__ import annotations

import os

import pytest

from app.config import let_threads_sleep

let_threads_sleep()
pytest_plugins = ["tests.fixtures_model"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have settings in the environment; the tests see none."""
    for name in [name for name in os.environ if name.startswith("RELEVO_")]:
        monkeypatch.delenv(name)
