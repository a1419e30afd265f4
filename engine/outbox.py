"""From the engine to one reader: the engine appends and never waits; the reader takes whatever has gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.batch import TokenLogprobs
    from engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went: until it was seated, until its first token, until its last; in seconds."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, and its times."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timing: Timing = Timing()


class Delta(NamedTuple):
    """A piece of an answer; there is one for every token.

    Attributes:
        text: what may be shown; empty when tokens are held back or stand for nothing visible.
        token_ids: the tokens that were generated since the piece before, also those whose text is held back.
        finish_reason: set on the last piece only.
        error: one line of cause when `finish_reason` is `ERROR`, the cause of the abort when it is `ABORT`.
        usage: set on the last piece only.
        logprobs: for requests that ask. They come with the text of their tokens, not with `token_ids`; the bytes of
            all their tokens are the bytes of the answer's text. Tokens that are not shown have none: control tokens,
            the stop token, and what lies within a stop string. One that is cut by a stop string has its entry.
        stop: the stop string that ended the answer, where one did.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop: str | None = None


class Outbox:
    """A list and an event. Its length is bounded by the longest answer, its age by `unread_since`.

    Attributes:
        on_news: called with every addition; must not wait. For who reads several outboxes as one.
        num_tokens: how many were ever added.
    """

    def __init__(self) -> None:
        self.on_news: Callable[[], None] = _nobody
        self.num_tokens = 0
        self.unread_since: float | None = None
        self.last: Delta | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._has_news = False
        self._awaited: trio.Event | None = None

    def append(self, text: str, token_id: int, now: float, logprobs: Iterable[TokenLogprobs] = ()) -> None:
        """Add a token, and the text and the log-probabilities that became certain with it."""
        if text:
            self._text.append(text)
        self._token_ids.append(token_id)
        if logprobs:
            self._logprobs.extend(logprobs)
        self.num_tokens += 1
        if self.unread_since is None:
            self.unread_since = now
        self._announce()

    def close(
        self,
        text: str,
        reason: FinishReason,
        usage: Usage,
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        stop: str | None = None,
    ) -> None:
        """Add the last text and the ending. Only the first ending counts."""
        if self.last is None:
            self.last = Delta(text, (), reason, error, usage, logprobs, stop)
            self._announce()

    async def take(self) -> Delta:
        """Wait for news and take all of it: several steps' worth when the reader was slow. Safe to cancel.

        There is one reader.
        """
        if self._has_news:
            await trio.lowlevel.checkpoint()
        else:
            self._awaited = trio.Event()
            await self._awaited.wait()
        return self._take()

    def take_now(self) -> Delta | None:
        """All the news there is, or `None`."""
        return self._take() if self._has_news else None

    def _announce(self) -> None:
        self._has_news = True
        if self._awaited is not None:
            self._awaited.set()
            self._awaited = None
        self.on_news()

    def _take(self) -> Delta:
        self._has_news = False
        self.unread_since = None
        text, token_ids, logprobs = "".join(self._text), tuple(self._token_ids), tuple(self._logprobs)
        last = self.last
        self._text.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        if last is None:
            return Delta(text, token_ids, logprobs=logprobs)
        logprobs += last.logprobs
        return Delta(text + last.text, token_ids, last.finish_reason, last.error, last.usage, logprobs, last.stop)


def _nobody() -> None:
    """Nobody else listens."""
