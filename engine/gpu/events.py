"""Places in what a device was asked for, to be waited for."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """One place, or another later on; before there is one nobody waits."""

    def record(self) -> None:
        """The place is here, behind everything that was launched."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...


class Past:
    """Of a device that computes at once."""

    def record(self) -> None:
        """It has come here."""

    def synchronize(self) -> None:
        """Nothing is under way."""
