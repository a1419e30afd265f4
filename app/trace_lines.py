"""The lines of traces: Azure's CSV, Mooncake's JSON, and those of a recording (`app.recording.lines`)."""

from __future__ import annotations

import csv
import json
import re
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from app.recording.lines import CACHED, CLASSES

AZURE_COLUMNS: Final[tuple[str, ...]] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS: Final[tuple[str, ...]] = ("timestamp", "input_length", "output_length")
MOONCAKE_BLOCK: Final = 512
MAX_TOKENS: Final = 10_000_000


class BadLineError(Exception):
    """A line is not what the format says; the text says what is wrong with it."""


class Entry(NamedTuple):
    """One line; `seconds` on the trace's own clock.

    Attributes:
        num_cached_tokens: of the prompt, with which an earlier one began, too.
    """

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    is_background: bool = False


def azure(line: str, columns: dict[str, int], num_columns: int) -> Entry:
    """A line of Azure's; `columns` are the places of `AZURE_COLUMNS`."""
    try:
        cells = [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise BadLineError("it is not CSV") from error
    if len(cells) != num_columns:
        raise BadLineError(f"it has {len(cells)} columns, not {num_columns}")
    when, prompt, answer = (cells[columns[name]] for name in AZURE_COLUMNS)
    return Entry(
        _seconds(when), _length(_integer(prompt), "ContextTokens"), _length(_integer(answer), "GeneratedTokens")
    )


def mooncake(line: str) -> Entry:
    """A line of Mooncake's."""
    record, seconds = _object(line)
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
    return Entry(seconds, prompt, answer, tuple(names or ()))


def recorded(line: str) -> Entry:
    """A line of a recording; whose answer never began is taken to have asked for one token."""
    record, seconds = _object(line, CACHED, "class")
    work_class = record["class"]
    if work_class not in CLASSES:
        raise BadLineError(f"class is {_shown(work_class)}, not one of {', '.join(CLASSES)}")
    return Entry(
        seconds,
        _length(record["input_length"], "input_length"),
        max(1, _length(record["output_length"], "output_length", least=0)),
        num_cached_tokens=_length(record[CACHED], CACHED, least=0),
        is_background=work_class == CLASSES[1],
    )


def _object(line: str, *more: str) -> tuple[dict[str, Any], float]:
    """The object of a line, which has Mooncake's fields and `more`, and its time in seconds."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError("it is not JSON") from error
    if not isinstance(record, dict):
        raise BadLineError("it is not a JSON object")
    missing = [name for name in (*MOONCAKE_FIELDS, *more) if name not in record]
    if missing:
        raise BadLineError(f"it lacks {', '.join(missing)}")
    when = record["timestamp"]
    if isinstance(when, bool) or not isinstance(when, (int, float)) or not abs(when) < 1e15:
        raise BadLineError(f"timestamp is {_shown(when)}, not a number of milliseconds")
    return record, when / 1000.0


def _seconds(text: str) -> float:
    """A date and time, or seconds."""
    if is_number(text):
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadLineError(f"TIMESTAMP is {_shown(text)}, neither a date with a time nor seconds") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def is_number(text: str) -> bool:
    """Whether a text spells a number that could be a time."""
    try:
        return abs(float(text)) < 1e15
    except ValueError:
        return False


def _integer(text: str) -> object:
    """A whole number where the text spells one, else the text."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def _length(value: object, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLineError(f"{name} is {_shown(value)}, not a whole number")
    if not least <= value <= MAX_TOKENS:
        raise BadLineError(f"{name} is {value}; it can be {least} to {MAX_TOKENS}")
    return value


def _shown(value: object) -> str:
    """A value as it can stand in one line of an error."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
