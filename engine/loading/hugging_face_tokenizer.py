"""The tokenizer of a directory in Hugging Face form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tokenizers

from engine.errors import ModelFileError, UnsupportedModelError
from engine.loading.checks import check_is_data
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def build_tokenizer(
    path: Path, configs: Iterable[dict[str, Any]], rules: dict[str, Any], *, num_rows: int
) -> Tokenizer:
    """Build the tokenizer from tokenizer.json.

    Args:
        configs: config.json and generation_config.json; the later one rules.
        rules: tokenizer_config.json, or `{}`.
        num_rows: rows of the embedding.

    Raises:
        ModelFileError: tokenizer.json is missing or damaged.
        UnsupportedModelError: its vocabulary stands neither for bytes nor for pieces with byte fallback.
    """
    file = path / "tokenizer.json"
    check_is_data(file)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(f"{file} is not a tokenizer: {error}.") from error
    byte_level = _is_byte_level(data, file)

    named = {key: _token_id(backend, rules.get(f"{key}_token")) for key in ("bos", "eos")}
    ends: set[int] = set()
    for config in configs:
        ends = _as_ids(config.get("eos_token_id")) or ends
        for key in named:
            listed = sorted(_as_ids(config.get(f"{key}_token_id")))
            if named[key] is None and listed:
                named[key] = listed[0]
    if named["eos"] is not None:
        ends.add(named["eos"])
    # What ends a turn must not be writable by a user, whether or not the file calls it special.
    steering = [token for i in ends if (token := backend.id_to_token(i)) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in steering])
    prefix, suffix = _surroundings(backend)
    return Tokenizer(
        backend,
        byte_level=byte_level,
        stop_token_ids=ends,
        bos_token_id=named["bos"],
        eos_token_id=named["eos"],
        prefix_ids=prefix,
        suffix_ids=suffix,
        num_rows=num_rows,
    )


def _is_byte_level(data: dict[str, Any], file: Path) -> bool:
    kinds = {entry.get("type") for key in ("decoder", "pre_tokenizer") for entry in _steps(data.get(key))}
    if "ByteLevel" in kinds:
        return True
    if data.get("model", {}).get("byte_fallback") or "Metaspace" in kinds:
        return False
    kind = data.get("model", {}).get("type")
    raise UnsupportedModelError(f"{file}: a {kind} vocabulary without bytes is not supported.")


def _steps(rule: Any) -> list[dict[str, Any]]:
    if not isinstance(rule, dict):
        return []
    inner = [*rule.get("decoders", []), *rule.get("pretokenizers", [])]
    return [rule, *(step for part in inner for step in _steps(part))]


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _as_ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []
