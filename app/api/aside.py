"""Work that is long enough to be felt by the other requests' streams goes to a thread of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
# Beyond this many characters or ids the work is that long.
INLINE_SIZE: Final = 4096
# Answer, choices, choice, logprobs, content: below are single tokens.
_LEVELS: Final = 5


async def run_aside(work: Callable[[], T], size: int) -> T:
    """What `work` gives; it is done right here where it is short, by its `size` in characters."""
    return work() if size <= INLINE_SIZE else await trio.to_thread.run_sync(work)


def dump_in_pieces(value: Any, levels: int = _LEVELS) -> str:
    """What `json.dumps` gives, for work aside: that one would let no other thread run until it has done everything.

    Args:
        levels: of lists and objects, from the outermost; what lies below is written in one go.
    """
    return "".join(_pieces(value, levels))


def _pieces(value: Any, levels: int) -> Iterator[str]:
    if not levels or not value or not isinstance(value, (dict, list)):
        yield json.dumps(value)
        return
    is_object = isinstance(value, dict)
    before = "{" if is_object else "["
    for entry in value.items() if isinstance(value, dict) else value:
        yield before
        before = ", "
        if is_object:
            yield f"{json.dumps(entry[0])}: "
            yield from _pieces(entry[1], levels - 1)
        else:
            yield from _pieces(entry, levels - 1)
    yield "}" if is_object else "]"
