"""What was asked for, checked before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_WORKLOAD: Final = "azure-conversation"
DEFAULT_SECONDS: Final = 480.0


@dataclass(frozen=True, slots=True)
class Options:
    """How to compare.

    Attributes:
        workload: name of a fitted workload; not looked at where there is a trace.
        trace: a trace file, or `None`.
        skip_bad_lines: leave bad lines of the trace out, instead of refusing it.
        factor: divide lengths by it; `None` takes what fits the model and the time.
        requests: of each run; `None` takes what fits into the time.
        repeats: rounds through all policies; `None` takes what fits, two at least where that can be.
        rate: requests a second; `None` has all of them wait at the start.
        duration: seconds of wall time that the whole comparison may take, aimed at.
        price_per_hour: of the machine, in any currency.
        seed: of the workload.
        flags: what else it was started with, for a reader who wants to repeat it.
    """

    workload: str = DEFAULT_WORKLOAD
    trace: Path | None = None
    skip_bad_lines: bool = False
    factor: float | None = None
    requests: int | None = None
    repeats: int | None = None
    rate: float | None = None
    duration: float = DEFAULT_SECONDS
    price_per_hour: float | None = None
    seed: int = 0
    flags: tuple[str, ...] = ()


def check_writable(path: Path | None) -> None:
    """Refuse a result file that could not be written, before minutes are spent on it. None is left behind.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    try:
        try:
            path.open("xb").close()
        except FileExistsError:
            path.open("ab").close()
        else:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; name another file.") from None
