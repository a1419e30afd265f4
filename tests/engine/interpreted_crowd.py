"""Answers under noise in a crowd on a late device, where some leave and a failed step has all begin anew, against what
each would be alone; and what a mailbox keeps of a copy that has not been fetched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import trio

from engine.gpu.columns import Columns
from engine.gpu.mailbox import MAX_CHANGES, Mailbox
from engine.handle import GenerationRequest, TokensPrompt
from engine.models.llama import LlamaModel, ModelInputs
from engine.sampler import noise_key
from engine.sequence import FinishReason, SamplingParams
from kernels.draws import SamplingColumns
from kernels.paged_attention import AttentionRows
from kernels.reference_sampling import sample
from tests.engine.tiny_engine import CONTEXT, Answer, open_tiny_engine, read_answer
from tests.fake_checkpoint import make_checkpoint
from tests.fakes import read_deltas
from tests.late_device import LateDevice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.engine import Engine
    from tests.late_device import LateRunner

SEATS, BLOCK_SIZE = 5, 4
# Of the decode steps the one that fails, when the crowd is at its thickest.
FAILING = 8
LONGEST = 64


def ask(number: int, length: int, max_tokens: int, **params: Any) -> GenerationRequest:
    prompt = TokensPrompt(tuple((11 + number * 5 + place * place) % 200 for place in range(length)))
    sampling = SamplingParams(max_tokens=max_tokens, seed=100 + number, **params)
    return GenerationRequest(f"r{number}", prompt, sampling, ignore_eos=True)


def requests() -> list[GenerationRequest]:
    """With every way to draw."""
    return [
        ask(0, 6, 8, temperature=1.0),
        ask(1, 14, 7, temperature=0.7, top_p=0.8),
        ask(2, 1, 9, temperature=1.3, top_k=20),
        ask(3, 8, 7, temperature=0.9, min_p=0.05),
        ask(4, 8, 7, temperature=2.0, top_p=0.95, top_k=40, min_p=0.01, choice_index=3),
        ask(5, 11, 5, temperature=0.0),
    ]


def alone(request: GenerationRequest, silent_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The answer as torch computes it, a token at a time and nothing kept, drawn by the plain version of the draws."""
    checkpoint, params = make_checkpoint(context_length=CONTEXT), request.params
    model = LlamaModel(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, max_model_len=LONGEST)
    columns = SamplingColumns(
        torch.tensor([params.temperature]),
        torch.tensor([params.top_k]),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
        torch.from_numpy(np.array([noise_key(params.seed, params.choice_index)]).view(np.int32)[None]),
    )
    assert isinstance(request.prompt, TokensPrompt)
    token_ids = list(request.prompt.token_ids)
    for _ in range(params.max_tokens or 0):
        logits = last_logits(model, token_ids).clone()
        logits[:, silent_ids] = -torch.inf
        drawn = sample(logits, columns, torch.zeros(1, dtype=torch.int32), torch.tensor([len(token_ids)]))
        token_ids.append(int(drawn))
    return tuple(token_ids[len(request.prompt.token_ids) :])


@torch.inference_mode()
def last_logits(model: LlamaModel, token_ids: list[int]) -> torch.Tensor:
    """[1, V] behind these."""
    config, count = model.config, len(token_ids)
    positions = torch.arange(count)
    block_ids = positions // BLOCK_SIZE
    tables = torch.arange(int(block_ids[-1]) + 1)[None]
    rows = AttentionRows(tables, torch.tensor([0, count]), torch.tensor([count]))
    shape = (tables.shape[1] + 1, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    caches = [torch.zeros(shape) for _ in range(config.num_layers)]
    inputs = ModelInputs(torch.tensor(token_ids), positions, block_ids, positions % BLOCK_SIZE, rows)
    return model.logits(model.forward(inputs, caches)[-1:])


async def leave_early(engine: Engine, request: GenerationRequest, num_tokens: int) -> None:
    """Read so many tokens and go."""
    handle = engine.submit(request)
    seen = 0
    async for delta in read_deltas(handle):
        seen += len(delta.token_ids)
        if seen >= num_tokens:
            handle.abort("client")


async def check_noise(runner: LateRunner, num_blocks: int, silent_ids: tuple[int, ...]) -> int:
    """All at once, and two who leave; gives the number of answers that are right."""
    runner.reset()
    late, answers = runner.late, dict[int, Answer]()
    first = late.replays

    def fail(replays: int) -> None:
        if replays == first + FAILING:
            raise RuntimeError("a step fails")

    late.before_replay = fail
    asked = requests()
    async with open_tiny_engine(
        num_blocks=num_blocks, runner=runner, max_num_seqs=SEATS, max_num_batched_tokens=16,
        capacity_num_seqs=runner.sizes.max_num_seqs, num_speculative_tokens=0,
    ) as engine:  # fmt: skip

        async def answer(index: int) -> None:
            answers[index] = await read_answer(engine.submit(asked[index]))

        async with trio.open_nursery() as nursery:
            for index, request in enumerate(asked):
                nursery.start_soon(answer, index)
                if index % 3 == 1:
                    # Long enough not to end by itself before its reader has seen enough.
                    params = replace(request.params, seed=index, max_tokens=20)
                    gone = replace(request, request_id=f"gone{index}", params=params)
                    nursery.start_soon(leave_early, engine, gone, 2 + index)
        await engine.wait_idle()
        told = engine.snapshot()
    assert told["faults"]["failed_steps"] == 1
    assert told["requests"]["finished_by_reason"]["abort"] == 2
    assert told["kv"]["free"] + told["kv"]["cached"] == told["kv"]["total"]
    for index, request in enumerate(asked):
        expected = Answer(answers[index].text, alone(request, silent_ids), FinishReason.LENGTH, None)
        assert answers[index] == expected, f"{request.request_id}: {answers[index]} and alone {expected}"
    return len(asked)


class SmallBox(Mailbox):
    """Notes how many numbers it takes to the device in copies of their own."""

    brought: list[int]

    def bring(self, *arrays: NDArray[np.generic]) -> list[torch.Tensor]:
        self.brought = [*getattr(self, "brought", ()), sum(array.size for array in arrays)]
        return super().bring(*arrays)


def check_mailbox() -> int:
    """Sends that nobody waits for, to a device that has fetched none of them yet; gives their number.

    The third has more changes than travel with the columns, in many parts.
    """
    late, num_rows, count, many = LateDevice(is_slow=True), 3, 7, 2 * MAX_CHANGES + 5
    box = SmallBox(num_rows, torch.device("cpu"), late.make_event)
    state = torch.zeros(count + many, dtype=torch.int32)
    arrived = []
    for number in range(count):
        filled = [np.full(num_rows, number + column, np.int32) for column in range(len(Columns._fields))]
        with late.noting(), torch.inference_mode():
            places = np.array([number], np.int32)
            if number == 2:
                places = np.append(places, np.arange(count, count + many, dtype=np.int32))
            box.send(Columns(*filled), places, -places, state)
            arrived.append([box.column(name, num_rows).clone() for name in Columns._fields])
    late.wait()
    for number, columns in enumerate(arrived):
        for index, column in enumerate(columns):
            assert column.tolist() == [number + index] * num_rows, f"send {number} came as {column.tolist()}"
    assert state.tolist() == [-number for number in range(count + many)]
    assert box.brought == [2 * MAX_CHANGES] * 2
    return count
