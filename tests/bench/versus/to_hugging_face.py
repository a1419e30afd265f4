"""A GGUF file as a folder in Hugging Face form, for servers that read no GGUF.

    python -m tests.bench.versus.to_hugging_face MODEL.gguf FOLDER

Weights are dequantized and rounded to bfloat16: the model is the same but for that rounding. Tensors are read and
written one shard at a time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from engine.errors import ModelError, UnsupportedModelError
from engine.loading.checks import expected_shapes
from engine.loading.gguf import GgufCheckpoint
from engine.loading.gguf_reader import open_gguf
from engine.loading.gguf_tokenizer import make_pre_tokenizer

if TYPE_CHECKING:
    from engine.models.config import ModelConfig, RopeConfig

SHARD_BYTES: Final = 1 << 29
CONTROL_TYPES: Final = (2, 3)  # of tokenizer.ggml.token_type: unknown, control
USER_DEFINED: Final = 4
PLAIN: Final = ("default", "gpt-2", "smollm", "llama-bpe")  # of tokenizer.ggml.pre: those that change no character


def write_folder(model: Path, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in `model`, a GGUF file, to `folder`.

    Args:
        shard_bytes: a shard is written as soon as it holds so many.

    Raises:
        ModelError: the file cannot be read, or its tokenizer cannot be written in the other form.
        OSError: the folder cannot be written.
    """
    checkpoint = GgufCheckpoint(model)
    backend = make_backend(model, checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos": checkpoint.tokenizer.bos_token_id, "eos": checkpoint.tokenizer.eos_token_id}
    ids = {key: token_id for key, token_id in names.items() if token_id is not None}
    rules = {f"{key}_token": checkpoint.tokenizer.token_text(token_id) for key, token_id in ids.items()}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **rules})
    numbers = {f"{key}_token_id": token_id for key, token_id in ids.items()}
    write_json(folder / "config.json", {**config_json(checkpoint.config), **numbers})
    if checkpoint.chat_template is not None:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template.source, encoding="utf-8")
    write_shards(checkpoint, folder, shard_bytes)


def write_shards(checkpoint: GgufCheckpoint, folder: Path, shard_bytes: int) -> None:
    """The weights as bfloat16, and the index that tells which shard has which."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = total = num_shards = 0
    left = len(expected_shapes(checkpoint.config))
    for name, tensor in checkpoint.tensors():
        shard[name] = tensor.to(torch.bfloat16).contiguous()
        size += shard[name].nbytes
        left -= 1
        if size >= shard_bytes or not left:
            num_shards += 1
            file = f"model-{num_shards:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard, size, total = {}, 0, total + size
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """The same for RoPE; `None` where positions are taken as they are."""
    if rope.kind == "default":
        return None
    told: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        told |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        told["original_max_position_embeddings"] = rope.original_context
    return told


def make_backend(model: Path, checkpoint: GgufCheckpoint) -> tokenizers.Tokenizer:
    """The rules of the file's tokenizer, whose vocabulary and merges were checked when the file was opened.

    Raises:
        UnsupportedModelError: words are cut in a way that this does not write.
    """
    reader = open_gguf(model)
    pre = reader.text("tokenizer.ggml.pre") or "default"
    if pre not in PLAIN:
        raise UnsupportedModelError(f"{model}: pre-tokenizer {pre!r} is not written here; known: {', '.join(PLAIN)}.")
    tokens = reader.strings("tokenizer.ggml.tokens") or []
    types = reader.integers("tokenizer.ggml.token_type") or []
    pairs = [tuple(merge.split(" ", 1)) for merge in reader.strings("tokenizer.ggml.merges") or []]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = make_pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=False))
    controls = [token for token, kind in kinds if kind in CONTROL_TYPES]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    defined = [token for token, kind in kinds if kind == USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False) for token in defined])
    bos = checkpoint.tokenizer.bos_token_id
    if checkpoint.tokenizer.adds_bos and bos is not None:
        text = checkpoint.tokenizer.token_text(bos)
        backend.post_processor = TemplateProcessing(single=f"{text} $A", special_tokens=[(text, bos)])
    return backend


def write_json(path: Path, values: dict[str, Any]) -> None:
    """A JSON file."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main(words: list[str] | None = None) -> None:
    """Convert; what cannot be read or written ends the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(words)
    try:
        write_folder(options.model, options.folder)
    except (ModelError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
