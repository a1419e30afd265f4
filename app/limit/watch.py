"""What is told of a search while it goes on, for programs: a JSON object a line.

{"event": "progress", "seconds": 61, "planned_seconds": 480, "what": "…", "rate": 4.1, "ended": 37, "total": 189}
{"event": "run", "kind": "rate", …}      an entry of `curve`; kind is capacity, single, rate, or tried (other settings)
{"event": "result", "result": {…}}       what `--json` writes, at the end
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from app.compare.options import check_writable
from app.limit.summary import figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from app.limit.runs import Run


class Watch:
    """Looks on, and tells nobody."""

    def trying(self, rate: float, ended: int, total: int) -> None:
        """A run goes on: `ended` of `total` requests of it have; `rate` is 0 in a closed loop."""

    def ran(self, kind: str, run: Run, *, factor: float | None = None) -> None:
        """A run is over; `factor` divided its lengths, told of those in a closed loop: it may not be one for all."""

    def found(self, result: Mapping[str, Any]) -> None:
        """It is all over."""


class Lines(Watch):
    """Writes lines; is a reporter of progress too."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._trying: dict[str, Any] = {"rate": None, "ended": 0, "total": 0}

    def __call__(self, gone: int, planned: int, what: str) -> None:
        """So many seconds are gone of those that are planned."""
        self._say("progress", seconds=gone, planned_seconds=planned, what=what, **self._trying)

    def trying(self, rate: float, ended: int, total: int) -> None:
        """Told with the next line."""
        self._trying = {"rate": rate or None, "ended": ended, "total": total}

    def ran(self, kind: str, run: Run, *, factor: float | None = None) -> None:
        """Told at once."""
        self._say("run", kind=kind, **figures(run), **({} if factor is None else {"factor": factor}))

    def found(self, result: Mapping[str, Any]) -> None:
        """The last line."""
        self._say("result", result=result)

    def _say(self, event: str, **told: Any) -> None:
        self._out.write(json.dumps({"event": event, **told}) + "\n")
        self._out.flush()


@contextmanager
def open_lines(path: Path | None) -> Iterator[Lines | None]:
    """What writes lines to a file, `-` being the standard output; `None` where no file is named.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        yield None
    elif str(path) == "-":
        yield Lines(sys.stdout)
    else:
        check_writable(path)
        with path.open("w", encoding="utf-8") as out:
            yield Lines(out)
