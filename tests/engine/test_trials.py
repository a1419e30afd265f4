"""Who is at fault is found, whoever it is, and nobody else is taken for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from engine.config import Limits
from engine.faults import lacks_memory, smaller_steps
from engine.trials import CONTROL, MAX_FAILED_CONTROLS, Trials, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable


def play(trials: Trials, fails: Callable[[set[int]], bool]) -> Verdict | None:
    """Try who is to be tried, all of a group in each step, until it is over or hopeless."""
    for _ in range(200):
        if not trials.group or trials.is_hopeless:
            raise AssertionError("nobody is tried")
        if fails({*trials.group}):
            trials.fail(trials.group)
            if trials.is_hopeless:
                return None
        elif verdict := trials.look(lambda _: 10):
            return verdict
    raise AssertionError("it does not end")


@given(st.integers(1, 64), st.data())
def test_the_one_at_fault_is_found(number: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(1, number))
    failed = []

    def fails(group: set[int]) -> bool:
        if guilty in group:
            failed.append(group)
        return guilty in group

    trials = Trials()
    trials.fail(dict.fromkeys(range(1, number + 1), 10))
    assert play(trials, fails) is Verdict.GUILTY
    assert trials.accused == guilty
    assert not trials.group
    assert len(failed) <= math.ceil(math.log2(number)) + 1
    assert failed[-1] == {guilty}


@given(st.integers(2, 64), st.data())
def test_what_fails_together_alone_is_told_apart(number: int, data: st.DataObject) -> None:
    most = data.draw(st.integers((number + 1) // 2, number - 1))
    trials = Trials()
    trials.fail(dict.fromkeys(range(1, number + 1), 10))
    assert play(trials, lambda group: len(group) > most) is Verdict.TOO_MANY


def test_what_does_not_fail_again_is_nobodys_fault() -> None:
    trials = Trials()
    trials.fail({1: 10, 2: 10})
    assert trials.look({1: 9, 2: 10}.get) is None
    assert trials.look({1: 10, 2: 0}.get) is Verdict.INNOCENT  # 2 has passed, whatever became of it since


def test_an_engine_that_fails_with_its_own_request_is_hopeless_and_nobody_is_to_blame() -> None:
    trials, controls = Trials(), []
    trials.fail({1: 10, 2: 10})
    assert play(trials, lambda group: controls.append(CONTROL in group) or True) is None
    assert sum(controls) == MAX_FAILED_CONTROLS


def test_those_who_have_left_hold_nothing_up() -> None:
    trials = Trials()
    trials.fail({1: 10, 2: 10})
    trials.fail({1: 10, 2: 10})
    assert [*trials.group] == [1]
    assert trials.look(lambda _: None) is None
    assert [*trials.group] == [2]
    assert trials.look(lambda _: None) is Verdict.INNOCENT


def test_steps_shrink_to_one_row_of_one_token_and_no_further() -> None:
    limits, seen = Limits(12, 100), []
    while smaller := smaller_steps(limits):
        limits = Limits(
            smaller.get("max_num_seqs", limits.max_num_seqs),
            smaller.get("max_num_batched_tokens", limits.max_num_batched_tokens),
        )
        seen.append((limits.max_num_seqs, limits.max_num_batched_tokens))
    assert seen == [(12, 50), (12, 25), (12, 12), (6, 6), (3, 3), (1, 1)]


def test_a_lack_of_memory_is_told_from_other_faults() -> None:
    assert lacks_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    assert not lacks_memory(RuntimeError("shape mismatch"))
    assert not lacks_memory(ValueError("out of memory"))
