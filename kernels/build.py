"""Compiles the native kernels for this very processor, once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
# Products and sums are joined only where the source says so: a value must not depend on what surrounds it.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_SECONDS = 300


class BuildError(Exception):
    """There is no library, and this is why."""


def build(folder: Path) -> Path:
    """The compiled library for this source, compiler and processor; made if it is not there yet.

    Args:
        folder: where libraries are kept.

    Raises:
        BuildError: no compiler, or it failed.
    """
    compiler = find_compiler()
    path = folder / f"kernels-{_fingerprint(compiler)}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # Under its own name only when it is whole: two servers may start at once.
            result = Path(scratch) / "kernels.so"
            command = [*compiler, *FLAGS, "-o", str(result), str(SOURCES / "relevo.cpp")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)  # noqa: S603
            if done.returncode != 0:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                raise BuildError(f"{' '.join(compiler)} could not compile them: {first or f'exit {done.returncode}'}")
            result.replace(path)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(compiler)} took longer than {TIMEOUT_SECONDS} s") from error
    except OSError as error:
        raise BuildError(f"they could not be compiled into {folder}: {error}") from error
    return path


def find_compiler() -> list[str]:
    """The C++ compiler's command: `$CXX`, or the first that is installed.

    Raises:
        BuildError: there is none.
    """
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise BuildError(f"$CXX is {chosen!r}, and there is no such compiler")
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C++ compiler (g++ or clang++)")


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256(repr((compiler, FLAGS, platform.machine(), _processor())).encode())
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
