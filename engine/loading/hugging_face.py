"""Directories in Hugging Face form: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import safetensors
from safetensors import SafetensorError

from engine.chat_template import ChatTemplate
from engine.errors import ModelFileError, UnsupportedModelError
from engine.loading.checks import Shape, check_config, check_is_data, check_tensors
from engine.loading.hugging_face_config import read_config
from engine.loading.hugging_face_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from engine.tokenizer import Tokenizer

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class HuggingFaceCheckpoint:
    """An opened directory; see `Checkpoint`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.name = name or _name_of(path)
        config = read_json(path / "config.json")
        self.config = read_config(config, path)
        check_config(self.config, path)
        self._shards = _find_shards(path)
        found, self.matrix_kinds = self._read_headers()
        self.weights_kind = self.matrix_kinds[0]
        check_tensors(found, self.config, path)
        generation = read_json(path / "generation_config.json", optional=True)
        rules = read_json(path / "tokenizer_config.json", optional=True)
        self.tokenizer: Tokenizer = build_tokenizer(path, (config, generation), rules, num_rows=self.config.vocab_size)
        source = _chat_template(path, rules)
        special_tokens = {key: text for key in rules if key.endswith("_token") and (text := token_text(rules, key))}
        self.chat_template = ChatTemplate(source, special_tokens=special_tokens) if source else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Checkpoint.tensors`."""
        for shard, names in self._shards.items():
            try:
                with safetensors.safe_open(shard, framework="pt") as file:
                    for name in sorted(names):
                        if self._is_wanted(name):
                            yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{shard} changed or broke while it was read: {error}.") from error

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Checkpoint.weights`."""
        return self.tensors()

    @property
    def is_quantized(self) -> bool:
        """See `Checkpoint.is_quantized`."""
        return False

    def _is_wanted(self, name: str) -> bool:
        # Old checkpoints stored the rotary frequencies; a tied head is a second copy of the embedding.
        return not (
            name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings)
        )

    def _read_headers(self) -> tuple[dict[str, Shape], tuple[str, ...]]:
        """Shapes of all tensors, and the types of matrices. Completes the names of a directory with no index."""
        shapes: dict[str, Shape] = {}
        kinds: Counter[str] = Counter()
        for shard, names in self._shards.items():
            check_is_data(shard)
            try:
                with safetensors.safe_open(shard, framework="pt") as file:
                    present = set(file.keys())
                    names.update(names or present)
                    for name in filter(self._is_wanted, sorted(names & present)):
                        view = file.get_slice(name)
                        shapes[name] = tuple(view.get_shape())
                        kind = view.get_dtype()
                        if kind not in _TYPES:
                            raise UnsupportedModelError(f"{shard}: tensor {name} has type {kind}, not supported.")
                        kinds[_TYPES[kind]] += math.prod(shapes[name]) if len(shapes[name]) > 1 else 0
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{shard} is truncated or damaged ({error}). Fetch it again.") from error
            if missing := names - present:
                raise ModelFileError(f"{shard}: tensor {min(missing)} is missing, though the index lists it.")
        return shapes, tuple(kind for kind, count in kinds.most_common() if count) or ("float32",)


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file; `{}` where an optional one is absent.

    Raises:
        ModelFileError: missing, a Git LFS pointer, or no JSON object.
    """
    if optional and not path.exists():
        return {}
    check_is_data(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} does not hold a JSON object.")
    return value


def token_text(rules: dict[str, Any], key: str) -> str | None:
    """A token named in tokenizer_config.json, which writes it as a string or as an object with `content`."""
    value = rules.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _name_of(path: Path) -> str:
    path = path.resolve()
    cached = path.parent.parent.name
    # The hub's cache keeps a model under models--org--name/snapshots/revision.
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return path.name


def _find_shards(path: Path) -> dict[Path, set[str]]:
    """Files with weights, each with the names the index promises (none where there is no index)."""
    if (path / _INDEX).exists():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{path / _INDEX} has no weight_map.")
        shards: dict[Path, set[str]] = {}
        for name, file_name in weight_map.items():
            # The index names files of its own directory; anything else would read elsewhere.
            if not isinstance(file_name, str) or "/" in file_name or "\\" in file_name:
                raise ModelFileError(f"{path / _INDEX} names a shard outside its directory: {file_name!r}.")
            shards.setdefault(path / file_name, set()).add(name)
        return shards
    if (path / _WEIGHTS).exists():
        return {path / _WEIGHTS: set()}
    other = next((file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pth", ".gguf")), None)
    hint = f" ({other} is not read from a directory)" if other else ""
    raise ModelFileError(f"{path} has no {_WEIGHTS}{hint}. Give a directory with safetensors, or a .gguf file.")


def _chat_template(path: Path, rules: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        check_is_data(file)
        return file.read_text(encoding="utf-8")
    template = rules.get("chat_template") or read_json(path / "chat_template.json", optional=True).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
