"""Places in what a device was asked for, to be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


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


def events_of(device: torch.device) -> Callable[[], Event]:
    """What makes events of a device; a processor computes at once."""
    return Past if device.type == "cpu" else torch.cuda.Event
