"""Who is served when more is asked for than there is: keys beside each other, classes one after the other.

Time is virtual: a step costs what reading the weights costs, or what its tokens cost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import pytest

from engine.config import Limits
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from engine.waiting import OUTPUT_WEIGHT, PROMPT_WEIGHT, SHARE_SLACK
from engine.work_class import MAX_YIELDS
from tests.fakes import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.batch import ScheduledBatch

STEP_SECONDS = 0.05
TOKEN_SECONDS = 0.001
SEATS = 8
BLOCK_SIZE = 16
CHECK_EVERY = 20  # steps: looking through every block takes longer than a step


@dataclass
class Arrival:
    time: float
    key: str
    num_prompt_tokens: int
    max_tokens: int
    background: bool = False
    priority: int = 0


@dataclass
class House:
    """A scheduler over the fake runner, and a clock."""

    num_blocks: int = 2000
    seats: int = SEATS
    admission: str = "on_demand"
    now: float = 0.0
    sequences: list[Sequence] = field(default_factory=list)
    finished: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            KVCache(self.num_blocks, BLOCK_SIZE),
            limits=Limits(self.seats, 128, admission=self.admission),
            num_seats=self.seats,
            max_model_len=2000,
        )
        self._runner = FakeRunner(self.num_blocks, BLOCK_SIZE)
        self._ids = count(1)
        self._num_steps = 0

    def add(self, arrival: Arrival) -> Sequence:
        sequence_id = next(self._ids)
        prompt = tuple((sequence_id * 31 + i * 7) % 256 for i in range(arrival.num_prompt_tokens))
        sequence = Sequence(
            sequence_id,
            f"r{sequence_id}",
            prompt,
            SamplingParams(max_tokens=arrival.max_tokens),
            arrival.time,
            key_name=arrival.key,
            background=arrival.background,
            priority=arrival.priority,
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule(self.now)
        # Whoever loses its seat does so for somebody else.
        assert not set(batch.preempted) & {seated.sequence_id for seated in batch.seated}
        self.now += max(STEP_SECONDS, TOKEN_SECONDS * batch.num_tokens)
        if not batch.is_empty:
            update = self.scheduler.update(batch, self._runner.execute(batch), self.now)
            self.finished.update((ending.sequence_id, self.now) for ending in update.endings)
        self._num_steps += 1
        if self._num_steps % CHECK_EVERY == 0:
            self.scheduler.check_integrity()
        return batch

    def serve(self, arrivals: list[Arrival], until: float = float("inf")) -> House:
        waiting = sorted(arrivals, key=lambda arrival: arrival.time)
        while self.now < until and (waiting or self.scheduler.num_running or self.scheduler.num_waiting):
            while waiting and waiting[0].time <= self.now:
                self.add(waiting.pop(0))
            self.step()
        return self

    def ttft_p95(self, key: str, *, background: bool = False) -> float:
        times = sorted(
            s.first_token_time - s.arrival_time
            for s in self.sequences
            if s.key_name == key and s.background is background and s.first_token_time is not None
        )
        assert times
        return times[int(0.95 * (len(times) - 1))]


def now_and_then(key: str, seed: int, gap: float = 1.5, number: int = 60) -> Iterator[Arrival]:
    """Short questions with short answers, one about every `gap` seconds."""
    source, time = random.Random(seed), 5.0
    for _ in range(number):
        time += source.expovariate(1 / gap)
        yield Arrival(time, key, source.randint(20, 60), source.randint(5, 15))


def flood(key: str, number: int = 120, *, background: bool = False) -> Iterator[Arrival]:
    """Long answers, all asked for at once."""
    return iter([Arrival(0.0, key, 40, 400, background=background) for _ in range(number)])


@pytest.mark.parametrize("seed", range(2))
def test_a_flood_of_one_key_costs_the_other_at_most_as_much_again(seed: int) -> None:
    little = list(now_and_then("little", seed))
    alone = House().serve(little).ttft_p95("little")
    beside = House().serve([*flood("big"), *little], until=110.0)
    assert sum(1 for s in beside.sequences if s.key_name == "little" and s.first_token_time is not None) >= 50
    assert beside.ttft_p95("little") <= 2 * alone
    assert max(s.num_yields for s in beside.sequences) <= MAX_YIELDS
    # Nobody's work is thrown away for nothing: the big one still has most of the house.
    big = sum(s.num_output_tokens for s in beside.sequences if s.key_name == "big")
    assert big > 0.7 * SEATS * beside.now / STEP_SECONDS


def test_without_keys_the_little_ones_wait_for_the_flood() -> None:
    """What the test above would measure if nothing were done."""
    little = list(now_and_then("", 0))
    alone = House().serve(little).ttft_p95("")
    house = House()
    house.serve([Arrival(0.0, "", 40, 400) for _ in range(120)] + little, until=110.0)
    late = [s for s in house.sequences if s.arrival_time > 0.0]
    assert sum(1 for s in late if s.first_token_time is None) > len(late) / 2
    assert alone < 1.0


def test_two_floods_are_served_alike() -> None:
    """The difference in service of two keys that always wait stays within the bound of VTC."""
    house = House(num_blocks=400)
    prompts = {"short": (10, 200), "long": (300, 20)}
    for _ in range(150):
        for key, (num_prompt_tokens, max_tokens) in prompts.items():
            house.add(Arrival(0.0, key, num_prompt_tokens, max_tokens))
    fairness = house.scheduler.interactive.fairness
    bound = 2 * max(PROMPT_WEIGHT * 300, OUTPUT_WEIGHT * 400 * BLOCK_SIZE) + SHARE_SLACK
    while all(account.num_waiting for account in fairness.accounts.values()):
        house.step()
        fairness.settle()
        served = [account.served for account in fairness.accounts.values()]
        assert abs(served[0] - served[1]) <= bound
    assert min(served) > bound / 2  # long enough to mean something


def test_a_key_that_was_away_has_saved_nothing() -> None:
    house = House(seats=2)
    for _ in range(20):
        house.add(Arrival(0.0, "steady", 20, 20))
    for _ in range(60):
        house.step()
    for _ in range(20):
        house.add(Arrival(house.now, "returns", 20, 20))
    served = []
    for _ in range(120):
        house.step()
    for key in ("steady", "returns"):
        after = [s for s in house.sequences if s.key_name == key and (s.first_seated_time or 0.0) > 60 * STEP_SECONDS]
        served.append(len(after))
    assert served[0] >= served[1] - 2 > 0


@pytest.mark.parametrize("seed", range(2))
def test_background_work_takes_what_is_left(seed: int) -> None:
    talk = list(now_and_then("", seed))
    alone = House().serve(talk).ttft_p95("")
    beside = House().serve([*flood("", background=True), *talk], until=110.0)
    assert beside.ttft_p95("") <= 2 * alone
    background = sum(s.num_output_tokens for s in beside.sequences if s.background)
    assert background > 0.6 * SEATS * beside.now / STEP_SECONDS


def test_background_work_waits_while_interactive_work_waits() -> None:
    house = House(seats=2)
    late = house.add(Arrival(0.0, "", 10, 5, background=True))
    first = [house.add(Arrival(0.0, "", 10, 5)) for _ in range(4)]
    house.step()
    assert late.seat < 0
    assert house.scheduler.background.why_waits(late) == "seats"
    house.serve([])
    assert house.finished[late.sequence_id] > max(house.finished[s.sequence_id] for s in first)


def test_background_work_gives_its_memory_too() -> None:
    house = House(num_blocks=40, seats=4)
    for _ in range(3):
        house.add(Arrival(0.0, "", 150, 40, background=True))
    for _ in range(12):
        house.step()
    asks = house.add(Arrival(house.now, "", 300, 10))
    begin = house.now
    house.serve([])
    assert asks.first_token_time is not None
    assert asks.first_token_time - begin < 1.0
    assert asks.num_preemptions == 0
    assert len(house.finished) == 4


def test_a_reservation_is_never_taken_back() -> None:
    house = House(admission="reserve")
    house.serve([*flood("big", 20), *now_and_then("little", 0, number=10), *flood("bulk", 10, background=True)])
    assert house.scheduler.counters.num_preemptions == 0
    assert len(house.finished) == 40


def test_a_seat_is_not_yielded_where_it_would_be_its_own_again() -> None:
    """The waiter's key was served so much more that the order of the queue would give the seat straight back."""
    house = House(seats=4)
    for _ in range(2):
        house.add(Arrival(0.0, "a", 20, 300))
    house.add(Arrival(0.0, "b", 1900, 1))
    for _ in range(20):
        house.step()
    for _ in range(2):
        house.add(Arrival(house.now, "a", 20, 300))
    for _ in range(3):
        house.step()
    house.add(Arrival(house.now, "b", 20, 5))
    preempted = sum(len(house.step().preempted) for _ in range(40))
    assert preempted <= 1
    house.serve([])
    assert len(house.finished) == 6


def test_a_seat_is_not_yielded_to_one_that_would_not_fit_then() -> None:
    house = House(seats=4, num_blocks=130)
    for _ in range(4):
        house.add(Arrival(0.0, "a", 400, 60))
    for _ in range(20):
        house.step()
    house.add(Arrival(house.now, "b", 1500, 5))
    assert not any(house.step().preempted for _ in range(10))
    house.serve([])
    assert len(house.finished) == 5


def test_background_work_yields_before_any_interactive_does() -> None:
    house = House(seats=4)
    background = house.add(Arrival(0.0, "a", 20, 300, background=True))
    house.step()
    for _ in range(3):
        house.add(Arrival(0.0, "a", 20, 300))
    house.step()
    house.step()
    house.add(Arrival(house.now, "b", 20, 5))
    assert house.step().preempted == (background.sequence_id,)
    assert not any(house.step().preempted for _ in range(5))
    counters = house.scheduler.counters
    assert (counters.num_preemptions, counters.num_yields) == (1, 1), "memory has room"


def test_fewer_seats_are_waited_for_and_nobody_is_thrown_out() -> None:
    house = House(seats=8)
    for _ in range(8):
        house.add(Arrival(0.0, "a", 20, 40))
    for _ in range(3):
        house.step()
    house.scheduler.set_limits(replace(house.scheduler.limits, max_num_seqs=4))
    house.add(Arrival(house.now, "b", 20, 5))
    assert not any(house.step().preempted for _ in range(20))


def test_a_giant_that_cannot_sit_yet_empties_no_seat_of_background_work() -> None:
    house = House(seats=8, num_blocks=100)
    runs = house.add(Arrival(0.0, "", 800, 40))
    small = [house.add(Arrival(0.0, "", 20, 200, background=True)) for _ in range(4)]
    for _ in range(12):
        house.step()
    house.add(Arrival(house.now, "", 1200, 5))
    while runs.sequence_id not in house.finished:
        assert not house.step().preempted
        assert all(sequence.seat >= 0 for sequence in small)
    late = house.add(Arrival(house.now, "", 20, 5, background=True))
    house.serve([])
    assert len(house.finished) == 7
    assert late.num_preemptions == 0


def test_a_key_without_a_seat_gets_one_from_whoever_holds_two_more() -> None:
    house = House(seats=4)
    for key in "ab":
        for _ in range(4):
            house.add(Arrival(0.0, key, 20, 400))
    for _ in range(5):
        house.step()
    asks = house.add(Arrival(house.now, "c", 20, 5))
    for _ in range(4):
        house.step()
    assert asks.first_token_time is not None


def test_the_lower_priority_number_goes_first_within_a_key_only() -> None:
    house = House(seats=1)
    order = [
        house.add(Arrival(0.0, key, 10, 5, priority=priority))
        for key, priority in (("a", 0), ("a", 5), ("a", -5), ("b", 9), ("b", 9))
    ]
    house.serve([])
    ended = sorted(order, key=lambda sequence: house.finished[sequence.sequence_id])
    assert [s.sequence_id for s in ended if s.key_name == "a"] == [3, 1, 2]
    assert [s.key_name for s in ended[:2]] == ["a", "b"]


def test_a_hundred_of_every_kind_all_end() -> None:
    source = random.Random(7)
    arrivals = [
        Arrival(
            source.uniform(0, 20),
            source.choice(["", "a", "b"]),
            source.randint(1, 200),
            source.randint(1, 60),
            background=source.random() < 0.4,
            priority=source.randint(-2, 2),
        )
        for _ in range(300)
    ]
    house = House(num_blocks=60).serve(arrivals)
    assert len(house.finished) == 300
    assert max(s.num_preemptions for s in house.sequences) <= 20
    usage = house.scheduler.kv_cache.usage
    assert usage.free + usage.cached == usage.total
