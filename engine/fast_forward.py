"""Many steps of a scheduler at once, where each does the same: everybody who runs adds one token to an answer.

The result is that of as many calls of `schedule` and `update`: tokens, blocks, counters. Nothing can happen in between
because it is asked for beforehand: nobody ends, nobody sits down, the pool has the blocks.

That holds where all work is interactive and of one key, as in a simulation. Between keys and classes a seat can be
yielded to one who waits while nobody ends, and that is not asked for here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.batch import ScheduledBatch, StepUpdate
    from engine.scheduler import Scheduler


def is_closed(scheduler: Scheduler) -> bool:
    """Whether nobody can sit down while those who run go on, whoever comes."""
    return scheduler.batching.forms_batches or scheduler.num_running >= scheduler.limits.max_num_seqs


def is_steady(scheduler: Scheduler, batch: ScheduledBatch, update: StepUpdate) -> bool:
    """Whether the next step adds one token to everybody who runs and does nothing else.

    Args:
        batch: the last step.
        update: what came of it. Nobody was added since.
    """
    running = scheduler.running
    if not running or scheduler.is_switching or len(running) + len(batch.padding) > batch.token_budget:
        return False
    if any([len(s.token_ids) - s.num_computed_tokens != 1 or s.first_token_time is None for s in running]):
        return False
    if scheduler.batching.forms_batches:
        # Whoever came or went changes the padding of the next step.
        same = not update.endings and not batch.seated and not batch.preempted
        return same and all([row.samples for row in batch.padding])
    if not scheduler.num_waiting or is_closed(scheduler):
        return True
    # Somebody waits beside free seats. If there was no room for him in this step there is none in the next: what
    # those who run have, and what is promised to them, only grows until one of them ends.
    return not update.endings and not batch.preempted and not batch.seated and all(batch.decodes)


def num_steady_steps(scheduler: Scheduler, ends_at: Mapping[int, int]) -> int:
    """How many steps can pass before one in which somebody ends or the pool runs out of blocks.

    Args:
        ends_at: sequence id to the number of tokens with which it ends.
    """
    running, size = scheduler.running, scheduler.kv_cache.block_size
    num_steps = min(
        [min(ends_at[s.sequence_id], s.end_length) - len(s.token_ids) - 1 for s in running],
    )
    available = scheduler.kv_cache.pool.num_available

    def needed(steps: int) -> int:
        # The step that computes a token allocates for it: the last token drawn has no place yet.
        return sum([max(0, -(-(len(s.token_ids) + steps - 1) // size) - len(s.block_ids)) for s in running])

    # First what is quick to see: nobody needs more than one block beside those that the new tokens fill.
    if len(running) * (num_steps // size + 1) <= available or needed(num_steps) <= available:
        return max(0, num_steps)
    low, high = 0, num_steps  # enough blocks for `low`, too few for `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= available else (low, middle)
    return low


def repeat(scheduler: Scheduler, batch: ScheduledBatch, num_steps: int, token_id: int) -> None:
    """Take `num_steps` steady steps, in each of which everybody draws `token_id`.

    Args:
        batch: the last step, whose padding goes on.

    Raises:
        RuntimeError: the pool had fewer blocks than `num_steady_steps` found.
    """
    kv_cache, running = scheduler.kv_cache, scheduler.running
    tokens = [token_id] * num_steps
    for sequence in running:
        num_tokens = len(sequence.token_ids) + num_steps
        short = num_tokens - 1 > len(sequence.block_ids) * kv_cache.block_size
        if short and kv_cache.allocate(sequence, num_tokens - 1) is None:
            raise RuntimeError(f"no blocks for {num_steps} steps of sequence {sequence.sequence_id}")
        sequence.token_ids.extend(tokens)
        sequence.num_computed_tokens = num_tokens - 1
        sequence.last_step = batch.step
        if num_tokens - 1 >= sequence.next_full:
            kv_cache.remember(sequence, num_tokens - 1)
    counters, num_rows, num_padding = scheduler.counters, len(running), len(batch.padding)
    counters.num_rows += num_steps * (num_rows + num_padding)
    counters.num_useful_rows += num_steps * num_rows
    counters.num_padding_rows += num_steps * num_padding
    counters.num_padding_tokens += num_steps * num_padding
