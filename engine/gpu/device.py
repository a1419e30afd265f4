"""Which device computes, and why."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.gpu.gpus import Gpus


class Device(NamedTuple):
    """What was chosen.

    Attributes:
        gpu: its number; `None` is the processor.
        reason: one line for people.
    """

    gpu: int | None
    reason: str

    @property
    def name(self) -> str:
        """As torch calls it: `cpu`, `cuda:0`. AMD's devices go by `cuda` too."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu}"


CPU: Final = Device(None, "as configured")


def choose_device(config: EngineConfig, gpus: Gpus) -> Device:
    """The device for the setting `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is the first GPU that this build of torch reaches, else the processor; and the processor where a setting
    asks for what a GPU does not compute.

    Raises:
        ConfigError: any other name, a GPU that cannot be used, or a setting that does not go with one.
    """
    name = config.device
    if name == "cpu":
        return CPU
    found = re.fullmatch(r"auto|cuda(?::(\d{1,4}))?", name)
    if found is None:
        raise ConfigError(f"engine.device is {name!r}; it can be auto, cpu, cuda, or cuda:1 for the second GPU.")
    index = int(found[1] or 0)
    obstacle = gpus.obstacle(index)
    if obstacle is None and name == "auto":
        obstacle = why_not(config)
    if obstacle is not None:
        if name == "auto":
            return Device(None, obstacle)
        raise ConfigError(f"engine.device is {name!r}, but {obstacle}: choose cpu or auto.")
    if unfit := why_not(config):
        raise ConfigError(f"engine.device is {name!r}, but {unfit}: change that, or choose cpu.")
    count = gpus.count()
    if index >= count:
        there = "is one GPU, cuda:0" if count == 1 else f"are {count} GPUs, cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"engine.device is {name!r}, but there {there}.")
    return Device(index, gpus.describe(index))


def why_not(config: EngineConfig) -> str | None:
    """The setting that no GPU goes with, in words, or `None`."""
    if config.kv_cache_dtype == "int8":
        return "cache.kv_cache_dtype is 'int8', which only processors have"
    if config.block_size & (config.block_size - 1):
        return f"cache.block_size is {config.block_size}, and on a GPU blocks are powers of two"
    return None
