"""From a configuration to a model that is ready to run. Everything here happens on the torch thread."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.gpu.device import choose_device
from engine.gpu.gpus import Gpus
from engine.gpu.startup import prepare_on_gpu
from engine.loaded import LoadedModel, Prepared
from engine.loading.checkpoint import open_checkpoint
from engine.loading.fetch import resolve_model
from engine.loading.vocabulary import vocabulary_remarks
from engine.memory import available_bytes, num_cache_blocks
from engine.model_runner import ModelRunner
from engine.processors import available_cores

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.gpu.device import Device
    from engine.loading.checkpoint import Checkpoint

log = logging.getLogger("relevo.engine")

# The KV cache takes this share of the free memory unless it is told otherwise: the rest is for weights,
# activations and whoever else lives on the machine.
CACHE_SHARE = 0.25


def load_model(config: EngineConfig, gpus: Gpus | None = None) -> LoadedModel:
    """Find the model, read its weights, allocate its cache and run it once.

    Args:
        gpus: those that torch reaches, unless others are given.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: a setting does not go with this model or this machine.
    """
    path = resolve_model(config.model)
    # A path is known by its own name; a built-in model or a hub id by the name it was asked for.
    checkpoint = open_checkpoint(path, name=None if Path(config.model).exists() else config.model)
    max_model_len = _context_length(config, checkpoint.config.context_length)
    gpus = Gpus() if gpus is None else gpus
    device = choose_device(config, gpus)
    prepared = prepare(config, checkpoint, device, max_model_len, gpus)
    remarks = [*prepared.remarks, *vocabulary_remarks(checkpoint.tokenizer)]
    if checkpoint.chat_template is None:
        remarks.append("the model has no chat template: /v1/completions works, /v1/chat/completions does not")
    return LoadedModel(
        name=config.served_model_name or checkpoint.name,
        dtype=prepared.dtype,
        weights_kind=checkpoint.weights_kind,
        max_model_len=max_model_len,
        num_blocks=prepared.num_blocks,
        runner=prepared.runner,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        device=device,
        remarks=tuple(remarks),
        is_batch_invariant=prepared.is_batch_invariant,
    )


def prepare(config: EngineConfig, checkpoint: Checkpoint, device: Device, max_model_len: int, gpus: Gpus) -> Prepared:
    """Read a model's weights, allocate its cache and run it once.

    Raises:
        ModelError: the model cannot be read or run.
        ConfigError: a setting does not go with this model or this device.
    """
    log.info("computing on %s: %s", device.name, device.reason)
    if device.gpu is not None:
        return prepare_on_gpu(config, checkpoint, device.gpu, max_model_len, gpus)
    return _prepare_on_cpu(config, checkpoint, max_model_len)


def _prepare_on_cpu(config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> Prepared:
    """A runner on the processor."""
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
    num_blocks = num_cache_blocks(
        config, max_model_len, runner.kv_bytes_per_token, available=available_bytes(), share=CACHE_SHARE
    )
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    is_batch_invariant = runner.precision.library is not None  # of floats the order of sums depends on the batch
    remarks = [f"dtype {runner.precision.name}: {runner.precision.reason}"]
    if config.num_speculative_tokens and not is_batch_invariant:
        remarks.append("nothing is drafted: without the native kernels drafts could change an answer, by rounding")
    return Prepared(runner, runner.precision.name, num_blocks, tuple(remarks), is_batch_invariant)


def _context_length(config: EngineConfig, trained: int) -> int:
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"model.max_model_len is {config.max_model_len}, but the model knows a context of {trained} tokens: "
            f"set it to {trained} or less."
        )
    return config.max_model_len or trained
