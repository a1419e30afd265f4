"""The whole engine over a tiny model whose every step goes through the Triton kernels, on a device that computes late
and replays graphs; to be started with TRITON_INTERPRET=1. What it answers is held against the same engine over the same
model, computed by torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import trio

from engine.gpu.runner import Sizes
from engine.gpu.startup import everything, try_requests, warm_up
from engine.grammar.spec import schema_spec
from engine.handle import GenerationRequest, TokensPrompt
from engine.sequence import SamplingParams
from tests.engine.interpreted_crowd import check_mailbox, check_noise
from tests.engine.interpreted_float8 import check_float8
from tests.engine.tiny_engine import CONTEXT, Answer, answer_all, bias, open_tiny_engine
from tests.fake_checkpoint import make_checkpoint, make_runner
from tests.gpu_runner import make_gpu_runner
from tests.late_device import LateDevice, LateRunner
from tests.quick_interpreter import stay_dressed

if TYPE_CHECKING:
    from engine.stepper import Runner

NUM_BLOCKS = 10  # of four tokens: too few for all, so that some lose their seats
FEW_BLOCKS = 8
SEATS = 5
TELLING = (2, 4)  # of the requests
CAPACITY = 6  # steps of three rows and of five are padded
SILENT = (9, 45)
TIME_LIMIT_SECONDS = 570  # for all; whoever starts this waits for longer


def make_late_runner(
    num_blocks: int, capacity: int, *, is_slow: bool, cache_dtype: torch.dtype = torch.float32
) -> LateRunner:
    sizes = Sizes(max_num_seqs=capacity, max_num_batched_tokens=256, max_model_len=CONTEXT, block_size=4)
    kind = partial(LateRunner, LateDevice(is_slow=is_slow))
    return make_gpu_runner(kind, sizes, num_blocks, cache_dtype=cache_dtype, silent_ids=SILENT)


def request(number: int, length: int, max_tokens: int, **params: Any) -> GenerationRequest:
    """A prompt of its own, read greedily."""
    prompt = TokensPrompt(tuple((3 + number * 7 + place * place) % 200 for place in range(length)))
    return GenerationRequest(f"r{number}", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, **params))


def requests() -> list[GenerationRequest]:
    """Short and long, with everything that can be asked for; the constrained one ends by itself."""
    shape = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    constrained = request(9, 6, 24, logit_bias=bias(), frequency_penalty=0.5)  # counts what follows without a draw too
    return [
        request(0, 3, 9),
        request(1, 18, 8),
        request(2, 1, 8, num_logprobs=3),
        request(3, 8, 6, repetition_penalty=1.4),
        request(4, 13, 6, frequency_penalty=0.9, presence_penalty=0.4, num_logprobs=0),
        request(5, 8, 4, logit_bias=((11, 60.0), (12, 59.0))),
        request(6, 9, 8, stop_token_ids=frozenset(range(3, 200, 2)), end_token_ids=frozenset({3}), min_tokens=6),
        request(7, 26, 3),
        replace(constrained, grammar=replace(schema_spec(shape, "x"), plain=True)),
    ]


async def answers_of(runner: Runner) -> tuple[list[Answer], int]:
    """All at once, in a pool that is too small for them."""
    async with open_tiny_engine(
        num_blocks=NUM_BLOCKS, runner=runner, max_num_seqs=SEATS, max_num_batched_tokens=24, capacity_num_seqs=CAPACITY,
        num_speculative_tokens=0,
    ) as engine:  # fmt: skip
        answers = await answer_all(engine, requests())
        return answers, engine.snapshot()["preemptions"]


def check_logprobs(one: Answer, other: Answer) -> None:
    """What an answer tells of its tokens, by graphs, and read when the next step is launched already."""
    for expected, found in zip(one.logprobs, other.logprobs, strict=True):
        ids, values = zip((expected.token_id, expected.logprob), *expected.top, strict=True)
        assert ids == (found.token_id, *[token_id for token_id, _ in found.top])
        assert [found.logprob, *[value for _, value in found.top]] == pytest.approx(values, abs=1e-4)


async def check_answers(runner: LateRunner) -> int:
    """The same tokens and endings, made ready as at a start; gives the number of answers."""
    plain = make_runner(make_checkpoint(context_length=CONTEXT), num_blocks=NUM_BLOCKS, silent_ids=SILENT)
    expected, before = await answers_of(plain)
    warm_up(runner, SEATS, 2)
    try_requests(runner, 16, 4, everything(runner.config.vocab_size))
    runner.capture()
    found, after = await answers_of(runner)
    for one, other in zip(expected, found, strict=True):
        assert one == other, f"{one} became {other}"
        check_logprobs(one, other)
    assert before, "nobody lost a seat"
    assert after, "nobody lost a seat"
    assert set(json.loads(found[-1].text)) == {"ok"}
    assert [len(answer.logprobs) for answer in found] == [
        len(answer.token_ids) if number in TELLING else 0 for number, answer in enumerate(found)
    ]
    assert runner.late.replays, "no step was a graph"
    return len(found)


async def check_fixed_batches() -> int:
    """Batches that are padded, with no more seats on the device than they fill; gives the number of answers."""
    seats = 3
    asked = [request(number, length, 4 + number) for number, length in enumerate((3, 12, 7))]
    found = []
    plain = make_runner(make_checkpoint(context_length=CONTEXT), num_blocks=200, silent_ids=SILENT)
    for runner in (plain, make_late_runner(200, seats, is_slow=False)):
        async with open_tiny_engine(
            num_blocks=200, runner=runner, policy="static", max_num_seqs=seats, capacity_num_seqs=seats,
            num_speculative_tokens=0,
        ) as engine:  # fmt: skip
            found.append(await answer_all(engine, asked))
            assert engine.snapshot()["useful_row_share"] < 1, "nothing was padded"
    assert found[0] == found[1], f"{found[0]} became {found[1]}"
    return len(asked)


async def main() -> None:
    """Everything, one after the other."""
    print(f"{check_mailbox()} sends arrive")
    runner = make_late_runner(NUM_BLOCKS, CAPACITY, is_slow=True)
    with trio.fail_after(TIME_LIMIT_SECONDS):
        print(f"{await check_answers(runner)} answers agree, {await check_fixed_batches()} in fixed batches")
        runner.late.is_slow = False
        print(f"{await check_noise(runner, FEW_BLOCKS, SILENT)} answers in a crowd are those alone")
        runner = make_late_runner(NUM_BLOCKS, CAPACITY, is_slow=True, cache_dtype=torch.float8_e4m3fn)
        print(f"{await check_float8(runner, NUM_BLOCKS, SILENT)} tokens are likeliest over eight-bit floats")


if __name__ == "__main__":
    stay_dressed()
    trio.run(main)
