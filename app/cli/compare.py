"""`relevo compare`: the same requests under static, dynamic and continuous batching."""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from app.cli.options import OFFLINE_SECTIONS, Parser, add_command, add_settings, count, settings_of
from app.cli.pull import with_model
from app.config import keys
from app.render.numbers import exact
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.compare.command import Outcome, Reporter
    from app.compare.options import Options
    from app.compare.simulated import Machine
    from app.config import Settings

SECTIONS = (*OFFLINE_SECTIONS, "slo")
BYTES_PER_WEIGHT = 2.0
# Of SmolLM2-135M in 16 bits: 2 x 30 layers x 3 KV heads x 64 numbers x 2 bytes.
KV_BYTES_PER_TOKEN = 23_040.0
MACHINE = ("memory_gb_per_second", "tflops", "parameters")
KV_HELP = "of that model: 2 x layers x KV heads x head size x bytes (with --cost-model: 23040 by default)"
SIMULATION = ("cost_model", *MACHINE, "bytes_per_weight", "kv_bytes_per_token")


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "compare", "the same requests under static, dynamic and continuous batching", run)
    command.add_argument(
        "--workload", metavar="W", help="azure-conversation (default), azure-code or mooncake: lengths fitted to traces"
    )
    command.add_argument("--trace", type=Path, metavar="FILE", help="an Azure (CSV) or Mooncake (JSON lines) trace")
    command.add_argument("--skip-bad-lines", action="store_true", help="leave out bad lines of the trace")
    command.add_argument("--factor", type=_positive, metavar="X", help="divide lengths by it (default: what fits)")
    command.add_argument("--requests", type=count, metavar="N", help="of each run (default: what fits into the time)")
    command.add_argument("--repeats", type=count, metavar="N", help="rounds (default: what fits, 2 at least)")
    command.add_argument("--duration", type=_positive, metavar="S", help="seconds to aim at (default 480)")
    command.add_argument("--seats", type=count, metavar="N", help="the same as --max-num-seqs")
    command.add_argument("--rate", type=_positive, metavar="R", help="requests/s (default: all wait at the start)")
    command.add_argument("--seed", type=_number, default=0, metavar="N", help="of the workload (default 0)")
    command.add_argument("--price-per-hour", type=_positive, metavar="P", help="prints the cost of 1,000 output tokens")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures there")
    _add_simulation(command)
    add_settings(command, SECTIONS)


def _add_simulation(command: Parser) -> None:
    group = command.add_argument_group("without a model, in virtual time")
    group.add_argument("--simulate", action="store_true", help="plan every step, and compute how long it would take")
    group.add_argument("--cost-model", type=Path, metavar="FILE", help="what `relevo bench --json FILE` wrote")
    group.add_argument("--memory-gb-per-second", type=_positive, metavar="X", help="or: what the machine reads")
    group.add_argument("--tflops", type=_positive, metavar="X", help="and what it multiplies")
    group.add_argument("--parameters", type=_positive, metavar="N", help="and the model's weights, such as 8e9")
    group.add_argument("--bytes-per-weight", type=_positive, metavar="X", help="of that model (default 2)")
    group.add_argument("--kv-bytes-per-token", type=_positive, metavar="X", help=KV_HELP)


def run(options: argparse.Namespace) -> int:
    """Compare, print the figures, and write the files where asked."""
    if getattr(options, "scheduler.policy", None) is not None:
        raise ConfigError("compare runs all policies in turn; leave --policy out.")
    if options.trace is not None and options.workload is not None:
        raise ConfigError("Give either --workload or --trace.")
    settings = settings_of(_with_one_number_of_seats(options))
    from app.compare.command import run_compare

    compare = _in_virtual_time if options.simulate else _on_the_engine
    return run_compare(partial(compare, settings, options), json_path=options.json, html_path=options.html)


def _with_one_number_of_seats(options: argparse.Namespace) -> argparse.Namespace:
    """`--seats` and `--max-num-seqs` are two names of one thing."""
    seats, name = options.seats, "scheduler.max_num_seqs"
    if seats is not None:
        given = getattr(options, name)
        if given is not None and given != str(seats):
            raise ConfigError(f"--seats {seats} and --max-num-seqs {given} contradict each other; give one of them.")
        setattr(options, name, str(seats))
    return options


def _asked(options: argparse.Namespace) -> Options:
    """What is to be compared."""
    from app.compare.options import Options

    given = {
        name: getattr(options, name)
        for name in ("workload", "trace", "skip_bad_lines", "factor", "requests", "repeats", "rate", "seed", "duration")
        if getattr(options, name) is not None
    }
    return Options(**given, price_per_hour=options.price_per_hour, flags=tuple(_other_flags(options)))


def _other_flags(options: argparse.Namespace) -> Iterator[str]:
    """The words that the comparison itself does not know, for whoever wants to repeat it."""
    if options.config is not None:
        yield from ("--config", str(options.config))
    for key in keys():
        value = getattr(options, key.dotted, None)
        if key.section in SECTIONS and value is not None and key.name != "max_num_seqs":
            yield from (key.flag, value)
    if options.simulate:
        yield "--simulate"
    for name in SIMULATION:
        value = getattr(options, name)
        if value is not None:
            yield from (_flag(name), exact(value) if isinstance(value, float) else str(value))


def _on_the_engine(settings: Settings, options: argparse.Namespace, report: Reporter) -> Outcome:
    given = [name for name in SIMULATION if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"{_flag(given[0])} describes a machine to simulate; add --simulate, or leave it out.")
    from app.compare.command import compare_policies
    from app.compare.load import MAX_REQUESTS, Source

    asked = _asked(options)
    source = Source(asked, max_requests=asked.requests or MAX_REQUESTS)
    config = with_model(settings).engine_config()
    return trio.run(partial(compare_policies, config, source, asked, report=report))


def _in_virtual_time(settings: Settings, options: argparse.Namespace, report: Reporter) -> Outcome:
    if options.repeats is not None:
        raise ConfigError("A simulation gives the same figures every time; leave --repeats out.")
    from app.compare.simulated import compare_simulated

    return compare_simulated(_machine(settings, options), settings.engine_config(), _asked(options), report=report)


def _machine(settings: Settings, options: argparse.Namespace) -> Machine:
    """The machine to simulate: one that was measured, or one that is described."""
    from app.compare.simulated import described_machine, measured_machine

    config = settings.engine_config()
    described = [name for name in MACHINE if getattr(options, name) is not None]
    kv_bytes = options.kv_bytes_per_token
    if options.cost_model is not None and not described:
        return measured_machine(options.cost_model, config, kv_bytes_per_token=kv_bytes or KV_BYTES_PER_TOKEN)
    if options.cost_model is None and len(described) == len(MACHINE):
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _number(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise argparse.ArgumentTypeError("must be a whole number from 0")
    return int(word)


def _positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value
