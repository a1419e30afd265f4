"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Version of the installed package; "0" where it runs without being installed."""
    try:
        return version("relevo")
    except PackageNotFoundError:
        return "0"
