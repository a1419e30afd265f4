"""What a test run may go without: nothing, unless somebody said so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ModelFileError, ModelNotFoundError
from tests import fixtures_model
from tests.order import LONGEST

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", LONGEST)
def test_what_begins_first_is_there(name: str) -> None:
    assert (ROOT / "tests" / name).is_file()


@pytest.mark.parametrize("error", [ModelFileError("wrong checksum"), ModelNotFoundError("no network")])
@pytest.mark.parametrize("offline", [True, False])
def test_a_model_that_cannot_be_had_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, offline: bool
) -> None:
    def resolve(_: str, *, offline: bool) -> Path:
        raise error

    monkeypatch.setattr(fixtures_model, "resolve_model", resolve)
    may_skip = offline and isinstance(error, ModelNotFoundError)
    with pytest.raises(pytest.skip.Exception if may_skip else type(error)):
        fixtures_model.find_model(offline=offline)


@pytest.mark.long
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("switch", "tests", "said"),
    [
        ("REQUIRE_BROWSER", "test_browser.py", "and there is no Chromium"),
        ("REQUIRE_NETWORKS", "test_vanished_clients.py", "but it takes root and iproute2"),
    ],
)
def test_what_is_required_is_not_skipped(tmp_path: Path, switch: str, tests: str, said: str, required: bool) -> None:
    """Where no program can be found."""
    environ = {**os.environ, "PATH": str(tmp_path), switch: "1" if required else ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/app/{tests}"]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == (1 if required else 0), run.stdout
    assert (f"{switch}=1, {said}" if required else "skipped") in run.stdout
