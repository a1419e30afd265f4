"""The limit under several batching policies: the same requests and the same promise, one policy after the other."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from app.limit.endpoint import EndpointError
from app.limit.interrupted import Interrupted, number_of, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from app.limit.command import Reporter
    from app.limit.options import Options
    from app.limit.summary import Outcome

    Find = Callable[[str, Options, Reporter], Outcome]

# Whose figures stand for the server where it is one of them.
MAIN: Final = "continuous"


def find_under(names: Sequence[str], find: Find, options: Options, report: Reporter) -> Outcome:
    """Look for the limit under each policy; each gets an equal share of the time that is left.

    What the first settles on, the factor of lengths and the number of requests, is what all others are asked too, under
    the same seeds.

    Args:
        find: looks under one policy; told its name, what is asked, and whom to report to.

    Raises:
        EndpointError: the server fails under the first of them; under a later one that ends it.
        Interrupted: somebody ends it; with what was measured of each until then.
    """
    began = time.monotonic()
    found: dict[str, Outcome] = {}
    name = ""
    try:
        for place, name in enumerate(names):
            left = max(1.0, options.duration - (time.monotonic() - began)) / (len(names) - place)
            asked = replace(options, duration=left, num_shares=len(names))
            outcome = find(name, asked, partial(_tell, report, name, began, options))
            found[name] = outcome
            counted = max([len(run.seen) for run in outcome.runs], default=None)
            options = replace(options, factor=outcome.source.factor, requests=options.requests or counted)
        return _together(found, began)
    except (KeyboardInterrupt, EndpointError) as end:
        if isinstance(end, Interrupted):
            found[name] = end.outcome
        if not found:
            raise
        missing = [one for one in names if one not in found]
        why = words_of(end) if isinstance(end, KeyboardInterrupt) else f"{name}: {str(end).removesuffix('.')}"
        why += f"; not measured: {', '.join(missing)}" if missing else ""
        cut = replace(_together(found, began), unfinished=why)
        if isinstance(end, EndpointError):
            return cut
        raise Interrupted(number_of(end), cut) from None


def _together(found: Mapping[str, Outcome], began: float) -> Outcome:
    main, first = MAIN if MAIN in found else [*found][-1], next(iter(found.values()))
    # What the first has settled on concerns all.
    remarks = [*dict.fromkeys([*first.remarks, *found[main].remarks])]
    cut = next((f"{name}: {one.unfinished}" for name, one in found.items() if one.unfinished), "")
    seconds = time.monotonic() - began
    return replace(found[main], policy=main, policies=found, seconds=seconds, remarks=remarks, unfinished=cut)


def _tell(report: Reporter, name: str, began: float, options: Options, _gone: int, _planned: int, what: str) -> None:
    report(int(time.monotonic() - began), int(options.duration), f"{name}, {what}")


def ratios(main: str, results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float] | None]:
    """The limit under the main policy over that under each other, `a_over_b`.

    `None` where one of them has none, or one that is only "at least" so much, with which the ratio may be anything. The
    bounds are those of the ends that are furthest apart.
    """
    return {f"{main}_over_{name}": _ratio(results[main], other) for name, other in results.items() if name != main}


def _ratio(result: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float] | None:
    mine, its = result["limit"], other["limit"]
    if mine is None or its is None or mine["is_at_least"] or its["is_at_least"]:
        return None
    name = "requests_per_second"
    return {"estimate": mine[name] / its[name], "low": mine["low"] / its["high"], "high": mine["high"] / its["low"]}
