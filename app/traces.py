"""Reads a trace of requests from a file: Azure's LLM inference traces (CSV), Mooncake's or a recording (JSON lines).

The file is read line by line. Azure's has the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, named by a
header in any order, or in this order without one. Mooncake's lines have `timestamp` (ms), `input_length`,
`output_length` and, where prompts share beginnings, `hash_ids`: one a block of 512 tokens. A recording of one's own
traffic (`app.recording`) has the same three and more, in the order in which requests ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from app.recording.lines import CACHED
from app.trace_lines import (
    AZURE_COLUMNS,
    MOONCAKE_BLOCK,
    MOONCAKE_FIELDS,
    BadLineError,
    Entry,
    azure,
    is_number,
    mooncake,
    recorded,
)
from engine.errors import ConfigError
from engine.workload import WorkItem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

# Nothing in these formats is longer; it keeps a file that is no text from being taken into memory as one line.
MAX_LINE_BYTES: Final = 1 << 20
# Blocks that a prompt of a recording names at most.
MAX_NAMED: Final = 512


class _Format(NamedTuple):
    """How the lines are read that the file is left at, the first of which has this `number`."""

    parse: Callable[[str], Entry]
    number: int = 1

    @property
    def is_recording(self) -> bool:
        """Whether its lines are in the order of the ends, and the last may be cut by a crash."""
        return self.parse is recorded


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
            format_ = _recognise(file, path)
            entries: Iterable[Entry] = _entries(file, format_, bad)
            if format_.is_recording:
                entries = sorted(entries, key=lambda entry: entry.seconds)
            read = list(islice(entries, max_requests))
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror or error}.") from error
    if bad.count and not skip_bad_lines:
        lines = "1 line is bad," if bad.count == 1 else f"{bad.count} lines are bad, the first is"
        raise ConfigError(f"The trace {path} is refused, {lines} {bad.first}. Mend the file, or skip its bad lines.")
    if not read:
        cause = f": {bad.count} bad lines, the first is {bad.first}." if bad.count else "."
        raise ConfigError(f"The trace {path} has no request{cause}")
    block = _block_of(read) if format_.is_recording else MOONCAKE_BLOCK
    items = tuple([_item(entry, read[0].seconds, block) for entry in read])
    return Workload(
        path.name,
        items,
        prefix_block_tokens=block if any(item.prefix_ids for item in items) else 0,
        max_output_tokens=max(item.num_output_tokens for item in items),
        num_skipped=bad.count,
    )


def _recognise(file: BinaryIO, path: Path) -> _Format:
    """The format, by the first line; the file is left at the first after a header."""
    first, number = file.readline(MAX_LINE_BYTES), 1
    while first and not first.strip():
        first, number = file.readline(MAX_LINE_BYTES), number + 1
    text = first.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").strip()
    if not text:
        raise ConfigError(f"The trace {path} is empty.")
    if text.startswith("{"):
        file.seek(0)
        return _Format(recorded if f'"{CACHED}"' in text else mooncake)
    cells = [cell.strip() for cell in text.split(",")]
    if not any(is_number(cell) for cell in cells[1:]):
        columns = {name: cells.index(name) for name in AZURE_COLUMNS if name in cells}
        missing = [name for name in AZURE_COLUMNS if name not in columns]
        if missing:
            raise ConfigError(
                f"The trace {path} is in no known format: its first line lacks {', '.join(missing)}. "
                f"Known are CSV with {','.join(AZURE_COLUMNS)}, "
                f"and JSON lines with {', '.join(MOONCAKE_FIELDS)}."
            )
        return _Format(lambda line: azure(line, columns, len(cells)), number + 1)
    file.seek(0)
    return _Format(lambda line: azure(line, {name: at for at, name in enumerate(AZURE_COLUMNS)}, 3))


def _entries(file: BinaryIO, format_: _Format, bad: _Bad) -> Iterator[Entry]:
    """The good lines; blank ones are passed over, bad ones are noted, and the last of a recording where it is cut."""
    last, number = float("-inf"), format_.number
    while line := file.readline(MAX_LINE_BYTES):
        try:
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                raise BadLineError(f"it is longer than {MAX_LINE_BYTES} bytes")
            text = _decoded(line)
            if text:
                entry = format_.parse(text)
                if entry.seconds < last and not format_.is_recording:
                    raise BadLineError(f"it is {last - entry.seconds:g} s earlier than the line before it")
                last = entry.seconds
                yield entry
        except BadLineError as error:
            if format_.is_recording and not line.endswith(b"\n"):
                return  # cut, as the server was killed while it was written
            bad.count += 1
            bad.first = bad.first or f"line {number}: {error}"
        number += 1


def _block_of(entries: Sequence[Entry]) -> int:
    """Tokens of the blocks that cached lengths are counted in; 0 where nothing was cached."""
    lengths = [entry.num_cached_tokens for entry in entries]
    block = math.gcd(*lengths)
    return block and block * -(-max(lengths) // (MAX_NAMED * block))


def _item(entry: Entry, start: float, block: int) -> WorkItem:
    """A request, with its arrival counted from the first."""
    names = _common(round(entry.num_cached_tokens / block)) if entry.num_cached_tokens else entry.prefix_ids
    arrival = entry.seconds - start
    return WorkItem(arrival, entry.num_prompt_tokens, entry.num_output_tokens, names, entry.is_background)


@cache
def _common(num_blocks: int) -> tuple[int, ...]:
    """Names for what the prefix cache had of a prompt.

    It is not written down with which earlier prompt it was shared: all begin with the same text, as those do that have
    a system prompt in common. What is found when it is replayed is as long; where it was of many conversations, fewer
    blocks are enough for it.
    """
    return tuple(range(num_blocks))


def _decoded(line: bytes) -> str:
    try:
        return line.removeprefix(b"\xef\xbb\xbf").decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise BadLineError("it is not UTF-8") from error
