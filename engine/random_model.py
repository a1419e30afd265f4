"""Models of known shapes with random weights: as fast as the real ones, and nothing is fetched for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.errors import ConfigError
from engine.loading.checks import expected_shapes
from engine.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED: Final = 0


def _llama(*sizes: int, **more: Any) -> ModelConfig:
    """Layers, hidden and inner size, heads, those of the cache, their size, vocabulary."""
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "vocab_size")
    more |= zip(names, sizes, strict=True)
    return ModelConfig("llama", **more)


def _stretched(factor: float) -> RopeConfig:
    """Of Llama 3, for a longer context than it was first trained on."""
    return RopeConfig(500_000.0, "llama3", factor, 1.0, 4.0, 8192)


# As their publishers give them. Qwen3 norms queries and keys, which is left out here: it costs next to nothing.
SHAPES: Final = {
    "qwen3-0.6b": _llama(
        28, 1024, 3072, 16, 8, 128, 151_936,
        context_length=40_960, rms_norm_eps=1e-6, rope=RopeConfig(1_000_000.0), tie_word_embeddings=True,
    ),
    "llama-3.2-1b": _llama(
        16, 2048, 8192, 32, 8, 64, 128_256,
        context_length=131_072, rms_norm_eps=1e-5, rope=_stretched(32.0), tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _llama(
        32, 4096, 14_336, 32, 8, 128, 128_256,
        context_length=131_072, rms_norm_eps=1e-5, rope=_stretched(8.0), tie_word_embeddings=False,
    ),
    "tiny": _llama(
        2, 64, 96, 4, 2, 16, 320,
        context_length=4096, rms_norm_eps=1e-5, rope=RopeConfig(10_000.0), tie_word_embeddings=True,
    ),
}  # fmt: skip


class NoTokenizer:
    """There is no text."""

    silent_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class RandomCheckpoint:
    """A model that is drawn while it is read; as `engine.loading.checkpoint.Checkpoint`.

    Attributes:
        device, dtype: where tensors are made, and of what.
    """

    name: str
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    weights_kind: str = "random"
    matrix_kinds: tuple[str, ...] = ("random",)
    is_quantized: bool = False
    tokenizer: Any = field(default_factory=NoTokenizer)
    chat_template: Any = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once; activations keep about the size that they begin with."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        for name, shape in expected_shapes(self.config).items():
            if len(shape) == 1:
                yield name, torch.ones(shape, device=self.device, dtype=self.dtype)
            else:
                tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
                yield name, tensor.normal_(0.0, 1 / math.sqrt(shape[-1]), generator=generator)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same."""
        return self.tensors()


def make_random_checkpoint(shape: str, device: torch.device) -> RandomCheckpoint:
    """A model of one of `SHAPES`.

    Raises:
        ConfigError: there is no such shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"There is no shape {shape!r}; there are {', '.join(SHAPES)}.")
    # Made on a GPU as it is used there, so that nothing twice as large lies beside it.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return RandomCheckpoint(f"{shape} shape, as Llama, random weights", SHAPES[shape], device, dtype)
