"""Results on disk: the whole of one or nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

# What a disk says that takes no more: then what was there before is all there is.
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
OPEN_FILES: Final = Path("/dev/fd")


def write_whole(path: Path, text: str) -> None:
    """Write a text beside a file and have it take its place, so that a disk that fills leaves what was there before.

    What is no plain file, or is open for writing here already, as `/dev/stdout` is, is written as it stands: what takes
    its place would not be read by whoever has it open. So is that of which nothing can take the place.

    Raises:
        OSError: the disk does not take it; names the file.
    """
    try:
        descriptor = _descriptor_of(path)
        if descriptor is not None:
            if sys.stdout is not None:
                sys.stdout.flush()  # what was said before comes before
            with open(os.dup(descriptor), "w", encoding="utf-8") as out:
                out.write(text)
        elif (path.exists() and not path.is_file()) or not _replace(path, text):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: object) -> None:
    """The same of a result, as JSON that people read too."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> bool:
    """Whether a file beside it took its place."""
    whole = path.resolve()  # where it is a link, it stays one
    part = whole.with_name(f".{whole.name}.{os.getpid()}.part")
    try:
        out = part.open("x", encoding="utf-8")
    except OSError as error:
        if error.errno in FULL:
            raise
        return False
    try:
        with out:
            out.write(text)
        with suppress(FileNotFoundError):
            shutil.copymode(whole, part)
        part.replace(whole)
    except OSError as error:
        if error.errno in FULL:
            raise
        return False
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return True


def _descriptor_of(path: Path) -> int | None:
    """Under which this process has that file open for writing, the first; `None` where it has not."""
    with suppress(OSError):
        wanted = path.stat()
        for number in sorted([int(entry.name) for entry in OPEN_FILES.iterdir()]):
            with suppress(OSError):  # that of the list itself is closed by now
                writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                if writes and os.path.samestat(os.fstat(number), wanted):
                    return number
    return None
