"""Who is seated next: order, nothing lost, and service shared between keys as the paper on VTC promises."""

from __future__ import annotations

from itertools import count
from time import thread_time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sequence import SamplingParams, Sequence
from engine.waiting import (
    CACHED_WEIGHT,
    MAX_IDLE_ACCOUNTS,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    Fairness,
    WaitingQueue,
    served_by_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., Sequence]


@pytest.fixture
def make() -> Make:
    return maker()


def maker() -> Make:
    """Makes sequences that are named in the order in which they were made."""
    ids = count()

    def make_sequence(key: str = "", *, priority: int = 0, num_prompt_tokens: int = 4, identity: str = "") -> Sequence:
        number = next(ids)
        prompt = tuple(range(num_prompt_tokens))
        who = {"key_name": key, "key_identity": identity}
        return Sequence(number, f"r{number}", prompt, SamplingParams(), float(number), **who, priority=priority)

    return make_sequence


def seat(queue: WaitingQueue, sequence: Sequence) -> None:
    queue.remove(sequence)
    queue.fairness.seated(sequence)


def seat_all(queue: WaitingQueue) -> list[int]:
    """Seats everybody; their ids in the order in which they were seated."""
    order = []
    for sequence in queue.candidates():
        seat(queue, sequence)
        order.append(sequence.sequence_id)
    return order


def test_one_key_is_first_come_first_served_within_a_priority(make: Make) -> None:
    queue = WaitingQueue(Fairness())
    for priority in (0, 5, 0, -1, 5):
        queue.add(make("a", priority=priority))
    assert seat_all(queue) == [3, 0, 2, 1, 4]
    assert not queue


def test_those_put_back_come_first_the_last_one_before_the_others(make: Make) -> None:
    queue = WaitingQueue(Fairness())
    a, b, c, d, urgent = make("a"), make("b"), make("a"), make("a"), make("b", priority=-9)
    queue.add(c)
    queue.add(urgent)
    queue.put_back(b)
    queue.put_back(a)
    queue.put_back_own(d)
    assert next(queue.candidates()) is a
    # Then d before c, for it stands at the front of its key's line; between the keys who waits longest.
    assert [sequence.sequence_id for sequence in queue.candidates()] == [0, 1, 3, 2, 4]


def test_between_keys_the_smallest_counter_is_served_next(make: Make) -> None:
    queue = WaitingQueue(Fairness())
    for key, num_prompt_tokens in (("a", 100), ("a", 100), ("b", 10), ("b", 10), ("b", 10)):
        queue.add(make(key, num_prompt_tokens=num_prompt_tokens))
    # a pays 100 for its first; b catches up with all of its own before a is served again.
    assert seat_all(queue) == [0, 2, 3, 4, 1]


def test_every_busy_key_has_the_same_share_of_the_seats(make: Make) -> None:
    fairness = Fairness()
    queue = WaitingQueue(fairness)
    assert fairness.share(5) == 5
    for key in "ab":
        queue.add(make(key))
    assert fairness.share(5) == 3
    seat(queue, next(queue.candidates()))
    assert fairness.share(5) == 3
    assert {key: account.num_seats for key, account in fairness.accounts.items()} == {"a": 1, "b": 0}


def test_a_candidate_may_be_passed_over_or_leave_or_come_while_others_are_chosen(make: Make) -> None:
    queue = WaitingQueue(Fairness())
    sequences = [make(key) for key in "abab"]
    for sequence in sequences:
        queue.add(sequence)
    candidates = queue.candidates()
    assert next(candidates) is sequences[0]
    queue.remove(sequences[0])
    queue.remove(sequences[2])
    assert next(candidates) is sequences[1]
    late = make("a")
    queue.add(late)
    # 1 was not taken; it is passed over, not offered again.
    assert next(candidates) is sequences[3]
    assert next(candidates) is late
    assert next(candidates, None) is None
    assert {sequence.sequence_id for sequence in queue} == {1, 3, 4}
    assert late in queue
    assert sequences[0] not in queue


def test_nobody_waits(make: Make) -> None:
    queue = WaitingQueue(Fairness())
    assert list(queue.candidates()) == []
    with pytest.raises(KeyError):
        queue.remove(make())


def test_tokens_cost_what_they_weigh_and_a_prompt_is_charged_once(make: Make) -> None:
    fairness = Fairness()
    queue = WaitingQueue(fairness)
    sequence = make("a", num_prompt_tokens=10)
    queue.add(sequence)
    sequence.num_cached_tokens = 4
    seat(queue, sequence)
    cost = 6 * PROMPT_WEIGHT + 4 * CACHED_WEIGHT
    assert fairness.accounts["a"].counter == pytest.approx(cost)
    sequence.token_ids.extend([7, 7, 7])
    fairness.settle()
    fairness.settle()
    assert fairness.accounts["a"].counter == pytest.approx(cost + 3 * OUTPUT_WEIGHT)
    sequence.token_ids.append(7)
    fairness.vacated(sequence)
    queue.put_back(sequence)
    assert queue.num_tokens == 14
    seat(queue, sequence)
    fairness.vacated(sequence)
    account = fairness.accounts["a"]
    assert account.counter == account.served == pytest.approx(cost + 4 * OUTPUT_WEIGHT)
    assert (account.num_waiting, account.num_seats) == (0, 0)


def test_what_was_served_is_told_by_name_over_all_classes(make: Make) -> None:
    classes = [WaitingQueue(Fairness()), WaitingQueue(Fairness())]
    for queue in classes:
        for key in ("a", ""):
            sequence = make(key, num_prompt_tokens=10)
            queue.add(sequence)
            seat(queue, sequence)
            sequence.token_ids.append(7)
    assert served_by_key(*[queue.fairness for queue in classes]) == {"a": 2 * (10 + 2)}


def test_a_key_pays_nothing_for_a_revoked_one_of_its_name(make: Make) -> None:
    """The name is for people; accounts, lines and seats go by identity."""
    fairness = Fairness()
    queue = WaitingQueue(fairness)
    old = make("alice", identity="1 alice", num_prompt_tokens=1000)
    queue.add(old)
    seat(queue, old)
    for key, identity in (("bob", "3 bob"), ("alice", "1 alice"), ("alice", "2 alice")):
        queue.add(make(key, identity=identity, num_prompt_tokens=100))
    counters = {identity: account.counter for identity, account in fairness.accounts.items()}
    assert counters == {"1 alice": 1000, "2 alice": 1000, "3 bob": 1000}  # a newcomer is lifted, to all the same
    assert fairness.share(6) == 2
    assert fairness.accounts["2 alice"].num_seats == 0
    assert fairness.accounts["2 alice"].served == 0
    assert seat_all(queue) == [1, 2, 3]
    assert served_by_key(fairness) == {"alice": 1200, "bob": 100}


def test_of_those_that_left_a_bounded_number_of_accounts_is_kept(make: Make) -> None:
    fairness = Fairness()
    queue = WaitingQueue(fairness)
    stays, returns = make("stays"), make("returns", num_prompt_tokens=500)
    for sequence in (stays, returns):
        queue.add(sequence)
        seat(queue, sequence)
    fairness.vacated(returns)
    for number in range(3 * MAX_IDLE_ACCOUNTS):
        if number % MAX_IDLE_ACCOUNTS in (9, 200):  # it is back often enough to be known, and what it had stays with it
            again = make("returns", num_prompt_tokens=1)
            queue.add(again)
            seat(queue, again)
            fairness.vacated(again)
        sequence = make("k", identity=f"{number} k")
        queue.add(sequence)
        if number % 2:
            seat(queue, sequence)
            fairness.vacated(sequence)
        else:
            queue.remove(sequence)
    assert len(fairness.accounts) == MAX_IDLE_ACCOUNTS + 1
    assert fairness.accounts["stays"].num_seats == 1
    assert fairness.accounts["returns"].served == 506
    assert "0 k" not in fairness.accounts
    assert fairness.share(6) == 6
    fairness.vacated(stays)
    assert len(fairness.accounts) == MAX_IDLE_ACCOUNTS


def test_an_abort_in_the_queue_costs_nothing(make: Make) -> None:
    queue = WaitingQueue(Fairness())
    sequence = make("a")
    queue.add(sequence)
    queue.remove(sequence)
    assert queue.fairness.accounts["a"].counter == 0
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_a_key_that_returns_is_lifted_to_the_least_of_those_that_wait(make: Make) -> None:
    fairness = Fairness()
    queue = WaitingQueue(fairness)
    for num_prompt_tokens in (500, 1):
        queue.add(make("a", num_prompt_tokens=num_prompt_tokens))
    runs = next(queue.candidates())
    seat(queue, runs)
    # What was generated since counts too, though nobody has asked for it to be charged.
    runs.token_ids.extend([7] * 50)
    queue.add(make("b"))
    assert fairness.accounts["b"].counter == 500 * PROMPT_WEIGHT + 50 * OUTPUT_WEIGHT
    assert fairness.accounts["b"].served == 0


def test_with_an_empty_queue_it_is_lifted_to_the_one_that_left_last(make: Make) -> None:
    fairness = Fairness()
    queue = WaitingQueue(fairness)
    for key, num_prompt_tokens in (("a", 300), ("b", 20)):
        queue.add(make(key, num_prompt_tokens=num_prompt_tokens))
    assert seat_all(queue) == [0, 1]
    queue.add(make("c"))
    assert fairness.accounts["c"].counter == 20
    assert seat_all(queue) == [2]
    # Whoever has more already keeps it.
    queue.add(make("a"))
    assert fairness.accounts["a"].counter == 300


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "seat", "skip", "end", "put_back", "put_back_own", "abort"]),
        st.sampled_from("abc"),
        st.integers(-1, 1),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_nothing_is_lost_or_doubled_and_the_lines_keep_their_order(operations: list[tuple[str, str, int]]) -> None:
    make, fairness = maker(), Fairness()
    queue = WaitingQueue(fairness)
    waiting: dict[int, Sequence] = {}
    running: list[Sequence] = []
    returned: set[int] = set()
    for name, key, priority in operations:
        if name == "add":
            sequence = make(key, priority=priority)
            queue.add(sequence)
            waiting[sequence.sequence_id] = sequence
        elif name in ("end", "put_back", "put_back_own") and running:
            sequence = running.pop()
            sequence.token_ids.append(7)
            fairness.vacated(sequence)
            if name != "end":
                getattr(queue, name)(sequence)
                waiting[sequence.sequence_id] = sequence
                returned.add(sequence.sequence_id)
        elif name in ("seat", "skip", "abort") and waiting:
            candidates = queue.candidates()
            sequence = next(candidates)
            if name == "skip":
                sequence = next(candidates, sequence)
            del waiting[sequence.sequence_id]
            if name == "abort":
                queue.remove(sequence)
            else:
                seat(queue, sequence)
                running.append(sequence)
        check(queue, waiting, running, returned)


def check(queue: WaitingQueue, waiting: dict[int, Sequence], running: list[Sequence], returned: set[int]) -> None:
    offered = list(queue.candidates())
    assert sorted(sequence.sequence_id for sequence in offered) == sorted(waiting)
    assert sorted(sequence.sequence_id for sequence in queue) == sorted(waiting)
    assert len(queue) == len(waiting)
    assert queue.num_tokens == sum(sequence.num_tokens for sequence in waiting.values())
    for key in "abc":
        line = [s for s in offered if s.key_name == key and s.sequence_id not in returned]
        assert line == sorted(line, key=lambda sequence: (sequence.priority, sequence.sequence_id))
    for key, account in queue.fairness.accounts.items():
        assert account.num_waiting == sum(sequence.key_name == key for sequence in waiting.values())
        assert account.num_seats == sum(sequence.key_name == key for sequence in running)
        assert 0 <= account.served <= account.counter


MAX_PROMPT, MAX_OUTPUT = 60, 12


@settings(max_examples=60)
@given(
    prompts=st.tuples(*[st.lists(st.integers(1, MAX_PROMPT), min_size=1, max_size=5)] * 3),
    outputs=st.tuples(*[st.lists(st.integers(1, MAX_OUTPUT), min_size=1, max_size=5)] * 3),
    num_seats=st.integers(1, 4),
    starts=st.tuples(*[st.integers(0, 40)] * 3),
)
def test_two_keys_that_always_wait_are_served_alike(
    prompts: tuple[list[int], ...], outputs: tuple[list[int], ...], num_seats: int, starts: tuple[int, ...]
) -> None:
    """The paper's bound (theorem 4.4): service over any interval in which both wait differs by no more than
    2 max(w_p L_input, w_q M), M being the most tokens in a batch."""
    make, fairness = maker(), Fairness()
    queue = WaitingQueue(fairness)
    running: list[tuple[Sequence, int]] = []
    made = dict.fromkeys("abc", 0)
    history: list[dict[str, float]] = []
    for step in range(200):
        for index, key in enumerate("abc"):
            # More wait at all times than there are seats, from the step on in which the key comes.
            account = fairness.accounts.get(key)
            for _ in range(num_seats + 1 - (account.num_waiting if account else 0) if step >= starts[index] else 0):
                queue.add(make(key, num_prompt_tokens=prompts[index][made[key] % len(prompts[index])]))
                made[key] += 1
        if len(running) < num_seats:
            for sequence in queue.candidates():
                index = "abc".index(sequence.key_name)
                seat(queue, sequence)
                running.append((sequence, outputs[index][sequence.sequence_id % len(outputs[index])]))
                if len(running) == num_seats:
                    break
        for sequence, _ in running:
            sequence.token_ids.append(7)
        for sequence, length in running:
            if sequence.num_output_tokens == length:
                fairness.vacated(sequence)
        running = [(sequence, length) for sequence, length in running if sequence.num_output_tokens < length]
        fairness.settle()
        history.append({key: account.served for key, account in fairness.accounts.items()})
    bound = 2 * max(PROMPT_WEIGHT * MAX_PROMPT, OUTPUT_WEIGHT * num_seats * (MAX_PROMPT + MAX_OUTPUT))
    for first, second in ("ab", "bc", "ac"):
        start = max(starts["abc".index(first)], starts["abc".index(second)])
        differences = [served.get(first, 0) - served.get(second, 0) for served in history[start:]]
        assert max(differences) - min(differences) <= bound


@pytest.mark.parametrize("keys", ["a", "abcdefgh"])
def test_a_pick_costs_the_same_however_many_wait(make: Make, keys: str) -> None:
    """Ten thousand wait: joining, being picked and leaving stay in microseconds."""
    queue = WaitingQueue(Fairness())
    start = thread_time()
    for number in range(10_000):
        queue.add(make(keys[number % len(keys)], num_prompt_tokens=1))
    for _ in range(1000):
        queue.remove(next(queue.candidates()))
    assert thread_time() - start < 2
