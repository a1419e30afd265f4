"""Tokens to text while they arrive: never half a character, never a piece of a stop string."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Detokenizer:
    """Turns one sequence's tokens into text as early as the text is certain.

    The joined output does not depend on how the text is cut into tokens: it is the text of all bytes, up to the first
    place where a stop string is complete. Where two stop strings end at the same character, the longer one counts.
    Invalid UTF-8 becomes U+FFFD as soon as it is known to be invalid.

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

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take one token; return the text that is certain now, often `""` or more than the token's own.

        Args:
            may_stop: whether a stop string may begin here; once true, it stays true (`min_tokens`).
        """
        if self._finished or self._skip(token_id):
            return ""
        text = self._decoder.decode(self._token_bytes(token_id))
        return self._release(text) if may_stop else text

    def finish(self) -> str:
        """End of the sequence: return what was held back. A character that was cut short becomes U+FFFD."""
        if self._finished:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text += self._held
        self._finished = True
        self._held = ""
        return text

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
