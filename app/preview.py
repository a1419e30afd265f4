"""What a change of the settings would do now, in words: from a look at the engine, before anything is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.live_change import FLUSH
from app.render import numbers
from engine.config import MAX_TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.live_change import Change, Value
    from engine.config import Limits

MAX_SHOWN: Final = 20


class Situation(NamedTuple):
    """How it stands.

    Attributes:
        waiting_most: how many wait in the class of work in which most do; so do the bounds of the queue count.
        hit_share: of the prompt tokens that the prefix cache was asked for; `None` while none was.
        right_share: of the drafted tokens that were checked; `None` while none was.
        seated: those that sit, `request_id`, `seat`, `output_tokens` and `age_seconds` of each.
    """

    running: int
    waiting: int
    waiting_most: int
    waiting_tokens: int
    cached_blocks: int
    step_seconds: float | None
    hit_share: float | None
    right_share: float | None
    seated: tuple[Mapping[str, Any], ...]


def look(snapshot: Mapping[str, Any]) -> Situation:
    """Take from the object of `/ops/stats.json` what a change depends on."""
    requests, cache = snapshot["requests"], snapshot["prefix_cache"]
    drafts = snapshot.get("speculation", {})
    shown = ("request_id", "seat", "output_tokens", "age_seconds")
    return Situation(
        running=requests["running"],
        waiting=requests["waiting"],
        waiting_most=max((group["waiting"] for group in requests["by_class"].values()), default=0),
        waiting_tokens=requests.get("waiting_tokens", 0),
        cached_blocks=snapshot["kv"]["cached"],
        step_seconds=snapshot["step"]["seconds_p50"],
        hit_share=_share(cache["hit_tokens"], cache["query_tokens"]),
        right_share=_share(drafts.get("accepted_tokens", 0), drafts.get("draft_tokens", 0)),
        seated=tuple({name: one[name] for name in shown} for one in snapshot["active"] if one["seat"] is not None),
    )


def make_preview(change: Change, limits: Limits, now: Situation) -> dict[str, Any]:
    """The object `preview` of a dry run.

    Returns:
        `changes` (old and new value by setting), `drains` (requests that end before a change is through, by setting),
        `words` (what happens, by setting), and `running` (who runs where some of them must end first, at most twenty).
    """
    changes = {name: (old, new) for name, new in change.values.items() if (old := getattr(limits, name)) != new}
    after = {name: change.values.get(name, getattr(limits, name)) for name in ("policy", "max_num_batched_tokens")}
    drains = {name: number for name, (_, new) in changes.items() if (number := _drained(name, new, now))}
    words = {name: _words(name, old, new, after, now) for name, (old, new) in changes.items()}
    if change.flush_prefix_cache:
        changes[FLUSH] = (now.cached_blocks, 0)
        words[FLUSH] = flush_words(now)
    return {
        "changes": {name: list(pair) for name, pair in changes.items()},
        "drains": drains,
        "words": words,
        "running": [dict(one) for one in now.seated[:MAX_SHOWN]] if drains else [],
    }


def _drained(name: str, new: Value, now: Situation) -> int:
    match name:
        case "max_num_seqs":
            return max(0, now.running - int(new))
        case "policy" | "admission":
            return now.running
        case "draining":
            return now.running + now.waiting if new else 0
    return 0


def _words(name: str, old: Value, new: Value, after: Mapping[str, Any], now: Situation) -> str:
    match name:
        case "policy" | "admission":
            return _switch_words(now)
        case "max_num_seqs":
            return _seat_words(int(old), int(new), now)
        case "max_num_batched_tokens":
            return _budget_words(int(old), int(new), now)
        case "long_prefill_token_threshold":
            return _chunk_words(int(new), int(after["max_num_batched_tokens"]))
        case "dynamic_preferred_size" | "dynamic_max_queue_delay_seconds":
            return "From the next batch on." if after["policy"] == "dynamic" else "Counts under dynamic batching alone."
        case "num_speculative_tokens":
            return "From the next step on; no answer changes." if new else "Nothing is drafted from the next step on."
        case "max_waiting":
            return _bound_words(int(new), now.waiting_most, "waiting")
        case "max_waiting_tokens":
            return _bound_words(int(new), now.waiting_tokens, "prompt tokens waiting")
        case "slo_admission":
            return (
                "Who comes from now on may be refused, who waits stays; steps may be shorter."
                if new
                else "Nobody is refused any more for coming too late, and steps have the whole budget."
            )
        case "enable_prefix_caching":
            return _cache_words(on=bool(new), now=now)
        case _ if name in MAX_TARGETS:
            return "Who ends from now on is judged by it." if new else "From now on nothing is promised."
        case _:
            return drain_words(now) if new else "New requests are taken again."


def drain_words(now: Situation) -> str:
    """What happens when nothing new is taken."""
    inside = "Nobody is inside."
    if now.running + now.waiting:
        inside = f"{now.running} running and {now.waiting} waiting: they finish."
    return f"New requests get 503, /readyz says why. {inside}"


def flush_words(now: Situation) -> str:
    """What happens when the prefix cache is flushed."""
    if not now.cached_blocks:
        return "No block is cached beside those in use; what begins like those is read anew, too."
    return f"Forgets {numbers.plural(now.cached_blocks, 'cached block')}: what begins alike is read anew once."


def _switch_words(now: Situation) -> str:
    if not now.running:
        return "Holds at once: nobody runs."
    ends = "1 request ends" if now.running == 1 else f"{now.running} requests end"
    return f"{ends} under the old one first. Nobody else sits down until then; {now.waiting} waiting now."


def _seat_words(old: int, new: int, now: Situation) -> str:
    if now.running > new:
        over = now.running - new
        return (
            f"{now.running} run: {over} above the {numbers.plural(new, 'seat')}. Nobody is cut off; the first {over} "
            f"to end are not replaced. {now.waiting} waiting now."
        )
    if new > old and now.waiting:
        return f"{min(new - now.running, now.waiting)} of the {now.waiting} who wait may sit down, if memory allows."
    return f"{now.running} run: nobody is above the new seats."


def _budget_words(old: int, new: int, now: Situation) -> str:
    if new < now.running:
        return f"{now.running} run: not everyone gets a token in every step."
    if new < old:
        return "From the next step on: steadier tokens, later first tokens."
    return "From the next step on: sooner first tokens, longer gaps while a prompt is read."


def _chunk_words(new: int, budget: int) -> str:
    if not new:
        return "One prompt may take all that a step has left."
    if new >= budget:
        return f"Changes nothing while a step computes {budget} tokens at most."
    return f"One prompt takes {new} of a step's {budget} tokens at most."


def _bound_words(new: int, depth: int, waits: str) -> str:
    if depth >= new:
        return f"{numbers.count(depth)} {waits} already. Nobody is sent away; who comes is refused until fewer do."
    return f"{numbers.count(depth)} {waits} now: room for {numbers.count(new - depth)} more."


def _cache_words(*, on: bool, now: Situation) -> str:
    if on:
        return "What is computed from now on is kept, and what still lies there is found."
    share = "" if now.hit_share is None else f" {numbers.percent(now.hit_share)} of prompt tokens came from it so far."
    return f"Every prompt is read anew. {numbers.plural(now.cached_blocks, 'block')} stay until room is needed.{share}"


def now_words(name: str, limits: Limits, now: Situation) -> str:
    """How it stands with a setting; empty where there is nothing to say."""
    match name:
        case "max_num_seqs":
            return f"{now.running} of {limits.max_num_seqs} taken, {now.waiting} waiting."
        case "max_num_batched_tokens":
            return "" if now.step_seconds is None else f"A usual step takes {numbers.seconds(now.step_seconds)}."
        case "num_speculative_tokens":
            return "" if now.right_share is None else f"{numbers.percent(now.right_share)} of the drafts were right."
        case "max_waiting":
            return f"{numbers.count(now.waiting_most)} waiting."
        case "max_waiting_tokens":
            return f"{numbers.count(now.waiting_tokens)} waiting."
        case "enable_prefix_caching":
            share = "" if now.hit_share is None else f", {numbers.percent(now.hit_share)} of prompt tokens came from it"
            return f"{numbers.plural(now.cached_blocks, 'block')} cached{share}."
    return ""


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
