"""Tokens to text while they arrive: never half a character, never a piece of a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.batch import TokenLogprobs


class Detokenizer:
    """Turns one sequence's tokens into text as early as the text is certain.

    The joined output does not depend on how the text is cut into tokens: it is the text of all bytes, up to the first
    place where a stop string is complete. Where two stop strings end at the same character, the longer one counts.
    Invalid UTF-8 becomes U+FFFD as soon as it is known to be invalid.

    Log-probabilities become certain with the text of their token (`take_logprobs`): when its last character is out.
    Of a token that a stop string cuts the beginning is text, so it is told of; those behind it never are.

    Args:
        token_bytes: the bytes that a token stands for.
        skip: whether a token is not shown (control tokens).
        stop: stop strings; empty ones are ignored.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, skip: Callable[[int], bool], stop: tuple[str, ...] = ()
    ) -> None:
        self.stopped: str | None = None
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Longest first, so that of two that end together the longer is found.
        self._matchers = [_Matcher(text) for text in sorted(filter(None, stop), key=len, reverse=True)]
        self._held = ""
        self._finished = False
        # Characters of the whole text: decoded, and out. Counted where log-probabilities are told.
        self._num_decoded = self._num_out = 0
        # Those whose text is not all out: where in the text it begins and ends.
        self._waiting: deque[tuple[int, int, TokenLogprobs]] = deque()
        self._certain: list[TokenLogprobs] = []

    def push(self, token_id: int, *, may_stop: bool = True, logprobs: TokenLogprobs | None = None) -> str:
        """Take one token; return the text that is certain now, often `""` or more than the token's own.

        Args:
            may_stop: whether a stop string may begin here; once true, it stays true (`min_tokens`).
            logprobs: what is to be told of the token, once its text is certain. With every token, or with none.
        """
        if self._finished or self._skip(token_id):
            return ""
        text = self._decoder.decode(self._token_bytes(token_id))
        if logprobs is not None:
            self._follow(len(text), logprobs)
        out = self._release(text) if may_stop else text
        if self._waiting:
            self._let_go(len(out))
        return out

    def finish(self) -> str:
        """End of the sequence: return what was held back. A character that was cut short becomes U+FFFD."""
        if self._finished:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text += self._held
        self._finished = True
        self._held = ""
        self._let_go(len(text))
        return text

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """What became certain since the last call, in the order of the tokens."""
        certain = tuple(self._certain)
        self._certain.clear()
        return certain

    def _follow(self, num_characters: int, logprobs: TokenLogprobs) -> None:
        """Note where the text of the newest token lies; a character that it leaves unfinished belongs to it."""
        begin = self._num_decoded
        self._num_decoded += num_characters
        unfinished = bool(self._decoder.getstate()[0])
        self._waiting.append((begin, self._num_decoded + unfinished, logprobs))

    def _let_go(self, num_characters: int) -> None:
        """So many more characters are out, and with them whoever ends there."""
        self._num_out += num_characters
        waiting, out = self._waiting, self._num_out
        while waiting and (waiting[0][1] <= out or (self._finished and waiting[0][0] < out)):
            self._certain.append(waiting.popleft()[2])

    def _release(self, text: str) -> str:
        if not self._matchers:
            return text
        buffer = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            for matcher in self._matchers:
                if matcher.advance(character):
                    self.stopped = matcher.text
                    self._finished = True
                    self._held = ""
                    return buffer[: index + 1 - len(matcher.text)]
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]


class _Matcher:
    """Follows one stop string through a text, in constant time a character (Knuth, Morris and Pratt).

    `matched` is the length of the longest suffix of the text so far that begins the stop string: just what has to be
    held back for it.
    """

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # _fallback[n]: the longest proper prefix of text[:n] that is also its suffix.
        self._fallback = [0, 0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = self._fallback[length]
            length += text[length] == character
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Take one character; true where it completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)
