"""Results on disk: the whole of one or nothing."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

# What lies there stands for something else: what takes its place would not be read by whoever has it open.
STREAMS: Final = ("/dev/", "/proc/")


def write_whole(path: Path, text: str) -> None:
    """Write a text beside a file and have it take its place, so that a disk that fills leaves what was there before.

    What is no plain file, such as `/dev/stdout`, or lies where nothing else may be written, is written as it stands.

    Raises:
        OSError: the disk does not take it; names the file.
    """
    whole = path.resolve()  # where it is a link, it stays one
    part = whole.with_name(f".{whole.name}.{os.getpid()}.part")
    try:
        if str(path.absolute()).startswith(STREAMS) or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
            return
        try:
            part.write_text(text, encoding="utf-8")
        except PermissionError:
            path.write_text(text, encoding="utf-8")
            return
        with suppress(FileNotFoundError):
            shutil.copymode(whole, part)
        part.replace(whole)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
