"""What bound the limit, explained: what it means, and what can be done about it."""

from __future__ import annotations

from typing import Final

# Where no rate was lost.
NOT_REACHED: Final = "unknown: every rate that was tried held"
# Where runs beyond it tell nothing of the server: of none, or none that was in its stride.
GENERATOR: Final = "the generator"
NOT_FILLED: Final = "unknown: beyond it runs were too short for the server to be in its stride"
# By `bound_by` of a limit.
BOUNDS: Final = {
    NOT_REACHED: "The limit lies above every rate that was tried: more time, or another attempt, tries higher ones.",
    "sequences": "Nearly all seats (max_num_seqs) were taken, and whoever came waited for one. More seats serve more "
    "at once, each a little slower: raise them while the gaps between tokens stay within their promise.",
    "KV memory": "The memory for prompts and answers was full, so that requests waited for it or lost their seat. Give "
    "the cache more of it (memory of [cache]) or smaller numbers (kv_cache_dtype), or have fewer seats (max_num_seqs).",
    "token budget": "Steps were nearly full (max_num_batched_tokens), so that prompts were read bit by bit. A larger "
    "budget brings the first token sooner and makes the gaps between tokens longer: raise it while they stay within "
    "their promise.",
    "compute": "Seats, KV memory and token budget had room left on average: it is the machine that computes no "
    "faster. A faster one, a smaller model or a quicker dtype serves more; so does a milder promise.",
    "sequences or token budget": "Requests waited though there was KV memory left, and the server does not tell how "
    "many seats it has. Try more seats first, then a larger token budget.",
    NOT_FILLED: "Beyond it fewer requests were under way when counting began than would have been later on, so nothing "
    "is known of the server there.",
    GENERATOR: "Beyond it the process that sends was itself late, or had no connection left, so nothing is known of "
    "the server there. Give it cores and files (ulimit -n) of its own, or send from another machine with relevo limit "
    "--url.",
}
UNKNOWN: Final = "The server did not tell how full it was, so nothing can be said of what would help."


def bound_title(bound_by: str) -> str:
    """What a limit is bound by, or why that is not known, as a sentence."""
    _, is_unknown, why = bound_by.partition(": ")
    return f"What bound it is not known: {why}." if is_unknown else f"Bound by {bound_by}."


def bound_words(bound_by: str) -> str:
    """What it means that a limit is bound by this, and what to do about it."""
    return BOUNDS.get(bound_by, UNKNOWN)
