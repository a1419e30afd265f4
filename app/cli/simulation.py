"""The options that describe a machine to simulate, for the commands that can do without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import positive
from app.render.numbers import exact
from engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from app.cli.options import Parser
    from app.compare.simulated import Machine
    from engine.config import EngineConfig

BYTES_PER_WEIGHT = 2.0
# Whoever names fewer weights means millions or billions of them.
LEAST_PARAMETERS = 1e6
# Of SmolLM2-135M in 16 bits: 2 x 30 layers x 3 KV heads x 64 numbers x 2 bytes.
KV_BYTES_PER_TOKEN = 23_040.0
MACHINE = ("memory_gb_per_second", "tflops", "parameters")
KV_HELP = "of that model: 2 x layers x KV heads x head size x bytes (with --cost-model: 23040 by default)"
SIMULATION = ("cost_model", *MACHINE, "bytes_per_weight", "kv_bytes_per_token")


def add_simulation(command: Parser) -> None:
    """Add them."""
    group = command.add_argument_group("without a model, in virtual time")
    group.add_argument("--simulate", action="store_true", help="plan every step, and compute how long it would take")
    group.add_argument("--cost-model", type=Path, metavar="FILE", help="what `relevo bench --json FILE` wrote")
    group.add_argument("--memory-gb-per-second", type=positive, metavar="X", help="or: what the machine reads")
    group.add_argument("--tflops", type=positive, metavar="X", help="and what it multiplies")
    group.add_argument("--parameters", type=positive, metavar="N", help="and the model's weights, such as 8e9")
    group.add_argument("--bytes-per-weight", type=positive, metavar="X", help="of that model (default 2)")
    group.add_argument("--kv-bytes-per-token", type=positive, metavar="X", help=KV_HELP)


def machine_of(options: argparse.Namespace, config: EngineConfig) -> Machine:
    """The machine to simulate: one that was measured, or one that is described.

    Raises:
        ConfigError: it is neither, or not wholly.
    """
    from app.compare.simulated import described_machine, measured_machine

    described = [name for name in MACHINE if getattr(options, name) is not None]
    kv_bytes = options.kv_bytes_per_token
    if options.cost_model is not None and not described:
        return measured_machine(options.cost_model, config, kv_bytes_per_token=kv_bytes or KV_BYTES_PER_TOKEN)
    if options.cost_model is None and len(described) == len(MACHINE):
        if options.parameters < LEAST_PARAMETERS:
            number = exact(options.parameters)
            raise ConfigError(f"--parameters {number} is no model: give all of its weights, such as {number}e9.")
        if kv_bytes is None:
            raise ConfigError(
                "A described machine needs --kv-bytes-per-token of its model: "
                "2 x layers x KV heads x head size x bytes of a number."
            )
        return described_machine(
            config,
            memory_gb_per_second=options.memory_gb_per_second,
            tflops=options.tflops,
            num_parameters=options.parameters,
            bytes_per_weight=options.bytes_per_weight or BYTES_PER_WEIGHT,
            kv_bytes_per_token=kv_bytes,
        )
    raise ConfigError(f"--simulate needs a machine: --cost-model FILE, or {', '.join(map(_flag, MACHINE))} together.")


def refuse_machine(options: argparse.Namespace) -> None:
    """Refuse the description of a machine where none is simulated.

    Raises:
        ConfigError: there is one.
    """
    given = [name for name in SIMULATION if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"{_flag(given[0])} describes a machine to simulate; add --simulate, or leave it out.")


def simulation_flags(options: argparse.Namespace) -> Iterator[str]:
    """The words that were given, for whoever wants to repeat it."""
    if options.simulate:
        yield "--simulate"
    for name in SIMULATION:
        value = getattr(options, name)
        if value is not None:
            yield from (_flag(name), exact(value) if isinstance(value, float) else str(value))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
