r"""Log-probabilities as OpenAI writes them, on the chat route and on the completions route.

A token that is no text of its own (part of a character) is written `bytes:\xe2\x82`, as OpenAI does; the chat route
has the exact bytes beside it.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.batch import TokenLogprobs

# JSON has no minus infinity; OpenAI writes this instead.
LEAST: Final = -9999.0


def spell(data: bytes) -> str:
    """A token's bytes as a string of JSON."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


class Writer(ABC):
    """Writes a choice's log-probabilities, from its first token to its last, in as many pieces as it likes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    @abstractmethod
    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of the choice, for these tokens."""

    def spell(self, token_id: int) -> str:
        """A token as a string of JSON."""
        return spell(self._token_bytes(token_id))


class ChatWriter(Writer):
    """As on the chat route, with exact bytes."""

    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`content`, a list of tokens."""
        content = [
            {**self._one(entry.token_id, entry.logprob), "top_logprobs": [self._one(*other) for other in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.spell(token_id),
            "logprob": _finite(logprob),
            "bytes": list(self._token_bytes(token_id)),
        }


class CompletionWriter(Writer):
    """As on the completions route: lists side by side, with the place of each token in the text, in characters.

    A character may be cut into several tokens: all of them begin where it begins.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__(token_bytes)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_characters = 0

    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The lists."""
        tops = []
        for entry in entries:
            # The chosen token is always among them, so there may be one more than was asked for.
            top = {self.spell(other): _finite(logprob) for other, logprob in entry.top}
            top.setdefault(self.spell(entry.token_id), _finite(entry.logprob))
            tops.append(top)
        return {
            "tokens": [self.spell(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [self._advance(entry.token_id) for entry in entries],
        }

    def _advance(self, token_id: int) -> int:
        begin = self._num_characters
        self._num_characters += len(self._decoder.decode(self._token_bytes(token_id)))
        return begin
