"""Keeps what people write from turning into control tokens."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlGuard:
    """Replaces one character of every control token's spelling inside given values by a private-use stand-in.

    Text built from guarded values holds a control token only where the builder itself wrote one. The stand-ins are
    turned back once the control tokens are found. Lengths do not change, and values without such spellings stay as
    they are.

    Args:
        spellings: how the control tokens are written.
    """

    def __init__(self, spellings: Iterable[str]) -> None:
        texts = sorted(filter(None, spellings), key=len, reverse=True)
        alternatives = "|".join(map(re.escape, texts)) or r"(?!)"
        self._any = re.compile(alternatives)
        # Every place where a spelling begins, overlapping ones too.
        self._begin = re.compile(rf"(?s)(?={alternatives}).")
        self._alphabet = sorted(set(chain.from_iterable(texts)))
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def protect(self, value: Any) -> tuple[Any, dict[int, str]]:
        """A guarded copy of a value made of strings, lists and mappings.

        Returns:
            The copy, and the table for `str.translate` that turns the stand-ins back.

        Raises:
            InvalidRequestError: the value uses so many private-use characters that none is left.
        """
        used = set(chain.from_iterable(strings_in(value)))
        free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in used)
        stand_ins = dict(zip(self._alphabet, free, strict=False))
        if len(stand_ins) < len(self._alphabet):
            raise InvalidRequestError("The messages use all private-use characters of Unicode.", param="messages")
        back = {ord(stand_in): character for character, stand_in in stand_ins.items()}
        return self._guard(value, stand_ins), back

    def _guard(self, value: Any, stand_ins: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self._edges(self._inside(value, stand_ins), stand_ins)
        if isinstance(value, dict):
            return {self._inside(key, stand_ins): self._guard(inner, stand_ins) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guard(inner, stand_ins) for inner in value]
        return value

    def _inside(self, text: str, stand_ins: dict[str, str]) -> str:
        if not self._any.search(text):
            return text
        return self._begin.sub(lambda match: stand_ins[match.group()], text)

    def _edges(self, text: str, stand_ins: dict[str, str]) -> str:
        """Part of a spelling at an edge could be completed by a neighbour. Templates trim, so spaces do not count."""
        core = text.strip()
        start = text.find(core)
        end = start + len(core)
        sizes = range(1, min(self._longest, len(core) + 1))
        if any(core[:size] in self._tails for size in sizes):
            text = text[:start] + stand_ins[text[start]] + text[start + 1 :]
        for size in sizes:
            first = end - size
            if text[first:end] in self._heads:
                text = text[:first] + stand_ins[text[first]] + text[first + 1 :]
        return text


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a value made of strings, lists and mappings, keys included; in no particular order."""
    rest = [value]
    while rest:
        entry = rest.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            rest.extend(entry)
            rest.extend(entry.values())
        elif isinstance(entry, (list, tuple)):
            rest.extend(entry)
