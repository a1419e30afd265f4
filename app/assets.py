"""Where the pages' templates and static files are: beside the packages in a checkout, inside `app` in a wheel."""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

_APP = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """The folder of the server-rendered pages."""
    return _find("templates")


def static_dir() -> Path:
    """The folder of the stylesheet, the scripts and the pictures."""
    return _find("static")


class StaticFile(NamedTuple):
    """A file of `static/`.

    Attributes:
        kind: its MIME type.
        mark: of its content, and of no other.
        modified: seconds since the epoch.
    """

    data: bytes
    kind: str
    mark: str
    modified: float

    @classmethod
    def of(cls, name: str) -> StaticFile:
        """As it is now; read where it has changed since it was last asked for."""
        path = static_dir() / name
        return _read(path, path.stat().st_mtime)


def asset(name: str) -> str:
    """The address of a file in `static/`, with the mark of its content, so that it can be cached for ever."""
    return f"/static/{name}?v={StaticFile.of(name).mark}"


@cache
def _read(path: Path, modified: float) -> StaticFile:
    data = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return StaticFile(data, kind, hashlib.sha256(data).hexdigest()[:12], modified)


def _find(name: str) -> Path:
    installed = _APP / "_web" / name
    return installed if installed.is_dir() else _APP.parent / name
