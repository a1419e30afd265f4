"""What is wrong, why, and which control helps, in plain words: rules on the numbers of `/ops/stats.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from app.render import numbers, words
from engine.engine import IS_DRAINING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Below this use of the KV memory there is room for more requests at once.
ROOMY: Final = 0.8
# A latency that takes no more than this share of its target can give some of it away.
SLACK: Final = 0.7
# A percentile on fewer samples is no more than a hint.
ENOUGH_SAMPLES: Final = 20
# A queue that is fuller may be full again in a moment.
NEARLY_FULL: Final = 0.8
# Prompts in so many of the steps are felt between the tokens of the others.
MANY_PREFILLS: Final = 0.2
RECENT_STEPS: Final = 40
POOR_ROWS: Final = 0.8
ENOUGH_ROWS: Final = 200
LATE_LOOP_SECONDS: Final = 0.1
PROMISED: Final = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class Advice:
    """Why something is as it is, and what helps; `setting` is the live setting that does, if there is one."""

    why: str
    help: str = ""
    setting: str | None = None


PACED: Final = Advice(
    "steps are kept as short as the gaps between tokens that are promised",
    "It needs less load, a faster machine, or a longer promise.",
    "itl_p95_seconds",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (`bad`), may become so (`warn`), or is as it should be (`good`)."""

    level: str
    what: str
    why: str = ""
    help: str = ""
    setting: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For `/ops/stats.json`."""
        return asdict(self)


def diagnose(snapshot: Mapping[str, Any], *, ready: bool, reason: str | None, most_seats: int) -> list[Finding]:
    """The worst first; one that says that all is well, where nothing else is to be said.

    Args:
        snapshot: with `recent`, what happened in the window.
        ready, reason: whether new requests are taken, and why not.
        most_seats: the highest `max_num_seqs`.
    """
    found = [
        *_failures(snapshot, most_seats),
        *_refusals(snapshot, most_seats),
        *_late(snapshot, snapshot, most_seats),
        *_late(snapshot, snapshot["background"], most_seats, "Background work: "),
        *_crowd(snapshot, most_seats),
        *_preemptions(snapshot),
        *_waste(snapshot),
        *_lag(snapshot),
    ]
    worst_first = sorted(found, key=lambda finding: finding.level != "bad")
    return [*_state(ready, reason), *_search(snapshot), *_told_once(worst_first)] or [_all_is_well(snapshot)]


def _told_once(findings: list[Finding]) -> Iterator[Finding]:
    """What is helped by the same: that is said once."""
    told: set[str] = set()
    for finding in findings:
        if finding.help and finding.help in told:
            yield replace(finding, help="", setting=None)
        else:
            yield finding
            told.add(finding.help)


def _state(ready: bool, reason: str | None) -> Iterator[Finding]:
    if ready:
        return
    word, _, why = (reason or "not ready").partition(": ")
    if reason == IS_DRAINING:
        yield Finding("warn", "The server is draining", why, "Admit again when it is to serve.", "draining")
    elif word == "draining":
        yield Finding("warn", "The server is draining", why or "it was asked to end", "It ends by itself.")
    elif word == "stalled":
        help_ = "If it does not come back, restart the server: whoever waits gets an error then, and tries again."
        yield Finding("bad", "The engine is stalled", why or "no step comes to its end", help_)
    else:
        yield Finding("bad", f"The server is not ready: {word}", why, "Its log says more.")


def _search(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    search = snapshot.get("limit_search")
    if search is not None:
        why = f"{search['who']} has the limit looked for: most of what is asked here comes from it and not from users"
        yield Finding("warn", "A search for the limit runs", why, "It is on the page Limit, where it can be stopped.")


def _failures(snapshot: Mapping[str, Any], most_seats: int) -> Iterator[Finding]:
    both = [work["ended"] for work in (snapshot, snapshot["background"])]
    late = sum(ended["timed_out"] for ended in both)
    broken = sum(ended["failed"] for ended in both) - late
    if broken:
        what = f"{numbers.plural(broken, 'request')} failed in {_window(snapshot)}"
        yield Finding("bad", what, "an error ended them", "See the log.")
    if late:
        yield _out_of_time(snapshot, late, sum(ended["timed_out_queued"] for ended in both), most_seats)


def _out_of_time(snapshot: Mapping[str, Any], late: int, queued: int, most_seats: int) -> Finding:
    """By where they were when their deadline came, `queued` without a seat; that is all that is known of why."""
    what = f"{numbers.plural(late, 'request')} ran out of time in {_window(snapshot)}"
    why = f"when the deadline came {numbers.count(queued)} had no seat yet, and {numbers.count(late - queued)} had one"
    if not snapshot["requests"]["waiting"]:
        return Finding("bad", what, f"{why}; nobody waits now")
    advice = _advice_on_waiting(snapshot, snapshot, most_seats)
    why += f"; now {advice.why}"
    # What helps those who wait now would not have helped those who had their seat.
    return Finding("bad", what, why, advice.help, advice.setting) if 2 * queued > late else Finding("bad", what, why)


def _refusals(snapshot: Mapping[str, Any], most_seats: int) -> Iterator[Finding]:
    requests, config = snapshot["requests"], snapshot["config"]
    depth = max(work["waiting"] for work in requests["by_class"].values())
    filled = max(depth / config["max_waiting"], requests["waiting_tokens"] / config["max_waiting_tokens"])
    for reason, amount in snapshot["recent"]["refused_by_reason"].items():
        if not amount:
            continue
        what = f"{numbers.plural(amount, 'request')} refused in {_window(snapshot)}"
        room = f"the queue had no room for them; {numbers.percent(filled)} of it is taken now"
        if reason == "queue_full" and filled >= NEARLY_FULL:
            advice = _advice_on_waiting(snapshot, snapshot, most_seats)
            what += ", and the queue is full" if filled >= 1 else f": {room}"
            yield Finding("bad", what, advice.why, advice.help, advice.setting)
        elif reason == "queue_full":
            yield Finding("warn", what, room)
        elif reason == "late":
            why = "their first token would have come after what is promised or asked, and slo_admission is on"
            yield Finding(
                "warn", what, why, "That keeps the promise to the others. It needs less load.", "slo_admission"
            )
        else:
            yield Finding("warn", what, words.word(words.REJECTED, reason))


def _late(snapshot: Mapping[str, Any], met: Mapping[str, Any], most_seats: int, whose: str = "") -> Iterator[Finding]:
    """Latencies over their targets, of one class of work."""
    for name in PROMISED:
        target, latency = met["slo"]["targets"][f"{name}_p95_seconds"], met["latency"][name]
        if target is None or not latency["count"] or latency["p95"] <= target:
            continue
        what = f"{whose}{words.LATENCIES[name]} p95 {numbers.seconds(latency['p95'])}"
        what += f", over its target of {numbers.seconds(target)}"
        few = latency["count"] < ENOUGH_SAMPLES
        if few:
            what += f" (only {numbers.plural(latency['count'], 'sample')})"
        if not snapshot["requests"]["running"] and not snapshot["requests"]["waiting"]:
            yield Finding("warn", what, f"nothing runs now; these are of {_window(snapshot)}")
            continue
        advise = {"ttft": _advice_on_first_tokens, "itl": _advice_on_gaps, "e2e": _advice_on_answers}[name]
        advice = advise(snapshot, met, most_seats)
        yield Finding("warn" if few else "bad", what, advice.why, advice.help, advice.setting)


def _advice_on_first_tokens(snapshot: Mapping[str, Any], met: Mapping[str, Any], most_seats: int) -> Advice:
    queue, ttft = met["latency"]["queue"]["p95"] or 0.0, met["latency"]["ttft"]["p95"]
    if queue >= ttft / 2:
        return _advice_on_waiting(snapshot, met, most_seats)
    if _is_paced(snapshot):
        return PACED
    why = "reading the prompts takes longer than the wait for a seat"
    budget = snapshot["config"]["max_num_batched_tokens"]
    if _has_slack(snapshot, "itl"):
        help_ = f"Raise the token budget ({numbers.count(budget)} now): prompts are read in fewer steps."
        return Advice(why, help_, "max_num_batched_tokens")
    return Advice(why, "Tokens have no time to give away either: the machine is at its limit for such prompts.")


def _advice_on_waiting(snapshot: Mapping[str, Any], met: Mapping[str, Any], most_seats: int) -> Advice:
    """By what most of them wait for."""
    requests, config = snapshot["requests"], snapshot["config"]
    if not requests["waiting"]:
        p95 = numbers.seconds(met["latency"]["queue"]["p95"])
        return Advice(f"up to {p95} of it was waiting for a seat; nobody waits now")
    reason, amount = max(requests["waiting_by_reason"].items(), key=lambda item: item[1], default=("", 0))
    waits = f"{numbers.count(amount)} {'waits' if amount == 1 else 'wait'}"
    if reason == "seats":
        return _advice_on_seats(snapshot, waits, most_seats)
    if reason == "kv_memory":
        why = f"{waits} for KV memory, of which {_used(snapshot)} is used"
        if config["admission"] != "on_demand":
            return Advice(why, "Admission on demand lets them in sooner, at the price of preemptions.", "admission")
        return Advice(why, "Shorter answers (max_tokens), or more [cache] memory at the next start.")
    if reason == "token_budget":
        if _is_paced(snapshot):
            return Advice(f"{waits} for room in a step, and {PACED.why}", PACED.help, PACED.setting)
        help_ = f"Raise the token budget ({numbers.count(config['max_num_batched_tokens'])} now)."
        return Advice(f"{waits} for room in a step", help_, "max_num_batched_tokens")
    if reason == "policy":
        why = f"{waits} for the next batch, as batching is {config['policy']}"
        return Advice(why, "Continuous batching seats whoever comes at the next step.", "policy")
    return Advice(f"{numbers.count(requests['waiting'])} wait")


def _is_paced(snapshot: Mapping[str, Any]) -> bool:
    """Whether most steps lately had fewer tokens than the budget, for the sake of gaps (`slo_admission`)."""
    config = snapshot["config"]
    if not config["slo_admission"]:
        return False
    steps = snapshot["table"]["steps"][-RECENT_STEPS:]
    present = [int(step["budget"]) for step in steps if step["generation"] == config["generation"]]
    most: int = config["max_num_batched_tokens"]
    return 2 * sum([budget < most for budget in present]) > len(present)


def _advice_on_seats(snapshot: Mapping[str, Any], waits: str, most_seats: int) -> Advice:
    seats = snapshot["config"]["max_num_seqs"]
    why = f"{waits} for a seat"
    if snapshot["kv"]["usage"] >= ROOMY:
        return Advice(f"{why}, and KV memory is {_used(snapshot)} used", "More seats would not help; less load would.")
    if seats >= most_seats:
        return Advice(why, f"All {numbers.count(seats)} seats that can be had are given: it needs less load.")
    if not _has_slack(snapshot, "itl"):
        return Advice(why, "More seats would make tokens later: it needs less load, or a faster machine.")
    help_ = f"Raise the seats ({seats} now, up to {most_seats}): KV memory has room, {_used(snapshot)} is used."
    return Advice(why, help_, "max_num_seqs")


def _advice_on_gaps(snapshot: Mapping[str, Any], _met: Mapping[str, Any], _most_seats: int) -> Advice:
    config, running = snapshot["config"], snapshot["requests"]["running"]
    if lost := _advice_on_lost_seats(snapshot):
        return lost
    steps = snapshot["table"]["steps"][-RECENT_STEPS:]
    prefills = sum(any(row[2] == "prefill" for row in step["rows"]) for step in steps)
    budget = config["max_num_batched_tokens"]
    if steps and prefills >= MANY_PREFILLS * len(steps) and budget > running and not _is_paced(snapshot):
        share = numbers.percent(prefills / len(steps))
        help_ = f"Lower the token budget ({numbers.count(budget)} now): prompts are read in smaller pieces."
        return Advice(f"prompts are read in {share} of the steps", help_, "max_num_batched_tokens")
    step = numbers.seconds(snapshot["step"]["seconds_p50"])
    if running > 1:
        help_ = f"Lower the seats ({config['max_num_seqs']} now): each is faster, others wait longer."
        return Advice(f"a step with {running} requests takes {step}", help_, "max_num_seqs")
    return Advice(
        f"a step takes {step} for one alone", "It needs a smaller model or number format, or a faster machine."
    )


def _advice_on_lost_seats(snapshot: Mapping[str, Any]) -> Advice | None:
    """By what most of those who lost their seat lost it to; `None` where nobody did."""
    reason, amount = max(snapshot["recent"]["preemptions_by_reason"].items(), key=lambda item: item[1])
    if not amount:
        return None
    seats, why = snapshot["config"]["max_num_seqs"], f"{numbers.plural(amount, 'time')} a request lost its seat"
    if reason == "kv_memory":
        why += " for want of KV memory and had to wait"
        return Advice(why, f"Lower the seats ({seats} now), or admit by reserve.", "max_num_seqs")
    why += " to one with a better right to it and had to wait"
    return Advice(why, f"With more seats ({seats} now) fewer have to give theirs.", "max_num_seqs")


def _advice_on_answers(snapshot: Mapping[str, Any], met: Mapping[str, Any], most_seats: int) -> Advice:
    spent = {name: met["spent"][f"{name}_seconds"] or 0.0 for name in words.SPENT}
    most = max(spent, key=lambda name: spent[name])
    why = f"most of it is {words.SPENT[most]}: {numbers.seconds(spent[most])} a request"
    if most == "queue":
        advice = _advice_on_waiting(snapshot, met, most_seats)
        return Advice(f"{why}; {advice.why}", advice.help, advice.setting)
    if most == "decode":
        return Advice(why, "Fewer seats make each faster; shorter answers (max_tokens) end sooner.", "max_num_seqs")
    if most == "prefill":
        if _is_paced(snapshot):
            return Advice(f"{why}; {PACED.why}", PACED.help, PACED.setting)
        return Advice(why, "A larger token budget reads prompts in fewer steps.", "max_num_batched_tokens")
    advice = _advice_on_lost_seats(snapshot) or Advice("nobody lost a seat lately")
    return Advice(f"{why}; {advice.why}", advice.help, advice.setting)


def _crowd(snapshot: Mapping[str, Any], most_seats: int) -> Iterator[Finding]:
    """A queue longer than the table: whoever comes now waits for more than a whole turn. Background work is to wait."""
    waiting, seats = snapshot["requests"]["by_class"]["interactive"]["waiting"], snapshot["config"]["max_num_seqs"]
    if waiting > seats:
        advice = _advice_on_waiting(snapshot, snapshot, most_seats)
        what = f"The queue is long: {numbers.count(waiting)} wait, and there are {numbers.plural(seats, 'seat')}"
        yield Finding("warn", what, advice.why, advice.help, advice.setting)


def _preemptions(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    lost = snapshot["recent"]["preemptions_by_reason"]["kv_memory"]
    if lost:
        what = f"{numbers.plural(lost, 'preemption')} in {_window(snapshot)}"
        why = "KV memory ran short, and what was computed for them is computed again"
        help_ = "Lower the seats, or admit by reserve or by prediction."
        yield Finding("warn", what, why, help_, "admission")


def _waste(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    rows, policy = snapshot["recent"]["rows"], snapshot["config"]["policy"]
    if rows["computed"] >= ENOUGH_ROWS and rows["useful"] < POOR_ROWS * rows["computed"]:
        share = numbers.percent(rows["useful"] / rows["computed"])
        what = f"Only {share} of what was computed in {_window(snapshot)} brought an answer forward"
        if policy == "continuous":
            yield Finding("warn", what, "the rest was padding of earlier batches, or for requests that had ended")
        else:
            why = f"{policy} batches are padded until the last of them is done"
            yield Finding("warn", what, why, "Continuous batching computes no padding.", "policy")


def _lag(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    lag = snapshot.get("loop_lag_seconds") or 0.0
    if lag > LATE_LOOP_SECONDS:
        what = f"The event loop is {numbers.seconds(lag)} late"
        yield Finding("warn", what, "every stream waits for it; something else takes the processor", "See the machine.")


def _all_is_well(snapshot: Mapping[str, Any]) -> Finding:
    running, waiting = snapshot["requests"]["running"], snapshot["requests"]["waiting"]
    if not running and not waiting:
        return Finding("good", "Nothing runs and nobody waits", "all seats are free")
    queue = "nobody waits" if not waiting else f"{numbers.count(waiting)} wait"
    promised = []
    for name in PROMISED:
        target, latency = snapshot["slo"]["targets"][f"{name}_p95_seconds"], snapshot["latency"][name]
        if target is not None and latency["count"]:
            p95 = numbers.seconds(latency["p95"])
            promised.append(f"{words.LATENCIES[name].lower()} p95 {p95} of {numbers.seconds(target)}")
    why = f"{numbers.plural(running, 'request')} {'runs' if running == 1 else 'run'}, {queue}"
    return Finding("good", "All is well", "; ".join([why, *promised]))


def _has_slack(snapshot: Mapping[str, Any], name: str) -> bool:
    """Whether interactive work could be a little slower in this without breaking its promise."""
    target, latency = snapshot["slo"]["targets"][f"{name}_p95_seconds"], snapshot["latency"][name]
    return target is None or not latency["count"] or latency["p95"] <= SLACK * target


def _used(snapshot: Mapping[str, Any]) -> str:
    return str(numbers.percent(snapshot["kv"]["usage"]))


def _window(snapshot: Mapping[str, Any]) -> str:
    return numbers.duration(snapshot["recent"]["seconds"])
