"""Earlier searches, as the event loop sees them: a list in memory, the rest on a disk that nobody waits for."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from app.errors import ApiError
from app.limit_page.kept import MAX_KEPT
from app.limit_page.search import make_brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.limit_page.kept import KeptSearches

log = logging.getLogger("relevo.limit")

T = TypeVar("T")
DISK_SECONDS: Final = 5.0
BEING_READ: Final = "Earlier searches are being read."


class Archive:
    """What is kept.

    Args:
        kept: where it lies; `None` keeps nothing.

    Attributes:
        briefs: a line of each, the newest first.
        problem: why the last one is not kept, or the others cannot be seen; empty where all is well.
    """

    def __init__(self, kept: KeptSearches | None) -> None:
        self._kept = kept
        self.briefs: list[dict[str, Any]] = []
        self.problem = "" if kept is None else BEING_READ

    async def open(self) -> None:
        """Read what earlier processes have left."""
        if self._kept is None:
            return
        try:
            self.briefs, self.problem = await _on_disk(self._kept.briefs), ""
        except OSError as error:
            self.problem = f"Earlier searches cannot be read: {_told(error)}."
            log.warning("earlier searches for the limit cannot be read: %s", _told(error))

    async def keep(self, told: dict[str, Any]) -> None:
        """Write one down; where that fails, `problem` says why."""
        if self._kept is None:
            return
        try:
            await _on_disk(partial(self._kept.keep, told))
        except OSError as error:
            self.problem = f"The last search is not kept: {_told(error)}."
            log.warning("the search %s is not kept: %s", told["id"], _told(error))
            return
        self.problem = ""
        self.briefs = [make_brief(told), *self.briefs][:MAX_KEPT]

    async def read(self, search_id: str) -> dict[str, Any]:
        """The whole of one.

        Raises:
            ApiError: 404, there is none of that name; 503, the disk does not give it.
        """
        if self._kept is None:
            raise _unknown(search_id)
        try:
            told = await _on_disk(partial(self._kept.read, search_id))
            make_brief(told)  # else somebody has changed it
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            raise _unknown(search_id) from None
        except OSError as error:
            raise ApiError(503, f"The disk does not give it: {_told(error)}.", code="state_unreadable") from None
        return told

    async def delete(self, search_id: str) -> None:
        """Forget one.

        Raises:
            ApiError: 404, there is none of that name; 503, the disk does not let go of it.
        """
        if self._kept is None:
            raise _unknown(search_id)
        try:
            await _on_disk(partial(self._kept.delete, search_id))
        except FileNotFoundError:
            raise _unknown(search_id) from None
        except OSError as error:
            raise ApiError(503, f"The disk does not let go of it: {_told(error)}.", code="state_unwritable") from None
        self.briefs = [brief for brief in self.briefs if brief["id"] != search_id]


async def _on_disk(work: Callable[[], T]) -> T:
    with trio.move_on_after(DISK_SECONDS):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
    raise OSError(f"the disk has not answered for {DISK_SECONDS:g} s")


def _told(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _unknown(search_id: str) -> ApiError:
    return ApiError(404, f"There is no search {search_id[:100]!r}, or not any more.", code="search_not_found")
