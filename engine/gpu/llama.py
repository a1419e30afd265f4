"""The Llama architecture on a GPU: products with floats are torch's, all else is kernels of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.gpu.weights import Loading, Matrix
from engine.models.rope import rotation_table
from kernels.gpu.activation import silu_mul
from kernels.gpu.attention import make_segments, num_segments, paged_attention
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import rope_kv_write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.models.config import ModelConfig
    from kernels.blocks import Blocks
    from kernels.gpu.attention import Segments
    from kernels.gpu.inputs import TokenInputs
    from kernels.paged_attention import AttentionRows


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """Weights of one layer; norms in the dtype of the model."""

    input_norm: torch.Tensor
    qkv: Matrix
    output: Matrix
    feed_forward_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


class GpuLlama:
    """A loaded model. The residual stream is float32.

    Args:
        weights: under their Hugging Face names, each once, of any device and dtype. What comes in blocks stays
            quantized.
        dtype: bfloat16, float16 or float32: of activations and of all other weights.
        max_model_len: positions that are prepared, in tokens.
        num_multiprocessors: of the device; rows are split where fewer would work.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor | Blocks]],
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
        # Of a cache of eight-bit floats, for its keys and its values: nothing is known of them beforehand.
        self._scales = torch.ones((2, config.num_kv_heads), device=device)
        loading = Loading(weights, dtype=dtype, device=device, head_size=config.head_size)
        self.layers = tuple(self._take_layer(loading, index) for index in range(config.num_layers))
        self.norm = loading.vector("model.norm")
        self.embedding = loading.matrix("model.embed_tokens")
        self.head = self.embedding if config.tie_word_embeddings else loading.matrix("lm_head")

    def forward(
        self, tokens: TokenInputs, rows: AttentionRows, kv_caches: list[torch.Tensor], *, max_query_len: int
    ) -> torch.Tensor:
        """Run the layers, writing keys and values.

        Args:
            tokens: N of them, rows one after the other.
            rows: which blocks each attends to.
            kv_caches: one a layer, [blocks, 2, KVH, block_size, D], of the model's dtype or eight-bit floats, which end
                at 448: what is beyond becomes that.
            max_query_len: tokens of the longest row; 1 where every row has one.

        Returns:
            [N, hidden_size] float32, before the last norm.
        """
        config = self.config
        num_heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        residual = self.embedding.rows(tokens.input_ids)
        segments = self._segments(len(tokens.input_ids)) if max_query_len == 1 else None
        normed = torch.empty(residual.shape, dtype=self.dtype, device=self._device)
        attended: torch.Tensor | None = None  # what the next norm adds to the stream
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            if attended is None:
                rms_norm(residual, layer.input_norm, eps, normed)
            else:
                add_rms_norm(attended, residual, layer.input_norm, eps, normed)
            qkv = layer.qkv.product(normed).view(-1, num_heads + 2 * kv_heads, config.head_size)
            scales = self._scales if kv_cache.dtype == torch.float8_e4m3fn else None
            rope_kv_write(qkv, self._rotations, tokens.positions, kv_cache, tokens.slots, scales=scales)
            heads = paged_attention(
                qkv[:, :num_heads], kv_cache, rows, max_query_len=max_query_len, scales=scales, segments=segments
            )
            mixed = layer.output.product(heads.flatten(1))
            add_rms_norm(mixed, residual, layer.feed_forward_norm, eps, normed)
            attended = layer.down.product(silu_mul(layer.gate_up.product(normed)))
        return residual if attended is None else residual.add_(attended)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary: [R, hidden_size] float32 → `out`, [R, vocab_size] float32."""
        normed = torch.empty(hidden.shape, dtype=self.dtype, device=self._device)
        return self.head.scores(rms_norm(hidden, self.norm, self.config.rms_norm_eps, normed), out)

    @property
    def read_bytes(self) -> int:
        """Weights that a step reads."""
        matrices = [matrix for each in self.layers for matrix in (each.qkv, each.output, each.gate_up, each.down)]
        return sum(matrix.nbytes for matrix in (*matrices, self.head))

    def _segments(self, num_rows: int) -> Segments | None:
        """Room for the parts of rows that are split, where that keeps more of the device busy."""
        config = self.config
        count = num_segments(num_rows, config.num_kv_heads, self._num_multiprocessors)
        if count == 1:
            return None
        like = torch.empty((num_rows, config.num_heads, config.head_size), dtype=self.dtype, device=self._device)
        return make_segments(like, count)

    def _take_layer(self, loading: Loading, index: int) -> GpuLayer:
        """Build a layer, taking its weights so that their memory goes as the layer comes."""
        layer = f"model.layers.{index}"
        return GpuLayer(
            input_norm=loading.vector(f"{layer}.input_layernorm"),
            qkv=loading.matrix(*[f"{layer}.self_attn.{name}_proj" for name in "qkv"]),
            output=loading.matrix(f"{layer}.self_attn.o_proj"),
            feed_forward_norm=loading.vector(f"{layer}.post_attention_layernorm"),
            gate_up=loading.matrix(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
            down=loading.matrix(f"{layer}.mlp.down_proj"),
        )
