"""The options of `relevo limit` that look for better settings, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from app.cli.options import Parser
    from app.limit.tune import Wish

ALL = "all"
TUNE_SECONDS = 1800.0


def add_tune(command: Parser) -> None:
    """Add them."""
    group = command.add_argument_group("better settings for these targets, tried live on a Relevo")
    group.add_argument(
        "--tune",
        nargs="?",
        const=ALL,
        metavar="A,B",
        help="try seats, token budget, longest part of a prompt, policy and admission, or those named "
        "(num_speculative_tokens too)",
    )
    group.add_argument(
        "--apply",
        action="store_true",
        help="keep what was found (default: all is put back; where this is killed, by the server, within minutes)",
    )
    group.add_argument("--while-serving", action="store_true", help="although the server has requests of others")


def wish_of(options: argparse.Namespace) -> Wish | None:
    """What is to be tuned; `None` for nothing.

    Raises:
        ConfigError: the options contradict each other.
    """
    from app.limit.tune import Wish
    from app.limit.tune_controls import USUAL, parse_names

    if options.tune is None:
        for flag in ("apply", "while_serving"):
            if getattr(options, flag):
                raise ConfigError(f"--{flag.replace('_', '-')} is for --tune.")
        return None
    if options.policies:
        raise ConfigError("--policies compares policies, and --tune tries them: give one of the two.")
    if options.url is None:
        for flag in ("apply", "while_serving"):
            if getattr(options, flag):
                raise ConfigError(
                    f"--{flag.replace('_', '-')} is for the server of --url; one that is started here ends with this."
                )
    names = USUAL if options.tune == ALL else parse_names(options.tune)
    return Wish(names, apply=options.apply, while_serving=options.while_serving)
