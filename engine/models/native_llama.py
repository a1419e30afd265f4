"""The Llama architecture on the native kernels: a whole step is one call."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.errors import ConfigError
from engine.models.rope import neighbour_order, rotation_table
from kernels.blocks import GROUP, Blocks, as_blocks, stack
from kernels.byte_lines import line_size
from kernels.native import (
    CACHE_KINDS,
    PARTS,
    LayerStruct,
    Library,
    ModelStruct,
    PackedMatrix,
    SeatsStruct,
    StepStruct,
    check,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from engine.models.config import ModelConfig
    from engine.models.llama import ModelInputs
    from engine.sampler import SamplingRows

LAYER_PREFIX = "model.layers."
PARTS_OF_A_LAYER = 9
MAX_HEAD_SIZE = 256
MAX_GROUP = 64


def why_not(config: ModelConfig) -> str | None:
    """What of a model's shape the kernels cannot do, or `None`."""
    group = config.num_heads // config.num_kv_heads
    if config.head_size % 16 or config.head_size > MAX_HEAD_SIZE or group > MAX_GROUP:
        return f"{group} heads of size {config.head_size} under one key head"
    for width in (config.hidden_size, config.intermediate_size, group * config.head_size):
        if width % GROUP:
            return f"a width of {width}, which is no multiple of {GROUP}"
    return None


class NativeLlama:
    """A loaded model; its interface is `LlamaModel`'s.

    Weights are the file's own blocks where the kernels know them, else blocks of eight bits made here.
    Activations are quantized to eight bits in groups of 32 before each product. A token's values depend on its own
    sequence alone, to the last bit: not on the batch, the chunk, or what was cached.

    Args:
        weights: under their Hugging Face names, each once.
        eight_bits: make everything blocks of eight bits.
        max_tokens: of the largest step.
        max_model_len: positions that are prepared, in tokens.
        block_size: of the KV cache.
        cache_dtype: of the KV cache, float16 or int8.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor | Blocks]],
        library: Library,
        *,
        eight_bits: bool,
        num_threads: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        cache_dtype: torch.dtype,
    ) -> None:
        self.config, self._cache_dtype = config, cache_dtype
        self._library, self._max_tokens, self._eight_bits = library, max_tokens, eight_bits
        self._rotations = torch.view_as_real(rotation_table(config.rope, config.head_size, max_model_len)).contiguous()
        self._kept: list[torch.Tensor] = [self._rotations]
        self._read_bytes = 0
        layers, parts = self._take_layers(weights)
        norm = self._keep(parts.pop("model.norm.weight"))
        embedding = self._pack(self._blocks(parts.pop("model.embed_tokens.weight")))
        if config.tie_word_embeddings:
            head = embedding
        else:
            self._read_bytes -= embedding.tiles.nbytes  # of it a step reads a row a token
            head = self._pack(self._blocks(parts.pop("lm_head.weight")))
        self._head_rows = head.rows
        self._scores = torch.empty(0, head.rows)
        # What the last call was given, with the addresses that went on: they seldom change.
        self._caches: tuple[list[torch.Tensor], ctypes.Array[ctypes.c_void_p]] | None = None
        self._seats: tuple[SamplingRows, SeatsStruct] | None = None
        self._struct = ModelStruct(
            layers=layers,
            norm=norm,
            rotations=self._rotations.data_ptr(),
            embedding=embedding.struct,
            head=head.struct,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            block_size=block_size,
            num_positions=max_model_len,
            cache_kind=CACHE_KINDS[cache_dtype],
            eps=config.rms_norm_eps,
        )
        self._seconds = (ctypes.c_double * len(PARTS))()
        self._engine = library.calls.relevo_open(byref(self._struct), num_threads, max_tokens)
        if not self._engine:
            raise ConfigError(
                f"{num_threads} threads and room for {max_tokens} tokens a step are more than this machine gives: "
                "lower engine.num_threads or scheduler.capacity_num_batched_tokens."
            )

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._library.calls.relevo_close(self._engine)
            self._engine = None

    @property
    def read_bytes(self) -> int:
        """Weights that a step reads, with their scales."""
        return self._read_bytes

    def product_rate(self) -> float:
        """Operations a second of the products' own loop on data at hand, two for each weight and row."""
        rate: float = self._library.calls.relevo_dot_rate(self._engine)
        return rate

    def forward(self, inputs: ModelInputs, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        """Run the layers, writing keys and values.

        Args:
            kv_caches: one a layer, [blocks, 2, KVH, block_size, D] float16, or as in kernels/byte_lines.py.

        Returns:
            [N, hidden_size] float32, before the last norm.

        Raises:
            MemoryError: the step needs memory that is not there.
            IndexError: it names a token, a block or a position that is not there; nothing was written.
        """
        num_tokens, config = len(inputs.input_ids), self.config
        if self._caches is None or self._caches[0] is not kv_caches:
            self._caches = kv_caches, self._addresses(kv_caches)
        if num_tokens > self._max_tokens:
            raise ValueError(f"a step of {num_tokens} tokens, made for {self._max_tokens}")
        hidden = torch.empty(num_tokens, config.hidden_size)
        rows = inputs.rows
        step = StepStruct(
            num_tokens,
            len(rows.seq_lens),
            rows.block_tables.shape[1],
            kv_caches[0].shape[0],
            inputs.input_ids.data_ptr(),
            inputs.positions.data_ptr(),
            inputs.block_ids.data_ptr(),
            inputs.offsets.data_ptr(),
            rows.query_start_loc.data_ptr(),
            rows.seq_lens.data_ptr(),
            rows.block_tables.data_ptr(),
            ctypes.addressof(self._caches[1]),
            hidden.data_ptr(),
        )
        check(self._library.calls.relevo_forward(self._engine, byref(step), self._seconds))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token of the vocabulary: [R, hidden_size] → [R, vocab_size] float32.

        The next call writes to the same memory: fresh memory would cost a step as much as drawing from it.
        """
        hidden = hidden.contiguous()
        if len(self._scores) < len(hidden):
            self._scores = torch.empty(len(hidden), self._head_rows)
        out = self._scores[: len(hidden)]
        calls = self._library.calls
        check(calls.relevo_logits(self._engine, hidden.data_ptr(), len(hidden), out.data_ptr(), self._seconds))
        return out

    def sample_rows(
        self, logits: torch.Tensor, rows: SamplingRows, seats: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As `engine.sampler.sample_rows`, which may differ where the noise is within rounding of a border.

        Raises:
            MemoryError: there is none to note what the vocabulary weighs.
        """
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (seats, positions)]
        if logits.dtype != torch.float32 or any(column.shape != logits.shape[:1] for column in columns):
            raise ValueError(f"expected float32 [R, V] and columns [R], not {logits.dtype} {list(logits.shape)}")
        if self._seats is None or self._seats[0] is not rows:
            how = rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.key
            self._seats = rows, SeatsStruct(*[column.ctypes.data for column in how])
        token_ids = np.empty(len(logits), dtype=np.int64)
        addresses = [column.ctypes.data for column in (*columns, token_ids)]
        logits = logits.contiguous()
        shape = logits.shape
        check(
            self._library.calls.relevo_draw(self._engine, logits.data_ptr(), *shape, byref(self._seats[1]), *addresses)
        )
        return token_ids

    def take_seconds(self) -> dict[str, float]:
        """Where the time went since the last call of this, by `PARTS`; waiting for other threads included."""
        spent = dict(zip(PARTS, self._seconds, strict=True))
        self._seconds[:] = [0.0] * len(PARTS)
        return spent

    def _addresses(self, kv_caches: list[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
        config = self.config
        dtype, size = self._cache_dtype, line_size(config.head_size, self._cache_dtype)
        block_shape = (2, config.num_kv_heads, self._struct.block_size, size)
        first = kv_caches[0]
        if len(kv_caches) != config.num_layers or first.shape[1:] != block_shape or first.dtype != dtype:
            raise ValueError(f"expected {config.num_layers} caches of {dtype} blocks {block_shape}")
        return (ctypes.c_void_p * len(kv_caches))(*[cache.data_ptr() for cache in kv_caches])

    def _take_layers(
        self, weights: Iterable[tuple[str, torch.Tensor | Blocks]]
    ) -> tuple[ctypes.Array[LayerStruct], dict[str, torch.Tensor | Blocks]]:
        """The packed layers, and the weights that belong to none.

        Unpacked weights are large: each layer is packed as soon as all of it is there.
        """
        layers = (LayerStruct * self.config.num_layers)()
        parts: dict[str, torch.Tensor | Blocks] = {}
        for name, weight in weights:
            parts[name] = weight
            if name.startswith(LAYER_PREFIX):
                index = int(name.removeprefix(LAYER_PREFIX).split(".")[0])
                if sum(part.startswith(f"{LAYER_PREFIX}{index}.") for part in parts) == PARTS_OF_A_LAYER:
                    self._take_layer(parts, index, layers[index])
        return layers, parts

    def _take_layer(self, parts: dict[str, torch.Tensor | Blocks], index: int, into: LayerStruct) -> None:
        """Pack a layer, taking its weights out of `parts` so that their memory goes as the layer comes."""
        config = self.config

        def take(name: str) -> torch.Tensor | Blocks:
            return parts.pop(f"{LAYER_PREFIX}{index}.{name}.weight")

        order = neighbour_order(config.head_size)
        query, key = (self._blocks(take(f"self_attn.{name}_proj")) for name in "qk")
        gate_up = self._stack([self._blocks(take("mlp.gate_proj")), self._blocks(take("mlp.up_proj"))])
        pieces = np.arange(config.intermediate_size).reshape(-1, self._library.piece)
        alternating = np.concatenate((pieces, pieces + config.intermediate_size), axis=1).ravel()
        into.input_norm = self._keep(take("input_layernorm"))
        into.feed_forward_norm = self._keep(take("post_attention_layernorm"))
        into.query = self._pack(query.take(_in_heads(order, config.num_heads))).struct
        into.key = self._pack(key.take(_in_heads(order, config.num_kv_heads))).struct
        into.value = self._pack(self._blocks(take("self_attn.v_proj"))).struct
        into.output = self._pack(self._blocks(take("self_attn.o_proj"))).struct
        into.gate_up = self._pack(gate_up.take(alternating)).struct
        into.down = self._pack(self._blocks(take("mlp.down_proj"))).struct

    def _blocks(self, weight: torch.Tensor | Blocks) -> Blocks:
        return as_blocks(weight, eight_bits=self._eight_bits)

    @staticmethod
    def _stack(parts: list[Blocks]) -> Blocks:
        """One below the other; where the file has unlike blocks for them, which is rare, all become eight bits."""
        mixed = len({part.bits for part in parts}) > 1
        return stack([as_blocks(part, eight_bits=mixed) for part in parts])

    def _pack(self, blocks: Blocks) -> PackedMatrix:
        matrix = self._library.pack(blocks)
        self._kept.append(matrix.tiles)
        self._read_bytes += matrix.tiles.nbytes
        return matrix

    def _keep(self, norm: torch.Tensor | Blocks) -> int:
        """The address of a norm's float32 weights, which live as long as the model."""
        values = norm if isinstance(norm, torch.Tensor) else norm.dequantize()
        self._kept.append(values.float().contiguous())
        return self._kept[-1].data_ptr()


def _in_heads(order: torch.Tensor, num_heads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The order within a head, for all rows of a matrix."""
    heads = torch.arange(num_heads)[:, None] * len(order) + order
    return heads.flatten().numpy()
