"""The command line."""

from __future__ import annotations


def main(argv: list[str] | None = None) -> int:
    """Run one command; give the exit code: 0 done, 1 failed, 2 wrong use."""
    return 0
