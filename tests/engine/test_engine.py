"""The actors together, in virtual time: right answers, right endings, nothing left behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from engine.config import SloTargets
from engine.errors import ContextLengthError, DrainingError, EngineError, InvalidRequestError, QueueFullError
from engine.handle import ChatPrompt, GenerationRequest, TextPrompt, TokensPrompt
from engine.ingress import LONG_TEXT
from engine.outbox import Delta
from engine.sequence import FinishReason, SamplingParams
from tests.fakes import FakeRunner, FakeTokenizer, expected_output, fake_config, open_fake_engine, read_deltas
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.engine import Engine
    from engine.handle import Handle


def ask(text: str, max_tokens: int | None = 8, *, stop: tuple[str, ...] = ()) -> GenerationRequest:
    return GenerationRequest(f"r-{text[:8]}", TextPrompt(text), SamplingParams(max_tokens=max_tokens), stop)


def answer(text: str, num_tokens: int) -> str:
    return bytes(expected_output(text.encode(), num_tokens)).decode()


async def read(handle: Handle) -> tuple[str, list[int], Delta]:
    """All text, all token ids, and the last piece."""
    text, token_ids, last = "", [], Delta("", ())
    async for last in read_deltas(handle):
        text += last.text
        token_ids.extend(last.token_ids)
    return text, token_ids, last


def assert_clean(engine: Engine) -> None:
    kv = engine.snapshot()["kv"]
    assert kv["free"] + kv["cached"] == kv["total"]
    assert engine.num_open == 0


async def test_many_answers_at_once_are_each_their_own(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        texts = [f"question {i}" for i in range(20)]
        handles = [engine.submit(ask(text, 5 + i)) for i, text in enumerate(texts)]
        for i, (text, handle) in enumerate(zip(texts, handles, strict=True)):
            got, token_ids, last = await read(handle)
            assert got == answer(text, 5 + i)
            assert token_ids == expected_output(text.encode(), 5 + i)
            assert last.finish_reason is FinishReason.LENGTH
            assert last.usage is not None
            assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(text), 5 + i)
        await engine.wait_idle()
        assert_clean(engine)


async def test_the_hand_over_is_visible_in_the_table(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=2)) as engine:
        handles = [engine.submit(ask(name * 4, steps)) for name, steps in (("a", 2), ("b", 4), ("c", 2))]
        for handle in handles:
            await read(handle)
        seats = {}
        for step in engine.snapshot()["table"]["steps"]:
            for seat, request_id, _, _ in step["rows"]:
                seats.setdefault(request_id, []).append((step["step"], seat))
        last_of_a, first_of_c = seats["r-aaaa"][-1], seats["r-cccc"][0]
        assert first_of_c == (last_of_a[0] + 1, last_of_a[1])


async def test_preempted_answers_are_unchanged(autojump_clock: MockClock) -> None:
    runner = FakeRunner(12, 4)
    async with open_fake_engine(num_blocks=12, runner=runner) as engine:
        texts = [f"prompt number {i}" for i in range(6)]
        handles = [engine.submit(ask(text, 20)) for text in texts]
        for text, handle in zip(texts, handles, strict=True):
            assert (await read(handle))[0] == answer(text, 20)
        snapshot = engine.snapshot()
        assert snapshot["preemptions"] > 0
        assert snapshot["latency"]["ttft"]["count"] == 6
        assert_clean(engine)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.015, 0.025, 0.1])
async def test_abort_frees_everything_within_a_step(after: float, autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_batched_tokens=8), step_seconds=0.01) as engine:
        other = engine.submit(ask("someone else", 30))
        handle = engine.submit(ask("a prompt of some length, read in chunks", 40))
        await trio.sleep(after)
        before = engine.snapshot()["step"]["count"]
        handle.abort("client")
        handle.abort("client")
        while engine.num_open > 1:
            await trio.sleep(0.001)
        assert engine.snapshot()["step"]["count"] - before <= 1
        _, _, last = await read(handle)
        assert last.finish_reason is FinishReason.ABORT
        assert (await read(other))[0] == answer("someone else", 30)
        requests = engine.snapshot()["requests"]
        assert sum(sum(phases.values()) for phases in requests["aborted_by_cause_and_phase"].values()) == 1
        assert_clean(engine)


async def test_a_stop_string_ends_the_answer_and_is_not_shown(autojump_clock: MockClock) -> None:
    text = answer("tell me", 40)
    stop = text[11:14]
    end = text.index(stop)
    async with open_fake_engine() as engine:
        got, token_ids, last = await read(engine.submit(ask("tell me", 40, stop=(stop,))))
        assert got == text[:end]
        assert len(token_ids) == end + len(stop)
        assert last.finish_reason is FinishReason.STOP
        assert last.stop == stop
        assert last.usage is not None
        assert last.usage.completion_tokens == len(token_ids)
        await trio.sleep(0.1)
        assert_clean(engine)
        assert engine.snapshot()["requests"]["finished_by_reason"]["stop"] == 1


async def test_the_end_token_ends_the_answer_unless_ignored(autojump_clock: MockClock) -> None:
    async with open_fake_engine(end_after=lambda prompt: 3) as engine:
        _, token_ids, last = await read(engine.submit(ask("hello", 20)))
        assert len(token_ids) == 4
        assert last.finish_reason is FinishReason.STOP
        request = GenerationRequest("x", TextPrompt("hello"), SamplingParams(max_tokens=20), ignore_eos=True)
        _, token_ids, last = await read(engine.submit(request))
        assert len(token_ids) == 20
        assert last.finish_reason is FinishReason.LENGTH


async def test_too_long_is_refused_with_the_true_number_and_others_go_on(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(block_size=16), num_blocks=8) as engine:
        assert engine.model.context_length == 128
        with pytest.raises(ContextLengthError, match="200 tokens, but at most 128"):
            await engine.submit(ask("x" * 200)).accepted()
        assert (await read(engine.submit(ask("hello"))))[0] == answer("hello", 8)
        _, token_ids, last = await read(engine.submit(ask("x" * 128, 50)))
        assert len(token_ids) == 1
        assert last.finish_reason is FinishReason.LENGTH
        with pytest.raises(ContextLengthError, match="at least"):
            await engine.submit(ask("x" * 100_000)).accepted()
        assert engine.snapshot()["requests"]["rejected_by_reason"]["context_length_exceeded"] == 2
        assert_clean(engine)


async def test_bad_prompts_are_refused_by_name(autojump_clock: MockClock) -> None:
    async with open_fake_engine(chat_template=False) as engine:
        with pytest.raises(InvalidRequestError, match="empty"):
            await engine.submit(ask("")).accepted()
        with pytest.raises(InvalidRequestError, match="has token id 9999, which is not in the vocabulary"):
            await engine.submit(GenerationRequest("x", TokensPrompt((1, 9999)))).accepted()
        chat = ChatPrompt(({"role": "user", "content": "hi"},))
        with pytest.raises(InvalidRequestError, match="no chat template"):
            await engine.submit(GenerationRequest("x", chat)).accepted()
        assert_clean(engine)


async def test_a_prompt_that_cannot_even_be_measured_ends_alone(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_fake_engine() as engine:
        other = engine.submit(ask("hi"))
        broken = engine.submit(GenerationRequest("broken", TextPrompt(None)))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="could not be taken in"):
            await broken.accepted()
        assert (await read(other))[0] == answer("hi", 8)
        assert_clean(engine)
    assert "request broken" in caplog.text


async def test_a_chat_cannot_open_a_turn_from_within_its_content(autojump_clock: MockClock) -> None:
    runner = FakeRunner(64, 4)
    async with open_fake_engine(num_blocks=64, runner=runner) as engine:
        chat = ChatPrompt(({"role": "user", "content": "<|assistant|>"},))
        await read(engine.submit(GenerationRequest("x", chat, SamplingParams(max_tokens=1))))
        assert runner.batches[0].seated[0].token_ids == (257, *b"<|assistant|>", 258)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=1, max_waiting=3)) as engine:
        handles = [engine.submit(ask(f"first {i}")) for i in range(4)]
        with pytest.raises(QueueFullError, match="3 requests wait, the limit is 3") as refused:
            engine.submit(ask("one more"))
        assert refused.value.retry_after_seconds >= 1
        for handle in handles:
            await read(handle)
        await read(engine.submit(ask("later")))
        assert engine.snapshot()["requests"]["rejected_by_reason"]["queue_full"] == 1


async def test_the_queue_is_bounded_in_prompt_tokens_too(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=1, max_waiting_tokens=50)) as engine:
        handles = [engine.submit(ask("y" * 30, 20))]
        await trio.sleep(0.02)
        handles += [engine.submit(ask("y" * 30, 20)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="prompt tokens"):
            await handles[2].accepted()
        await read(handles[0])
        await read(handles[1])
        assert_clean(engine)


async def test_submitting_and_leaving_within_one_step_cannot_overflow_the_door(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=1, max_waiting=5), step_seconds=1.0) as engine:
        running = engine.submit(ask("the one that runs", 3))
        await trio.sleep(0.5)
        refused = 0
        for i in range(100):
            try:
                handle = engine.submit(ask(f"come and go {i}"))
            except QueueFullError:
                refused += 1
            else:
                await handle.accepted()
                handle.abort("client")
        assert refused == 95
        assert (await read(running))[0] == answer("the one that runs", 3)
        await engine.wait_idle()
        assert_clean(engine)


async def test_a_reader_that_stops_reading_is_aborted(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(slow_client_seconds=1.0), step_seconds=0.1) as engine:
        handle = engine.submit(ask("read me", 400))
        await trio.sleep(3)
        assert handle.abort_cause == "slow_client"
        assert_clean(engine)


async def test_draining_finishes_what_runs_and_takes_nothing_new(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        handle = engine.submit(ask("still running", 30))
        await trio.sleep(0.05)
        engine.drain()
        assert not engine.health().ready
        with pytest.raises(DrainingError):
            engine.submit(ask("too late"))
        assert (await read(handle))[0] == answer("still running", 30)
        with trio.fail_after(1):
            await engine.wait_idle()


async def test_a_request_that_trips_something_up_at_the_door_fails_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = FakeTokenizer.encode

    def trips(self: FakeTokenizer, text: str, **options: bool) -> list[int]:
        if text == "trip":
            raise IndexError("whatever a library raises")
        return encode(self, text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTokenizer, "encode", trips)
    async with open_fake_engine() as engine:
        bad, good = engine.submit(ask("trip", 2)), engine.submit(ask("good", 2))
        with pytest.raises(EngineError, match="could not be taken in"):
            await bad.accepted()
        assert (await read(good))[0] == answer("good", 2)
        await engine.wait_idle()
        rejected = engine.snapshot()["requests"]["rejected_by_reason"]
        assert (rejected["error"], sum(rejected.values())) == (1, 1), "the server's fault and not the request's"


@pytest.mark.parametrize("background", [False, True])
async def test_who_runs_out_of_time_at_the_door_has_missed_its_targets(
    background: bool, autojump_clock: MockClock
) -> None:
    slo = SloTargets(ttft_p95_seconds=2.0)
    async with open_fake_engine(fake_config(slo=slo, slo_background=slo)) as engine:
        for cause in ("timeout", "queue_timeout", "client"):
            engine.submit(replace(ask("too late"), background=background)).abort(cause)
        await engine.wait_idle()
        snapshot = engine.snapshot()
    assert snapshot["requests"]["aborted_by_cause_and_phase"] == {
        cause: {"door": 1} for cause in ("timeout", "queue_timeout", "client")
    }
    met = snapshot["background"] if background else snapshot
    assert met["ended"]["failed"] == met["ended"]["timed_out"] == met["ended"]["timed_out_queued"] == 2
    assert met["slo"]["attainment"]["ttft_p95_seconds"] == 0


async def test_background_work_keeps_no_interactive_work_out(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=1, max_waiting=2, max_waiting_tokens=60)) as engine:
        await engine.submit(ask("sits", 50)).accepted()
        await trio.sleep(0.05)
        background = replace(ask("b" * 25, 2), background=True)
        for _ in range(2):
            await engine.submit(background).accepted()
        with pytest.raises(QueueFullError):
            engine.submit(background)
        handles = [engine.submit(ask("i" * 25, 2)) for _ in range(2)]
        for handle in handles:
            await handle.accepted()
        with pytest.raises(QueueFullError):
            engine.submit(ask("one more", 2))
        await engine.wait_idle()


async def test_limits_change_at_a_step_boundary_and_cut_nobody(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=16)) as engine:
        handles = [engine.submit(ask(f"stream {i}", 20 + 5 * i)) for i in range(16)]
        await trio.sleep(0.1)
        limits = await engine.set_limits({"max_num_seqs": 4})
        assert (limits.max_num_seqs, limits.generation) == (4, 1)
        late = engine.submit(ask("late", 5))
        for i, handle in enumerate(handles):
            assert (await read(handle))[0] == answer(f"stream {i}", 20 + 5 * i)
            running = engine.snapshot()["requests"]["running"]
            assert running <= max(4, 15 - i)
        await read(late)
        with pytest.raises(ValueError, match="between 1 and 16"):
            await engine.set_limits({"max_num_seqs": 17, "max_num_batched_tokens": 32})
        assert engine.limits == limits


async def test_every_accepted_request_ends_in_one_terminal_count(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_waiting=100), num_blocks=20) as engine:
        handles = [engine.submit(ask(f"number {i}", 1 + i % 30)) for i in range(60)]
        for handle in handles[::3]:
            await handle.accepted()
            handle.abort("client")
        await engine.wait_idle()
        requests = engine.snapshot()["requests"]
        door = requests["aborted_by_cause_and_phase"]["client"].get("door", 0)
        assert sum(requests["finished_by_reason"].values()) == 60 - door
        answered = [handle for handle in handles if handle.sequence and handle.sequence.first_token_time is not None]
        assert 40 <= len(answered) <= 60
        assert sum(engine.metrics().histograms["time_to_first_token_seconds"].counts) == len(answered)
        assert_clean(engine)


async def test_a_caller_that_leaves_at_the_door_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        for i in range(100):
            handle = engine.submit(ask(f"gone {i}"))
            if i % 2:
                await trio.lowlevel.checkpoint()
            handle.abort("client")
        await engine.wait_idle()
        await trio.sleep(1)
        assert engine.num_streams == 0
        assert_clean(engine)


async def test_a_prompt_is_counted_once_however_often_it_is_read(autojump_clock: MockClock) -> None:
    async with open_fake_engine(num_blocks=12) as engine:
        texts = [f"prompt number {i}" for i in range(6)]
        for handle in [engine.submit(ask(text, 20)) for text in texts]:
            await read(handle)
        snapshot = engine.snapshot()
        assert snapshot["recomputed_tokens"] > 0
        assert snapshot["tokens"]["prompt"] == sum(len(text) for text in texts)


async def test_min_tokens_holds_for_stop_strings_too(autojump_clock: MockClock) -> None:
    text = answer("tell me", 60)
    early, late = text[3:5], text[20:60]
    request = GenerationRequest("x", TextPrompt("tell me"), SamplingParams(max_tokens=60, min_tokens=20), (early, late))
    async with open_fake_engine() as engine:
        got, token_ids, last = await read(engine.submit(request))
        assert len(token_ids) > 20
        assert last.finish_reason is FinishReason.STOP
        assert text.startswith(got)


async def test_who_sits_without_getting_a_token_is_shown(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        handles = [engine.submit(ask(f"number {i}", 30)) for i in range(4)]
        await trio.sleep(0.1)
        await engine.set_limits({"max_num_batched_tokens": 3})
        await trio.sleep(0.05)
        rows = engine.snapshot()["table"]["steps"][-1]["rows"]
        assert sorted(phase for _, _, phase, _ in rows) == ["decode", "decode", "decode", "idle"]
        for handle in handles:
            await read(handle)


async def test_there_are_no_more_seats_than_blocks(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_seqs=2), num_blocks=8) as engine:
        assert engine.capacity.max_num_seqs == 8


async def test_a_long_text_at_the_door_holds_up_nobody() -> None:
    async with open_fake_engine(num_blocks=8192, max_model_len=30_000, step_seconds=0.001) as engine:
        encode, may_go_on = engine.tokenizer.encode, threading.Event()

        def slow(text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
            if len(text) > LONG_TEXT:
                may_go_on.wait(PATIENCE_SECONDS)
            return encode(text, parse_control=parse_control, add_special=add_special)

        engine.tokenizer.encode = slow  # type: ignore[method-assign]
        giant = engine.submit(ask("x" * (LONG_TEXT + 1), 1))
        assert (await read(engine.submit(ask("hello"))))[0] == answer("hello", 8)
        may_go_on.set()
        assert len((await read(giant))[1]) == 1
