"""From a configuration to a model that is ready to run. Everything here happens on the torch thread."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.loaded import LoadedModel
from engine.loading.checkpoint import open_checkpoint
from engine.loading.fetch import resolve_model
from engine.loading.vocabulary import vocabulary_remarks
from engine.memory import available_bytes
from engine.model_runner import ModelRunner
from engine.processors import available_cores

if TYPE_CHECKING:
    from engine.config import EngineConfig

# The KV cache takes this share of the free memory unless it is told otherwise: the rest is for weights,
# activations and whoever else lives on the machine.
CACHE_SHARE = 0.25


def load_model(config: EngineConfig) -> LoadedModel:
    """Find the model, read its weights, allocate its cache and run it once.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: a setting does not go with this model or this machine.
    """
    path = resolve_model(config.model)
    # A path is known by its own name; a built-in model or a hub id by the name it was asked for.
    checkpoint = open_checkpoint(path, name=None if Path(config.model).exists() else config.model)
    max_model_len = _context_length(config, checkpoint.config.context_length)
    runner = ModelRunner(
        checkpoint,
        dtype=config.dtype,
        num_threads=config.num_threads or available_cores(),
        max_num_seqs=config.capacity_num_seqs,
        max_num_batched_tokens=config.capacity_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        silent_ids=checkpoint.tokenizer.silent_ids,
    )
    runner.load()
    num_blocks = _num_blocks(config, max_model_len, runner.kv_bytes_per_token)
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    is_batch_invariant = runner.precision.library is not None  # of floats the order of sums depends on the batch
    remarks = [f"dtype {runner.precision.name}: {runner.precision.reason}", *vocabulary_remarks(checkpoint.tokenizer)]
    if config.num_speculative_tokens and not is_batch_invariant:
        remarks.append("nothing is guessed: without the native kernels guesses could change an answer, by rounding")
    if checkpoint.chat_template is None:
        remarks.append("the model has no chat template: /v1/completions works, /v1/chat/completions does not")
    return LoadedModel(
        name=config.served_model_name or checkpoint.name,
        dtype=runner.precision.name,
        weights_kind=checkpoint.weights_kind,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        runner=runner,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        remarks=tuple(remarks),
        is_batch_invariant=is_batch_invariant,
    )


def _context_length(config: EngineConfig, trained: int) -> int:
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"model.max_model_len is {config.max_model_len}, but the model knows a context of {trained} tokens: "
            f"set it to {trained} or less."
        )
    return config.max_model_len or trained


def _num_blocks(config: EngineConfig, max_model_len: int, bytes_per_token: int) -> int:
    """Blocks for the memory that was given, or for what is useful within the share that may be taken."""
    block_bytes = bytes_per_token * config.block_size
    available = available_bytes()
    if config.cache_memory_bytes is not None:
        if config.cache_memory_bytes > available:
            raise ConfigError(
                f"cache.memory is {config.cache_memory_bytes} bytes, but only {available} are free: give it less."
            )
        num_blocks = config.cache_memory_bytes // block_bytes
    else:
        useful = config.capacity_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = min(useful, int(available * CACHE_SHARE) // block_bytes)
    if num_blocks < 1:
        raise ConfigError(f"cache.memory is too small: one block takes {block_bytes} bytes, give at least as many.")
    return num_blocks
