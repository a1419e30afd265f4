"""The Llama architecture on a GPU: the products are torch's, all else is kernels of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from engine.models.rope import pair_neighbours, rotation_table
from kernels.gpu.activation import silu_mul
from kernels.gpu.attention import make_segments, num_segments, paged_attention
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import rope_kv_write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.models.config import ModelConfig
    from kernels.gpu.attention import Segments
    from kernels.gpu.inputs import TokenInputs
    from kernels.paged_attention import AttentionRows


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """Weights of one layer, all in the dtype of the model."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class GpuLlama:
    """A loaded model. Activations have the weights' dtype, the residual stream is float32.

    Args:
        tensors: under their Hugging Face names, each once, of any device and dtype.
        dtype: bfloat16, float16 or float32.
        max_model_len: positions that are prepared, in tokens.
        num_multiprocessors: of the device; rows are split where fewer would work.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        num_multiprocessors: int,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._device, self._num_multiprocessors = device, num_multiprocessors
        table = rotation_table(config.rope, config.head_size, max_model_len)
        self._rotations = torch.view_as_real(table).contiguous().to(device)  # [positions, D / 2, 2]
        # On the device as they come: the whole model never lies beside it in the machine's memory.
        weights = {name: tensor.to(device, dtype) for name, tensor in tensors}
        self.layers = tuple(self._take_layer(weights, index) for index in range(config.num_layers))
        self.norm = weights.pop("model.norm.weight")
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.head = self.embedding if config.tie_word_embeddings else weights.pop("lm_head.weight")

    def forward(
        self, tokens: TokenInputs, rows: AttentionRows, kv_caches: list[torch.Tensor], *, max_query_len: int
    ) -> torch.Tensor:
        """Run the layers, writing keys and values.

        Args:
            tokens: N of them, rows one after the other.
            rows: which blocks each attends to.
            kv_caches: one a layer, [blocks, 2, KVH, block_size, D].
            max_query_len: tokens of the longest row; 1 where every row has one.

        Returns:
            [N, hidden_size] float32, before the last norm.
        """
        config = self.config
        num_heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        residual = F.embedding(tokens.input_ids, self.embedding).float()
        segments = self._segments(len(tokens.input_ids)) if max_query_len == 1 else None
        normed = torch.empty(residual.shape, dtype=self.dtype, device=self._device)
        attended: torch.Tensor | None = None  # what the next norm adds to the stream
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            if attended is None:
                rms_norm(residual, layer.input_norm, eps, normed)
            else:
                add_rms_norm(attended, residual, layer.input_norm, eps, normed)
            qkv = F.linear(normed, layer.qkv).view(-1, num_heads + 2 * kv_heads, config.head_size)
            rope_kv_write(qkv, self._rotations, tokens.positions, kv_cache, tokens.slots)
            heads = paged_attention(qkv[:, :num_heads], kv_cache, rows, max_query_len=max_query_len, segments=segments)
            add_rms_norm(F.linear(heads.flatten(1), layer.output), residual, layer.feed_forward_norm, eps, normed)
            attended = F.linear(silu_mul(F.linear(normed, layer.gate_up)), layer.down)
        return residual if attended is None else residual.add_(attended)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary: [R, hidden_size] float32 → `out`, [R, vocab_size] float32."""
        normed = torch.empty(hidden.shape, dtype=self.dtype, device=self._device)
        rms_norm(hidden, self.norm, self.config.rms_norm_eps, normed)
        return out.copy_(F.linear(normed, self.head))

    @property
    def read_bytes(self) -> int:
        """Weights that a step reads."""
        return self.config.num_products * self.dtype.itemsize

    def _segments(self, num_rows: int) -> Segments | None:
        """Room for the parts of rows that are split, where that keeps more of the device busy."""
        config = self.config
        count = num_segments(num_rows, config.num_kv_heads, self._num_multiprocessors)
        if count == 1:
            return None
        like = torch.empty((num_rows, config.num_heads, config.head_size), dtype=self.dtype, device=self._device)
        return make_segments(like, count)

    def _take_layer(self, weights: dict[str, torch.Tensor], index: int) -> GpuLayer:
        """Build a layer, taking its tensors out of `weights` so that their memory goes as the layer comes."""

        def take(name: str) -> torch.Tensor:
            return weights.pop(f"model.layers.{index}.{name}.weight")

        size = self.config.head_size
        query, key = (pair_neighbours(take(f"self_attn.{name}_proj"), size) for name in "qk")
        return GpuLayer(
            input_norm=take("input_layernorm"),
            qkv=torch.cat((query, key, take("self_attn.v_proj"))),
            output=take("self_attn.o_proj"),
            feed_forward_norm=take("post_attention_layernorm"),
            gate_up=torch.cat((take("mlp.gate_proj"), take("mlp.up_proj"))),
            down=take("mlp.down_proj"),
        )
