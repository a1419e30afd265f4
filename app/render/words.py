"""Plain words for the closed sets the engine counts by; an unknown word is shown as it is, never dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

WAITING = {
    "seats": "no free seat",
    "kv_memory": "no free KV memory",
    "token_budget": "token budget used up",
    "policy": "next batch",
    "switching": "policy is being changed",
    "shared_prompt": "prompt is read for another choice",
    "fault": "set aside while a fault is looked for",
}
FINISHED = {"stop": "came to an end", "length": "cut at its limit", "abort": "aborted", "error": "failed"}
ABORTED = {
    "client": "its client left",
    "timeout": "out of time",
    "queue_timeout": "no seat in time",
    "slow_client": "nobody read it",
    "shutdown": "the server shut down",
    "admin": "by an operator",
    "error": "another part of it failed",
}
PREEMPTED = {"kv_memory": "lost for memory", "better_right": "lost to a better right"}
PHASES = {
    "queued": "waits for a seat",
    "preempted": "preempted, waits again",
    "idle": "seated, no tokens",
    "prefill": "reads its prompt",
    "recompute": "computes again",
    "forced": "reads what followed without a choice",
    "decode": "answers",
}
REJECTED = {
    "queue_full": "queue full",
    "late": "first token too late",
    "context_length_exceeded": "prompt too long",
    "rate_limited": "over the limit of its key",
    "busy": "too much being read, or too many connections",
    "draining": "taking nothing new",
    "unavailable": "not possible now",
    "invalid": "not valid, at the engine",
    "error": "failed at the door, by the server's own fault",
}
EVENTS = {
    "start": "Start",
    "stop": "Stop",
    "drain": "Drain",
    "config": "Settings",
    "revert": "Revert",
    "recording": "Recording",
    "preemptions": "Preemptions",
    "rejections": "Refusals",
    "stall": "Stall",
    "late": "Late",
    "fault": "Fault",
    "integrity": "Integrity",
    "limit": "Limit",
}
LATENCIES = {
    "ttft": "First token",
    "itl": "Between tokens",
    "tpot": "Mean per token",
    "e2e": "End to end",
    "queue": "In the queue",
}
SPENT = {
    "queue": "waiting for a seat",
    "prefill": "reading the prompt",
    "decode": "writing the answer",
    "preempted": "waiting for a lost seat",
}
SETTINGS = {
    "policy": "Batching",
    "admission": "KV memory",
    "max_num_seqs": "Seats",
    "max_num_batched_tokens": "Token budget",
    "long_prefill_token_threshold": "Chunk limit",
    "dynamic_preferred_size": "Dynamic batch size",
    "dynamic_max_queue_delay_seconds": "Dynamic batch delay",
    "num_speculative_tokens": "Drafts",
    "max_waiting": "Queue, requests",
    "max_waiting_tokens": "Queue, prompt tokens",
    "slo_admission": "Keep the promise",
    "enable_prefix_caching": "Prefix cache",
    "ttft_p95_seconds": "Target, first token",
    "itl_p95_seconds": "Target, between tokens",
    "e2e_p95_seconds": "Target, end to end",
    "background_ttft_p95_seconds": "Background target, first token",
    "background_itl_p95_seconds": "Background target, between tokens",
    "background_e2e_p95_seconds": "Background target, end to end",
    "draining": "Draining",
    "flush_prefix_cache": "Cached blocks",
}


def word(names: Mapping[str, str], key: str) -> str:
    """The plain word for `key`."""
    return names.get(key) or key.replace("_", " ")
