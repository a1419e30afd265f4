"""Earlier searches on disk, a JSON file each. Every call may block for as long as the disk does."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from app.files import write_whole
from app.limit_page.search import make_brief

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "limits"
MAX_KEPT: Final = 100
MAX_BYTES: Final = 8 << 20  # of a file: hundreds of times what a search makes
_NAME: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")


def is_search_id(text: str) -> bool:
    """Whether this can be the name of a search: the time at which it began, and what no other has."""
    return _NAME.fullmatch(text) is not None


class KeptSearches:
    """Of one folder, which is made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, told: dict[str, Any]) -> None:
        """Write one down, the whole of it or nothing, and let go of the oldest.

        Raises:
            OSError: the disk does not take it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(told["id"]), json.dumps(told))
        for old in self._names()[MAX_KEPT:]:
            self._path(old).unlink(missing_ok=True)

    def briefs(self) -> list[dict[str, Any]]:
        """A line of each, the newest first; what cannot be read is left out.

        Raises:
            OSError: the folder cannot be read.
        """
        found = []
        for name in self._names():
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                found.append(make_brief(self.read(name)))
        return found

    def read(self, search_id: str) -> dict[str, Any]:
        """One of them.

        Raises:
            OSError: it is not there, or cannot be read.
            ValueError: it is not what was written.
        """
        with self._path(search_id).open("rb") as file:
            told = json.loads(file.read(MAX_BYTES))
        if not isinstance(told, dict) or told.get("id") != search_id:
            raise ValueError(f"{search_id} is no search")
        return told

    def delete(self, search_id: str) -> None:
        """Delete one.

        Raises:
            OSError: it is not there, or the disk does not let go of it.
        """
        self._path(search_id).unlink()

    def _path(self, search_id: str) -> Path:
        if not is_search_id(search_id):  # it may be part of an address
            raise FileNotFoundError(search_id)
        return self._folder / f"{search_id}.json"

    def _names(self) -> list[str]:
        """The newest first."""
        try:
            names = [path.stem for path in self._folder.iterdir() if path.suffix == ".json"]
        except FileNotFoundError:
            return []
        return sorted(filter(is_search_id, names), reverse=True)
