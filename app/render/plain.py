"""What others have named, as it can be shown: a terminal obeys nothing of it, and it turns no other word around."""

from __future__ import annotations

from typing import Any

from app.logs import escape


def plain(text: str) -> str:
    """A text in one line: control characters and marks of direction as Python writes them, spaces as they are."""
    return "\N{NO-BREAK SPACE}".join([escape(piece) for piece in text.split("\N{NO-BREAK SPACE}")])


def plain_of(value: Any) -> Any:
    """The same of every text in an object as JSON has it, names of its members too."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain_of(name): plain_of(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_of(one) for one in value]
    return value
