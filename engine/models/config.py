"""The shape of a model: what a checkpoint's metadata says and the forward pass needs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache_spec import CacheGroup, CacheSpec


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: `default`, `linear` (positions divided by `factor`) or `llama3` (low frequencies divided by `factor`,
            high ones kept, a smooth ramp between). Every other kind is refused when the checkpoint is opened.
        factor: the stretch, 1.0 for `default`.
        low_freq_factor: `llama3`: wavelengths above `original_context / low_freq_factor` are stretched in full.
        high_freq_factor: `llama3`: wavelengths below `original_context / high_freq_factor` are kept.
        original_context: `llama3`: context of the first training, in tokens; 0 for the other kinds.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder-only model.

    Attributes:
        architecture: `llama`.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the gated feed-forward layer.
        num_heads: query heads of a layer.
        num_kv_heads: key/value heads of a layer; divides `num_heads`.
        head_size: elements of a head; `num_heads * head_size` need not equal `hidden_size`.
        vocab_size: rows of the embedding, in tokens; may exceed the tokenizer's by padding.
        context_length: longest sequence the model was made for, in tokens.
        tie_word_embeddings: the output head is the embedding matrix; no `lm_head.weight` is given then.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool

    @property
    def num_products(self) -> int:
        """Weights that a token which samples is multiplied with."""
        attended, key_value = self.num_heads * self.head_size, 2 * self.num_kv_heads * self.head_size
        layer = self.hidden_size * (2 * attended + key_value + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def cache_spec(self) -> CacheSpec:
        """What is kept of a token: one group, in which every layer keeps everything."""
        layers = tuple(range(self.num_layers))
        return CacheSpec((CacheGroup("full", layers, self.num_kv_heads, self.head_size),))
