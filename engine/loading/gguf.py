"""GGUF files: one file with weights, vocabulary, chat template and sizes."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from engine.chat_template import ChatTemplate
from engine.errors import ModelFileError, UnsupportedModelError
from engine.loading.checks import check_architecture, check_config, check_tensors
from engine.loading.gguf_reader import MetadataReader, open_gguf
from engine.loading.gguf_tokenizer import build_tokenizer
from engine.models.config import ModelConfig, RopeConfig
from kernels.gguf_blocks import FORMATS, read_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gguf import ReaderTensor
    from numpy.typing import NDArray

    from engine.tokenizer import Tokenizer
    from kernels.blocks import Blocks

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# What every published llama3-style file was made with; its tensor of factors is compared with what they give.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}


class GgufCheckpoint:
    """An opened GGUF file; see `Checkpoint`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        reader = open_gguf(path)
        check_architecture(str(reader.text("general.architecture")), path)
        self.name = name or path.stem
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = _read_config(reader, self._tensors, path)
        found = {_hf_name(name): tuple(reversed(tensor.shape.tolist())) for name, tensor in self._matrices()}
        check_tensors(found, self.config, path)
        self.matrix_kinds = self._kinds_of_matrices()
        self.weights_kind = self.matrix_kinds[0]
        self.tokenizer: Tokenizer = build_tokenizer(reader, path, num_rows=self.config.vocab_size)
        template = reader.text("tokenizer.chat_template")
        named = _special_tokens(self.tokenizer)
        self.chat_template = ChatTemplate(template, special_tokens=named) if template else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Checkpoint.tensors`."""
        for name, tensor in self._matrices():
            order = self._row_order(name)
            values = _to_torch(tensor)
            yield _hf_name(name), values if order is None else values[order]

    def weights(self) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
        """See `Checkpoint.weights`."""
        for name, tensor in self._matrices():
            order = self._row_order(name)
            kind = tensor.tensor_type.name
            if kind in FORMATS:
                blocks = read_blocks(kind, tensor.data, int(tensor.shape[0]))
                yield _hf_name(name), blocks if order is None else blocks.take(order)
            else:
                values = _to_torch(tensor)
                yield _hf_name(name), values if order is None else values[order]

    @property
    def is_quantized(self) -> bool:
        """See `Checkpoint.is_quantized`."""
        return self.weights_kind not in ("F32", "F16", "BF16")

    def _row_order(self, name: str) -> NDArray[np.int64] | None:
        """Rows of query and key as the others have them: llama.cpp stores them for interleaved RoPE pairs."""
        if ".attn_q." in name:
            return _half_split(self.config.num_heads, self.config.head_size)
        if ".attn_k." in name:
            return _half_split(self.config.num_kv_heads, self.config.head_size)
        return None

    def _matrices(self) -> Iterator[tuple[str, ReaderTensor]]:
        return ((name, tensor) for name, tensor in self._tensors.items() if name != _ROPE_FACTORS)

    def _kinds_of_matrices(self) -> tuple[str, ...]:
        sizes: Counter[str] = Counter()
        for _, tensor in self._matrices():
            if len(tensor.shape) > 1:
                sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        return tuple(kind for kind, _ in sizes.most_common())


def _hf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if match and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return name


def _to_torch(tensor: ReaderTensor) -> torch.Tensor:
    kind = tensor.tensor_type
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return torch.from_numpy(np.array(tensor.data))
    if kind == GGMLQuantizationType.BF16:
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16)
    return torch.from_numpy(dequantize(tensor.data, kind))


def _half_split(num_heads: int, head_size: int) -> NDArray[np.int64]:
    """The order of rows in which a head's rotated pairs are (i, i + size/2) and no longer (2i, 2i + 1)."""
    return np.arange(num_heads * head_size).reshape(num_heads, head_size // 2, 2).transpose(0, 2, 1).ravel()


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return {name: tokenizer.token_text(token_id) for name, token_id in ids.items() if token_id is not None}


def _read_config(reader: MetadataReader, tensors: dict[str, ReaderTensor], path: Path) -> ModelConfig:
    def size(key: str, default: int | None = None) -> int:
        value = reader.value(f"llama.{key}")
        # Some files give a list, one entry a layer; this version runs layers that are alike.
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        value = default if value is None else value
        if not isinstance(value, int):
            what = "missing" if value is None else "not one whole number"
            raise ModelFileError(f"{path}: metadata llama.{key} is {what}.")
        return value

    def real(key: str, default: float | None = None) -> float:
        value = reader.number(f"llama.{key}")
        value = default if value is None else value
        if value is None:
            raise ModelFileError(f"{path}: metadata llama.{key} is missing.")
        return float(value)

    if size("expert_count", 0):
        raise UnsupportedModelError(f"{path}: mixture-of-experts models (llama.expert_count) are not supported.")
    embedding = tensors.get("token_embd.weight")
    num_heads = size("attention.head_count")
    hidden_size = size("embedding_length")
    head_size = size("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if size(key, head_size) != head_size:
            raise UnsupportedModelError(f"{path}: llama.{key} differs from the head size, which is not supported.")
    config = ModelConfig(
        architecture="llama",
        num_layers=size("block_count"),
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_size=head_size,
        vocab_size=int(embedding.shape[1]) if embedding is not None else size("vocab_size"),
        context_length=size("context_length"),
        # float32 in the file: 1e-5 arrives as 9.999999747e-06.
        rms_norm_eps=float(f"{real('attention.layer_norm_rms_epsilon'):.6g}"),
        rope=_read_rope(reader, tensors, real("rope.freq_base", 10000.0), head_size, path),
        tie_word_embeddings="output.weight" not in tensors,
    )
    check_config(config, path)
    return config


def _read_rope(
    reader: MetadataReader, tensors: dict[str, ReaderTensor], theta: float, head_size: int, path: Path
) -> RopeConfig:
    old_scale = reader.number("llama.rope.scale_linear")  # before there was a type
    kind = reader.text("llama.rope.scaling.type") or ("linear" if old_scale else "none")
    factor = reader.number("llama.rope.scaling.factor") or old_scale or 1.0
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"{path}: RoPE scaling {kind!r} is not supported.")
    if _ROPE_FACTORS in tensors:
        rope = _match_llama3(_to_torch(tensors[_ROPE_FACTORS]).float(), theta, head_size)
        if rope is None or kind != "none":
            raise UnsupportedModelError(f"{path}: tensor {_ROPE_FACTORS} holds RoPE factors of an unknown kind.")
        return rope
    if kind == "linear" and factor != 1.0:
        return RopeConfig(theta=theta, kind="linear", factor=float(factor))
    return RopeConfig(theta=theta)


def _match_llama3(divisors: torch.Tensor, theta: float, head_size: int) -> RopeConfig | None:
    """The llama3 settings that give these divisors of the frequencies, shape [head_size / 2]; `None` if none does."""
    if divisors.shape != (head_size // 2,):
        return None
    factor = float(divisors.max())
    low, high, original = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], _LLAMA3["original_context"]
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    keep = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 1: kept, 0: divided by the whole factor
    if not torch.allclose(1 / (keep + (1 - keep) / factor), divisors.double(), rtol=1e-3):
        return None
    return RopeConfig(theta, "llama3", factor, low, high, int(original))
