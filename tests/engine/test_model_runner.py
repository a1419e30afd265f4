"""The runner: persistent rows, mixed batches, and rows that fail alone."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine.batch import Padding, ScheduledBatch, Seated
from engine.sequence import SamplingParams
from tests.fake_checkpoint import GREEDY, FakeCheckpoint, Table, make_checkpoint, make_runner
from tests.fakes import VOCAB_SIZE, OneOf

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNKS = (1, 2, 3, 5, 11, 64)
OPTIONS = tuple(b"%c and %c, then a long rest of it" % (a, b) for a in b"xyz" for b in b"pqr")


@pytest.fixture(scope="module")
def tiny() -> FakeCheckpoint:
    return make_checkpoint()


def prompts_of(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(source.randint(1, 60))] for _ in range(count)]


def params_of(index: int) -> SamplingParams:
    if index % 3 == 0:
        return GREEDY
    return SamplingParams(temperature=0.8, top_p=0.9 if index % 2 else 1.0, top_k=20 * (index % 4), seed=index)


def alone(checkpoint: FakeCheckpoint, prompt: list[int], num_tokens: int, params: SamplingParams) -> list[int]:
    table = Table(make_runner(checkpoint), num_blocks=64, block_size=4, seats=16, chunks=(64,))
    guest = table.seat(prompt, num_tokens, params)
    table.run()
    return guest.output


@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_in_random_chunks_changes_no_token(tiny: FakeCheckpoint, seed: int) -> None:
    runner = make_runner(tiny, num_blocks=512)
    table = Table(runner, num_blocks=512, block_size=4, seats=5 + seed, chunks=CHUNKS, seed=seed)
    prompts = prompts_of(14, tiny.config.vocab_size, seed)
    guests = [table.seat(prompt, 3 + i, params_of(i)) for i, prompt in enumerate(prompts)]
    table.run(preempt_share=0.05 * (seed % 2))
    for i, (guest, prompt) in enumerate(zip(guests, prompts, strict=True)):
        assert guest.output == alone(tiny, prompt, 3 + i, params_of(i))


def asking_params_of(index: int) -> SamplingParams:
    """Every kind of wish, and rows without any between them."""
    wishes: dict[str, object] = [
        {},
        {"num_logprobs": 3},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5},
        {"repetition_penalty": 1.5, "num_logprobs": 0},
        {"logit_bias": ((7, 4.0), (11, -100.0), (10**6, 1.0))},
        {"constraint": OneOf(OPTIONS)},
        {"constraint": OneOf(OPTIONS, forces=False), "presence_penalty": 1.0},
    ][index % 7]
    return replace(params_of(index), **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_what_a_row_asks_for_is_the_same_in_a_crowd_and_after_preemptions(seed: int) -> None:
    checkpoint = make_checkpoint(vocab_size=VOCAB_SIZE + 5)
    runner = make_runner(checkpoint, num_blocks=512)
    table = Table(runner, num_blocks=512, block_size=4, seats=6, chunks=CHUNKS, seed=seed)
    prompts = prompts_of(14, checkpoint.config.vocab_size, seed)
    guests = [table.seat(prompt, 12, asking_params_of(i)) for i, prompt in enumerate(prompts)]
    table.run(preempt_share=0.1)
    assert not table.failures
    for i, (guest, prompt) in enumerate(zip(guests, prompts, strict=True)):
        lonely = Table(make_runner(checkpoint), num_blocks=64, block_size=4, seats=16, chunks=(64,))
        other = lonely.seat(prompt, 12, asking_params_of(i))
        lonely.run()
        assert guest.output == other.output
        assert [told.token_id for told in guest.logprobs] == [told.token_id for told in other.logprobs]
        for told, expected in zip(guest.logprobs, other.logprobs, strict=True):
            assert told.logprob == pytest.approx(expected.logprob, abs=1e-4)
        if i % 7 in (5, 6):
            assert any(bytes(guest.output[:12]) == option[:12] for option in OPTIONS)
        if i % 7 in (1, 3):
            assert [told.token_id for told in guest.logprobs] == guest.output


def test_the_chunk_size_changes_no_score(tiny: FakeCheckpoint) -> None:
    token_ids = prompts_of(1, tiny.config.vocab_size, 7)[0] * 3
    whole = make_runner(tiny, max_num_batched_tokens=128).score(token_ids[:120])
    for budget in (1, 7, 16):
        scores = make_runner(tiny, max_num_batched_tokens=budget).score(token_ids[:120])
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(whole), rtol=1e-4, atol=1e-5)


def test_the_answer_fills_the_context_to_the_last_token(tiny: FakeCheckpoint) -> None:
    runner = make_runner(tiny, max_model_len=20)
    table = Table(runner, num_blocks=5, block_size=4, seats=1, chunks=(64,))
    guest = table.seat([5] * 18, 3)
    table.run()
    assert len(guest.token_ids) == 21  # 20 are computed, the last one is only drawn


def test_a_step_without_rows_gives_nothing(tiny: FakeCheckpoint) -> None:
    output = make_runner(tiny).execute(ScheduledBatch(step=9))
    assert (output.step, output.token_ids, dict(output.failures)) == (9, (), {})


def test_a_batch_that_the_rows_do_not_know_is_an_error(tiny: FakeCheckpoint) -> None:
    runner = make_runner(tiny)
    seated = (Seated(0, 1, (5, 6), 2, GREEDY),)
    with pytest.raises(RuntimeError, match="do not match"):  # no block was given
        runner.execute(ScheduledBatch(1, (0,), (1,), (0,), (2,), (True,), seated=seated))
    with pytest.raises(RuntimeError, match="do not match"):  # another sequence sits there
        runner.execute(ScheduledBatch(1, (0,), (2,), (0,), (2,), (True,), new_blocks=((0, (0,)),)))


def test_stop_tokens_cannot_come_before_min_tokens(tiny: FakeCheckpoint) -> None:
    prompt = [5, 6, 7]
    free = alone(tiny, prompt, 8, GREEDY)
    barred = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=frozenset({free[0], 10**9}))
    output = alone(tiny, prompt, 8, barred)
    assert free[0] not in output[:4]


@pytest.mark.parametrize("position", [0, 2])
def test_a_row_that_is_not_a_number_fails_alone_and_leaves_nothing(position: int) -> None:
    broken_token = 9
    checkpoint = make_checkpoint(tie_word_embeddings=False)
    checkpoint.by_name["model.embed_tokens.weight"][broken_token] = float("nan")
    healthy_prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 1, 1, 2, 2, 3]]
    expected = [alone(checkpoint, prompt, 6, GREEDY) for prompt in healthy_prompts]
    assert all(broken_token not in output for output in expected)
    table = Table(make_runner(checkpoint, num_blocks=12), num_blocks=12, block_size=4, seats=4, chunks=(2, 64))
    prompt = [3, 3, 3, 3]
    prompt[position] = broken_token
    bad = table.seat(prompt, 5)
    guests = [table.seat(healthy, 6) for healthy in healthy_prompts]
    table.run()
    assert list(table.failures) == [bad.sequence_id]
    assert "not finite" in table.failures[bad.sequence_id]
    # Then others get the blocks of the one that failed.
    late = [table.seat(healthy, 6) for healthy in healthy_prompts]
    table.run()
    assert [guest.output for guest in guests + late] == expected * 2


def test_a_sequence_that_cannot_be_given_its_seat_fails_alone_and_leaves_nothing(tiny: FakeCheckpoint) -> None:
    nonsense = replace(GREEDY, logit_bias=(("no token", 1.0),))  # type: ignore[arg-type]
    table = Table(make_runner(tiny), num_blocks=64, block_size=4, seats=2, chunks=(2, 64))
    bad, good = table.seat([1, 2, 3, 4, 5], 4, nonsense), table.seat([5, 6, 7], 4)
    table.run()
    assert [*table.failures] == [bad.sequence_id]
    late = [table.seat([5, 6, 7], 4) for _ in range(2)]
    table.run()
    assert [guest.output for guest in (good, *late)] == [alone(tiny, [5, 6, 7], 4, GREEDY)] * 3


def scarce(allocate: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """There is memory for so many calls, and no more."""
    left = iter(range(calls))

    def allocates(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError("none is left")
        return allocate(*args, **kwargs)

    return allocates


def test_after_a_reset_nothing_is_left_of_what_a_step_wrote(
    tiny: FakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no memory for it the first time."""
    runner = make_runner(tiny, num_blocks=8)
    before = Table(runner, num_blocks=8, block_size=4, seats=4, chunks=(64,))
    before.seat([1, 2, 3, 4, 5, 6], 9)
    before.serve()
    with torch.inference_mode():
        for kv_cache in runner.kv_caches:
            kv_cache.fill_(float("nan"))
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", scarce(np.zeros, calls=1))
        with pytest.raises(MemoryError):
            runner.reset()
    runner.reset()
    table = Table(runner, num_blocks=8, block_size=4, seats=4, chunks=(3,))
    guests = [table.seat([7, 6, 5], 5), table.seat([1, 2, 3, 4], 5)]
    table.run()
    assert [guest.output for guest in guests] == [alone(tiny, p, 5, GREEDY) for p in ([7, 6, 5], [1, 2, 3, 4])]


def test_a_draw_that_fails_touches_nothing_in_the_cache(tiny: FakeCheckpoint) -> None:
    """Only what was computed can be broken; where a constraint allows nothing, the blocks are as good as before."""
    runner = make_runner(tiny)
    with torch.inference_mode():
        runner.kv_caches[0][1] = float("inf")  # of the row, but behind its tokens: read by nobody
    nothing = SamplingParams(temperature=0.0, constraint=OneOf(()))
    seated = (Seated(0, 1, (5, 6), 2, nothing),)
    new_blocks = ((0, (0, 1)),)
    output = runner.execute(ScheduledBatch(1, (0,), (1,), (0,), (2,), (True,), seated=seated, new_blocks=new_blocks))
    assert "may follow" in output.failures[0]
    assert runner.kv_caches[0][1].isinf().all()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=2.0, seed=1), replace(GREEDY, num_logprobs=5)])
def test_what_stands_for_nothing_is_never_drawn(tiny: FakeCheckpoint, params: SamplingParams) -> None:
    prompt = [5, 6, 7]
    free = alone(tiny, prompt, 12, params)
    barred = tuple(set(free))
    table = Table(make_runner(tiny, silent_ids=barred), num_blocks=64, block_size=4, seats=1, chunks=(64,))
    guest = table.seat(prompt, 12, params)
    table.run()
    assert len(guest.output) == 12
    assert not set(barred) & set(guest.output)
    assert not set(barred) & {token_id for told in guest.logprobs for token_id, _ in told.top}


def test_padding_reads_no_block_of_another_row() -> None:
    checkpoint = make_checkpoint(tie_word_embeddings=False)
    checkpoint.by_name["model.embed_tokens.weight"][9] = float("nan")
    prompts = [(9,), (6,), (1,) * 9]  # the last one pads the others
    output = make_runner(checkpoint).execute(
        ScheduledBatch(
            step=1,
            seats=(0, 1, 2),
            sequence_ids=(0, 1, 2),
            starts=(0, 0, 8),
            counts=(1, 1, 1),
            samples=(True, True, True),
            seated=tuple(Seated(i, i, prompt, len(prompt), GREEDY) for i, prompt in enumerate(prompts)),
            new_blocks=((0, (0,)), (1, (1,)), (2, (2, 3, 4))),
        )
    )
    assert list(output.failures) == [0]
    assert output.token_ids[1:2] == tuple(alone(checkpoint, [6], 1, GREEDY))


def test_bfloat16_is_close_to_float32(tiny: FakeCheckpoint) -> None:
    token_ids = prompts_of(1, tiny.config.vocab_size, 3)[0]
    exact = torch.tensor(make_runner(tiny).score(token_ids))
    for budget in (2, 64):  # few rows and many take different products
        runner = make_runner(tiny, dtype="bfloat16", max_num_batched_tokens=budget)
        assert runner.precision.cache_dtype.itemsize == 2
        torch.testing.assert_close(torch.tensor(runner.score(token_ids)), exact, rtol=0.05, atol=0.1)


class DeadEnd:
    """A constraint under which no token may come."""

    def begin(self, output: object) -> DeadEnd:
        return self

    def allowed(self) -> bytes:
        return bytes(1000)

    def consume(self, token_id: int) -> None:
        raise AssertionError("nothing was drawn")

    def force(self) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_seat_whose_request_was_given_no_token_can_be_padded_afterwards(tiny: FakeCheckpoint, dtype: str) -> None:
    runner = make_runner(tiny, dtype=dtype)
    stuck = replace(GREEDY, constraint=DeadEnd())
    first = ScheduledBatch(
        1, (0,), (1,), (0,), (6,), (True,), seated=(Seated(0, 1, (1,) * 6, 6, stuck),), new_blocks=((0, (0, 1)),)
    )
    assert list(runner.execute(first).failures) == [0]
    second = ScheduledBatch(
        step=2,
        seats=(0, 1),
        sequence_ids=(2, 3),
        starts=(0, 0),
        counts=(3, 10),
        samples=(True, True),
        seated=(Seated(0, 2, (7, 8, 9), 3, GREEDY), Seated(1, 3, tuple(range(10)), 10, GREEDY)),
        new_blocks=((0, (0,)), (1, (1, 2, 3))),
        padding=(Padding(0, 0, 7, samples=False),),
    )
    assert not runner.execute(second).failures


def test_warm_up_leaves_the_cache_untouched(tiny: FakeCheckpoint) -> None:
    prompt = [1, 2, 3]
    runner = make_runner(tiny)
    runner.warm_up()
    table = Table(runner, num_blocks=64, block_size=4, seats=2, chunks=(64,))
    guest = table.seat(prompt, 4)
    table.run()
    assert guest.output == alone(tiny, prompt, 4, GREEDY)


def test_the_cache_is_declared(tiny: FakeCheckpoint) -> None:
    runner = make_runner(tiny)
    (group,) = runner.cache_spec.groups
    assert (group.kind, group.layers, group.num_kv_heads, group.head_size) == ("full", (0, 1), 2, 16)
    assert runner.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_loaded_model_lets_go_of_its_file(dtype: str) -> None:
    checkpoint = make_checkpoint()
    held = weakref.ref(checkpoint)
    runner = make_runner(checkpoint, dtype=dtype)
    del checkpoint
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match="loaded already"):
        runner.load()
