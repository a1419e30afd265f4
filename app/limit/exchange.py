"""One streamed answer over HTTP/1.1: while it comes, only when which bytes came is noted; they are read afterwards.

A client that measures shares the machine with what it measures, so it does as little as it can while requests run:
callbacks of asyncio's loop and no task for a connection. A connection carries one request, since some servers give an
open connection a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Pieces = list[tuple[float, bytes]]

# With the end of the chunk before it: a text may end in a nought and an empty line of its own.
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
MAX_ERROR_CHARS: Final = 300
# No answer to such requests is longer: who sends more would fill this machine's memory.
MAX_BYTES: Final = 64 << 20
DONE: Final = b"[DONE]"
# Errors that the answer itself does not tell: it was given up by who asked, in its own time or with the whole run.
NOT_FINISHED: Final = "not finished in time"
STOPPED: Final = "stopped"
# Another kind that is none of the server's: this machine opens no more connections.
NO_CONNECTION: Final = "no connection left here"
NOT_STREAMED: Final = "the answer is not a stream of events"
NO_USAGE: Final = "the stream held no usage"
NO_TEXT: Final = "the stream held no text"
# So many tokens may be of a character that is not complete, and have no text.
MAX_SILENT_TOKENS: Final = 3
TOO_LONG: Final = f"more than {MAX_BYTES >> 20} MiB came"
# What bytes that are no response, or JSON that is no event, make of reading them.
UNREADABLE: Final = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
# Where a chat's answer and what it thought before it stand; tokens are tokens.
DELTA_TEXTS: Final = ("content", "reasoning_content", "reasoning")


@dataclass(slots=True)
class Answer:
    """What one request saw. Times are seconds on one clock.

    Attributes:
        due: when it was to be sent.
        sent: when that was begun.
        first: when the first text came.
        finished: when the stream ended.
        gaps: seconds between one piece of text and the next.
        sizes: characters of each piece of text.
        prompt_tokens, output_tokens: as the server's `usage` says.
        error: why the answer does not count, its kind before the first colon; empty where it does.
    """

    due: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    error: str = ""

    def token_gaps(self, usual: float = 0.0) -> list[float]:
        """Seconds a token: each gap divided by the tokens of the piece that ended it.

        A piece is one token where there are as many pieces as tokens, or one less: an end token has no text. Else
        tokens are taken to be spread over the pieces as characters are.

        Args:
            usual: tokens a character (`tokens_per_character`), for an answer that did not come as far as its usage.
        """
        if self.output_tokens:
            is_split = self.output_tokens <= len(self.sizes) + 1
            usual = 0.0 if is_split else self.output_tokens / sum(self.sizes)
        if not usual:
            return self.gaps
        return [gap / max(1.0, size * usual) for gap, size in zip(self.gaps, self.sizes[1:], strict=True)]


def tokens_per_character(answers: Iterable[Answer]) -> float:
    """Of whole answers together; 0 where a piece is one token, or nothing is known."""
    whole = [answer for answer in answers if answer.output_tokens and answer.sizes]
    num_tokens, num_pieces = sum(one.output_tokens for one in whole), sum(len(one.sizes) for one in whole)
    if num_tokens <= num_pieces + len(whole):
        return 0.0
    return num_tokens / sum(sum(one.sizes) for one in whole)


class EventReader:
    """Reads an HTTP/1.1 response that may be chunked, and the events in it."""

    def __init__(self) -> None:
        self.status = 0
        self.is_stream = False
        self.body = bytearray()
        self._raw = bytearray()
        self._chunked = False
        self._data: list[bytes] = []
        self._read = 0  # bytes of `body` that were read as lines

    def feed(self, data: bytes) -> list[bytes]:
        """More bytes; gives the data of the events that they complete."""
        self._raw += data
        if not self.status and not self._read_head():
            return []
        if self._chunked:
            self._read_chunks()
        else:
            self.body += self._raw
            self._raw.clear()
        return list(self._read_events())

    def _read_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *headers = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        names = {name.strip().lower(): value.strip().lower() for name, _, value in (h.partition(":") for h in headers)}
        self._chunked = "chunked" in names.get("transfer-encoding", "")
        self.is_stream = "text/event-stream" in names.get("content-type", "")
        del self._raw[: end + 4]
        return True

    def _read_chunks(self) -> None:
        while (end := self._raw.find(b"\r\n")) >= 0:
            size = int(bytes(self._raw[:end]).partition(b";")[0], 16)
            if len(self._raw) < end + 2 + size + 2:
                return
            self.body += self._raw[end + 2 : end + 2 + size]
            del self._raw[: end + 2 + size + 2]

    def _read_events(self) -> Iterator[bytes]:
        while (end := self.body.find(b"\n", self._read)) >= 0:
            line = bytes(self.body[self._read : end]).rstrip(b"\r")
            self._read = end + 1
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


def text_of(said: Mapping[str, Any]) -> str:
    """The text in an event's data, of a chat or a completion; empty where it has none, as where a role is told."""
    texts = []
    for choice in said.get("choices") or ():
        delta = choice.get("delta") or {}
        texts += [choice.get("text"), *(delta.get(name) for name in DELTA_TEXTS)]
    return "".join(text for text in texts if text)


def has_text(pieces: Pieces) -> bool:
    """Whether any text came in what has come so far."""
    reader = EventReader()
    return any(event != DONE and text_of(json.loads(event)) for _, data in pieces for event in reader.feed(data))


def read_answer(answer: Answer, pieces: Pieces) -> None:
    """Fill in what the pieces of a response, each with its time, say; without usage nothing can be counted."""
    reader, moments, done = EventReader(), list[float](), False
    for moment, data in pieces:
        answer.finished = moment
        for event in reader.feed(data):
            if event == DONE:
                done = True
                continue
            said = json.loads(event)
            if said.get("error"):
                answer.error = answer.error or f"in the stream: {json.dumps(said['error'])[:MAX_ERROR_CHARS]}"
            if text := text_of(said):
                moments.append(moment)
                answer.sizes.append(len(text))
            if usage := said.get("usage"):
                answer.prompt_tokens = _as_count(usage["prompt_tokens"])
                answer.output_tokens = _as_count(usage["completion_tokens"])
    if moments:
        answer.first = moments[0]
        answer.gaps = [later - earlier for earlier, later in pairwise(moments)]
    answer.error = answer.error or _what_is_missing(reader, answer, done=done)


def _as_count(told: Any) -> int:
    if not isinstance(told, int) or told < 0:
        raise ValueError(f"usage of {told!r} tokens")
    return told


def _what_is_missing(reader: EventReader, answer: Answer, *, done: bool) -> str:
    if reader.status != 200:
        said = bytes(reader.body[:MAX_ERROR_CHARS]).decode(errors="replace")
        return f"HTTP {reader.status}: {said}" if reader.status else "no answer came"
    if not done:
        return "the stream ended without [DONE]" if reader.is_stream else NOT_STREAMED
    if not answer.output_tokens:
        return NO_USAGE
    return "" if answer.sizes or answer.output_tokens <= MAX_SILENT_TOKENS else NO_TEXT


def read_whole(answer: Answer, pieces: Pieces) -> None:
    """Fill in an answer; what cannot be read is its error."""
    try:
        read_answer(answer, pieces)
    except UNREADABLE as error:
        answer.error = f"not understood: {str(error)[:MAX_ERROR_CHARS] or type(error).__name__}"


class Exchange(asyncio.Protocol):
    """Sends one request, and notes in `pieces` when which bytes of the response came.

    Args:
        ended: called once, with an error or an empty word, when the response is complete or the other side has closed.
    """

    def __init__(self, request: bytes, pieces: Pieces, ended: Callable[[str], object]) -> None:
        self._request, self._pieces = request, pieces
        self._on_end: Callable[[str], object] | None = ended
        self._tail = b""
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send it."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note it, nothing more; servers that keep the connection open are seen to end by their last chunk."""
        self._pieces.append((time.perf_counter(), data))
        size = len(LAST_CHUNK)
        self._tail = (self._tail + data[-size:])[-size:]
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BYTES:
            self._end(TOO_LONG)
        elif self._tail == LAST_CHUNK:
            self._end()

    def connection_lost(self, _error: Exception | None) -> None:
        """The other side is done."""
        self._end()

    def _end(self, error: str = "") -> None:
        if self._on_end is not None:
            ended, self._on_end = self._on_end, None
            ended(error)


def make_post(host: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a POST that asks for a stream. `host` is what the Host header says."""
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        f"Content-Length: {len(content)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content
