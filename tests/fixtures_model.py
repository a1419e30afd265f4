"""The real model, opened once for the whole run, and what an independent implementation says about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.errors import ModelNotFoundError
from engine.loading.checkpoint import open_checkpoint
from engine.loading.fetch import resolve_model

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint


def find_model(*, offline: bool) -> Path:
    """The built-in model's file, fetched if it is not in the cache yet.

    Where it cannot be had the tests fail: skipping would hide a fetch that is broken. Only who says that there is no
    network may go without, and a damaged file is a failure even then.
    """
    try:
        return resolve_model("smollm2-135m", offline=offline)
    except ModelNotFoundError as error:
        if not offline:
            raise
        pytest.skip(f"TEST_OFFLINE=1, and the built-in model is not here: {error}")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The built-in model's file."""
    return find_model(offline=os.environ.get("TEST_OFFLINE") == "1")


@pytest.fixture(scope="session")
def checkpoint(model_path: Path) -> Checkpoint:
    """The built-in model, opened; its weights are read where a test asks for them."""
    return open_checkpoint(model_path)


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Token ids, rendered chats, greedy continuations and scores of the built-in model."""
    path = Path(__file__).parent / "data" / "smollm2.json"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
