"""From a checkpoint to a runner on a GPU: in which numbers it computes, and what is done with the device's memory."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from engine.batch import ScheduledBatch, Seated
from engine.errors import ConfigError
from engine.faults import lacks_memory
from engine.gpu.gpus import MIB
from engine.gpu.graphs import sizes_for
from engine.loaded import Prepared
from engine.memory import num_cache_blocks
from engine.precision import BLOCKS, GPU_CACHE_NAMES, what_becomes
from engine.sequence import SamplingParams
from kernels.blocks import GROUP
from kernels.draws import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.config import EngineConfig
    from engine.gpu.gpus import GpuRunnerLike, Gpus
    from engine.loading.checkpoint import Checkpoint

log = logging.getLogger("relevo.engine")

# The KV cache takes this share of what weights, the largest step and graphs leave, unless it is told otherwise.
CACHE_SHARE: Final = 0.9
# What a captured graph takes beside its tensors; others tell of 1.7 MB for each.
GRAPH_BYTES: Final = 2 * MIB
# What cuBLAS takes for the stream that graphs are captured on: 32 MiB on sm_90, 8 before. Reasoned and not measured.
CAPTURE_BYTES: Final = 32 * MIB
# Tokens of prompts: kernels are compiled anew for one number, and for multiples of sixteen.
PROMPTS: Final = (1, 2, 16, 33)
# Triton's, by name since it may not be installed: more shared memory than there is, as a rule.
OUT_OF_RESOURCES: Final = "OutOfResources"
FLOAT8: Final = torch.float8_e4m3fn
# The kernels take these two by two, and no fewer than sixteen pairs at a time.
LEAST_FLOAT8_HEAD: Final = 32
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def prepare_on_gpu(
    config: EngineConfig, checkpoint: Checkpoint, index: int, max_model_len: int, gpus: Gpus
) -> Prepared:
    """Load the model, share out the memory and capture the graphs.

    Raises:
        ModelError: the checkpoint cannot be read.
        ConfigError: a setting does not go with this device, or something does not fit into its memory.
    """
    name, reason = choose_dtype(config.dtype, index, gpus)
    blocks = config.dtype if config.dtype in BLOCKS else None
    if blocks is not None:
        reason = f"{_what_blocks(checkpoint, blocks)}; multiplied as {name}"
    cache_dtype = choose_cache_dtype(config, checkpoint.config.head_size, DTYPES[name], index, gpus)
    reason += "; KV cache of eight-bit floats" * (cache_dtype == FLOAT8)
    seats, tokens = config.capacity_num_seqs, config.capacity_num_batched_tokens
    runner = gpus.make_runner(
        checkpoint,
        index,
        dtype=DTYPES[name],
        cache_dtype=cache_dtype,
        blocks=blocks,
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        silent_ids=tuple(checkpoint.tokenizer.silent_ids),
    )
    free = gpus.free_bytes(index)
    with _fitting(index, f"the weights do not fit into {free // MIB} MiB", "a smaller model, or --device cpu"):
        runner.load()
    with _fitting(index, f"a step of {tokens} tokens does not fit beside the weights", "fewer tokens or seats a step"):
        runner.allocate_cache(1)  # which all rows read
        warm_up(runner, seats, tokens)
        reserve = bytes_for_steps(runner, index, seats, tokens, gpus, everything(checkpoint.config.vocab_size))
    free = gpus.free_bytes(index) - reserve
    num_blocks = num_cache_blocks(
        config, max_model_len, runner.kv_bytes_per_token, available=free, share=CACHE_SHARE, where=f"on cuda:{index}"
    )
    with _fitting(index, "the KV cache or the graphs do not fit", "the cache less memory ([cache] memory)"):
        runner.allocate_cache(num_blocks)
        room = min(tokens, max_model_len, num_blocks * config.block_size)
        try_requests(runner, room, config.block_size, everything(checkpoint.config.vocab_size))
        capture(runner, gpus)
    remarks = [f"dtype {blocks or name}: {reason}"]
    if config.num_speculative_tokens:
        remarks.append("nothing is drafted: on a GPU rounding depends on the batch, so drafts could change an answer")
    return Prepared(runner, blocks or name, num_blocks, tuple(remarks), is_batch_invariant=False)


def choose_dtype(name: str, index: int, gpus: Gpus) -> tuple[str, str]:
    """The floats to compute in, and why. Blocks are multiplied in those that `auto` takes.

    Raises:
        ConfigError: the device does not multiply them.
    """
    has_bfloat16 = gpus.multiplies_bfloat16(index)
    if name == "auto" or name in BLOCKS:
        chosen = ("bfloat16", "multiplied by this GPU"), ("float16", "this GPU multiplies no bfloat16")
        return chosen[0] if has_bfloat16 else chosen[1]
    if name == "bfloat16" and not has_bfloat16:
        raise ConfigError(f"model.dtype is 'bfloat16', which cuda:{index} does not multiply: choose float16 or auto.")
    return name, "as configured"


def choose_cache_dtype(config: EngineConfig, head_size: int, dtype: torch.dtype, index: int, gpus: Gpus) -> torch.dtype:
    """What the KV cache is of: eight-bit floats where they are asked for, or with `auto` the model's dtype.

    Raises:
        ConfigError: any other name, the device does not make eight-bit floats, or heads are too small for them.
    """
    if config.kv_cache_dtype not in GPU_CACHE_NAMES:
        names = " or ".join(GPU_CACHE_NAMES)
        raise ConfigError(f"cache.kv_cache_dtype is {config.kv_cache_dtype!r}; on a GPU it can be {names}.")
    if config.kv_cache_dtype != "fp8":
        return dtype
    if head_size < LEAST_FLOAT8_HEAD:
        raise ConfigError(
            f"cache.kv_cache_dtype is 'fp8', but the model has heads of {head_size} numbers, and that takes "
            f"{LEAST_FLOAT8_HEAD}: choose auto."
        )
    if not gpus.has_float8(index):
        raise ConfigError(
            f"cache.kv_cache_dtype is 'fp8', which cuda:{index} does not make; NVIDIA's do from sm_89 on: choose auto."
        )
    return FLOAT8


def _what_blocks(checkpoint: Checkpoint, blocks: str) -> str:
    """What of the file is kept in blocks of which kind.

    Raises:
        ConfigError: the model's shape does not go with blocks.
    """
    config = checkpoint.config
    for width in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_size):
        if width % GROUP:
            raise ConfigError(
                f"model.dtype is {blocks!r}, but the model has a width of {width}, which is no multiple of {GROUP}: "
                "choose auto."
            )
    return what_becomes(checkpoint.matrix_kinds, own_blocks=blocks == "native")


class Anything:
    """A constraint that allows all there is."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = b"\xff" * -(-vocab_size // 8)

    def begin(self, token_ids: tuple[int, ...]) -> Anything:
        """It is the same everywhere."""
        del token_ids
        return self

    def allowed(self) -> bytes:
        """All."""
        return self._mask

    def consume(self, token_id: int) -> None:
        """No matter."""

    def force(self) -> tuple[int, ...]:
        """Nothing."""
        return ()


def everything(vocab_size: int) -> SamplingParams:
    """All that a request can ask for beside a token, so that each of it has run once and had its memory."""
    return SamplingParams(
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        num_logprobs=MOST,
        constraint=Anything(vocab_size),
    )


def bytes_for_steps(
    runner: GpuRunnerLike, index: int, seats: int, tokens: int, gpus: Gpus, params: SamplingParams
) -> int:
    """What is to be kept free for the largest step, and for the graphs of those that decode: found by computing both.

    Args:
        params: what each row of the largest step asks for.
    """
    largest = gpus.peak_bytes(index, partial(runner.run_empty, min(seats, tokens), tokens, params=params))
    # The graphs of all sizes share the memory of the largest one.
    decoding = gpus.peak_bytes(index, partial(runner.run_empty, seats, seats))
    graphs = decoding + CAPTURE_BYTES + 2 * len(sizes_for(seats)) * GRAPH_BYTES
    log.info("the largest step takes %d MiB, graphs up to %d MiB", largest // MIB, graphs // MIB)
    return largest + graphs


def warm_up(runner: GpuRunnerLike, seats: int, tokens: int) -> None:
    """Have kernels compiled that are of another kind for a longer prompt, several rows, or draws without filters.

    What is compiled is kept on the disk (by Triton, in ~/.triton), so that later starts find it there.
    """
    report = _reporting("kernels for %d of %d sizes of steps are ready")
    sizes = [(rows, 1 << power) for power in range(1, tokens.bit_length()) for rows in {1, min(seats, 1 << power - 1)}]
    sizes = [*dict.fromkeys([*sizes, (1, tokens)])]
    for done, (num_rows, num_tokens) in enumerate(sizes, start=1):
        runner.run_empty(num_rows, num_tokens, filtered=False)
        report(done, len(sizes))


def try_requests(runner: GpuRunnerLike, room: int, block_size: int, params: SamplingParams) -> None:
    """Read prompts and draw two tokens behind each, with everything that takes kernels of its own.

    Args:
        room: tokens that a sequence and a step may have.
        params: what they ask for.
    """
    for length in [length for length in PROMPTS if length < room]:
        row = ScheduledBatch(0, (0,), (length,), (0,), (length,), (True,))
        seated = Seated(0, length, (0,) * length, length, params)
        block_ids = tuple(range(-(-(length + 1) // block_size)))
        runner.execute(replace(row, seated=(seated,), new_blocks=((0, block_ids),)))
        runner.execute(replace(row, starts=(length,), counts=(1,)))
    runner.reset()


def capture(runner: GpuRunnerLike, gpus: Gpus) -> None:
    """Capture decode steps."""
    gpus.capture(runner, _reporting("%d of %d sizes of decode steps captured"))


def _reporting(what: str) -> Callable[[int, int], None]:
    """Tells how far it is every quarter of the way, and how long that took.

    Args:
        what: has places for how much is done, and of how much.
    """

    def report(done: int, total: int) -> None:
        if 4 * done // total > 4 * (done - 1) // total:
            log.info(what + ", after %.1f s", done, total, time.perf_counter() - begun)

    begun = time.perf_counter()
    return report


@contextmanager
def _fitting(index: int, what: str, advice: str) -> Iterator[None]:
    """Turn a lack of memory, or a kernel that this device has not the means for, into a line that says what to do."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise ConfigError(f"The memory of cuda:{index} is too small: {what}; give {advice}.") from error
        if type(error).__name__ == OUT_OF_RESOURCES:
            lack: Any = error
            raise ConfigError(
                f"A kernel wants more {lack.name} than cuda:{index} has ({lack.required}, and there are {lack.limit}): "
                "choose another [model] dtype or [cache] kv_cache_dtype, or --device cpu."
            ) from error
        raise
