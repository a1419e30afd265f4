"""Tiny random checkpoints, written to disk in both forms."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from engine.loading.checks import expected_shapes
from engine.models.config import ModelConfig, RopeConfig
from engine.tokenizer import byte_alphabet

if TYPE_CHECKING:
    from pathlib import Path

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = [*CONTROLS, *byte_alphabet().values(), *(merge.replace(" ", "") for merge in MERGES)]


def make_config(**changes: Any) -> ModelConfig:
    """A model of two layers with grouped heads."""
    values: dict[str, Any] = {
        "architecture": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "vocab_size": len(TOKENS),
        "context_length": 128,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "tie_word_embeddings": True,
    }
    return ModelConfig(**{**values, **changes})


def make_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """A tensor's name in a GGUF file."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def interleave(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to query and key rows: (i, i + size/2) becomes (2i, 2i + 1)."""
    size = rows.shape[0] // num_heads
    heads = [rows[head * size : (head + 1) * size] for head in range(num_heads)]
    return np.concatenate([np.stack([h[: size // 2], h[size // 2 :]], axis=1).reshape(h.shape) for h in heads])


def add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    """The metadata that tells the shape."""
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    raw: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]] | None = None,
    metadata: dict[str, Any] | None = None,
    pre: str | None = "smollm",
    tokenizer: str = "gpt2",
    more_tokens: dict[str, gguf.TokenType] | None = None,
) -> Path:
    """A GGUF file with matrices of one type, but for those in `raw`, whose blocks are given; vectors stay float32.

    `more_tokens` come behind `TOKENS`.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add_shape(writer, config)
    writer.add_tokenizer_model(tokenizer)
    if pre:
        writer.add_tokenizer_pre(pre)
    more_tokens = more_tokens or {}
    kinds = [gguf.TokenType.CONTROL] * len(CONTROLS) + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3)
    writer.add_token_list([*TOKENS, *more_tokens])
    writer.add_token_types([*kinds, *more_tokens.values()])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    raw = raw or {}
    for name, (values, raw_kind) in raw.items():
        writer.add_tensor(gguf_name(name), values, raw_dtype=raw_kind)
    for name, tensor in tensors.items():
        if name in raw:
            continue
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleave(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if values.ndim == 2 and kind != GGMLQuantizationType.F32:
            values = values.astype(np.float16) if kind == GGMLQuantizationType.F16 else quantize(values, kind)
            raw_dtype = None if kind == GGMLQuantizationType.F16 else kind
            writer.add_tensor(gguf_name(name), values, raw_dtype=raw_dtype)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; `None` removes one."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        data.pop(key, None)
        if value is not None:
            data[key] = value
    path.write_text(json.dumps(data), encoding="utf-8")


def write_hugging_face(path: Path, *, shard_size: str = "50GB", dtype: str = "float32", **changes: Any) -> Any:
    """A random Llama model saved by transformers, with tokenizer and chat template; returns the model."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**values, **changes})).to(getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size=shard_size)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(path)
    return model


def make_backend() -> Any:
    """The tiny vocabulary as the library's own object, put together without the loader."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: token_id for token_id, token in enumerate(TOKENS)}
    pairs = [tuple(merge.split()) for merge in MERGES]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROLS)
    return backend
