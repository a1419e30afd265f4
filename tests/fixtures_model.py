"""The real model, opened once for the whole run, and what an independent implementation says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.errors import ModelError
from engine.loading.checkpoint import open_checkpoint
from engine.loading.fetch import resolve_model

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The built-in model's file, fetched if it is not in the cache yet."""
    try:
        return resolve_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"the built-in model is not here: {error}")


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
