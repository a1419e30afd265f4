"""The tokenizer that a GGUF file describes in its metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.errors import ModelFileError, UnsupportedModelError
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.loading.gguf_reader import MetadataReader

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# Files seldom name every token that ends an answer; these spellings always do.
_ENDS_ANSWER = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _split(*patterns: str) -> list[Any]:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


# tokenizer.ggml.pre: how text is cut into words before merging.
_PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def make_pre_tokenizer(pre: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """How text is cut into words before merging, by the name a file gives it.

    Raises:
        KeyError: the name is not known here.
    """
    return pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())


def build_tokenizer(reader: MetadataReader, path: Path, *, num_rows: int) -> Tokenizer:
    """Build the tokenizer of an opened file.

    Args:
        num_rows: rows of the embedding.

    Raises:
        UnsupportedModelError: a kind of vocabulary or word splitting that is not known here.
        ModelFileError: the vocabulary is missing or contradicts itself.
    """
    kind = reader.text("tokenizer.ggml.model")
    pre = reader.text("tokenizer.ggml.pre") or "default"
    if kind != "gpt2":
        raise UnsupportedModelError(f"{path}: tokenizer {kind!r} is not supported; supported: 'gpt2' (byte-level BPE).")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModelError(f"{path}: pre-tokenizer {pre!r} is not supported; supported: {known}.")
    tokens, merges = reader.strings("tokenizer.ggml.tokens"), reader.strings("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise ModelFileError(f"{path}: the vocabulary is missing from the metadata.")
    types = reader.integers("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFileError(f"{path}: {len(tokens)} tokens, but {len(types)} token types.")

    named = {name: _token_id(reader, name, len(tokens), path) for name in ("bos", "eos", "eot", "eom")}
    ends = {token_id for name, token_id in named.items() if token_id is not None and name != "bos"}
    controls = {token_id for token_id in named.values() if token_id is not None}
    controls |= {token_id for token_id, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)}
    backend = _byte_level_bpe(tokens, merges, pre, path)
    # Adding a token that the vocabulary has keeps its id.
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in sorted(controls)])
    defined = [i for i, k in enumerate(types) if k == _USER_DEFINED and i not in controls]
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in defined])

    bos, add_bos = named["bos"], reader.value("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = pre == "llama-bpe"
    return Tokenizer(
        backend,
        byte_level=True,
        stop_token_ids=ends | {i for i in controls if tokens[i] in _ENDS_ANSWER},
        bos_token_id=bos,
        eos_token_id=named["eos"],
        prefix_ids=[bos] if add_bos and bos is not None else [],
        num_rows=num_rows,
        unused_ids=[token_id for token_id, kind in enumerate(types) if kind == _UNUSED and token_id < num_rows],
    )


def _token_id(reader: MetadataReader, name: str, vocab_size: int, path: Path) -> int | None:
    token_id = reader.integer(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < vocab_size:
        raise ModelFileError(f"{path}: the {name} token {token_id} is not in the vocabulary of {vocab_size}.")
    return token_id


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str, path: Path) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(f"{path}: the merges do not fit the vocabulary ({error}).") from error
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = make_pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend
