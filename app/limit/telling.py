"""What is told of a result: lines on a terminal, and the files that were asked for."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from app.compare.options import check_writable
from app.files import write_json, write_whole
from app.limit.against import against_lines, read_result
from app.limit.report import page_of
from app.limit.tune_words import tune_lines
from app.limit.words import lines_of
from app.render.plain import plain_of
from engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

EXIT_FAILED: Final = 1
# How a result shows itself to be another's, or to be of a version that wrote something else.
NOT_A_RESULT: Final = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


def tell(
    result: Mapping[str, Any],
    older: Mapping[str, Any] | None = None,
    *,
    json_path: Path | None = None,
    html_path: Path | None = None,
    echo: Callable[[str], object] | None = print,
) -> int:
    """Show the figures, and write the files.

    Args:
        older: another result to compare with.
        echo: takes the lines; `None` where nobody reads them.

    Returns:
        The exit code: 0, or 1 where there is no limit, or the search did not come to its end.

    Raises:
        OSError: a file cannot be written, or `echo` raises it; all else is done all the same.
    """
    with ExitStack() as stack:  # from the last to the first, each of them whatever became of those before
        if json_path is not None:
            stack.callback(write_json, json_path, result)
        shown, then = plain_of(result), plain_of(older)
        tuned = tune_lines(shown["tune"]) if "tune" in shown else []
        lines = ["", *lines_of(shown), *tuned, *(against_lines(shown, then) if older is not None else [])]
        if html_path is not None:  # of what is no result there were no lines
            stack.callback(lambda: write_whole(html_path, page_of(result, older)))
        if echo is not None:
            for line in lines:
                echo(line)
    best = result["tune"]["best"] if "tune" in result else result
    return EXIT_FAILED if best["limit"] is None or result.get("unfinished") else 0


def tell_again(
    path: Path,
    *,
    against: Path | None = None,
    html_path: Path | None = None,
    echo: Callable[[str], object] = print,
) -> int:
    """The same of a result that `--json` wrote earlier.

    Raises:
        ConfigError: a file cannot be read or written, or is something else.
    """
    check_writable(html_path)
    result = read_result(path)
    older = read_result(against) if against is not None else None
    lines: list[str] = []
    try:
        code = tell(result, older, html_path=html_path, echo=lines.append)
    except NOT_A_RESULT as error:
        raise ConfigError(f"{path} is no whole result of `relevo limit --json`.") from error
    for line in lines:
        echo(line)
    return code
