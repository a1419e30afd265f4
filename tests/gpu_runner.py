"""A runner of the GPU's kind over a tiny random model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.gpu.runner import GpuRunner
from tests.fake_checkpoint import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.gpu.runner import Sizes

R = TypeVar("R", bound=GpuRunner)


def make_gpu_runner(kind: Callable[..., R], sizes: Sizes, num_blocks: int, **options: Any) -> R:
    """Loaded, with its cache, in float32 unless `options`, which are those of its kind, say otherwise."""
    checkpoint = make_checkpoint(context_length=sizes.max_model_len)
    runner = kind(checkpoint, sizes, **{"dtype": torch.float32, "cache_dtype": torch.float32, **options})
    runner.load()
    runner.allocate_cache(num_blocks)
    return runner
