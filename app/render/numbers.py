"""Figures as people read them: few digits, the unit beside the number."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

MISSING = "\N{EM DASH}"


class Figure(NamedTuple):
    """A number as it is printed, and its unit; `text` is a dash where nothing was measured."""

    text: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.text}\N{NO-BREAK SPACE}{self.unit}" if self.unit else self.text


def seconds(value: float | None) -> Figure:
    """A latency: milliseconds below one second, else seconds."""
    if value is None:
        return Figure(MISSING)
    if value < 0.00995:
        return Figure(f"{value * 1000:.1f}", "ms")
    if value < 0.9995:
        return Figure(f"{value * 1000:.0f}", "ms")
    if value < 99.5:
        return Figure(f"{value:.2f}" if value < 9.995 else f"{value:.1f}", "s")
    return Figure(count(round(value)), "s")


def rate(value: float | None) -> Figure:
    """Something per second: one decimal below a hundred."""
    if value is None:
        return Figure(MISSING)
    return Figure(f"{value:.1f}" if 0 < value < 99.95 else count(round(value)))


def count(value: int | None) -> str:
    """An integer with its thousands apart."""
    return MISSING if value is None else f"{value:,}"


def setting(value: str | float) -> str:
    """A setting's value: words as people write them, on or off, integers with their thousands apart."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str):
        return value.replace("_", " ")
    return count(value) if isinstance(value, int) else f"{value:g}"


def exact(value: float) -> str:
    """A number to be typed again: no digit is lost, and integers have no point."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def percent(share: float | None) -> Figure:
    """A share from 0 to 1; never rounds up to 100 or down to 0."""
    if share is None:
        return Figure(MISSING)
    points = share * 100
    if 0 < points < 0.1:
        return Figure("<0.1", "%")
    if points < 10 and points:
        return Figure(f"{points:.1f}", "%")
    if 99.5 <= points < 100:
        return Figure(f"{min(points, 99.9):.1f}", "%")
    return Figure(f"{points:.0f}", "%")


def duration(value: float) -> str:
    """A time span in its two largest units."""
    whole = int(value)
    if whole < 60:
        return f"{whole}\N{NO-BREAK SPACE}s"
    parts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next(index for index, (amount, _) in enumerate(parts) if amount)
    shown = [f"{amount}\N{NO-BREAK SPACE}{unit}" for amount, unit in parts[first : first + 2] if amount]
    return "\N{NO-BREAK SPACE}".join(shown)


def age(value: float) -> str:
    """How old a request is: tenths while it is young."""
    return f"{value:.1f}\N{NO-BREAK SPACE}s" if value < 60 else duration(value)


def plural(number: int, one: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{count(number)} {one if number == 1 else one + 's'}"


def clock(time: float) -> str:
    """Seconds since the epoch as `31 Jan 12:00:00 UTC`."""
    moment = datetime.fromtimestamp(time, UTC)
    return f"{moment.day} {moment:%b %H:%M:%S} UTC"


def clock_of(iso: str) -> str:
    """The same of a time as JSON has it."""
    return clock(datetime.fromisoformat(iso).timestamp())
