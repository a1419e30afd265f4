"""Reads a trace of requests from a file: an Azure LLM inference trace (CSV) or a Mooncake trace (JSON lines).

The file is read line by line. Azure's has the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, named by a
header in any order, or in this order without one. Mooncake's lines have `timestamp` (ms), `input_length`,
`output_length` and, where prompts share beginnings, `hash_ids`: one a block of 512 tokens.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from engine.errors import ConfigError
from engine.workload import WorkItem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512
# Nothing in these formats is longer; it keeps a file that is no text from being taken into memory as one line.
MAX_LINE_BYTES = 1 << 20
MAX_TOKENS = 10_000_000


class BadLineError(Exception):
    """A line is not what the format says; the text says what is wrong with it."""


class _Entry(NamedTuple):
    """One line; `seconds` on the trace's own clock."""

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Bad:
    """What is wrong with the first bad line, and how many there are."""

    first: str = ""
    count: int = 0


def read_trace(path: Path, *, max_requests: int | None = None, skip_bad_lines: bool = False) -> Workload:
    """Read a trace.

    Args:
        max_requests: stop after so many; `None` reads all.
        skip_bad_lines: leave out bad lines and count them, rather than refuse the file.

    Returns:
        The workload as it was recorded, first arrival at 0; `scaled` fits it to a model.

    Raises:
        ConfigError: the file cannot be read, is in no known format, has no request, or has bad lines. A line is bad
            too when it lies before the one above it in time.
    """
    if max_requests is not None and max_requests < 1:
        raise ConfigError(f"A trace needs at least one request, not {max_requests}.")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a trace file.")
    bad = _Bad()
    try:
        with path.open("rb") as file:
            parse, number = _recognise(file, path)
            items = tuple(islice(_items(_entries(file, parse, number, bad)), max_requests))
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror or error}.") from error
    if bad.count and not skip_bad_lines:
        lines = "1 line is bad," if bad.count == 1 else f"{bad.count} lines are bad, the first is"
        raise ConfigError(f"The trace {path} is refused, {lines} {bad.first}. Mend the file, or skip its bad lines.")
    if not items:
        cause = f": {bad.count} bad lines, the first is {bad.first}." if bad.count else "."
        raise ConfigError(f"The trace {path} has no request{cause}")
    return Workload(
        path.name,
        items,
        prefix_block_tokens=MOONCAKE_BLOCK if any(item.prefix_ids for item in items) else 0,
        max_output_tokens=max(item.num_output_tokens for item in items),
        num_skipped=bad.count,
    )


def _recognise(file: BinaryIO, path: Path) -> tuple[Callable[[str], _Entry], int]:
    """How to read a line, and the number of the line that the file is left at: the first after a header."""
    first, number = file.readline(MAX_LINE_BYTES), 1
    while first and not first.strip():
        first, number = file.readline(MAX_LINE_BYTES), number + 1
    text = first.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").strip()
    if not text:
        raise ConfigError(f"The trace {path} is empty.")
    if text.startswith("{"):
        file.seek(0)
        return _mooncake, 1
    cells = [cell.strip() for cell in text.split(",")]
    if not any(_is_number(cell) for cell in cells[1:]):
        columns = {name: cells.index(name) for name in AZURE_COLUMNS if name in cells}
        missing = [name for name in AZURE_COLUMNS if name not in columns]
        if missing:
            raise ConfigError(
                f"The trace {path} is in no known format: its first line lacks {', '.join(missing)}. "
                f"Known are CSV with {','.join(AZURE_COLUMNS)}, "
                "and JSON lines with timestamp, input_length and output_length."
            )
        return lambda line: _azure(line, columns, len(cells)), number + 1
    file.seek(0)
    return lambda line: _azure(line, {name: at for at, name in enumerate(AZURE_COLUMNS)}, 3), 1


def _entries(file: BinaryIO, parse: Callable[[str], _Entry], number: int, bad: _Bad) -> Iterator[_Entry]:
    """The good lines from line `number` on; blank ones are passed over, bad ones are noted."""
    last = float("-inf")
    while line := file.readline(MAX_LINE_BYTES):
        try:
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                raise BadLineError(f"it is longer than {MAX_LINE_BYTES} bytes")
            text = _decoded(line)
            if text:
                entry = parse(text)
                if entry.seconds < last:
                    raise BadLineError(f"it is {last - entry.seconds:g} s earlier than the line before it")
                last = entry.seconds
                yield entry
        except BadLineError as error:
            bad.count += 1
            bad.first = bad.first or f"line {number}: {error}"
        number += 1


def _items(entries: Iterator[_Entry]) -> Iterator[WorkItem]:
    """Arrivals counted from the first."""
    start: float | None = None
    for seconds, num_prompt_tokens, num_output_tokens, prefix_ids in entries:
        start = seconds if start is None else start
        yield WorkItem(seconds - start, num_prompt_tokens, num_output_tokens, prefix_ids)


def _decoded(line: bytes) -> str:
    try:
        return line.removeprefix(b"\xef\xbb\xbf").decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadLineError("it is not UTF-8") from error


def _azure(line: str, columns: dict[str, int], num_columns: int) -> _Entry:
    try:
        cells = [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise BadLineError("it is not CSV") from error
    if len(cells) != num_columns:
        raise BadLineError(f"it has {len(cells)} columns, not {num_columns}")
    when, prompt, answer = (cells[columns[name]] for name in AZURE_COLUMNS)
    return _Entry(
        _seconds(when), _length(_integer(prompt), "ContextTokens"), _length(_integer(answer), "GeneratedTokens")
    )


def _mooncake(line: str) -> _Entry:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError("it is not JSON") from error
    if not isinstance(record, dict):
        raise BadLineError("it is not a JSON object")
    missing = [name for name in ("timestamp", "input_length", "output_length") if name not in record]
    if missing:
        raise BadLineError(f"it lacks {', '.join(missing)}")
    when = record["timestamp"]
    if isinstance(when, bool) or not isinstance(when, (int, float)) or not abs(when) < 1e15:
        raise BadLineError(f"timestamp is {_shown(when)}, not a number of milliseconds")
    prompt = _length(record["input_length"], "input_length")
    answer = _length(record["output_length"], "output_length")
    names = record.get("hash_ids")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, int) and not isinstance(name, bool) for name in names)
    ):
        raise BadLineError("hash_ids is not a list of whole numbers")
    expected = -(-prompt // MOONCAKE_BLOCK)
    if names and len(names) != expected:
        raise BadLineError(f"it has {len(names)} hash_ids; a prompt of {prompt} tokens has {expected}")
    return _Entry(when / 1000.0, prompt, answer, tuple(names or ()))


def _seconds(text: str) -> float:
    """A date and time, or seconds."""
    if _is_number(text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadLineError(f"TIMESTAMP is {_shown(text)}, neither a date with a time nor seconds") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) < 1e15
    except ValueError:
        return False


def _integer(text: str) -> object:
    """A whole number where the text spells one, else the text."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def _length(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLineError(f"{name} is {_shown(value)}, not a whole number")
    if not 0 < value <= MAX_TOKENS:
        raise BadLineError(f"{name} is {value}; it can be 1 to {MAX_TOKENS}")
    return value


def _shown(value: object) -> str:
    """A value as it can stand in one line of an error."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
