"""What a reader must know beside the figures, and why there is no limit."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any

from app.limit.elsewhere import MUCH
from app.limit.exchange import NO_CONNECTION, NOT_FINISHED
from app.limit.piling import enough_to_judge
from app.limit.runs import COLD, LATE, MAX_LAG_SHARE, WANTED_SAMPLES, WANTING, given
from app.render import numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from app.limit.runs import Run, Seen

# A search that is not out of time tries rates down to less than this share of the capacity.
LOW_SHARE = 0.04
# Gaps with such a coefficient of variation come in bursts; a run is to have so many that are independent.
BURSTY_CV, MIN_INDEPENDENT = 2.0, 30
# More of the tokens that were asked for are missing, not counting one an answer, which may be one that is not told.
MISSING_SHARE = 0.03
# A recording of which a run is so many times over, or more, is a few requests and no traffic.
FEW_RECORDED = 0.1
# What to do where no connection is left to send with.
MORE_CONNECTIONS = "let a process have more files open here (ulimit -n), or send from another"
NAMES = {"ttft": "the first token", "itl": "the gaps between tokens", "e2e": "the whole answer"}


def longer_words(wanted_seconds: int | None, duration: float) -> str:
    """What to give where the time was over: what a whole search takes, where that is known and more than there was."""
    if wanted_seconds is None or wanted_seconds <= duration:
        return "a larger --duration"
    return f"--duration {wanted_seconds} or more"


def why_not(
    single: Run | None, runs: Sequence[Run], capacity: float, unfinished: str = "", longer: str = "a larger --duration"
) -> str:
    """Why there is no limit.

    Args:
        capacity: requests a second in a closed loop, by which it is seen how far down the search came.
        unfinished: what has ended the search before its time, which is the reason then and no rate is.
        longer: what to give where there was no time.
    """
    if unfinished:
        tried = f"known to hold (tried down to {min(run.rate for run in runs):.3g} requests/s)" if runs else "tried"
        return f"{unfinished}, before any rate was {tried}."
    if single is not None and not runs:
        return f"Not even one user alone is served within the targets: {'; '.join(_misses(single))}."
    lowest = min(runs, key=lambda run: run.rate)
    if lowest.unknown == LATE:
        return (
            f"The generator was late by {numbers.seconds(lowest.lag_p99)} (p99), more than {MAX_LAG_SHARE:.0%} of the "
            "smallest target: nothing is known of the server. Give it a machine of its own, or less to do."
        )
    if lowest.unknown:
        return next(iter(_on_unknown([lowest])))
    held = [run.rate for run in runs if run.is_valid and run.holds]
    if held:
        return (
            f"The targets hold at {max(held):.3g} requests/s under one seed and under another they do not; "
            f"there was no time for lower rates. Give {longer}."
        )
    worst = max(lowest.excesses().items(), key=lambda item: item[1])[0]
    no_time = lowest.rate > LOW_SHARE * capacity
    advice = f"; there was no time for lower ones, give {longer}, or a larger --factor" if no_time else ""
    return f"The targets hold at no rate that was tried, down to {lowest.rate:.3g} requests/s ({worst}){advice}."


def _misses(single: Run) -> Iterator[str]:
    """Each promise that one user alone does not get, with what that user gets; then what failed of it."""
    for number, targets in enumerate(single.promise.targets):
        seen = [one for one in single.seen if one.work_class == number]
        of = single.promise.of(number)
        for name, target in given(targets).items():
            if name + of in single.hopeless:
                got = numbers.seconds(median(_samples(seen, name)) if _samples(seen, name) else None)
                takes = "take" if name == "itl" else "takes"
                yield f"{NAMES[name]}{of} {takes} {got} (median), more than {numbers.seconds(target)}"
    if "errors" in single.hopeless:
        kinds = Counter(seen.error for seen in single.seen if seen.error)
        told = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
        late = "; see --deadline" if NOT_FINISHED in kinds else ""
        yield f"{kinds.total()} of {numbers.plural(len(single.seen), 'request')} failed ({told}{late})"


def _samples(seen: Sequence[Seen], name: str) -> list[float]:
    if name == "itl":
        return [gap for one in seen for gap in one.gaps]
    return [value for one in seen if (value := one.ttft if name == "ttft" else one.e2e) is not None]


def remarks_on(result: Mapping[str, Any], runs: Sequence[Run], num_seeds: int, longer: str) -> list[str]:
    """A line each.

    Args:
        num_seeds: how many were to be tried near the limit.
        longer: what to give where there was no time.
    """
    remarks = [*_on_samples(result, runs), *_on_bursts(result, runs)]
    kinds = Counter(seen.error for run in runs for seen in run.seen if seen.error not in ("", NO_CONNECTION))
    if kinds:
        remarks.append(f"Errors: {', '.join(f'{number} {kind}' for kind, number in kinds.most_common())}.")
    remarks += _on_lengths(runs)
    remarks += remarks_on_others(result["curve"])
    remarks += _on_machine(result["curve"])
    remarks += _on_unknown(runs)
    if any(run.stopped and run.unknown != WANTING for run in runs):
        remarks.append("Runs that were certain to be lost were ended: their percentiles are of what had come by then.")
    if result["limit"]:
        if result["limit"]["is_at_least"] and all(run.is_valid for run in runs):
            remarks.append("The targets held at every rate that was tried: the limit is at least this.")
        tried = len({run.seed for run in runs if run.is_valid})
        if tried == 1 and not result["limit"]["is_at_least"]:
            remarks.append(
                "The interval is of one seed: it knows nothing of how far the limits of other seeds lie apart."
            )
        if tried < num_seeds:
            why = "" if result["unfinished"] else f": there was no time for more, give {longer}"
            remarks.append(f"Only {tried} of {num_seeds} seeds were tried{why}.")
    if cut := result["workload"]["shortened"]:
        share = numbers.percent(cut / result["workload"]["looked_at"])
        remarks.append(f"{share} of the requests did not fit into the context and were cut to it.")
    recorded, num_counted = result["recorded_requests"], max([len(run.seen) for run in runs], default=0)
    if recorded is not None and recorded < FEW_RECORDED * num_counted:
        remarks.append(
            f"There are {numbers.plural(recorded, 'recorded request')}, and {num_counted} of a run that count: the "
            "same come again and again, so that the limit is of these few."
        )
    if result["workload"]["skipped"]:
        remarks.append(f"{numbers.plural(result['workload']['skipped'], 'bad line')} of the trace had to be skipped.")
    return remarks


def remarks_on_others(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    """That others had answers during runs, which are those of the result of a search; at most one line."""
    disturbed = [number for run in curve if (number := run.get("requests_of_others"))]
    if not disturbed:
        return []
    answers, during = numbers.plural(sum(disturbed), "answer"), f"{len(disturbed)} of {len(curve)}"
    return [
        f"The server gave {answers} to others during {during} runs, to users or to another search: the limit is of "
        "what they left."
    ]


def _on_machine(curve: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """That the machine was busy with something else during runs, so that a quiet one serves more; at most one line."""
    known = [run for run in curve if run["cpu_share_of_others"] is not None]
    busy = [run for run in known if run["cpu_share_of_others"] + run["cpu_share_stolen"] > MUCH]
    if not busy:
        return
    others, stolen = (max(run[f"cpu_share_{name}"] for run in busy) for name in ("of_others", "stolen"))
    host = f", and its host gave up to {numbers.percent(stolen)} to other machines" if stolen > MUCH / 10 else ""
    yield (
        f"This machine was busy with something else during {len(busy)} of {len(known)} runs: processes other than the "
        f"server's and the search's own took up to {numbers.percent(others)} of its CPUs{host}. The limit is of what "
        "they left; measure it again when the machine is quiet."
    )


def unknown_words(run: Mapping[str, Any]) -> str:
    """Why a run of a result says nothing of the server, in a few words."""
    words = {WANTING: "no connection left to send with", COLD: "too few were sent before those that count"}
    late = f"sent {numbers.seconds(run['dispatch_lag_p99_seconds'])} late"
    return words.get(run.get("unknown") or LATE, late)  # older results do not tell


def _on_unknown(runs: Sequence[Run]) -> Iterator[str]:
    """The rates at which nothing came to be known of the server, and why: a line for each reason."""
    known = {(run.rate, run.seed) for run in runs if run.is_valid}
    by_why = {why: [run for run in runs if run.unknown == why] for why in (LATE, WANTING, COLD)}
    by_why[COLD] = [run for run in by_why[COLD] if (run.rate, run.seed) not in known]
    for why, those in by_why.items():
        if not those:
            continue
        at = f"At {', '.join(dict.fromkeys(f'{run.rate:.3g}' for run in those))} requests/s"
        if why == LATE:
            yield f"{at} the generator itself was late; these runs say nothing of the server."
        elif why == WANTING:
            said = those[0].own_want.partition(": ")[2]
            yield f"{at} no connection was left here ({said}), which says nothing of the server: {MORE_CONNECTIONS}."
        else:
            stay, at_once = max(run.mean_stay for run in those), max(run.rate * run.mean_stay for run in those)
            yield (
                f"{at} the promises were kept, but by a server that was not in its stride: an answer takes "
                f"{numbers.seconds(stay)}, and too few requests were sent before those that count. Give "
                f"--seats {math.ceil(at_once)}."
            )


def _on_lengths(runs: Sequence[Run]) -> Iterator[str]:
    """That answers were shorter than was asked for: the server ended them where the model would."""
    whole = [seen for run in runs for seen in run.finished if seen.asked_tokens]
    asked, came = (sum([getattr(seen, name) for seen in whole]) for name in ("asked_tokens", "output_tokens"))
    if sum([max(0, seen.asked_tokens - seen.output_tokens - 1) for seen in whole]) > MISSING_SHARE * asked:
        yield (
            f"Answers had {numbers.percent(came / asked)} of the tokens that were asked for: the server ends them by "
            "itself, whatever ignore_eos says, and the limit is of such answers."
        )


def _on_bursts(result: Mapping[str, Any], runs: Sequence[Run]) -> Iterator[str]:
    """That requests came in bursts, and so few of them that blocks of requests do not tell the chance in it."""
    dues = min([sorted(seen.due for seen in run.seen) for run in runs if not run.stopped], key=len, default=[])
    gaps = [after - before for before, after in pairwise(dues)]
    if not any(gaps):
        return
    cv = result["workload"]["gap_cv"] or pstdev(gaps) / fmean(gaps)
    if cv >= BURSTY_CV and (independent := len(dues) / cv**2) < MIN_INDEPENDENT:
        yield (
            f"Requests came in bursts, with gaps of a CV of {cv:.2g}: for chance the {len(dues)} of a run are no more "
            f"than about {max(1, round(independent))} that come singly, and the interval, which takes bursts apart, is "
            "too narrow. Give a larger --requests, and a larger --repeats."
        )


def _on_samples(result: Mapping[str, Any], runs: Sequence[Run]) -> Iterator[str]:
    """What rests on few requests."""
    whole = [run for run in runs if not run.stopped]
    for number, one in enumerate(result["classes"]):
        few = min([len([s for s in run.finished if s.work_class == number]) for run in whole], default=0)
        of = f" of {one['name']}" if len(result["classes"]) > 1 else ""
        for percent in (95, 99):
            if whole and few < WANTED_SAMPLES[percent]:
                yield f"A p{percent} wants {WANTED_SAMPLES[percent]:,} finished requests{of}; here are runs with {few}."
    held = [
        (enough_to_judge([seen.num_there for seen in run.seen], run.filled), len(run.seen))
        for run in whole
        if run.holds and not run.is_wait_promised
    ]
    if short := [pair for pair in held if pair[0] > pair[1]]:
        wanted, num_counted = max(short)
        yield (
            f"{num_counted} requests a run are too few to tell whether ever more of them are there, as so many are at "
            f"once; --requests {wanted} would tell."
        )
