"""Compiles the native kernels for this very processor, once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCES = Path(__file__).parent / "native"
# Products and sums are joined only where the source says so: a value must not depend on what surrounds it.
_TUNE = "-mcpu=native" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "-march=native"
FLAGS = ("-std=c++20", "-O3", _TUNE, "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
C_COMPILERS = ("gcc", "clang")
TIMEOUT_SECONDS = 300


class BuildError(Exception):
    """There is no library, and this is why."""


class DamagedError(BuildError):
    """What lies there is no library, or one of another machine; compiling again may help."""


class UnwritableError(BuildError):
    """The folder takes nothing; another one may."""


def build(folder: Path, *, announce: Callable[[], None] = lambda: None) -> Path:
    """The compiled library for this source, compiler and processor; made if it is not there yet.

    Args:
        folder: where libraries are kept.
        announce: called before something is compiled, which takes some seconds.

    Raises:
        UnwritableError: they are not there yet, and the folder cannot be written.
        BuildError: no compiler, or it failed, or what lies there may have been put there by somebody else.
    """
    compiler = find_compiler()
    with running(compiler):
        name = f"kernels-{_fingerprint(compiler)}.so"
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        _check_owner(folder)
        if path.exists():
            _check_owner(path)
            return path
        # Under its own name only when it is whole: two servers may start at once.
        scratch = tempfile.TemporaryDirectory(dir=folder)
    with scratch:
        announce()
        result = Path(scratch.name) / "kernels.so"
        with running(compiler):
            _compile([*compiler, *FLAGS, "-o", str(result), str(SOURCES / "relevo.cpp")])
        with writing(folder):
            result.replace(path)
    return path


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What goes wrong in the body is the folder's fault."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(f"{folder} cannot be written: {(error.strerror or str(error)).lower()}") from error


@contextmanager
def running(compiler: list[str]) -> Iterator[None]:
    """What goes wrong in the body is the compiler's fault."""
    try:
        yield
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler[0]} took longer than {TIMEOUT_SECONDS} s") from error
    except OSError as error:
        raise BuildError(f"{compiler[0]} cannot be run: {(error.strerror or str(error)).lower()}") from error


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)  # noqa: S603
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} could not compile them: {first or f'exit {done.returncode}'}")


def _check_owner(path: Path) -> None:
    """A library runs with all our rights: whoever can write it, or put another in its place, has them too."""
    if not hasattr(os, "geteuid"):
        return
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise BuildError(f"{path} belongs to somebody else, or others may write to it")


def find_compiler() -> list[str]:
    """The C++ compiler's command: `$CXX`, or the first that is installed.

    Raises:
        BuildError: there is none.
    """
    if chosen := os.environ.get("CXX"):
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise BuildError(f"$CXX is {chosen!r}: {error}") from error
        if not command or shutil.which(command[0]) is None:
            raise BuildError(f"$CXX is {chosen!r}, and there is no such compiler")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler (g++ or clang++)")


def what_triton_lacks() -> str | None:
    """Of what Triton compiles its launches with, in words; `None` where all is there. Looks where Triton does."""
    if chosen := os.environ.get("CC"):
        if shutil.which(chosen) is None:
            return f"$CC is {chosen!r}, and there is no such compiler, which Triton wants"
    elif not any(map(shutil.which, C_COMPILERS)):
        return "there is no C compiler, which Triton wants (apt-get install gcc)"
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme has no headers.
    header = Path(sysconfig.get_path("include", scheme.replace("posix_local", "posix_prefix"))) / "Python.h"
    return None if header.exists() else f"there is no {header}, which Triton wants (apt-get install python3-dev)"


def _fingerprint(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=TIMEOUT_SECONDS, check=False).stdout  # noqa: S603
    digest = hashlib.sha256(repr((compiler, version, FLAGS, platform.machine(), _processor())).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` looks at: a cache may be carried to another machine."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
