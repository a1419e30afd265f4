"""A random checkpoint in memory, and a table of seats that drives a runner by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.batch import ScheduledBatch, Seated, StepOutput
from engine.model_runner import ModelRunner
from engine.sequence import SamplingParams
from tests.tiny_models import make_config, make_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from engine.batch import TokenLogprobs
    from engine.loading.checkpoint import Checkpoint
    from engine.models.config import ModelConfig
    from engine.stepper import Runner

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class FakeCheckpoint:
    """Satisfies the protocol without a file; it has no text."""

    config: ModelConfig
    by_name: dict[str, torch.Tensor]
    name: str = "fake"
    is_quantized: bool = False
    weights_kind: str = "float32"
    matrix_kinds: tuple[str, ...] = ("float32",)
    tokenizer: Any = None
    chat_template: Any = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.by_name.items()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()


def make_checkpoint(*, seed: int = 0, **changes: Any) -> FakeCheckpoint:
    """A tiny random model; `changes` are fields of its `ModelConfig`."""
    config = make_config(**changes)
    weights = make_tensors(config, seed)
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.add_(1.0)
    return FakeCheckpoint(config, weights)


def make_runner(checkpoint: Checkpoint, *, num_blocks: int = 64, **changes: Any) -> ModelRunner:
    """A loaded runner with its cache. One thread: threads that wait for each other are slow on a busy machine."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": checkpoint.config.context_length,
        "block_size": 4,
    }
    options.update(changes)
    runner = ModelRunner(checkpoint, **options)
    runner.load()
    runner.allocate_cache(num_blocks)
    return runner


@dataclass
class Guest:
    """A sequence at the table."""

    token_ids: list[int]
    goal: int
    params: SamplingParams = GREEDY
    sequence_id: int = 0
    seat: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Table:
    """Seats guests and serves them in chunks of random sizes; block ids are handed out in random order."""

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        block_size: int,
        seats: int,
        chunks: tuple[int, ...],
        seed: int = 0,
    ) -> None:
        self.runner, self.block_size, self.chunks = runner, block_size, chunks
        self.random = random.Random(seed)
        self.free = list(range(num_blocks))
        self.random.shuffle(self.free)
        self.empty_seats = list(range(seats))
        self.guests: list[Guest] = []
        self.failures: dict[int, str] = {}
        self.step = self.next_id = 0

    def seat(self, prompt: list[int], num_tokens: int, params: SamplingParams = GREEDY) -> Guest:
        self.next_id += 1
        guest = Guest(list(prompt), len(prompt) + num_tokens, params, self.next_id, num_prompt_tokens=len(prompt))
        self.guests.append(guest)
        return guest

    def leave(self, guest: Guest) -> None:
        """Take the guest's seat and blocks away; its tokens stay, so it can be seated again."""
        self.free.extend(guest.blocks)
        if guest.seat >= 0:
            self.empty_seats.append(guest.seat)
        guest.blocks, guest.seat, guest.computed = [], -1, 0

    def run(self, *, preempt_share: float = 0.0) -> None:
        while any(self.serve(preempt_share=preempt_share)):
            pass

    def serve(self, *, preempt_share: float = 0.0) -> list[Guest]:
        """One step; gives the guests who took part."""
        for guest in self.guests:
            if guest.seat >= 0 and self.random.random() < preempt_share:
                self.leave(guest)
        self.step += 1
        served, columns, seated, new_blocks = [], [], [], []
        for guest in self.guests:
            if len(guest.token_ids) >= guest.goal or (guest.seat < 0 and not self.empty_seats):
                continue
            if guest.seat < 0:
                guest.seat = self.empty_seats.pop(self.random.randrange(len(self.empty_seats)))
                seated.append(
                    Seated(guest.seat, guest.sequence_id, tuple(guest.token_ids), guest.num_prompt_tokens, guest.params)
                )
            left = len(guest.token_ids) - guest.computed
            count = min(left, self.random.choice(self.chunks))
            missing = -(-(guest.computed + count) // self.block_size) - len(guest.blocks)
            if missing > 0:
                fresh = [self.free.pop() for _ in range(missing)]
                guest.blocks.extend(fresh)
                new_blocks.append((guest.seat, tuple(fresh)))
            served.append(guest)
            columns.append((guest.seat, guest.sequence_id, guest.computed, count, count == left))
        if served:
            seats, ids, starts, counts, samples = zip(*columns, strict=True)
            batch = ScheduledBatch(
                self.step, seats, ids, starts, counts, samples, seated=tuple(seated), new_blocks=tuple(new_blocks)
            )
            self._apply(served, batch, self.runner.execute(batch))
        return served

    def _apply(self, served: list[Guest], batch: ScheduledBatch, output: StepOutput) -> None:
        assert output.step == batch.step
        for row, guest in enumerate(served):
            guest.computed += batch.counts[row]
            if row in output.failures:
                assert output.token_ids[row] == -1
                self.failures[guest.sequence_id] = output.failures[row]
                guest.goal = len(guest.token_ids)
            elif batch.samples[row]:
                guest.token_ids.extend((output.token_ids[row], *output.forced.get(row, ())))
                guest.logprobs.extend([output.logprobs[row]] if row in output.logprobs else [])
            else:
                assert output.token_ids[row] == -1
            if len(guest.token_ids) >= guest.goal:
                self.leave(guest)
