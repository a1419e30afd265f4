"""What an answer is made of beside its text: log-probabilities, forced tokens, stop tokens, control tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
import trio

from engine.errors import InvalidRequestError
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import MAX_LOGPROBS, FinishReason, SamplingParams
from tests.engine.simulate import Simulation
from tests.fakes import (
    CONTROL,
    EOS,
    FakeRunner,
    OneOf,
    expected_output,
    fake_config,
    fake_logprobs,
    open_fake_engine,
    read_deltas,
)

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.batch import TokenLogprobs
    from engine.handle import Handle
    from engine.outbox import Delta

PROMPT = "tell me"


def ask(max_tokens: int | None = 8, *, stop: tuple[str, ...] = (), **params: object) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return GenerationRequest("r", TextPrompt(PROMPT), sampling, stop)


async def read(handle: Handle) -> list[Delta]:
    return [delta async for delta in read_deltas(handle)]


def text_of(deltas: list[Delta]) -> str:
    return "".join([delta.text for delta in deltas])


def told_in(deltas: list[Delta]) -> list[TokenLogprobs]:
    return [entry for delta in deltas for entry in delta.logprobs]


def expected_logprobs(num_tokens: int, num_top: int) -> list[TokenLogprobs]:
    known, expected = list(PROMPT.encode()), []
    for token_id in expected_output(known, num_tokens):
        expected.append(fake_logprobs(known, token_id, num_top))
        known.append(token_id)
    return expected


@pytest.mark.parametrize("num_blocks", [64, 12], ids=["alone", "preempted"])
async def test_each_token_has_its_log_probabilities(num_blocks: int, autojump_clock: MockClock) -> None:
    runner = FakeRunner(num_blocks, 4)
    async with open_fake_engine(num_blocks=num_blocks, runner=runner) as engine:
        others = [engine.submit(replace(ask(20), prompt=TextPrompt(f"prompt number {i}"))) for i in range(5)]
        deltas = await read(engine.submit(ask(20, num_logprobs=3)))
        assert told_in(deltas) == expected_logprobs(20, 3)
        assert bytes([entry.token_id for entry in told_in(deltas)]).decode() == text_of(deltas)
        for other in others:
            assert not told_in(await read(other))
        assert (engine.snapshot()["preemptions"] > 0) == (num_blocks == 12)


@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_as_many_likeliest_as_were_asked_for(num_top: int, autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        deltas = await read(engine.submit(ask(4, num_logprobs=num_top)))
        assert [len(entry.top) for entry in told_in(deltas)] == [num_top] * 4


async def test_log_probabilities_are_held_back_with_their_text(autojump_clock: MockClock) -> None:
    text = bytes(expected_output(PROMPT.encode(), 40)).decode()
    stop = text[11:14]
    end = text.index(stop)
    async with open_fake_engine() as engine:
        deltas = await read(engine.submit(ask(40, stop=(stop,), num_logprobs=1)))
        assert text_of(deltas) == text[:end]
        assert told_in(deltas) == expected_logprobs(end, 1)
        assert sum(len(delta.token_ids) for delta in deltas) == end + len(stop)
        # A beginning of a stop string that stays one is text in the end, and told of then.
        deltas = await read(engine.submit(ask(12, stop=(text[9:12] + "#",), num_logprobs=1)))
        assert text_of(deltas) == text[:12]
        assert told_in(deltas) == expected_logprobs(12, 1)
        shown = ""
        for delta, told in zip(deltas, [delta.logprobs for delta in deltas], strict=True):
            shown += delta.text
            assert bytes([entry.token_id for entry in told]).decode() == delta.text


async def test_a_reader_who_takes_all_at_once_is_told_the_same(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        request = ask(9, stop=("zz", "qq"), num_logprobs=2)
        pieces = await read(engine.submit(request))
        handle = engine.submit(request)
        await engine.wait_idle()
        (whole,) = await read(handle)
        assert len(pieces) > 1
        assert whole.logprobs == tuple(told_in(pieces))
        assert (whole.text, whole.finish_reason) == (text_of(pieces), pieces[-1].finish_reason)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 9


async def test_the_token_that_ends_an_answer_is_not_shown(autojump_clock: MockClock) -> None:
    output = expected_output(PROMPT.encode(), 30)
    last = output[6]
    count = output.index(last) + 1
    async with open_fake_engine() as engine:
        deltas = await read(engine.submit(ask(30, stop_token_ids=frozenset({last}), num_logprobs=0)))
        assert text_of(deltas) == bytes(output[: count - 1]).decode()
        assert [entry.token_id for entry in told_in(deltas)] == output[: count - 1]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == count
        # At the longest length it is text like any other.
        deltas = await read(engine.submit(ask(count, min_tokens=count, stop_token_ids=frozenset({last}))))
        assert text_of(deltas) == bytes(output[:count]).decode()
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_control_tokens_are_shown_to_whoever_asks(autojump_clock: MockClock) -> None:
    asked = SamplingParams(max_tokens=9, num_logprobs=0)
    for shows in (False, True):
        async with open_fake_engine(runner=ControlRunner(64, 4)) as engine:
            request = GenerationRequest("r", TextPrompt("x"), asked, skip_special_tokens=not shows)
            deltas = await read(engine.submit(request))
            assert text_of(deltas) == (f"a{CONTROL[257]}b" if shows else "ab")
            assert [entry.token_id for entry in told_in(deltas)] == ([97, 257, 98] if shows else [97, 98])
            assert deltas[-1].finish_reason is FinishReason.STOP


class ControlRunner(FakeRunner):
    """Answers a control token between two letters, and ends."""

    def _draw(self, row: object, known: list[int]) -> int:
        return [97, 257, 98, EOS][len(known) - 1]


@pytest.mark.parametrize("num_logprobs", [None, 0])
async def test_forced_tokens_cost_no_steps_of_their_own(num_logprobs: int | None, autojump_clock: MockClock) -> None:
    options = (b"the first of all answers", b"a second one")
    runner = FakeRunner(64, 4)
    async with open_fake_engine(num_blocks=64, runner=runner) as engine:
        deltas = await read(engine.submit(ask(100, constraint=OneOf(options), num_logprobs=num_logprobs)))
        answer = text_of(deltas).encode()
        assert answer in options
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == len(answer) + 1
        assert [i for delta in deltas for i in delta.token_ids] == [*answer, EOS]
        # Whoever wants log-probabilities pays a step for each token: what is forced has none.
        assert len(runner.batches) == (1 if num_logprobs is None else len(answer) + 1)
        assert len(told_in(deltas)) == (0 if num_logprobs is None else len(answer))


async def test_what_was_forced_is_read_like_a_prompt(autojump_clock: MockClock) -> None:
    """In the middle of an answer, in chunks, across a preemption: the tokens after it depend on every one of them."""
    options = tuple(" and then ".join(letters).encode() for letters in product("xy", repeat=6))
    expected = {}
    for num_blocks in (200, 20):
        runner = FakeRunner(num_blocks, 4)
        limits = fake_config(max_num_batched_tokens=10)
        async with open_fake_engine(limits, num_blocks=num_blocks, runner=runner) as engine:
            requests = {
                text: GenerationRequest(text, TextPrompt(text), SamplingParams(constraint=OneOf(options)))
                for text in ("one", "two", "three", "four", "five")
            }
            handles = {text: engine.submit(request) for text, request in requests.items()}
            for text, handle in handles.items():
                deltas = await read(handle)
                assert expected.setdefault(text, text_of(deltas)).encode() in options
                assert text_of(deltas) == expected[text]
            snapshot = engine.snapshot()
            assert (snapshot["preemptions"] > 0) == (num_blocks == 20)
            assert snapshot["kv"]["free"] + snapshot["kv"]["cached"] == num_blocks


async def test_max_tokens_cuts_what_is_forced(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        for max_tokens in range(1, 8):
            deltas = await read(engine.submit(ask(max_tokens, constraint=OneOf((b"abcdef",)))))
            assert text_of(deltas) == "abcdef"[:max_tokens]
            assert sum(len(delta.token_ids) for delta in deltas) == max_tokens
            assert deltas[-1].finish_reason is (FinishReason.STOP if max_tokens == 7 else FinishReason.LENGTH)
        assert engine.snapshot()["kv"]["used"] == 0


async def test_a_stop_string_within_forced_tokens_ends_the_answer_there(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        deltas = await read(engine.submit(ask(50, stop=("cd",), constraint=OneOf((b"abcdef",)))))
        assert text_of(deltas) == "ab"
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == 4


async def test_forced_tokens_fill_the_context_and_no_more(autojump_clock: MockClock) -> None:
    async with open_fake_engine(max_model_len=20) as engine:
        deltas = await read(engine.submit(ask(None, constraint=OneOf((b"a" * 50,)))))
        assert text_of(deltas) == "a" * (21 - len(PROMPT))
        assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_an_answer_that_is_complete_ends_before_min_tokens(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        for forces in (True, False):
            deltas = await read(engine.submit(ask(50, min_tokens=20, constraint=OneOf((b"short",), forces))))
            assert text_of(deltas) == "short"
            assert deltas[-1].finish_reason is FinishReason.STOP


async def test_a_constraint_that_fails_ends_its_request_alone(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        other = engine.submit(ask(20))
        deltas = await read(engine.submit(ask(20, constraint=OneOf(()))))
        assert deltas[-1].finish_reason is FinishReason.ERROR
        assert text_of(await read(other)) == bytes(expected_output(PROMPT.encode(), 20)).decode()


async def test_a_caller_who_leaves_amid_forced_tokens_leaves_nothing(autojump_clock: MockClock) -> None:
    async with open_fake_engine(fake_config(max_num_batched_tokens=4)) as engine:
        handle = engine.submit(ask(None, constraint=OneOf((b"a" * 60 + b"x", b"a" * 60 + b"y"))))
        first = await handle.take()
        assert first.text == "a" * 60
        handle.abort("client")
        await engine.wait_idle()
        kv = engine.snapshot()["kv"]
        assert kv["free"] + kv["cached"] == kv["total"]


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "b"), (2, "ban"), (4, "banan"), (5, "banan"), (6, "banana")])
@pytest.mark.parametrize("num_logprobs", [None, 0])
async def test_a_stop_token_of_the_callers_own_waits_for_min_tokens_under_a_constraint(
    min_tokens: int, text: str, num_logprobs: int | None, autojump_clock: MockClock
) -> None:
    """Though nothing else may be drawn in its place: behind it the answer goes on."""
    for forces in (True, False):
        fields = {"stop_token_ids": frozenset(b"a"), "constraint": OneOf((b"banana",), forces)}
        async with open_fake_engine() as engine:
            request = ask(50, min_tokens=min_tokens, num_logprobs=num_logprobs, **fields)
            deltas = await read(engine.submit(request))
        assert text_of(deltas) == text
        assert [token_id for delta in deltas for token_id in delta.token_ids][: len(text)] == list(text.encode())
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == len(text) + 1


async def test_a_bias_for_a_token_that_is_not_there_is_refused_by_name(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        for token_id in (-1, 259):
            with pytest.raises(InvalidRequestError, match=f"has token id {token_id},") as refused:
                await engine.submit(ask(logit_bias=((5, 1.0), (token_id, 1.0)))).accepted()
            assert refused.value.param == "logit_bias"


async def test_more_log_probabilities_than_are_told_are_refused_by_name(autojump_clock: MockClock) -> None:
    async with open_fake_engine() as engine:
        for number in (-1, MAX_LOGPROBS + 1):
            with pytest.raises(InvalidRequestError, match=f"of {number} tokens are asked for; .* 0 to 20") as refused:
                await engine.submit(ask(num_logprobs=number)).accepted()
            assert refused.value.param == "logprobs"


def test_forced_tokens_stand_in_the_order_in_which_they_follow() -> None:
    simulation = Simulation()
    sequence = simulation.add(4, 20, constraint=OneOf((b"abc1de", b"abc2de")))
    plain = simulation.add(4, 3)
    batch = simulation.scheduler.schedule(0.0)
    update = simulation.scheduler.update(batch, simulation.runner.execute(batch), 0.0)
    ids = [sequence.sequence_id] * 3
    assert update.tokens[:3] == list(zip(ids, b"abc", strict=True))
    assert [sequence_id for sequence_id, _ in update.tokens[3:]] == [plain.sequence_id]
    assert not update.logprobs
    following = simulation.scheduler.schedule(1.0)
    assert following.counts == (3, 1)
    assert following.decodes == (False, True)
    assert following.samples == (True, True)


AGAIN = b"a song, a song; " * 10


async def test_several_tokens_of_a_step_arrive_with_their_time(autojump_clock: MockClock) -> None:
    """The first of them ends the gap, the others have none; the text and the usage are those of an answer without."""
    config = fake_config(num_speculative_tokens=4, block_size=16)
    async with open_fake_engine(config, step_seconds=1.0, answer=lambda _: AGAIN) as engine:
        handle = engine.submit(ask(60))
        await handle.accepted()
        deltas = await read(handle)
        stats = engine.snapshot()
    assert text_of(deltas) == AGAIN[:60].decode()
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(AGAIN[:60])
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 60
    accepted, itl = stats["speculation"]["accepted_tokens"], stats["latency"]["itl"]
    assert accepted > 30
    assert (itl["count"], stats["step"]["count"]) == (59, 60 - accepted)
    # As many gaps as there were steps are a step long, the others nothing.
    assert (itl["p50"], itl["p99"]) == (0.0, 1.0)
    assert stats["latency"]["tpot"]["p50"] == pytest.approx((59 - accepted) / 59)


async def test_nothing_is_drafted_where_a_draft_could_change_a_token(autojump_clock: MockClock) -> None:
    """Where rounding depends on how full a step is; whatever is set, at the start or later."""
    config = fake_config(num_speculative_tokens=4)
    async with open_fake_engine(config, answer=lambda _: AGAIN, is_batch_invariant=False) as engine:
        for drafts in (4, 7):
            await engine.set_limits({"num_speculative_tokens": drafts})
            handle = engine.submit(ask(60))
            await handle.accepted()
            assert text_of(await read(handle)) == AGAIN[:60].decode()
        assert engine.snapshot()["speculation"]["draft_tokens"] == 0


@pytest.mark.parametrize("stop", ["song; a", "; ", "g, a song"])
async def test_a_stop_string_ends_within_what_was_accepted(autojump_clock: MockClock, stop: str) -> None:
    answers = []
    for drafts in (0, 7):
        async with open_fake_engine(fake_config(num_speculative_tokens=drafts), answer=lambda _: AGAIN) as engine:
            # Not before the song is known.
            handle = engine.submit(ask(100, stop=(stop,), min_tokens=50))
            await handle.accepted()
            deltas = await read(handle)
            while engine.num_running:
                await trio.sleep(0.01)
            assert bool(engine.snapshot()["speculation"]["accepted_tokens"]) == bool(drafts)
            assert engine.snapshot()["kv"]["used"] == 0
        last = deltas[-1]
        answers.append((text_of(deltas), last.finish_reason, last.usage and last.usage.completion_tokens))
    assert answers[0] == answers[1]
    assert answers[0][1] is FinishReason.STOP
    text = AGAIN.decode()
    assert answers[0][0] == text[: len(answers[0][0])]
