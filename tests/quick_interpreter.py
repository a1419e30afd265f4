"""Triton's interpreter, several times as quick: it dresses its language up anew whenever a function of a kernel is
called. In a process that compiles nothing the language may stay as it is for interpreting.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def stay_dressed() -> None:
    """From here on the language is dressed up once for each module with kernels."""
    dress, dressed = interpreter._patch_lang, set[int]()

    def once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in dressed:
            dressed.add(module)
            dress(function)
        return interpreter._LangPatchScope()  # nothing to be taken off

    interpreter._patch_lang = once
