"""Who is at fault is found, whoever it is, and nobody else is taken for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from engine.config import Limits
from engine.faults import lacks_memory, smaller_steps
from engine.trials import CONTROL, CONTROL_TOKENS, MAX_FAILED_CONTROLS, Trials, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable


def play(trials: Trials, fails: Callable[[set[int]], bool]) -> Verdict | None:
    """Try who is to be tried, all of a group in each step, until it is over or hopeless."""
    for _ in range(200):
        assert trials.group, "nobody is tried"
        if fails({*trials.group}):
            verdict = trials.fail(dict.fromkeys(trials.group, 2 if CONTROL in trials.group else 10))
        else:
            verdict = trials.look(lambda _: 99)
        if verdict is not None or trials.is_hopeless:
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
    assert len(failed) <= math.ceil(math.log2(number)) + 2
    assert failed[-2:] == [{guilty}, {guilty}]


@given(st.integers(2, 64), st.data())
def test_what_fails_together_alone_is_told_apart(number: int, data: st.DataObject) -> None:
    most = data.draw(st.integers((number + 1) // 2, number - 1))
    trials = Trials()
    trials.fail(dict.fromkeys(range(1, number + 1), 10))
    assert play(trials, lambda group: len(group) > most) is Verdict.TOO_MANY


def test_what_does_not_fail_again_is_nobodys_fault() -> None:
    trials = Trials()
    trials.fail({1: 10, 2: 10})
    assert trials.look({1: 10, 2: 11}.get) is None
    assert trials.look({1: 11, 2: 0}.get) is Verdict.INNOCENT  # 2 has passed, whatever became of it since


def test_an_engine_that_fails_with_its_own_request_is_hopeless_and_nobody_is_to_blame() -> None:
    controls: list[set[int]] = []

    def fails(group: set[int]) -> bool:
        controls.extend([group] if CONTROL in group else [])
        return True

    trials = Trials()
    trials.fail({1: 10, 2: 10})
    assert play(trials, fails) is None
    assert controls == [{CONTROL}] * MAX_FAILED_CONTROLS


def test_those_who_have_left_hold_nothing_up() -> None:
    trials = Trials()
    trials.fail({1: 10, 2: 10})
    trials.fail({1: 10, 2: 10})
    assert [*trials.group] == [1]
    assert trials.look(lambda _: None) is None
    assert [*trials.group] == [2]
    assert trials.look(lambda _: None) is None
    assert [*trials.group] == [1, 2]
    assert trials.look(lambda _: None) is Verdict.INNOCENT


@given(st.integers(1, 16), st.integers(0, 8), st.data())
def test_faults_that_go_away_convict_nobody_who_did_not_fail_alone_twice_in_a_row(
    number: int, num_faults: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(0, number))
    tried: list[tuple[set[int], bool]] = []

    def fails(group: set[int]) -> bool:
        tried.append((group, len(group) > most and sum(failed for _, failed in tried) < num_faults))
        return tried[-1][1]

    trials = Trials()
    trials.fail(dict.fromkeys(range(1, number + 1), 10))
    verdict = play(trials, fails)
    if verdict is Verdict.GUILTY:
        assert [(group, failed) for group, failed in tried if group != {CONTROL}][-2:] == 2 * [({trials.accused}, True)]
    elif verdict is Verdict.TOO_MANY:
        assert [failed for _, failed in tried[-3:]] == [False, False, True]
    else:
        assert (verdict is None) == (most == 0 and trials.is_hopeless)


def test_a_fault_with_nobody_in_the_step_is_for_the_engines_own_request_to_judge() -> None:
    trials = Trials()
    for _ in range(2 * MAX_FAILED_CONTROLS):
        assert trials.fail({}) is None
        assert [*trials.group] == [CONTROL]
        assert trials.look(lambda _: 2) is Verdict.INNOCENT
    for _ in range(MAX_FAILED_CONTROLS + 1):
        assert not trials.is_hopeless
        trials.fail(dict.fromkeys(trials.group, 1))
    assert trials.is_hopeless


def test_each_fault_in_a_row_wants_a_sequence_to_come_further() -> None:
    trials, further = Trials(), []
    for _ in range(8):
        trials.fail({1: 10, 2: 10})
        further.append(trials.group[1] - 10)
        assert trials.look(lambda _: 99) is Verdict.INNOCENT
    assert further == [1, 3, 7, 15, 31, 63, 63, 63]
    trials.fail({2: 10})
    trials.look(lambda _: 99)
    trials.fail({1: 10})
    assert trials.group == {1: 11}


def test_where_the_engines_own_request_fails_only_as_far_as_that_nobody_is_to_blame() -> None:
    trials = Trials()
    for _ in range(4):
        trials.fail({1: 10})
        trials.look(lambda _: 99)
    trials.fail({1: 10})
    trials.fail({1: 30})
    assert trials.group == {CONTROL: CONTROL_TOKENS + 30}
    assert trials.fail({CONTROL: 20}) is Verdict.INNOCENT
    assert not trials.is_hopeless


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
