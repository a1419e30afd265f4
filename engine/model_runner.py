"""Runs a model: weights, KV cache, and one step after the other. All calls come from one thread."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import ScheduledBatch, Seated, StepOutput
from engine.drawing import NOT_A_NUMBER, Drawn, confirm, draw
from engine.input_batch import InputBatch, StepInputs
from engine.models.native_llama import NativeLlama
from engine.precision import Model, Precision, choose_precision
from engine.sampler import sample_rows
from engine.sequence import SamplingParams
from engine.stopwatch import Stopwatch
from kernels.byte_lines import SCALE_BYTES, line_size, without_nan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.cache_spec import CacheSpec
    from engine.loading.checkpoint import Checkpoint
    from engine.sampler import SampleRows

WARM_UP_TOKENS = 32
CACHE_LINE = 64
NUM_SPARE_BLOCKS = 2  # the null block, and one for padding


class ModelRunner:
    """A model with its cache. `launch` computes the step, `collect` hands over what came of it.

    Args:
        dtype: one of `engine.precision.NAMES`.
        num_threads: threads of torch's pool, and of the native kernels'.
        max_num_seqs: seats.
        max_num_batched_tokens: tokens of the largest step.
        max_model_len: longest sequence, in tokens.
        block_size: tokens of a KV block.
        kv_cache_dtype: one of `engine.precision.CACHE_NAMES`.
        silent_ids: tokens that are never drawn, for they stand for nothing.

    Raises:
        ConfigError: a dtype is not known, or does not go with the model or the other one.
    """

    overlaps = False

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str,
        num_threads: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        kv_cache_dtype: str = "auto",
        silent_ids: Sequence[int] = (),
    ) -> None:
        self.precision: Precision = choose_precision(dtype, checkpoint, kv_cache_dtype)
        self.model: Model
        self._checkpoint: Checkpoint | None = checkpoint
        self._config = checkpoint.config
        self._num_threads = num_threads
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._silent_ids = torch.tensor(silent_ids, dtype=torch.int64)
        self._watch = Stopwatch()
        self._sample_rows: SampleRows = sample_rows
        self.kv_caches: list[torch.Tensor] = []
        self._num_blocks = 0
        self._rows: InputBatch

    @property
    def cache_spec(self) -> CacheSpec:
        """What the model keeps of each token."""
        return self._config.cache_spec

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, over all layers."""
        dtype = self.precision.cache_dtype
        return self.cache_spec.bytes_per_token(dtype.itemsize, SCALE_BYTES if dtype == torch.int8 else 0)

    @torch.inference_mode()
    def load(self) -> None:
        """Read the weights.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        torch.set_num_threads(self._num_threads)
        if self._checkpoint is None:
            raise RuntimeError("the model is loaded already")
        checkpoint, self._checkpoint = self._checkpoint, None  # the file stays mapped as long as somebody holds it
        self.model = self.precision.build(
            checkpoint,
            num_threads=self._num_threads,
            max_tokens=self._max_num_batched_tokens,
            max_model_len=self._max_model_len,
            block_size=self._block_size,
        )
        self._sample_rows = self.model.sample_rows if isinstance(self.model, NativeLlama) else sample_rows

    @torch.inference_mode()
    def allocate_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks; what was cached before is gone."""
        self._num_blocks = num_blocks
        self.kv_caches = self._make_caches(num_blocks)
        self._rows = self._make_rows(self._max_num_seqs, num_blocks)

    @torch.inference_mode()
    def reset(self) -> None:
        """Begin with an empty cache and empty rows; what a step that failed wrote is nowhere any more.

        The memory is given back before there is new, of which only what is written takes any; whoever calls has let go
        of the step that failed. What fails here can be tried once more.
        """
        self.kv_caches.clear()
        self.allocate_cache(self._num_blocks)

    def warm_up(self) -> None:
        """Run a short chunk and a single token once, so that the first request finds threads and kernels prepared."""
        for count in (min(WARM_UP_TOKENS, self._max_num_batched_tokens, self._max_model_len), 1):
            for _ in self.logits_of([0] * count):
                pass

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch's tokens and draw a token for each row that samples."""
        begin = time.perf_counter()
        self._rows.apply(batch)
        if batch.is_empty:
            return StepOutput(batch.step, (), {}, time.perf_counter() - begin)
        self._watch.start()
        inputs = self._rows.prepare(batch)
        self._watch.lap("inputs")
        hidden = self.model.forward(inputs.model, self.kv_caches)
        drawn = self._draw(batch, inputs, hidden)
        broken = {row for row in _broken_rows(hidden, inputs) if row < len(batch)}
        failures = {**drawn.failures, **self._rows.failures_of(batch), **dict.fromkeys(sorted(broken), NOT_A_NUMBER)}
        for row, why in failures.items():
            drawn.token_ids[row] = -1
            if why == NOT_A_NUMBER:
                self._clean(batch.seats[row])
        seconds = time.perf_counter() - begin
        token_ids = tuple(drawn.token_ids.tolist())
        return StepOutput(batch.step, token_ids, failures, seconds, drawn.logprobs, drawn.forced, drawn.accepted)

    def launch(self, batch: ScheduledBatch) -> StepOutput:
        """As `execute`."""
        return self.execute(batch)

    def collect(self, ticket: StepOutput) -> StepOutput:
        """What came of a step that was launched."""
        return ticket

    def take_seconds(self) -> dict[str, float]:
        """Where the time of steps went since the last call of this, by part."""
        return self._watch.take() | self.model.take_seconds()

    def score(self, token_ids: list[int]) -> list[float]:
        """Negative log-likelihood of each token but the first, in nats, for checks of quality."""
        scores: list[float] = []
        for first, logits in self.logits_of(token_ids):
            following = torch.tensor(token_ids[first + 1 : first + 1 + len(logits)])
            rows = torch.log_softmax(logits[: len(following)], dim=-1)
            scores.extend((-rows.gather(-1, following[:, None])[:, 0]).tolist())
        return scores

    @torch.inference_mode()
    def logits_of(self, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Run one sequence beside everything else, in a cache of its own.

        Yields:
            (first position, logits [n, vocab_size] float32) of each chunk.
        """
        num_blocks = -(-len(token_ids) // self._block_size)
        kv_caches, rows = self._make_caches(num_blocks), self._make_rows(1, num_blocks)
        seated: tuple[Seated, ...] = (Seated(0, 0, tuple(token_ids), len(token_ids), SamplingParams()),)
        new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ((0, tuple(range(num_blocks))),)
        for start in range(0, len(token_ids), self._max_num_batched_tokens):
            count = min(self._max_num_batched_tokens, len(token_ids) - start)
            batch = ScheduledBatch(
                step=0,
                seats=(0,),
                sequence_ids=(0,),
                starts=(start,),
                counts=(count,),
                samples=(False,),
                seated=seated,
                new_blocks=new_blocks,
            )
            rows.apply(batch)
            seated, new_blocks = (), ()
            hidden = self.model.forward(rows.prepare(batch).model, kv_caches)
            yield start, self.model.logits(hidden).clone()

    def _draw(self, batch: ScheduledBatch, inputs: StepInputs, hidden: torch.Tensor) -> Drawn:
        """Draw for the rows of the batch that sample, and write the tokens down; hidden is [N, E]."""
        if len(inputs.sampling) == 0:
            return Drawn(np.full(len(batch), -1, dtype=np.int64))
        rows = inputs.order[inputs.sampling]
        logits = self.model.logits(hidden[inputs.last_tokens])
        if len(self._silent_ids) > 0:
            logits.index_fill_(-1, self._silent_ids, -math.inf)
        logits, behind = logits[: len(rows)], logits[len(rows) :]
        if batch.padding:  # computed like the others, and of no use to anybody
            logits, rows = logits[torch.from_numpy(rows < len(batch))], rows[rows < len(batch)]
        seats, positions = np.array(batch.seats)[rows], (np.array(batch.starts) + np.array(batch.counts))[rows]
        self._watch.start()
        drawn = draw(logits, self._rows.sampling, self._rows.extras, seats, positions, self._sample_rows)
        if batch.drafts:
            drafts = {index: batch.drafts[row] for index, row in enumerate(rows.tolist()) if row in batch.drafts}
            drawn = confirm(drawn, drafts, behind, self._rows.sampling, seats, positions, self._sample_rows)
        # A row without a token ends, but what its seat holds may yet be computed as padding.
        self._rows.append(seats, positions, np.maximum(drawn.token_ids, 0), {**drawn.forced, **drawn.accepted})
        self._watch.lap("sampling")
        return drawn.placed(rows, len(batch))

    def _make_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """One cache a layer; behind its blocks the null block, which stays zero, and one for padding to write to."""
        shape = (num_blocks + NUM_SPARE_BLOCKS, *self._block_shape())
        return [_zeros_on_demand(shape, self.precision.cache_dtype) for _ in range(self._config.num_layers)]

    def _block_shape(self) -> tuple[int, int, int, int]:
        (group,) = self.cache_spec.groups
        size = line_size(group.head_size, self.precision.cache_dtype)
        return (2, group.num_kv_heads, self._block_size, size)

    def _make_rows(self, max_num_seqs: int, null_block: int) -> InputBatch:
        return InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=self._max_model_len,
            block_size=self._block_size,
            null_block=null_block,
            vocab_size=self._config.vocab_size,
        )

    def _clean(self, seat: int) -> None:
        """Take what is no number out of a seat's blocks: whoever gets them next multiplies it by zero, which is NaN."""
        block_ids = self._rows.blocks_of(seat)
        for kv_cache in self.kv_caches:
            kv_cache[block_ids] = without_nan(kv_cache[block_ids])


def _zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory when they are first written: a large cache costs nothing until it is used.

    numpy asks the system for zeroed pages, in huge ones where it can; torch writes the zeros.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    start = -memory.ctypes.data % CACHE_LINE  # blocks are to begin with a line
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def _broken_rows(hidden: torch.Tensor, inputs: StepInputs) -> set[int]:
    """Rows of the batch with a token whose hidden state is not finite; hidden is [N, E]."""
    # By numpy: it begins sooner than torch, and a decode step has little to sum.
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(hidden.float().numpy().sum(-1))
    if finite.all():
        return set()
    whole = np.logical_and.reduceat(finite, inputs.row_starts)
    return {int(row) for row in inputs.order[~whole]}
