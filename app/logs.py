"""The log: human or JSON lines, written by a thread of their own, of which no client can forge one.

A record may carry `extra={FIELDS: {...}}`: pairs behind a human line, members of a JSON one.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from app.audit import timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import TextIO

FIELDS: Final = "fields"
MAX_LINES: Final = 10_000  # that wait for a reader who does not read
CLOSE_SECONDS: Final = 3.0
FLUSH_SECONDS: Final = 1.0
_PLAIN: Final = re.compile(r"[\w./:+@-]+")


class HumanFormatter(logging.Formatter):
    """`time LEVEL logger: message name=value …`; below an error the lines of its traceback, each behind a bar."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {escape(record.getMessage())}"
        line += "".join([f" {name}={_pair(value)}" for name, value in fields_of(record).items() if value is not None])
        if record.exc_info:
            told = self.formatException(record.exc_info).splitlines()
            line += "".join([f"\n  | {escape(part)}" for part in told])
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        told = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told)


FORMATS: Final[Mapping[str, type[logging.Formatter]]] = {"human": HumanFormatter, "json": JsonFormatter}


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What a record carries beside its message."""
    found: Mapping[str, Any] = getattr(record, FIELDS, {})
    return found


def escape(text: str) -> str:
    """A text in one line: line ends, control characters and marks of direction as Python writes them."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])


def _pair(value: object) -> str:
    """A value that cannot be taken for a further pair."""
    text = f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if _PLAIN.fullmatch(text) or not isinstance(value, str) else json.dumps(text)


class LineWriter(logging.Handler):
    """Writes lines on a thread of its own: whoever logs never waits for a terminal or a pipe that nobody reads.

    What is beyond `max_lines` is lost, and how much that was is told as soon as somebody reads again.
    """

    def __init__(self, stream: TextIO, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._num_lost = 0
        self._num_taken, self._num_written = 0, 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line over."""
        try:
            self._lines.put_nowait(self.format(record))
            self._num_taken += 1
        except queue.Full:
            self._num_lost += 1
        except Exception:
            self.handleError(record)  # logging's own way to tell of a message that cannot be made

    def flush(self) -> None:
        """Wait until all is written; not for long, and without a lock: a signal may want it in the midst of a line."""
        end = time.monotonic() + FLUSH_SECONDS
        while self._thread.is_alive() and self._num_written < self._num_taken and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        """Write what there is; a reader who does not read is not waited for."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._lines.put(None, timeout=CLOSE_SECONDS)
                self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._num_lost = self._num_lost, 0
            told = f"{self.format(_lost(lost))}\n{line}\n" if lost else f"{line}\n"
            try:
                self._stream.write(told)
                self._stream.flush()
            except OSError:
                self._num_lost += 1 + lost
            self._num_written += 1


def _lost(number: int) -> logging.LogRecord:
    message = "%d lines of the log are lost: they were not read in time"
    return logging.LogRecord("relevo.log", logging.WARNING, "", 0, message, (number,), None)


def flush_logs() -> None:
    """Write what was logged, for an end of the process that cleans nothing up."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineWriter):
            handler.flush()


@contextmanager
def open_logs(log_format: str, level: str, stream: TextIO | None = None) -> Iterator[None]:
    """What is logged in the body, from `level` on, becomes lines on `stream` (stderr) in one of `FORMATS`."""
    root = logging.getLogger()
    writer, before = LineWriter(sys.stderr if stream is None else stream), root.level
    writer.setFormatter(FORMATS[log_format]())
    root.addHandler(writer)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.removeHandler(writer)
        root.setLevel(before)
        writer.close()
