"""Words to options. Every setting has a flag, made from its declaration."""

from __future__ import annotations

import argparse
import math
import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from app.config import environment, keys, load_settings
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from app.config import Settings

# Commands without a server leave the server's own settings out.
OFFLINE_SECTIONS = ("model", "engine", "cache", "scheduler")
ALL_SECTIONS = (*OFFLINE_SECTIONS, "server", "security", "slo", "slo.background")


class Parser(argparse.ArgumentParser):
    """Answers wrong use with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave."""
        self.exit(2, f"relevo: {message} ({self.prog} --help lists what there is)\n")

    def refuse(self, word: str) -> NoReturn:
        """Say that `word` is unknown, and which flag is nearest."""
        nearest = get_close_matches(word.partition("=")[0], re.findall(r"--[a-z0-9-]+", self.format_usage()), 1)
        self.error(f"unknown argument {word}" + (f"; did you mean {nearest[0]}?" if nearest else ""))


def add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> Parser:
    """Add a command whose work `run` does; it returns the exit code."""
    command = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    command.set_defaults(run=run, parser=command)
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def add_lengths(group: argparse._ActionsContainer) -> None:
    """Add the flags that say where the lengths of requests come from."""
    group.add_argument(
        "--workload", metavar="W", help="azure-conversation (default), azure-code or mooncake: lengths fitted to traces"
    )
    group.add_argument("--trace", type=Path, metavar="FILE", help="a recording, or a trace of Azure's or Mooncake's")
    group.add_argument("--skip-bad-lines", action="store_true", help="leave out bad lines of the trace")


def add_settings(command: Parser, sections: Collection[str]) -> None:
    """Add `--config` and the flags of all settings in `sections`."""
    command.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings")
    for section in sections:
        group = command.add_argument_group(f"settings [{section}]")
        for key in keys():
            if key.section == section:
                unit = f"{key.unit}, " if key.unit else ""
                text = f"{key.reason} ({unit}{key.range}; default {key.default_text})".replace("%", "%%")
                group.add_argument(
                    key.flag, dest=key.dotted, action="append" if key.is_list else "store", metavar="X", help=text
                )


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings that a command's flags, the environment and the file amount to.

    Raises:
        ConfigError: a key is unknown, or a value is out of range.
    """
    flags = {key.dotted: getattr(options, key.dotted, None) for key in keys()}
    return load_settings(path=options.config, environ=environment(), flags=flags)


def with_one_number_of_seats(options: argparse.Namespace) -> argparse.Namespace:
    """`--seats` and `--max-num-seqs` are two names of one thing.

    Raises:
        ConfigError: both are given, and differ.
    """
    seats, name = options.seats, "scheduler.max_num_seqs"
    if seats is not None:
        given = getattr(options, name)
        if given is not None and given != str(seats):
            raise ConfigError(f"--seats {seats} and --max-num-seqs {given} contradict each other; give one of them.")
        setattr(options, name, str(seats))
    return options


def count(word: str) -> int:
    """A whole number of at least 1, for an option's `type`."""
    return _at_least(1, word)


def count_or_zero(word: str) -> int:
    """The same where 0 makes sense."""
    return _at_least(0, word)


def _at_least(least: int, word: str) -> int:
    if not (word.isascii() and word.isdigit() and int(word) >= least):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}")
    return int(word)


def positive(word: str) -> float:
    """A number above 0."""
    value = _as_float(word)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def positive_or_none(word: str) -> float:
    """A number above 0, or `none`, which is 0."""
    if word == "none":
        return 0.0
    try:
        return positive(word)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or none") from None


def share(word: str) -> float:
    """A number from 0 to 1."""
    value = _as_float(word)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be a number from 0 to 1")
    return value


def _as_float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return math.nan
