"""The Llama architecture: RMSNorm, rotary attention with grouped heads, gated feed-forward."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.models.linear import Linear, LinearFactory
from engine.models.rope import pair_neighbours, rotation_table
from engine.stopwatch import Stopwatch
from kernels.cpu import kv_write, rms_norm, rope, silu_mul
from kernels.paged_attention import AttentionRows, Workspace, paged_attention, plan_attention

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.models.config import ModelConfig

RATE_ROWS = 256  # enough for a product to be bound by arithmetic


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The tokens of one step, rows one after the other.

    Attributes:
        input_ids: [N] int64.
        positions: [N] int64, each token's place in its sequence.
        block_ids: [N] int64, the block that its keys and values go to.
        offsets: [N] int64, their place in the block.
        rows: which blocks each token attends to.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    block_ids: torch.Tensor
    offsets: torch.Tensor
    rows: AttentionRows


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """A loaded model.

    Args:
        tensors: under their Hugging Face names, each once.
        dtype: of the weights; activations are float32.
        max_model_len: positions that are prepared, in tokens.
        eight_bits: quantize activations before each product as the native kernels do, to compute what they compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        max_model_len: int,
        eight_bits: bool = False,
    ) -> None:
        self.config = config
        self._workspace, self._watch = Workspace(), Stopwatch()
        self.rotations = rotation_table(config.rope, config.head_size, max_model_len)
        # Narrowed on arrival: a float32 copy of the whole model never exists beside the one that is kept.
        weights = {name: tensor.to(dtype) for name, tensor in tensors}
        linear = LinearFactory(dtype, eight_bits=eight_bits)
        self.layers = tuple(self._take_layer(weights, index, linear) for index in range(config.num_layers))
        self.norm = weights.pop("model.norm.weight").float()
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.head = linear(self.embedding if config.tie_word_embeddings else weights.pop("lm_head.weight"))

    def forward(self, inputs: ModelInputs, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Run the layers, writing keys and values.

        Args:
            kv_caches: one a layer, [blocks, 2, KVH, block_size, D].

        Returns:
            [N, hidden_size] float32, before the last norm.
        """
        config = self.config
        size, num_heads, kv_heads = config.head_size, config.num_heads, config.num_kv_heads
        watch = self._watch
        watch.start()
        hidden = F.embedding(inputs.input_ids, self.embedding).float()
        rotation = self.rotations[inputs.positions]
        plan = plan_attention(inputs.rows, kv_caches[0], self._workspace)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            normed = rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            watch.lap("glue")
            qkv = layer.qkv(normed).view(-1, num_heads + 2 * kv_heads, size)
            watch.lap("products")
            rope(qkv[:, : num_heads + kv_heads], rotation)
            new = qkv[:, num_heads:].view(-1, 2, kv_heads, size)
            kv_write(new, kv_cache, inputs.block_ids, inputs.offsets)
            watch.lap("glue")
            attended = paged_attention(qkv[:, :num_heads], kv_cache, plan)
            watch.lap("attention")
            hidden += layer.output(attended.flatten(1))
            watch.lap("products")
            normed = rms_norm(hidden, layer.feed_forward_norm, config.rms_norm_eps)
            watch.lap("glue")
            gate_up = layer.gate_up(normed)
            watch.lap("products")
            gated = silu_mul(gate_up)
            watch.lap("glue")
            hidden += layer.down(gated)
            watch.lap("products")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary: [R, hidden_size] → [R, vocab_size] float32."""
        self._watch.start()
        scores = self.head(rms_norm(hidden, self.norm, self.config.rms_norm_eps))
        self._watch.lap("head")
        return scores

    def take_seconds(self) -> dict[str, float]:
        """Where the time went since the last call of this: glue, products, attention, head."""
        return self._watch.take()

    @property
    def read_bytes(self) -> int:
        """Weights that a step reads."""
        return self.config.num_products * self.embedding.itemsize

    def product_rate(self) -> float:
        """Operations a second of its largest products with many rows, two for each weight and row."""
        layers, x = self.layers[:8], torch.randn(RATE_ROWS, self.config.hidden_size)

        def seconds() -> float:
            begin = time.perf_counter()
            for layer in layers:
                layer.gate_up(x)
            return time.perf_counter() - begin

        operations = 2 * x.numel() * 2 * self.config.intermediate_size * len(layers)
        return operations / median(seconds() for _ in range(7))

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
