"""One search as a value: what was asked for, what its process has told so far, and how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from app.audit import timestamp
from app.limit.words import is_at_least
from app.live_change import KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping

# How a search can end, and what pages call that.
ENDS: Final = {
    "found": "found",
    "cut": "cut short",
    "none": "no limit",
    "users": "users came",
    "stopped": "stopped",
    "failed": "failed",
    "late": "ran out of time",
    "shutdown": "the server ended",
}
MAX_CURVE: Final = 2000  # runs; a search makes some dozens


@dataclass(slots=True)
class Search:
    """One search.

    Attributes:
        search_id: its name on disk and in addresses.
        wish: the object that was asked for.
        who: asked for it.
        model: that is served.
        began: seconds since the epoch; so is `ended`.
        end: a key of `ENDS`, empty while it goes on; `why` says more in a sentence.
        is_stopping: its process was asked to end.
        seconds, planned, what: how far it is, and at what, in words.
        trying: `rate` (`None` in a closed loop), and `ended` of `total` requests.
        capacity, single: the runs before the rates: a closed loop of all seats, and of one user.
        curve: runs at rates, in the order in which they were made; keys as in `relevo limit --json`.
        tried: the same under other settings, while they are tuned.
        result: what `relevo limit --json` writes.
        users: requests of others that came in while it ran.
        remarks: what a reader must know beside the result.
    """

    search_id: str
    wish: Mapping[str, Any]
    who: str
    model: str
    began: float
    ended: float | None = None
    end: str = ""
    why: str = ""
    is_stopping: bool = False
    seconds: float = 0.0
    planned: float = 0.0
    what: str = "starting"
    trying: dict[str, Any] = field(default_factory=lambda: {"rate": None, "ended": 0, "total": 0})
    capacity: dict[str, Any] | None = None
    single: dict[str, Any] | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None
    users: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return not self.end

    @property
    def limit(self) -> dict[str, Any] | None:
        """The limit, where one was found."""
        return self.result["limit"] if self.result is not None else None

    def take(self, line: bytes) -> None:
        """Take in what the process has told.

        Raises:
            ValueError: it is no line of `relevo limit --progress-json`.
        """
        told = json.loads(line)
        if not isinstance(told, dict):
            raise ValueError("it is no object")
        match told.pop("event", None):
            case "progress":
                self.seconds, self.planned = float(told["seconds"]), float(told["planned_seconds"])
                self.what = str(told["what"])
                self.trying = {name: told.get(name) for name in ("rate", "ended", "total")}
            case "run":
                self._take_run(told)
            case "result":
                self.result = told["result"]

    def _take_run(self, run: dict[str, Any]) -> None:
        match run.pop("kind", None):
            case "capacity":
                self.capacity = run
            case "single":
                self.single = run
            case kind if len(self.curve) + len(self.tried) < MAX_CURVE:
                (self.tried if kind == "tried" else self.curve).append(run)

    @property
    def has_measured(self) -> bool:
        """Whether there is anything to be seen in it."""
        return bool(self.curve or self.tried or self.capacity or self.single or self.result)

    def as_ended(self, end: str, why: str, at: float) -> Search:
        """The same when it is over."""
        nothing = {"rate": None, "ended": 0, "total": 0}
        return replace(self, end=end, why=why, ended=at, is_stopping=False, trying=nothing)

    def as_json(self) -> dict[str, Any]:
        """The object of `GET /ops/limit/<search_id>.json`, which is also what lies on disk."""
        return {
            "id": self.search_id,
            "asked": dict(self.wish),
            "who": self.who,
            "model": self.model,
            "began": timestamp(self.began),
            "ended": None if self.ended is None else timestamp(self.ended),
            "end": self.end or None,
            "why": self.why,
            "stopping": self.is_stopping,
            "seconds": self.seconds,
            "planned_seconds": self.planned,
            "what": self.what,
            "trying": dict(self.trying),
            "capacity": self.capacity,
            "single_user": self.single,
            "curve": list(self.curve),
            "tried": list(self.tried),
            "result": self.result,
            "requests_of_users": self.users,
            "remarks": list(self.remarks),
        }


def suggestion(told: Mapping[str, Any]) -> dict[str, Any]:
    """The live settings that a search with `tune` found to be better; empty where there are none."""
    result = told["result"]
    tune = result.get("tune") if result is not None else None
    return {} if tune is None else {name: new for name, (_, new) in tune["best"]["changes"].items() if name in KEYS}


def make_brief(told: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the list of earlier searches, of the object of one.

    Raises:
        KeyError, TypeError: it is no such object.
    """
    result, asked = told["result"], told["asked"]
    limit = result["limit"] if result is not None else None
    has_end = limit is not None and not is_at_least(limit)
    return {
        "id": str(told["id"]),
        "began": str(told["began"]),
        "end": str(told["end"]),
        "model": str(told["model"]),
        "workload": str(asked["workload"]),
        "note": str(asked["note"]),
        "beside_users": bool(asked["beside_users"]),
        "runs": len(told["curve"]),
        "requests_per_second": None if limit is None else float(limit["requests_per_second"]),
        "low": None if limit is None else float(limit["low"]),
        "high": float(limit["high"]) if limit is not None and has_end else None,
        "bound_by": None if limit is None else str(limit["bound_by"]),
        "factor": None if result is None else float(result["workload"]["factor"]),
        "mean_output_tokens": None if result is None else float(result["workload"]["mean_output_tokens"]),
    }
