"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from app.config import let_threads_sleep
from tests.order import LONGEST

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is tested is the same on every machine: with a GPU in it `auto` would take that, here and in every server.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = "-1"
gc.disable()  # what collecting the tests brings in stays
let_threads_sleep()
# A script's background job ignores the key for interrupting, one under nohup the end of its terminal as well; and so
# would every program that the tests start. A handler is no more than the default there.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# How long an example takes depends on what else the machine does.
settings.register_profile("relevo", deadline=None)
settings.load_profile("relevo")

pytest_plugins = ["tests.fixtures_browser", "tests.fixtures_model"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, all else as it comes."""
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """As a server does once it has loaded: to look through all that is there took a sixth of the tests' time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)  # seldom: no token waits here


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have settings in the environment; the tests see none."""
    for name in [name for name in os.environ if name.startswith("RELEVO_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True, scope="session")
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that the tests start keep nothing in the home of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
