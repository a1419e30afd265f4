"""Runs a model on a GPU: weights, KV cache, and one step after the other. All calls come from one thread.

A step is launched without waiting for the one before it: what it needs of that one, the drawn tokens, lies on the
device already. Decode steps are replayed from CUDA graphs of a few sizes; what rows ask for beside a token comes
between the graph that ends with the logits and the one that draws.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.batch import StepOutput
from engine.drawing import NOT_A_NUMBER
from engine.gpu.columns import Columns, columns_of
from engine.gpu.events import Past
from engine.gpu.llama import GpuLlama
from engine.gpu.mailbox import Mailbox
from engine.gpu.rows import GpuRows
from engine.gpu.seat_extras import SeatExtras
from engine.gpu.step_extras import StepExtras
from engine.gpu.weights import in_blocks
from engine.stopwatch import Stopwatch
from kernels.gpu.inputs import TokenInputs, append_tokens, gather_inputs
from kernels.gpu.sampling import make_scratch, sample
from kernels.paged_attention import AttentionRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from engine.batch import ScheduledBatch
    from engine.gpu.events import Event
    from engine.gpu.graphs import Graphs
    from engine.loading.checkpoint import Checkpoint
    from engine.sequence import SamplingParams


class Sizes(NamedTuple):
    """What a runner has room for.

    Attributes:
        max_num_seqs: seats.
        max_num_batched_tokens: tokens of the largest step.
        max_model_len: longest sequence, in tokens.
        block_size: tokens of a KV block.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step under way.

    Attributes:
        rows: [S], those of the batch that sample.
        token_ids: [S] in the machine's memory, once `done`.
        done: when the device has come to the end of the step.
    """

    batch: ScheduledBatch
    rows: NDArray[np.intp]
    extras: StepExtras
    failures: Mapping[int, str]
    token_ids: torch.Tensor
    done: Event
    begun: float


class GpuRunner:
    """A model with its cache, on a device.

    Args:
        device: a GPU; or the CPU under Triton's interpreter, which computes at once and is for tests.
        dtype: of activations, and of weights that are not quantized.
        cache_dtype: of the KV cache; that of the activations, or eight-bit floats.
        blocks: `native` keeps matrices quantized, in the file's own blocks where it has some, `int8` in such of eight
            bits; `None` makes floats of all.
        silent_ids: tokens that are never drawn, for they stand for nothing.
        make_event: of the device; it computes at once unless others are given.
        num_multiprocessors: of the device.

    Attributes:
        graphs: of decode steps, once they are captured.
    """

    overlaps = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        sizes: Sizes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        blocks: str | None = None,
        silent_ids: tuple[int, ...] = (),
        make_event: Callable[[], Event] = Past,
        num_multiprocessors: int = 1,
    ) -> None:
        self.sizes, self.device, self.dtype, self.blocks = sizes, device, dtype, blocks
        self.cache_dtype = cache_dtype
        self.config = checkpoint.config
        self.graphs: Graphs | None = None
        self.kv_caches: list[torch.Tensor] = []
        self._checkpoint: Checkpoint | None = checkpoint
        self._silent_ids = torch.tensor(silent_ids, dtype=torch.int64, device=device)
        self._make_event, self._num_multiprocessors = make_event, num_multiprocessors
        self._watch = Stopwatch()
        self._last_end = 0.0
        self.model: GpuLlama
        self._rows: GpuRows

    @torch.inference_mode()
    def load(self) -> None:
        """Read the weights, and make room for what a step needs beside the cache.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        if self._checkpoint is None:
            raise RuntimeError("the model is loaded already")
        checkpoint, self._checkpoint = self._checkpoint, None
        device, sizes = self.device, self.sizes
        self.model = GpuLlama(
            checkpoint.config,
            in_blocks(checkpoint.weights(), eight_bits=self.blocks == "int8") if self.blocks else checkpoint.tensors(),
            dtype=self.dtype,
            device=device,
            max_model_len=sizes.max_model_len,
            num_multiprocessors=self._num_multiprocessors,
        )
        seats, vocab_size = sizes.max_num_seqs, self.config.vocab_size
        self._rows = GpuRows(
            max_num_seqs=seats,
            max_model_len=sizes.max_model_len,
            block_size=sizes.block_size,
            vocab_size=vocab_size,
            device=device,
        )
        # A fixed batch computes padding beside its rows, of each seat at most one.
        self._box = Mailbox(2 * seats, device, self._make_event)
        tokens = max(seats, sizes.max_num_batched_tokens)
        self._tokens = TokenInputs(*[torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(3)])
        self._tables = torch.zeros_like(self._rows.block_tables).repeat(2, 1)
        self._scratch = make_scratch(seats, vocab_size, device)
        # One place for the logits of all steps: graphs of many sizes would each keep their own.
        self._logits = torch.empty((seats, vocab_size), dtype=torch.float32, device=device)
        # How often each token stands in what a seat holds, of those whose penalties ask for it.
        self._counts = torch.empty((seats, vocab_size), dtype=torch.int32, device=device)
        self._drawn = torch.zeros(seats, dtype=torch.int32, device=device)
        # Two, in turn: a step may be launched before what came of the one before it is read.
        self._hosts = [torch.zeros(seats, dtype=torch.int32, pin_memory=device.type != "cpu") for _ in range(2)]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache, over all layers."""
        return self.config.cache_spec.bytes_per_token(self.cache_dtype.itemsize)

    @torch.inference_mode()
    def allocate_cache(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks; what was cached before is gone."""
        (group,) = self.config.cache_spec.groups
        shape = (num_blocks, 2, group.num_kv_heads, self.sizes.block_size, group.head_size)
        self.kv_caches.clear()
        self.kv_caches += [
            torch.zeros(shape, dtype=self.cache_dtype, device=self.device) for _ in range(self.config.num_layers)
        ]

    @torch.inference_mode()
    def reset(self) -> None:
        """Begin with empty rows; nothing that was cached is asked for any more. Waits for what is under way."""
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # what a step left that ran out of memory may lie in pieces
        self._rows.clear()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Compute the batch's tokens and draw a token for each row that samples."""
        return self.collect(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> GpuStep:
        """Begin a step, behind those that were launched before; does not wait for any of them."""
        begun = time.perf_counter()
        self._watch.start()
        own, rows = columns_of(batch)
        places, values = self._rows.apply(batch, own)
        if batch.drafts:
            raise RuntimeError("on this device nothing is drafted, and a step came with drafts")
        size = self.graphs.size_for(own) if self.graphs is not None else None
        columns = own.padded(size or own.num_rows)
        self._box.send(columns, places, values, self._rows.state)
        of_seats = self._rows.extras
        extras = StepExtras(own, rows, of_seats, self._box.bring)
        self._watch.lap("inputs")
        self._compute(columns, extras, size, filtered=bool(of_seats.filters[own.sample_seats[: len(rows)]].any()))
        self._hosts.reverse()
        token_ids, done = self._hosts[0][: len(rows)], self._make_event()
        token_ids.copy_(self._drawn[: len(rows)], non_blocking=True)
        done.record()
        self._watch.lap("launch")
        return GpuStep(batch, rows, extras, self._rows.failures_of(batch), token_ids, done, begun)

    def collect(self, ticket: GpuStep) -> StepOutput:
        """Wait for the oldest step that was launched and give back what came of it."""
        self._watch.start()
        ticket.done.synchronize()
        self._watch.lap("wait")
        batch, extras = ticket.batch, ticket.extras
        drawn = np.full(len(batch), -1, dtype=np.int64)
        drawn[ticket.rows] = ticket.token_ids.numpy()
        broken = {row: NOT_A_NUMBER for row in ticket.rows[drawn[ticket.rows] < 0].tolist()}
        drawn[list(ticket.failures)] = -1
        token_ids: list[int] = drawn.tolist()
        logprobs, forced = extras.take(token_ids) if extras else ({}, {})
        for row, following in forced.items():
            self._rows.append(batch.seats[row], batch.starts[row] + batch.counts[row] + 1, following)
        failures = {**broken, **extras.failures, **ticket.failures}
        for row in failures:
            token_ids[row] = -1
        now = time.perf_counter()
        seconds, self._last_end = now - max(ticket.begun, self._last_end), now
        return StepOutput(batch.step, tuple(token_ids), failures, seconds, logprobs, forced)

    def take_seconds(self) -> dict[str, float]:
        """Where the time of steps went since the last call of this, on this side: inputs, launch, wait."""
        return self._watch.take()

    @torch.inference_mode()
    def run_empty(
        self, num_rows: int, num_tokens: int, *, filtered: bool = True, params: SamplingParams | None = None
    ) -> None:
        """Compute a step of rows that stand for nothing: compiles what it needs, and takes the memory it takes.

        Args:
            num_tokens: at least as many; the last rows get what is left, none more than the context has.
            filtered: the draws look at top-k, top-p and min-p.
            params: what each row asks for beside a token; nothing unless it is given.
        """
        room = self.sizes.max_model_len - 1
        lengths = 1 + np.clip(num_tokens - num_rows - room * np.arange(num_rows)[::-1], 0, room)
        nothing, none = np.zeros(num_rows, np.int32), np.full(num_rows, -1, np.int32)
        loc = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        seq_lens = lengths.astype(np.int32)
        columns = Columns(none, nothing, nothing, seq_lens, loc[1:] - 1, nothing, none, loc)
        self._box.send(columns, nothing[:0], nothing[:0], self._rows.state)
        of_seats = SeatExtras(1, self.config.vocab_size)
        if params is not None:
            of_seats.set(0, params, (), 0)
        extras = StepExtras(columns, np.arange(num_rows), of_seats, self._box.bring)
        self._compute(columns, extras, None, filtered=filtered)

    def logits(self, num_rows: int, num_tokens: int, max_query_len: int, num_draws: int) -> torch.Tensor:
        """From what lies in the mailbox to the logits behind each row that samples: [S, V] float32."""
        box, rows = self._box, self._rows
        loc = box.column("query_start_loc", num_rows + 1)
        tokens = gather_inputs(
            rows.token_ids, rows.block_tables, box.column("seats", num_rows), box.column("starts", num_rows), loc,
            block_size=self.sizes.block_size, max_query_len=max_query_len,
            out=TokenInputs(*[column[:num_tokens] for column in self._tokens]),
        )  # fmt: skip
        tables = self._tables[:num_rows]
        torch.index_select(rows.block_tables, 0, box.column("table_seats", num_rows), out=tables)
        attention = AttentionRows(tables, loc, box.column("seq_lens", num_rows))
        hidden = self.model.forward(tokens, attention, self.kv_caches, max_query_len=max_query_len)
        last = hidden.index_select(0, box.column("sample_tokens", num_draws))
        logits = self.model.logits(last, self._logits[:num_draws])
        if len(self._silent_ids):
            logits.index_fill_(-1, self._silent_ids, -torch.inf)
        return logits

    def draw(self, logits: torch.Tensor, *, filtered: bool) -> None:
        """Draw behind each of [S, V] logits, and write the tokens down."""
        count = logits.shape[0]
        seats, positions = (self._box.column(name, count) for name in ("sample_seats", "sample_positions"))
        scratch = type(self._scratch)(*[tensor[:count] for tensor in self._scratch])
        out = self._drawn[:count]
        sample(logits, self._rows.columns, seats, positions, filtered=filtered, scratch=scratch, out=out)
        append_tokens(self._rows.token_ids, seats, positions, out)

    def _compute(self, columns: Columns, extras: StepExtras, size: int | None, *, filtered: bool) -> None:
        """One step, by graphs of a size or call by call."""
        if self.graphs is not None and size is not None:
            logits = self.graphs.logits(size)
        else:
            num_draws = len(columns.sample_tokens)
            logits = self.logits(columns.num_rows, columns.num_tokens, columns.max_query_len, num_draws)
        if extras:
            extras.adjust(logits, self._rows.token_ids, self._counts)
        if self.graphs is not None and size is not None:
            self.graphs.draw(size)
        elif logits.shape[0]:
            self.draw(logits, filtered=filtered)
        extras.fetch_logprobs(logits, self._drawn)
