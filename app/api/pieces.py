"""What an answer's text turns out to be, piece by piece: thinking, text, calls of tools. No HTTP and no clock here.

A reader takes the text as it comes, however it is cut, and gives pieces. Joined, the pieces do not depend on the cuts,
so that a streamed answer and a whole one agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Text:
    """What is meant for the person who asked."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """What the model says to itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls the tool `name`; its arguments follow. `index` counts the calls of an answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which together are a JSON object."""

    index: int
    text: str


Piece = Text | Thinking | CallBegun | CallArguments


class Reader(Protocol):
    """Turns text into pieces."""

    def push(self, text: str) -> list[Piece]:
        """Take text; give the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """The answer is over: give what was held back."""
        ...


class PlainReader:
    """All of it is text."""

    def push(self, text: str) -> list[Piece]:
        """The text as it is."""
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing was held back."""
        return []


class ChainedReader:
    """What `first` takes for text is read once more by `second`."""

    def __init__(self, first: Reader, second: Reader) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> list[Piece]:
        """Both readers' pieces, in order."""
        return self._pass_on(self._first.push(text))

    def finish(self) -> list[Piece]:
        """What either held back."""
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, pieces: list[Piece]) -> list[Piece]:
        return [
            inner
            for piece in pieces
            for inner in (self._second.push(piece.text) if isinstance(piece, Text) else [piece])
        ]


@dataclass(slots=True)
class Call:
    """A call of a tool, with its arguments as JSON."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole answer."""

    text: str = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take in pieces, in order."""
        for piece in pieces:
            match piece:
                case Text(text):
                    self.text += text
                case Thinking(text):
                    self.thinking += text
                case CallBegun(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text


def begun_suffix(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`; all of it does not count."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
