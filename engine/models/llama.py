"""The Llama architecture: RMSNorm, rotary attention with grouped heads, gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.cache_spec import CacheGroup, CacheSpec
from engine.models.linear import Linear, LinearFactory
from engine.models.rope import pair_neighbours, rotation_table
from kernels.cpu import kv_write, rms_norm, rope, silu_mul
from kernels.paged_attention import AttentionPlan, paged_attention

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The tokens of one step, rows one after the other.

    Attributes:
        input_ids: [N] int64.
        positions: [N] int64, each token's place in its sequence.
        block_ids: [N] int64, the block that its keys and values go to.
        offsets: [N] int64, their place in the block.
        plan: which blocks each token attends to.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor
    offsets: torch.Tensor
    plan: AttentionPlan


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def products(self) -> tuple[Linear, ...]:
        """Its four matrix products, in the order of their use."""
        return (self.qkv, self.output, self.gate_up, self.down)


class LlamaModel:
    """A loaded model.

    Args:
        tensors: under their Hugging Face names, each once.
        dtype: of the weights; activations are float32.
        max_model_len: positions that are prepared, in tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.rotations = rotation_table(config.rope, config.head_size, max_model_len)
        # Narrowed on arrival: a float32 copy of the whole model never exists beside the one that is kept.
        weights = {name: tensor.to(dtype) for name, tensor in tensors}
        linear = LinearFactory(dtype)
        self.layers = tuple(self._take_layer(weights, index, linear) for index in range(config.num_layers))
        self.norm = weights.pop("model.norm.weight").float()
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.head = linear(self.embedding if config.tie_word_embeddings else weights.pop("lm_head.weight"))

    @property
    def cache_spec(self) -> CacheSpec:
        """One group: every layer keeps every token."""
        config = self.config
        layers = tuple(range(config.num_layers))
        return CacheSpec((CacheGroup("full", layers, config.num_kv_heads, config.head_size),))

    def forward(self, inputs: ModelInputs, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Run the layers, writing keys and values.

        Args:
            kv_caches: one a layer, [blocks, 2, KVH, block_size, D].

        Returns:
            [N, hidden_size] float32, before the last norm.
        """
        config = self.config
        size, num_heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
        hidden = F.embedding(inputs.input_ids, self.embedding).float()
        rotation = self.rotations[inputs.positions]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            qkv = layer.qkv(normed).view(-1, num_heads + 2 * kv_heads, size)
            rope(qkv[:, : num_heads + kv_heads], rotation)
            new = qkv[:, num_heads:].view(-1, 2, kv_heads, size)
            kv_write(new, kv_cache, inputs.block_ids, inputs.offsets)
            attended = paged_attention(qkv[:, :num_heads], kv_cache, inputs.plan)
            hidden += layer.output(attended.flatten(1))
            normed = rms_norm(hidden, layer.feed_forward_norm, config.rms_norm_eps)
            hidden += layer.down(silu_mul(layer.gate_up(normed)))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary: [R, hidden_size] → [R, vocab_size] float32."""
        return self.head(rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def _take_layer(self, weights: dict[str, torch.Tensor], index: int, linear: LinearFactory) -> LlamaLayer:
        """Build a layer, taking its tensors out of `weights` so that their memory goes as the layer comes."""

        def take(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{index}.{name}.weight")

        size = self.config.head_size
        query, key = (pair_neighbours(take(f"self_attn.{name}_proj"), size) for name in "qk")
        return LlamaLayer(
            input_norm=take("input_layernorm").float(),
            qkv=linear(torch.cat((query, key, take("self_attn.v_proj")))),
            output=linear(take("self_attn.o_proj")),
            feed_forward_norm=take("post_attention_layernorm").float(),
            gate_up=linear(torch.cat((take("mlp.gate_proj"), take("mlp.up_proj")))),
            down=linear(take("mlp.down_proj")),
        )
