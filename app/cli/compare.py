"""`relevo compare`: the same requests under static, dynamic and continuous batching."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from app.cli.options import (
    OFFLINE_SECTIONS,
    Parser,
    add_command,
    add_lengths,
    add_settings,
    count,
    count_or_zero,
    positive,
    settings_of,
    with_one_number_of_seats,
)
from app.cli.pull import with_model
from app.cli.simulation import add_simulation, machine_of, refuse_machine, simulation_flags
from app.config import keys
from engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from app.compare.command import Outcome, Reporter
    from app.compare.options import Options
    from app.config import Settings

SECTIONS = (*OFFLINE_SECTIONS, "slo")


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "compare", "the same requests under static, dynamic and continuous batching", run)
    add_lengths(command)
    command.add_argument("--factor", type=positive, metavar="X", help="divide lengths by it (default: what fits)")
    command.add_argument("--requests", type=count, metavar="N", help="of each run (default: what fits into the time)")
    command.add_argument("--repeats", type=count, metavar="N", help="rounds (default: what fits, 2 at least)")
    command.add_argument("--duration", type=positive, metavar="S", help="seconds to aim at (default 480)")
    command.add_argument("--seats", type=count, metavar="N", help="the same as --max-num-seqs")
    command.add_argument("--rate", type=positive, metavar="R", help="requests/s (default: all wait at the start)")
    command.add_argument("--seed", type=count_or_zero, default=0, metavar="N", help="of the workload (default 0)")
    command.add_argument("--price-per-hour", type=positive, metavar="P", help="prints the cost of 1,000 output tokens")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures there")
    add_simulation(command)
    add_settings(command, SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Compare, print the figures, and write the files where asked."""
    if getattr(options, "scheduler.policy", None) is not None:
        raise ConfigError("compare runs all policies in turn; leave --policy out.")
    if options.trace is not None and options.workload is not None:
        raise ConfigError("Give either --workload or --trace.")
    settings = settings_of(with_one_number_of_seats(options))
    from app.compare.command import run_compare

    compare = _in_virtual_time if options.simulate else _on_the_engine
    return run_compare(partial(compare, settings, options), json_path=options.json, html_path=options.html)


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
    yield from simulation_flags(options)


def _on_the_engine(settings: Settings, options: argparse.Namespace, report: Reporter) -> Outcome:
    refuse_machine(options)
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

    config = settings.engine_config()
    return compare_simulated(machine_of(options, config), config, _asked(options), report=report)
