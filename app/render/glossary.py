"""What each number of the dashboard means, for somebody who sees it for the first time."""

from __future__ import annotations

from typing import Final

ABOUT: Final = {
    "ttft": "From a request's arrival to its first token: how long a person looks at an empty answer (TTFT).",
    "itl": "The gap between two tokens of one answer (ITL): how steadily it is written. A lost seat is part of it.",
    "tpot": "The mean gap between the tokens of one request, one number a request (TPOT).",
    "e2e": "From a request's arrival to its last token.",
    "queue": "From a request's arrival to its first seat.",
    "p95": "Of a hundred samples ninety-five are not longer than this. p50 is the middle one.",
    "target": "What users are promised for the p95, from [slo] in the configuration.",
    "within": "Requests that met the target, of those that came to their end; for the gaps between its tokens one in "
    "which at most 5 % of them are longer.",
    "met": "Requests that met every target, of those that came to their end; who failed or ran out of time met none. "
    "Goodput is how many of those there are in a second.",
    "requests": "Requests that came to their end in a second, well or not; those that their client or an operator gave "
    "up are not among them. Refused: turned away who could be served at another time, as at a full queue. Failed: "
    "ended by an error, or out of time.",
    "output": "Tokens generated in a second for all requests together, over the last ten seconds.",
    "waiting": "Requests that have no seat yet, and what they wait for.",
    "running": "Requests that hold a seat: a row at the table, and of the batch that is computed in each step.",
    "kv": "The memory that running requests read their earlier tokens from, in blocks. Used: held by those who run. "
    "Cached: kept in case somebody asks alike, given up when memory is needed. Free: neither.",
    "hit": "Tokens of prompts that were found in memory and not computed, of all that were looked up.",
    "evictions": "Cached blocks given up for others that were needed.",
    "waste": "Token slots set aside for requests that were never written, of all that were.",
    "heat": "Every gap between two tokens: from left to right when, from bottom to top how long, the darker the more.",
    "spent": "Where the time of a request went: waiting for its first seat, reading its prompt, writing its answer, "
    "and waiting for a seat that it lost.",
    "busy": "How much of what there is is taken: it may be busy and still do little that is of use.",
    "useful": "Rows that brought an answer forward, of all that were computed: the rest is padding, or was for "
    "requests that had ended.",
    "drafts": "Tokens that were drafted and checked beside the one that was due, since the start; each that was right "
    "saved its request a step.",
    "recomputed": "Tokens computed again for requests that lost their seat.",
    "lost": "Times that a request lost its seat, since the start: for want of KV memory, or to one with a better right "
    "to it (interactive before background work, and each key its share).",
    "budget": "Tokens a step may compute for all requests together, and how much of it the last steps took.",
    "lag": "How much too late a short sleep of the server ended: what every stream suffers on top.",
}
TERMS: Final = {
    "First token": "ttft",
    "Between tokens": "itl",
    "Mean per token": "tpot",
    "End to end": "e2e",
    "In the queue": "queue",
    "p50, p95, p99": "p95",
    "Target": "target",
    "Requests within": "within",
    "Within targets, goodput": "met",
    "Requests/s, refused, failed": "requests",
    "Output": "output",
    "Waiting": "waiting",
    "Running, seats": "running",
    "KV memory": "kv",
    "Cache hit rate": "hit",
    "Evictions": "evictions",
    "Never written": "waste",
    "Between tokens, all of them": "heat",
    "Where the time went": "spent",
    "Busy": "busy",
    "Useful rows": "useful",
    "Drafts right": "drafts",
    "Computed again": "recomputed",
    "Lost for memory, to a better right": "lost",
    "Token budget": "budget",
    "Event loop lag": "lag",
}
