"""Calls into libraries that are written in Rust, whose panics are no `Exception` in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class PanicError(RuntimeError):
    """A library came upon a fault of its own. Only what it was working on is lost."""


def without_panic(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a library so that its panic can be caught like any other error; else it would end the process.

    Raises:
        PanicError: it panicked.
    """
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError(str(error)) from error
