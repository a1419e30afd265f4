"""Checks that every kind of checkpoint shares: what must be there, and that it has the right shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.models.config import ModelConfig

Shape = tuple[int, ...]
ARCHITECTURES = ("llama",)

_POINTER = b"version https://git-lfs"


def check_is_data(path: Path) -> None:
    """Refuse what stands where a large file should be.

    Raises:
        ModelFileError: the file is missing, empty, unreadable or a Git LFS pointer.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_POINTER))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path} is missing.") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}.") from error
    if not head:
        raise ModelFileError(f"{path} is empty. Fetch it again.")
    if head == _POINTER:
        raise ModelFileError(
            f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` in its directory, or fetch it again."
        )


def check_architecture(name: str, path: Path) -> None:
    """Refuse an architecture that this version does not run.

    Raises:
        UnsupportedModelError: it is none of `ARCHITECTURES`.
    """
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{path}: architecture {name!r} is not supported; supported: {known}.")


def check_config(config: ModelConfig, path: Path) -> None:
    """Refuse sizes that make no model.

    Raises:
        ModelFileError: a size is not positive or does not fit another.
    """
    for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size",
                "vocab_size", "context_length"):  # fmt: skip
        if getattr(config, key) <= 0:
            raise ModelFileError(f"{path}: {key} is {getattr(config, key)}; it must be positive.")
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{path}: {config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly."
        )
    if config.head_size % 2:
        raise ModelFileError(f"{path}: a head of {config.head_size} elements cannot be rotated in pairs.")


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor a Llama checkpoint must have, by its Hugging Face name, with its shape [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layer: dict[str, Shape] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(found: Mapping[str, Shape], config: ModelConfig, path: Path) -> None:
    """Compare the tensors of a checkpoint with what its configuration asks for.

    Raises:
        ModelFileError: one is missing or has another shape.
        UnsupportedModelError: one is there that the architecture does not know.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelFileError(f"{path}: tensor {name} is missing. Fetch the model again.")
        if found[name] != shape:
            raise ModelFileError(f"{path}: tensor {name} is {list(found[name])}; its configuration says {list(shape)}.")
    for name in found:
        if name not in expected:
            raise UnsupportedModelError(f"{path}: tensor {name} is not part of the {config.architecture} architecture.")
