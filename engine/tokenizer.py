"""Text to token ids and back, with the border between text and control tokens in one place."""

from __future__ import annotations

import json
import re
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import tokenizers

from engine.errors import InvalidRequestError
from engine.panics import without_panic
from engine.text_guard import ControlGuard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# A text in pieces: strings are ordinary text, numbers are control tokens.
Piece = str | int

SPACE_MARK = "▁"
# In characters; what is shorter keeps no other thread waiting that would notice.
_LONG_TEXT = 4096


def byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level vocabularies write for each byte.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


class Tokenizer:
    """A vocabulary with its rules.

    Encoding is free of state, so it may be called from any thread.

    Args:
        backend: the rules. Its added tokens marked `special` are the control tokens.
        byte_level: the vocabulary writes bytes as printable characters; otherwise it writes spaces as U+2581 and
            bytes as `<0xNN>`.
        stop_token_ids: tokens that end an answer (end of sequence, end of turn).
        prefix_ids: put before a text that stands alone (a BOS, or nothing).
        suffix_ids: put after it.
        num_rows: tokens that the model can be given; `None` is as many as the vocabulary has.
        unused_ids: tokens that only fill up the vocabulary.

    Attributes:
        vocab_size: one more than the highest token id that the model can be given and that means anything. Whoever
            takes token ids from outside is bound by it.
        lost_tokens: id to spelling of the tokens that the vocabulary has and the model lacks. No text leads to one.
        silent_ids: what the model could draw though it stands for nothing: padding, and gaps in the vocabulary.
        adds_bos: whether a text that stands alone gets a BOS.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        byte_level: bool,
        stop_token_ids: Iterable[int],
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        num_rows: int | None = None,
        unused_ids: Iterable[int] = (),
    ) -> None:
        backend.encode_special_tokens = True  # a control token's spelling is ordinary text to the backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        last = max(vocabulary.values(), default=-1)
        num_rows = last + 1 if num_rows is None else num_rows
        ends = frozenset(stop_token_ids)
        self.stop_token_ids = frozenset(token_id for token_id in ends if 0 <= token_id < num_rows)
        self.vocab_size = min(num_rows, max(last, *self.stop_token_ids, -1) + 1)
        texts = {token_id: "" for token_id in ends} | {token_id: text for text, token_id in vocabulary.items()}
        self.lost_tokens = {token_id: texts[token_id] for token_id in sorted(texts) if token_id >= self.vocab_size}
        _make_special(backend, self.lost_tokens)  # what people write is not turned into a token that cannot be computed
        self._texts = [texts.get(token_id, "") for token_id in range(self.vocab_size)]
        silent = {*unused_ids, *(token_id for token_id, text in enumerate(self._texts) if not text)}
        self.silent_ids = (*sorted(silent - self.stop_token_ids), *range(self.vocab_size, num_rows))

        self._backend = backend
        self._continuation = _without_first_space(backend)
        self._byte_level = byte_level
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.adds_bos = bos_token_id is not None and bos_token_id in self._prefix_ids
        self._added = backend.get_added_tokens_decoder()
        self._controls = {added.content: (i, added) for i, added in self._added.items() if added.special}
        self._control_ids = frozenset(i for i, _ in self._controls.values())
        # Longest first: where one spelling begins another, the longer is meant.
        spellings = sorted(filter(None, self._controls), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        self._byte_table = {ord(character): byte for byte, character in byte_alphabet().items()}

    @cached_property
    def guard(self) -> ControlGuard:
        """What keeps the contents of messages apart from control tokens; made at first use."""
        return ControlGuard(self._controls)

    def token_text(self, token_id: int) -> str:
        """A token as the vocabulary spells it (`""` where there is none); for a control token, its name."""
        return self._texts[token_id] if 0 <= token_id < self.vocab_size else ""

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model and is not text."""
        return token_id in self._control_ids

    def control_id(self, spelling: str) -> int | None:
        """The control token that is written like this, if there is one."""
        token_id = self._controls[spelling][0] if spelling in self._controls else self.vocab_size
        return token_id if token_id < self.vocab_size else None

    def encode(self, text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            parse_control: spellings of control tokens become those tokens; otherwise they are ordinary text.
            add_special: add what the tokenizer puts around a text that stands alone; a BOS is never doubled.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which no encoding can carry, or a token that
                the model lacks.
        """
        ids = self.encode_pieces(self.split_control(text) if parse_control else [text])
        if not add_special:
            return ids
        prefix = [] if self._prefix_ids and ids[: len(self._prefix_ids)] == self._prefix_ids else self._prefix_ids
        return [*prefix, *ids, *self._suffix_ids]

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of a text already split: each string is encoded as one ordinary text, ids stay.

        Raises:
            InvalidRequestError: see `encode`.
        """
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            elif piece:
                ids += self._encode_ordinary(piece, first=not ids)
        if self.lost_tokens and max(ids, default=0) >= self.vocab_size:
            raise InvalidRequestError(
                f"The text holds {self.lost_tokens[max(ids)]!r}, which is token {max(ids)} of the tokenizer, but the "
                f"model knows tokens 0 to {self.vocab_size - 1} only: leave it out."
            )
        return ids

    def split_control(self, text: str) -> list[Piece]:
        """Split a text at the spellings of control tokens, which become ids."""
        pieces: list[Piece] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            if match.start() < end:
                continue
            token_id, added = self._controls[match.group()]
            ordinary = text[end : match.start()]
            pieces.append(ordinary.rstrip() if added.lstrip else ordinary)
            pieces.append(token_id)
            end = match.end()
            while added.rstrip and text[end : end + 1].isspace():
                end += 1
        pieces.append(text[end:])
        return [piece for piece in pieces if piece != ""]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        chunks: list[bytes] = []
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"Token id {token_id} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}.",
                    param="tokens",
                )
            chunks.append(self.token_bytes(token_id))
        return b"".join(chunks).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; none for an id outside the vocabulary (padding of the embedding)."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        text = self._texts[token_id]
        if token_id in self._added:
            return text.encode()
        if self._byte_level:
            try:
                return text.translate(self._byte_table).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace(SPACE_MARK, " ").encode()

    def _encode_ordinary(self, text: str, *, first: bool) -> list[int]:
        ids = self._encode_part(text, first=first)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The merges of this vocabulary lead to a control token: cut its spellings, and they cannot.
        cuts = [0, *(match.start() + 1 for match in self._control_pattern.finditer(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        return [i for n, part in enumerate(parts) for i in self._encode_part(part, first=first and n == 0)]

    def _encode_part(self, text: str, *, first: bool) -> list[int]:
        backend = self._backend if first else self._continuation
        try:
            if len(text) < _LONG_TEXT:
                ids: list[int] = without_panic(backend.encode, text, add_special_tokens=False).ids
            else:  # other threads run meanwhile only where it works on a list
                [encoding] = without_panic(backend.encode_batch, [text], add_special_tokens=False)
                ids = encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError("The text holds half of a surrogate pair; send whole characters.") from error
        return ids


def _make_special(backend: tokenizers.Tokenizer, tokens: Mapping[int, str]) -> None:
    """Let the added ones among these tokens be special: their spelling then is ordinary text to the backend."""
    added = backend.get_added_tokens_decoder()
    texts = [text for token_id, text in tokens.items() if token_id in added and not added[token_id].special]
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in texts])


def _without_first_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The rules for text after a control token: a space put before the first word only is left out there."""
    cutting = backend.pre_tokenizer
    # Its own state is short; the whole tokenizer as JSON takes a quarter of a second.
    if not isinstance(cutting, _MAY_PREPEND) or not _replace_first(json.loads(cutting.__getstate__())):
        return backend
    rules = json.loads(backend.to_str())
    _replace_first(rules["pre_tokenizer"])
    changed = tokenizers.Tokenizer.from_str(json.dumps(rules))
    changed.encode_special_tokens = True
    return changed


_MAY_PREPEND = (tokenizers.pre_tokenizers.Metaspace, tokenizers.pre_tokenizers.Sequence)


def _replace_first(rule: Any) -> bool:
    if not isinstance(rule, dict):
        return False
    if rule.get("type") == "Metaspace" and rule.get("prepend_scheme") == "first":
        rule["prepend_scheme"] = "never"
        return True
    return any([_replace_first(inner) for inner in rule.get("pretokenizers", [])])
