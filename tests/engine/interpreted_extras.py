"""What rows are told of log-probabilities on a device, whatever else they ask for, against what the processor tells; to
be started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from engine.gpu.runner import GpuRunner, Sizes
from engine.sequence import SamplingParams
from kernels.gpu.logprobs import drawn_logprobs
from tests.fake_checkpoint import Table, make_checkpoint, make_runner
from tests.gpu_runner import make_gpu_runner
from tests.quick_interpreter import stay_dressed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.batch import ScheduledBatch
    from engine.gpu.runner import GpuStep
    from engine.model_runner import ModelRunner
    from tests.fake_checkpoint import Guest

CONTEXT, NUM_BLOCKS = 128, 40
BLOCK_SIZE = 4
# Of rows that are told of, some are changed before the draw and some are not, in one batch.
ASKS: tuple[dict[str, Any], ...] = (
    {"num_logprobs": 20},
    {"num_logprobs": 0, "repetition_penalty": 1.5},
    {"num_logprobs": 3, "logit_bias": ((11, 50.0), (12, 49.0)), "frequency_penalty": 3.0},
    {"num_logprobs": 5, "min_tokens": 4, "stop_token_ids": frozenset(range(3, 200, 2))},
    {"logit_bias": ((13, 70.0),)},
    {"num_logprobs": 1},
)
LENGTHS = (3, 14, 7, 9, 5, 1)
NUM_TOKENS = 7


def serve(runner: GpuRunner | ModelRunner) -> list[Guest]:
    """Greedy answers to the same prompts; the last joins late."""
    table = Table(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, seats=5, chunks=(1, 3, 20), seed=4)
    guests = []
    for number, (length, asks) in enumerate(zip(LENGTHS, ASKS, strict=True)):
        prompt = [(5 + 11 * number + place * place) % 200 for place in range(length)]
        guests.append(table.seat(prompt, NUM_TOKENS, SamplingParams(temperature=0.0, **asks)))
    table.run()
    assert not table.failures
    return guests


@contextmanager
def no_copy_outlives_its_launch() -> Iterator[None]:
    """Of logits that are changed a copy is looked at once more: before a step is read the memory is another's."""
    copies: list[weakref.ref[torch.Tensor]] = []
    launch = GpuRunner.launch

    def look(logits: torch.Tensor, kept: torch.Tensor, *rest: Any) -> None:
        if kept is not logits:
            copies.append(weakref.ref(kept))
        drawn_logprobs(logits, kept, *rest)

    def launch_and_see(runner: GpuRunner, batch: ScheduledBatch) -> GpuStep:
        step = launch(runner, batch)
        assert not any(copy() is not None for copy in copies), "a step under way holds a copy of its logits"
        return step

    with patch("engine.gpu.step_extras.drawn_logprobs", look), patch.object(GpuRunner, "launch", launch_and_see):
        yield
    assert copies, "no logits were changed"


def check_logprobs() -> int:
    """Compare them all; gives the number of tokens that were told of."""
    plain, num_told = make_runner(make_checkpoint(context_length=CONTEXT), num_blocks=NUM_BLOCKS), 0
    with no_copy_outlives_its_launch():
        sizes = Sizes(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=CONTEXT, block_size=BLOCK_SIZE)
        # The device is the processor, which computes at once.
        others = serve(make_gpu_runner(GpuRunner, sizes, NUM_BLOCKS, device=torch.device("cpu")))
    for asks, one, other in zip(ASKS, serve(plain), others, strict=True):
        assert one.token_ids == other.token_ids, asks
        assert len(one.logprobs) == len(other.logprobs) == ("num_logprobs" in asks) * len(one.output), asks
        for expected, found in zip(one.logprobs, other.logprobs, strict=True):
            assert [token_id for token_id, _ in expected.top] == [token_id for token_id, _ in found.top], asks
            values = [expected.logprob, *[value for _, value in expected.top]]
            assert [found.logprob, *[value for _, value in found.top]] == pytest.approx(values, abs=1e-4), asks
            num_told += 1
    return num_told


if __name__ == "__main__":
    stay_dressed()
    print(f"{check_logprobs()} log-probabilities agree")
