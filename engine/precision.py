"""In which numbers a model computes: what was asked for, what this machine can do, and one line that says why."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigError
from engine.loading.fetch import cache_dir
from engine.models.linear import multiplies_bfloat16
from engine.models.llama import LlamaModel
from engine.models.native_llama import NativeLlama, why_not
from kernels.blocks import as_blocks
from kernels.build import BuildError
from kernels.gguf_blocks import FORMATS
from kernels.native import Library, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from engine.loading.checkpoint import Checkpoint
    from kernels.blocks import Blocks

log = logging.getLogger("relevo.engine")

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCKS = ("native", "int8")
NAMES = ("auto", *FLOATS, *BLOCKS)
CACHE_NAMES = ("auto", "int8")  # on a processor
GPU_CACHE_NAMES = ("auto", "fp8")

Model = LlamaModel | NativeLlama


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model computes.

    Attributes:
        name: `float32`, `bfloat16`, `float16`; `native` for a quantized file's own blocks, or `int8` for blocks of
            eight bits, both with activations quantized to eight bits.
        cache_dtype: of the KV cache.
        library: the native kernels; only blocks have them, and not on every machine.
        reason: why this one.
    """

    name: str
    cache_dtype: torch.dtype
    library: Library | None
    reason: str

    def build(
        self, checkpoint: Checkpoint, *, num_threads: int, max_tokens: int, max_model_len: int, block_size: int
    ) -> Model:
        """Read the weights.

        Args:
            max_tokens: of the largest step.
            block_size: tokens of a KV block.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        if self.name in FLOATS:
            dtype = FLOATS[self.name]
            return LlamaModel(checkpoint.config, checkpoint.tensors(), dtype=dtype, max_model_len=max_model_len)
        if self.library is None:
            return LlamaModel(
                checkpoint.config,
                rounded(checkpoint.weights(), eight_bits=self.name == "int8"),
                dtype=torch.float32,
                max_model_len=max_model_len,
                eight_bits=True,
            )
        return NativeLlama(
            checkpoint.config,
            checkpoint.weights(),
            self.library,
            eight_bits=self.name == "int8",
            num_threads=num_threads,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            cache_dtype=self.cache_dtype,
        )


def choose_precision(name: str, checkpoint: Checkpoint, cache_name: str = "auto") -> Precision:
    """The numbers to compute in, and those to keep.

    Args:
        name: one of `NAMES`; `auto` is the fastest on this machine: blocks where the native kernels run, else
            bfloat16 where the processor multiplies it, else float32.
        cache_name: one of `CACHE_NAMES`; `int8` is as `auto` where the native kernels cannot run.

    Raises:
        ConfigError: any other name, a model whose shape does not go with it, or two that do not go together.
    """
    if cache_name not in CACHE_NAMES:
        where = ", which is for GPUs; on a processor" if cache_name == "fp8" else ";"
        raise ConfigError(f"cache.kv_cache_dtype is {cache_name!r}{where} it can be {' or '.join(CACHE_NAMES)}.")
    if cache_name == "int8" and name in FLOATS:
        raise ConfigError(
            f"cache.kv_cache_dtype is 'int8', which only the native kernels read, and model.dtype is {name!r}, which "
            "they do not compute in: choose auto for one of the two."
        )
    chosen = _choose(name, checkpoint)
    if cache_name == "auto":
        return chosen
    if chosen.library is None:
        return replace(chosen, reason=f"{chosen.reason}; the KV cache is as with auto, for int8 needs native kernels")
    return replace(chosen, cache_dtype=torch.int8, reason=f"{chosen.reason}; KV cache of eight bits")


def _choose(name: str, checkpoint: Checkpoint) -> Precision:
    """As `choose_precision`, with the cache that goes with the name."""
    if name not in NAMES:
        raise ConfigError(f"model.dtype is {name!r}; it can be {', '.join(NAMES[:-1])} or {NAMES[-1]}.")
    if name in FLOATS:
        return Precision(name, FLOATS[name], None, "as configured")
    obstacle = why_not(checkpoint.config)
    if name in BLOCKS and obstacle is not None:
        raise ConfigError(f"model.dtype is {name!r}, but the model has {obstacle}: choose auto or float32.")
    library, missing = (None, f"the model has {obstacle}") if obstacle else _load()
    if name == "auto" and library is not None and not library.has_vectors:
        library, missing = None, "they know no vector instructions of this processor"
    if name == "auto" and library is None:
        name = "bfloat16" if multiplies_bfloat16() else "float32"
        return Precision(name, FLOATS[name], None, f"the fastest without native kernels: {missing}")
    if name == "auto":
        name = "native" if checkpoint.is_quantized else "int8"
    what = what_becomes(checkpoint.matrix_kinds, own_blocks=name == "native")
    if library is None:
        return Precision(
            name, torch.float32, None, f"{what}; computed by torch, slowly, without native kernels: {missing}"
        )
    return Precision(name, torch.float16, library, f"{what}; native kernels for {library.instructions}")


def what_becomes(kinds: tuple[str, ...], *, own_blocks: bool) -> str:
    """What is done with matrices of these kinds, in words."""
    used = [kind for kind in kinds if own_blocks and kind in FORMATS]
    made = [kind for kind in kinds if kind not in used]
    return "; ".join(
        [f"blocks of {', '.join(used)}, as in the file"] * bool(used)
        + [f"{', '.join(made)} made into blocks of eight bits"] * bool(made)
    )


def rounded(
    weights: Iterable[tuple[str, torch.Tensor | Blocks]], *, eight_bits: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as the native kernels see them, in float32."""
    for name, weight in weights:
        if isinstance(weight, torch.Tensor) and weight.dim() == 1:
            yield name, weight
        else:
            yield name, as_blocks(weight, eight_bits=eight_bits).dequantize()


def kernels_dir() -> Path:
    """Where compiled kernels are kept."""
    return cache_dir().parent / "kernels"


def _load() -> tuple[Library | None, str]:
    """The kernels, or why there are none."""

    def warn(why: str) -> None:
        hint = "XDG_CACHE_HOME names another place for it"
        log.warning("the native kernels are compiled for this run alone, again at the next start: %s; %s", why, hint)

    try:
        announce = partial(log.info, "compiling the native kernels")
        return load(kernels_dir(), announce=announce, cannot_keep=warn), ""
    except BuildError as error:
        return None, str(error)
