"""A progress bar on stderr, on a terminal only."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from app.render.plain import plain

if TYPE_CHECKING:
    from types import TracebackType

_WIDTH = 30
_REDRAW_SECONDS = 0.1


class Progress:
    """Draws how far something is; call it with (done, total). Silent where nobody watches."""

    def __init__(self, label: str, *, unit: str = "") -> None:
        self._label = label
        self._unit = unit
        self._shown = False
        self._drawn_at = 0.0
        self._visible = sys.stderr.isatty()

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Draw `done` of `total`, and a word about it; a total of 0 is not known yet."""
        now = time.monotonic()
        if not self._visible or (now - self._drawn_at < _REDRAW_SECONDS and done < total):
            return
        self._drawn_at = now
        note = plain(note)  # a server may have named something in it
        share = min(done / total, 1.0) if total else 0.0
        bar = ("█" * round(share * _WIDTH)).ljust(_WIDTH, "░")
        count = f"{_size(done)} of {_size(total)}" if self._unit == "bytes" else f"{done} of {total} {self._unit}"
        self._write(f"\r\x1b[K{self._label} {bar} {share:4.0%}  {count}" + (f"  {note}" if note else ""))
        self._shown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._shown:
            self._write("\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal is closed: what is measured goes on, and so does an error on its way
            sys.stderr.write(text)
            sys.stderr.flush()


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
