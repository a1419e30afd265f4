"""The files of recordings. Every call may block for as long as the disk does; what goes wrong is an `OSError`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_NAME: Final = re.compile(r"traffic-(\d{8}T\d{6}Z)(-\d{1,3})?\.jsonl")
_TIME: Final = "%Y%m%dT%H%M%SZ"
# Of one second.
MAX_NAMES: Final = 100
READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """A recording on disk.

    Attributes:
        began: seconds since the epoch.
        num_requests: lines that are whole.
    """

    name: str
    path: Path
    began: float
    num_requests: int
    num_bytes: int


def is_name(name: str) -> bool:
    """Whether a recording could be called so; nothing else ever comes to the disk."""
    return _NAME.fullmatch(name) is not None


def make_file(folder: Path, began: float) -> Path:
    """An empty file for a recording, in a folder that is made where it is missing; both are for their owner alone.

    Args:
        began: seconds since the epoch.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stem = f"traffic-{datetime.fromtimestamp(began, UTC):{_TIME}}"
    for number in range(MAX_NAMES):
        path = folder / (f"{stem}-{number}.jsonl" if number else f"{stem}.jsonl")
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return path
    raise FileExistsError(f"{stem}.jsonl and {MAX_NAMES - 1} more are there already")


def append(path: Path, lines: bytes, size: int) -> None:
    """Add lines to a file of `size` bytes that is there; all of them or, where the disk still lets that be, none.

    A file that was deleted is not made again.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        left = memoryview(lines)
        while left:
            left = left[os.write(file, left) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, size)
        raise
    finally:
        os.close(file)


def list_kept(folder: Path, counted: dict[str, tuple[int, int]]) -> list[Kept]:
    """All recordings of a folder, the newest first; none where there is no folder.

    Args:
        counted: what is known from the last time, a name to bytes and lines; brought up to date.
    """
    try:
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if is_name(entry.name)}
    except FileNotFoundError:
        return []
    for name in counted.keys() - sizes:
        del counted[name]
    for name, size in sizes.items():
        if name not in counted or counted[name][0] != size:
            counted[name] = (size, _count_lines(folder / name, size))
    return [
        Kept(name, folder / name, _began(name), counted[name][1], sizes[name]) for name in sorted(sizes, reverse=True)
    ]


def count_kept(folder: Path) -> int:
    """How many recordings there are."""
    try:
        return sum(is_name(entry.name) for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0


def _count_lines(path: Path, size: int) -> int:
    """Lines in the first `size` bytes."""
    lines = 0
    with path.open("rb") as file:
        while piece := file.read(min(READ_BYTES, size)):
            lines, size = lines + piece.count(b"\n"), size - len(piece)
    return lines


def _began(name: str) -> float:
    found = _NAME.fullmatch(name)
    assert found is not None
    try:
        return datetime.strptime(found[1], _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:  # digits that are no date, by somebody's hand
        return 0.0
