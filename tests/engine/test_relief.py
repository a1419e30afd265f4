"""What was lowered comes back, sooner where that holds, later where it does not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import Limits
from engine.relief import FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS, Relief

if TYPE_CHECKING:
    from collections.abc import Mapping


def lower(relief: Relief, limits: Limits, now: float, **values: int) -> Limits:
    relief.lower(limits, values, now)
    return with_values(limits, values)


def with_values(limits: Limits, values: Mapping[str, int]) -> Limits:
    return replace(
        limits,
        max_num_seqs=values.get("max_num_seqs", limits.max_num_seqs),
        max_num_batched_tokens=values.get("max_num_batched_tokens", limits.max_num_batched_tokens),
    )


def test_limits_come_back_by_doubling_and_no_further_than_they_were() -> None:
    relief, limits, seen = Relief(), Limits(12, 100), []
    assert relief.due == math.inf
    limits = lower(relief, limits, 5.0, max_num_seqs=3, max_num_batched_tokens=3)
    while relief.due < math.inf:
        now = relief.due
        limits = with_values(limits, relief.step_back(limits, now))
        seen.append((now - 5.0, limits.max_num_seqs, limits.max_num_batched_tokens))
    sizes = [(6, 6), (12, 12), (12, 24), (12, 48), (12, 96), (12, 100)]
    assert seen == [(FIRST_WAIT_SECONDS * (number + 1), *size) for number, size in enumerate(sizes)]


def test_a_fault_that_comes_back_at_once_is_waited_for_ever_longer() -> None:
    relief, limits, waits = Relief(), Limits(16, 16), []
    now = 0.0
    for _ in range(9):
        limits = lower(relief, limits, now, max_num_seqs=8)
        waits.append(relief.due - now)
        now = relief.due
        limits = with_values(limits, relief.step_back(limits, now))
        assert limits.max_num_seqs == 16
        now += 1.0
    assert waits == [60, 120, 240, 480, 960, 1920, MAX_WAIT_SECONDS, MAX_WAIT_SECONDS, MAX_WAIT_SECONDS]
    now += 2 * MAX_WAIT_SECONDS
    lower(relief, limits, now, max_num_seqs=8)
    assert relief.due - now == FIRST_WAIT_SECONDS


def test_what_one_request_caused_is_undone_at_once_and_no_more_than_that() -> None:
    relief, limits = Relief(), Limits(16, 64)
    relief.begin()
    limits = lower(relief, limits, 0.0, max_num_batched_tokens=32)
    relief.begin()
    limits = lower(relief, limits, 1.0, max_num_batched_tokens=16)
    limits = lower(relief, limits, 2.0, max_num_seqs=8, max_num_batched_tokens=8)
    limits = with_values(limits, relief.undo(limits))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (16, 32)
    assert relief.step_back(limits, relief.due) == {"max_num_batched_tokens": 64}
    assert relief.due == math.inf


def test_what_somebody_else_has_set_meanwhile_is_left_alone() -> None:
    relief, limits = Relief(), Limits(16, 64)
    relief.begin()
    limits = replace(lower(relief, limits, 0.0, max_num_seqs=8, max_num_batched_tokens=8), max_num_seqs=5)
    assert relief.undo(limits) == {"max_num_batched_tokens": 64}
    limits = lower(relief, limits, 0.0, max_num_seqs=2)
    assert relief.step_back(replace(limits, max_num_seqs=3), relief.due) == {}
    assert relief.due == math.inf
