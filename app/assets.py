"""Where the pages' templates and static files are: beside the packages in a checkout, inside `app` in a wheel."""

from __future__ import annotations

from pathlib import Path

_APP = Path(__file__).resolve().parent


def templates_dir() -> Path:
    """The folder of the server-rendered pages."""
    return _find("templates")


def static_dir() -> Path:
    """The folder of the stylesheet, the scripts and the pictures."""
    return _find("static")


def _find(name: str) -> Path:
    installed = _APP / "_web" / name
    return installed if installed.is_dir() else _APP.parent / name
