"""The command line: `relevo serve`, `pull`, `generate`, `bench`, `compare` and `limit`.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted; of `limit` 143 by SIGTERM and 129 by SIGHUP, too. An error
is one line on stderr; `--debug` adds where.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.errors import ConfigError, RelevoError

if TYPE_CHECKING:
    import argparse

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after `relevo`; `None` takes them from the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _said(_run(arguments))


def _run(arguments: list[str]) -> int:
    try:
        # What takes long to import is imported here, where an interrupt is no traceback.
        from app.config import let_threads_sleep

        let_threads_sleep()
        options = _parse(arguments)
        return int(options.run(options))
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else EXIT_FAILED
    except BaseException as error:
        return _report(error, debug="--debug" in arguments)


def _parse(argv: list[str]) -> argparse.Namespace:
    from app.cli import bench, compare, generate, limit, pull, serve
    from app.cli.options import Parser
    from app.version import package_version

    top = Parser(
        prog="relevo", description="A server for language models with continuous batching.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"relevo {package_version()}", help="print the version")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for module in (serve, pull, generate, bench, compare, limit):
        module.register(commands)
    options, unknown = top.parse_known_args(argv)
    if unknown:
        options.parser.refuse(unknown[0])
    return options


def _report(error: BaseException, *, debug: bool) -> int:
    """Say in one line what went wrong."""
    from app.limit.interrupted import code_of
    from app.render.plain import plain

    cause = _first_cause(error)
    if isinstance(cause, KeyboardInterrupt):
        return code_of(cause)
    if isinstance(cause, BrokenPipeError):
        return EXIT_FAILED
    if not isinstance(cause, Exception):
        raise error
    with suppress(OSError):  # the terminal is closed
        if debug:
            traceback.print_exception(error)
        print(f"relevo: {plain(_in_one_line(cause))}", file=sys.stderr)
    return EXIT_USAGE if isinstance(cause, ConfigError) else EXIT_FAILED


def _said(code: int) -> int:
    """The exit code, when all that is left to be said is said, or its reader has left (`relevo ... | head`).

    What a terminal that is closed does not take would be an error at exit, with a code of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # where they were closed from the start
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                code = code or EXIT_FAILED
    return code


def _first_cause(error: BaseException) -> BaseException:
    """The error inside the groups that nurseries wrap around it; one meant for the user before any other."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_first_cause(inner) for inner in error.exceptions]
    meant = [cause for cause in causes if isinstance(cause, (KeyboardInterrupt, RelevoError))]
    return (meant or causes)[0]


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    if isinstance(error, (RelevoError, OSError)):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text} (--debug shows where)"
