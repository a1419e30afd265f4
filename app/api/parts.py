"""What an answer is made of, between the text that the engine writes and the shape that a route gives it.

A reader takes one choice's text as it comes, however it is cut, and says what it is: thinking, text, calls of tools.
Joined, the parts do not depend on the cuts, so that a streamed answer and a whole one agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of what the model says to itself before it answers."""

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


Part = Text | Thinking | CallBegun | CallArguments


class Reader(Protocol):
    """Takes one choice's text as it comes and says what it is. One for each choice; it may hold text back."""

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        ...

    def finish(self) -> list[Part]:
        """The text is over: what was held back."""
        ...

    def reason(self, reason: str) -> str:
        """The finish reason to tell, from the engine's."""
        ...


class PlainReader:
    """All text is the answer."""

    def push(self, text: str) -> list[Part]:
        """The text as it is."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """Nothing is ever held back."""
        return []

    def reason(self, reason: str) -> str:
        """The engine's own."""
        return reason


class ChainedReader:
    """What `first` takes for text is read once more by `second`."""

    def __init__(self, first: Reader, second: Reader) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> list[Part]:
        """Both readers' parts, in order."""
        return self._pass_on(self._first.push(text))

    def finish(self) -> list[Part]:
        """What either held back."""
        return self._pass_on(self._first.finish()) + self._second.finish()

    def reason(self, reason: str) -> str:
        """Both may have a say."""
        return self._second.reason(self._first.reason(reason))

    def _pass_on(self, parts: list[Part]) -> list[Part]:
        return [
            inner for part in parts for inner in (self._second.push(part.text) if isinstance(part, Text) else [part])
        ]


def join_text(parts: Iterable[Part]) -> str:
    """The answer's text, whole."""
    return "".join([part.text for part in parts if isinstance(part, Text)])


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


def join_parts(parts: Iterable[Part]) -> Message:
    """The whole answer that these parts, in order, make up."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case Thinking(text):
                thoughts.append(text)
            case CallBegun(_, call_id, name):
                calls.append(Call(call_id, name))
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return Message("".join(texts), "".join(thoughts), calls)


def begun_suffix(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`; a whole mark does not count."""
    if mark[0] not in text[1 - len(mark) :]:
        return 0
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
