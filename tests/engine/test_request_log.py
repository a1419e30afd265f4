"""What is told of each request afterwards is what the steps did to it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import trio

from engine.batch import ScheduledBatch, Seated, StepOutput
from engine.config import Limits
from engine.handle import GenerationRequest, TextPrompt, TokensPrompt
from engine.report import MAX_LISTED_WAITING
from engine.request_log import MAX_KEPT_TOKENS, MAX_SPANS, RequestLog, as_life
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from engine.step_log import SHOWN_STEPS, StepLog, StepRecord
from tests.fakes import FakeRunner, Poison, fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.engine import Engine
    from engine.handle import Handle


def ask(name: str, length: int, max_tokens: int, **more: Any) -> GenerationRequest:
    # Prompts of different beginnings, so that nothing comes from the prefix cache unasked.
    first = sum(map(ord, name)) % 200
    prompt = TokensPrompt((first, *[1 + i % 90 for i in range(length - 1)]))
    return GenerationRequest(name, prompt, SamplingParams(0.0, max_tokens=max_tokens), **more)


async def read(handle: Handle) -> None:
    async for _ in read_deltas(handle):
        pass


async def lives(engine: Engine) -> dict[str, dict[str, Any]]:
    """Of all that have ended, by name, when the engine has come to rest."""
    await engine.wait_idle()
    await trio.sleep(1)
    found = [engine.requests.life(line["number"]) for line in engine.requests.finished()]
    return {life["request_id"]: life for life in found if life is not None}


def rows_of(engine: Engine, name: str) -> dict[int, tuple[str, int, int]]:
    """Step to phase, seat and tokens of one request, as the table has them."""
    found = {}
    for step in engine.table(5000)["steps"]:
        again = dict(map(tuple, step["recomputed"]))
        right = {seat: accepted for seat, _, accepted in step["drafts"]}
        made = {seat: drafts for seat, drafts, _ in step["drafts"]}
        for seat, request_id, phase, tokens in step["rows"]:
            if request_id == name:
                tokens += right.get(seat, 0) - made.get(seat, 0)
                found[step["step"]] = ("recompute" if seat in again else phase, seat, tokens)
    return found


def rows_in(life: dict[str, Any]) -> dict[int, tuple[str, int, int]]:
    """The same of what is told of it; tokens of a decode that had drafts cannot be told apart by step."""
    found = {}
    for span in life["spans"]:
        first, last = span["steps"]
        if span["phase"] in ("queued", "preempted"):
            assert span["tokens"] == 0
            continue
        for step in range(first, last + 1):
            assert step not in found
            tokens = span["tokens"] if first == last else 0 if span["phase"] == "idle" else 1
            phase = "prefill" if span["phase"] == "forced" else span["phase"]
            found[step] = (phase, span["seat"], tokens)
    return found


async def test_a_life_is_queue_chunks_and_answer(autojump_clock: MockClock) -> None:
    config = fake_config(max_num_seqs=1, max_num_batched_tokens=8)
    async with open_fake_engine(config, step_seconds=0.5) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read, engine.submit(ask("first", 5, 3)))
        nursery.start_soon(read, engine.submit(ask("second", 20, 4, key_name="me")))
        await trio.sleep(0.6)
        (waiting,) = [line for line in engine.requests.open() if line["request_id"] == "second"]
        life = engine.requests.life(waiting["number"])
        assert life is not None
        assert (life["state"], life["reason"], life["finish_reason"]) == ("waiting", "seats", None)
        assert [span["phase"] for span in life["spans"]] == ["queued"]
        life = (await lives(engine))["second"]
        assert [(s["phase"], s["steps"], s["seat"], s["tokens"]) for s in life["spans"]] == [
            ("queued", [2, 3], None, 0),
            ("prefill", [4, 4], 0, 8),
            ("prefill", [5, 5], 0, 8),
            ("prefill", [6, 6], 0, 4),
            ("decode", [7, 9], 0, 3),
        ]
        assert life["times"] == {
            "queue_seconds": 1.5, "prefill_seconds": 1.5, "decode_seconds": 1.5, "preempted_seconds": 0.0,
        }  # fmt: skip
        assert (life["ttft_seconds"], life["e2e_seconds"], life["output_tokens"]) == (3.0, 4.5, 4)
        assert (life["finish_reason"], life["key"], life["state"]) == ("length", "me", "finished")
        assert [line["request_id"] for line in engine.requests.finished()] == ["second", "first"]
        assert [line["request_id"] for line in engine.requests.finished(1)] == ["second"]
        assert engine.requests.life(99) is None


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(6))
async def test_every_step_that_is_told_is_one_that_was(autojump_clock: MockClock, seed: int, drafts: int) -> None:
    """Little memory, few tokens a step: chunks, gaps, preemptions, drafts, aborts. The table is the witness."""
    rng = random.Random(seed)
    config = fake_config(max_num_seqs=5, max_num_batched_tokens=rng.choice((3, 7, 24)), num_speculative_tokens=drafts)
    words = [97, 98, 99] * 40
    answer = (lambda prompt: words) if drafts else None
    async with open_fake_engine(config, num_blocks=20, answer=answer) as engine, trio.open_nursery() as nursery:
        handles = []
        for number in range(14):
            handle = engine.submit(ask(f"r{number}", rng.randint(1, 40), rng.randint(1, 40)))
            nursery.start_soon(read, handle)
            handles.append(handle)
            await trio.sleep(rng.random() * 0.1)
        handles[3].abort("client")
        handles[9].abort("admin")
        found = await lives(engine)
        assert len(found) == 14
        for name, life in found.items():
            told, was = rows_in(life), rows_of(engine, name)
            assert {step: row[:2] for step, row in told.items()} == {step: row[:2] for step, row in was.items()}, name
            total = sum(span["tokens"] for span in life["spans"])
            assert total == sum(tokens for _, _, tokens in was.values())
            lost = [span for span in life["spans"] if span["phase"] == "preempted"]
            assert len(lost) == life["num_preemptions"]
            ends = [span["at_seconds"] + span["seconds"] for span in life["spans"]]
            begins = [span["at_seconds"] for span in life["spans"]]
            assert all(end <= begin + 0.0002 for end, begin in zip(ends, begins[1:], strict=False))
        stats = engine.snapshot()
        assert sum(life["recomputed_tokens"] for life in found.values()) == stats["recomputed_tokens"]
        assert (stats["preemptions"] > 0) == any(life["num_preemptions"] for life in found.values())
        assert (found["r3"]["finish_reason"], found["r3"]["abort_cause"]) in (("abort", "client"), ("length", None))


async def test_an_answer_that_ends_with_a_stop_string_has_what_was_told(autojump_clock: MockClock) -> None:
    async with open_fake_engine(answer=lambda _: b"abcdefgh") as engine:
        handle = engine.submit(ask("stops", 4, 8, stop=("cd",)))
        await read(handle)
        life = (await lives(engine))["stops"]
        assert (life["finish_reason"], life["output_tokens"]) == ("stop", 4)
        assert life["spans"][-1]["seconds"] is not None


async def test_an_operator_ends_a_request_in_any_state_once(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=1), step_seconds=0.1) as engine:
        runs, waits = engine.submit(ask("runs", 4, 400)), engine.submit(ask("waits", 4, 400))
        await trio.sleep(1.05)
        numbers = {line["request_id"]: line["number"] for line in engine.requests.open()}
        for name, handle in (("waits", waits), ("runs", runs)):
            assert engine.requests.abort(numbers[name])
            assert not engine.requests.abort(numbers[name])
            await read(handle)
        found = await lives(engine)
        assert {name: (life["finish_reason"], life["abort_cause"]) for name, life in found.items()} == {
            "runs": ("abort", "admin"), "waits": ("abort", "admin"),
        }  # fmt: skip
        assert [span["phase"] for span in found["waits"]["spans"]] == ["queued"]
        assert engine.snapshot()["requests"]["aborted_by_cause_and_phase"] == {"admin": {"queued": 1, "decode": 1}}
        assert not engine.requests.abort(12345)


@pytest.mark.parametrize("keeps", [False, True])
async def test_tokens_are_kept_only_where_that_was_asked_for(autojump_clock: MockClock, keeps: bool) -> None:
    config = fake_config(keep_request_texts=keeps)
    async with open_fake_engine(config, step_seconds=0.1, answer=lambda _: b"yes") as engine:
        handle = engine.submit(ask("asks", 3, 3))
        await trio.sleep(0.15)
        (line,) = engine.requests.open()
        spell = engine.requests.tokens(line["number"])
        assert spell is not None
        told = spell()
        assert told["output_pieces"] == ["y"]
        prompt = told["prompt_token_ids"]
        await read(handle)
        await lives(engine)
        spell = engine.requests.tokens(line["number"])
        if keeps:
            assert spell is not None
            assert (spell()["prompt_token_ids"], spell()["output_pieces"]) == (prompt, ["y", "e", "s"])
        else:
            assert spell is None
        assert engine.requests.tokens(77) is None


async def test_the_last_are_remembered_and_the_rest_forgotten(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=16)) as engine:
        for number in range(203):
            await read(engine.submit(ask(f"r{number}", 2, 1)))
        assert len(await lives(engine)) == 200
        assert engine.requests.life(3) is None
        assert engine.requests.life(4) is not None


def a_sequence(number: int, length: int) -> Sequence:
    return Sequence(number, f"r{number}", tuple(range(length)), SamplingParams(), 0.0)


def test_a_long_life_keeps_its_ends() -> None:
    log, sequence = RequestLog(), a_sequence(1, 10_000)
    log.open(sequence)
    for step in range(1, 1001):
        batch = ScheduledBatch(step, (0,), (1,), (step - 1,), (1,), (False,), (False,))
        log.step(batch, step, step + 0.5, accepted={})
    record = log.find(1)
    assert record is not None
    life = as_life(record, 1001.0, log.last_step)
    assert len(life["spans"]) == MAX_SPANS
    assert life["spans_left_out"] == 1001 - MAX_SPANS
    assert (life["spans"][1]["steps"], life["spans"][-1]["steps"]) == ([1, 1], [1000, 1000])


def test_an_answer_that_goes_on_has_a_token_for_each_step() -> None:
    log, sequence = RequestLog(), a_sequence(1, 3)
    log.open(sequence)
    seated = Seated(0, 1, (0, 1, 2), 3, SamplingParams())
    log.step(ScheduledBatch(1, (0,), (1,), (0,), (3,), (True,), (False,), seated=(seated,)), 1.0, 1.5, accepted={})
    for step in range(2, 102):
        drafts = {0: (7,)} if step < 22 else {}
        batch = ScheduledBatch(step, (0,), (1,), (step + 1,), (1,), (True,), (True,), drafts=drafts)
        log.step(batch, step, step + 0.5, accepted=drafts)
    record = log.find(1)
    assert record is not None
    assert as_life(record, 102.0, log.last_step)["spans"][-1]["tokens"] == 100 + 20


async def test_what_a_preemption_cost_is_told_once(autojump_clock: MockClock) -> None:
    """Background work yields the only seat while it answers; what is told adds up, before it sits again and after."""
    config = fake_config(max_num_seqs=1)
    async with open_fake_engine(config, step_seconds=0.5) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read, engine.submit(ask("late", 4, 8, background=True)))
        await trio.sleep(2.2)
        nursery.start_soon(read, engine.submit(ask("first", 4, 6)))
        await trio.sleep(2.0)
        (line,) = [line for line in engine.requests.open() if line["request_id"] == "late"]
        for _ in range(2):
            life = engine.requests.life(line["number"])
            assert life is not None
            times, whole = life["times"], life["e2e_seconds"] or life["age_seconds"]
            assert life["num_preemptions"] == 1
            (lost,) = [span for span in life["spans"] if span["phase"] == "preempted"]
            assert times["preempted_seconds"] == pytest.approx(lost["seconds"] or whole - lost["at_seconds"])
            assert 1.0 <= times["preempted_seconds"] <= 4.0
            assert sum(times.values()) == pytest.approx(whole, abs=0.01)
            await engine.wait_idle()
            await trio.sleep(1)
        assert engine.snapshot()["preemptions_by_reason"] == {"kv_memory": 0, "better_right": 1}


async def test_what_is_told_in_two_places_is_one_time(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long planning takes, and however many digits are shown."""
    schedule = Scheduler.schedule

    def plan_slowly(self: Scheduler, now: float) -> ScheduledBatch:
        autojump_clock.jump(0.0021234)
        return schedule(self, now)

    monkeypatch.setattr(Scheduler, "schedule", plan_slowly)
    async with open_fake_engine(step_seconds=0.0184999) as engine:
        handle = engine.submit(ask("a", 10, 3))
        await read(handle)
        told = (await lives(engine))["a"]
    queued, chunk, answer = told["spans"]
    times = told["times"]
    assert times["queue_seconds"] == queued["seconds"] == chunk["at_seconds"]
    assert times["prefill_seconds"] == chunk["seconds"] == 0.020623
    assert times["decode_seconds"] == answer["seconds"]
    assert told["ttft_seconds"] == answer["at_seconds"]


async def test_of_very_many_that_wait_some_are_told_one_by_one(autojump_clock: MockClock) -> None:
    config = fake_config(max_num_seqs=2, max_waiting=5000)
    async with open_fake_engine(config, step_seconds=1) as engine:
        for number in range(MAX_LISTED_WAITING + 12):
            engine.submit(ask(f"r{number}", 2, 5, key_name="me", background=number % 2 == 0))
        await trio.sleep(1.5)
        told = engine.snapshot()
        requests = told["requests"]
        assert requests["running"] + requests["waiting"] == MAX_LISTED_WAITING + 12
        assert len(told["active"]) - requests["running"] == MAX_LISTED_WAITING
        assert told["active_left_out"] == requests["waiting"] - MAX_LISTED_WAITING > 0
        assert {name: requests["by_key"]["me"][name] for name in ("running", "waiting")} == {
            name: requests[name] for name in ("running", "waiting")
        }
        assert sum([work["waiting"] for work in requests["by_class"].values()]) == requests["waiting"]
        engine.abort_all("admin")


async def test_who_is_set_aside_while_a_fault_is_looked_for_is_counted_wherever_those_who_wait_are(
    autojump_clock: MockClock,
) -> None:
    config = fake_config(max_num_seqs=8)
    runner = FakeRunner(256, config.block_size, before_step=Poison())
    async with open_fake_engine(config, runner=runner, step_seconds=1) as engine:
        handles = [engine.submit(ask(f"r{n}", 2, 5, key_name="me", background=n % 2 == 0)) for n in range(6)]
        handles.append(engine.submit(GenerationRequest("bad", TextPrompt("poison"), SamplingParams(max_tokens=5))))
        with trio.fail_after(60):
            while "fault" not in engine.snapshot()["requests"]["waiting_by_reason"]:
                await trio.sleep(0.5)
        handles.append(engine.submit(ask("late", 2, 5, key_name="new")))
        await trio.sleep(1.5)  # newcomers are taken in between two steps
        requests = engine.snapshot()["requests"]
        assert requests["by_key"]["new"]["waiting"] == 1
        assert requests["waiting_by_reason"]["fault"] > 1
        assert sum(requests["waiting_by_reason"].values()) == requests["waiting"]
        assert sum([work["waiting"] for work in requests["by_class"].values()]) == requests["waiting"]
        mine = requests["by_key"]["me"]
        assert mine["running"] + mine["waiting"] == 6
        assert requests["waiting_tokens"] >= 2 * requests["waiting"]
        for handle in handles:
            await read(handle)


def test_kept_texts_have_a_bound() -> None:
    log = RequestLog(keep_tokens=True)
    for number in range(1, 5):
        log.open(a_sequence(number, MAX_KEPT_TOKENS // 3))
        log.leave(number, 1.0)
        log.close(number, 1.0, reason="stop", cause=None, error=None, num_output_tokens=0, last_token=None)
    assert [log.find_tokens(number) is not None for number in range(1, 5)] == [False, True, True, True]


def test_steps_are_kept_up_to_a_number_of_rows() -> None:
    log, limits = StepLog(max_steps=1000, max_rows=3000), Limits(4, 16)
    for step in range(1, 2001):
        width = 4 if step <= 1000 else 20
        row = tuple(range(width))
        batch = ScheduledBatch(step, row, row, row, (1,) * width, (True,) * width, (True,) * width)
        log.append(StepRecord(batch, tuple(map(str, row)), (), (), float(step)))
        if step == 1000:
            assert log.table(limits)["kept"] == [251, 1000]
    table = log.table(limits)
    assert table["kept"] == [2000 - SHOWN_STEPS + 1, 2000]  # a table's worth in any case
    assert [step["step"] for step in table["steps"]] == list(range(1761, 2001))


@pytest.mark.parametrize(
    ("last_step", "shown"),
    [(None, (91, 100)), (60, (51, 60)), (100, (91, 100)), (999, (91, 100)), (0, (1, 10)), (4, (1, 10))],
)
def test_earlier_steps_are_asked_for_by_number(last_step: int | None, shown: tuple[int, int]) -> None:
    log = StepLog()
    for step in range(1, 101):
        log.append(StepRecord(ScheduledBatch(step, (0,), (1,), (0,), (1,), (True,), (True,)), ("a",), (), (), 0.0))
    steps = log.table(Limits(1, 1), 10, last_step)["steps"]
    assert (steps[0]["step"], steps[-1]["step"], len(steps)) == (*shown, 10)
    assert StepLog().table(Limits(1, 1), 10, 5)["steps"] == []


def test_what_was_told_before_the_step_came_back_is_told_anew() -> None:
    log = StepLog()
    batch = ScheduledBatch(1, (0,), (1,), (0,), (1,), (True,), (True,), drafts={0: (5, 6)})
    log.append(StepRecord(batch, ("a",), (), (), 0.0))
    assert log.table(Limits(1, 1))["steps"][0]["drafts"] == [(0, 2, 0)]
    log.note(StepOutput(1, (4,), accepted={0: (5,)}))
    assert log.table(Limits(1, 1))["steps"][0]["drafts"] == [(0, 2, 1)]
