"""What a step pays for drawing its tokens: `python -m tests.bench.sampler`.

Sixteen rows over a vocabulary of 49,152. First the native kernels beside torch, then plain sampling beside the same
rows with something asked for; always in turn, so that all see the same machine. Microseconds of processor time of the
one thread that computes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median, quantiles
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from engine.drawing import Extras, draw
from engine.models.native_llama import NativeLlama
from engine.sampler import SamplingRows, sample, sample_rows
from engine.sequence import SamplingParams
from tests.fake_checkpoint import make_checkpoint, make_runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.constraint import ConstraintState
    from engine.sampler import SampleRows

NUM_ROWS, VOCAB_SIZE, ROUNDS = 16, 49_152, 50
PROMPT: Final = tuple(i * 37 % VOCAB_SIZE for i in range(200))
OUTPUT: Final = tuple(i * 91 % VOCAB_SIZE for i in range(100))
SHAPES: Final = {"peaked": 6.0, "flat": 0.5}  # spread of the logits
KINDS: Final = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_k 50, top_p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
}


class Everything:
    """A constraint that allows all: what remains is the cost of the mask itself."""

    def begin(self, _token_ids: tuple[int, ...]) -> ConstraintState:
        """The only state there is."""
        return self

    def allowed(self) -> bytes:
        """All bits set."""
        return b"\xff" * (VOCAB_SIZE // 8)

    def consume(self, _token_id: int) -> None:
        """Nothing changes."""

    def force(self) -> tuple[int, ...]:
        """Nothing must follow."""
        return ()


def make_step(params: SamplingParams, asked: SamplingParams, num_asking: int) -> Callable[[torch.Tensor], object]:
    """A step's draws; the first `num_asking` rows ask for more."""
    rows, extras = SamplingRows(NUM_ROWS, VOCAB_SIZE), {}
    for seat in range(NUM_ROWS):
        each = asked if seat < num_asking else params
        rows.set(seat, replace(each, seed=seat), len(PROMPT))
        if not each.is_plain:
            extras[seat] = Extras(each, PROMPT + OUTPUT, len(PROMPT), VOCAB_SIZE)
    seats, positions = np.arange(NUM_ROWS), np.full(NUM_ROWS, len(PROMPT) + len(OUTPUT))
    return lambda logits: draw(logits, rows, extras, seats, positions)


def plain(params: SamplingParams, choose: SampleRows = sample_rows) -> Callable[[torch.Tensor], object]:
    """`sample` alone: what there was before a row could ask for anything else."""
    rows = SamplingRows(NUM_ROWS, VOCAB_SIZE)
    for seat in range(NUM_ROWS):
        rows.set(seat, replace(params, seed=seat), len(PROMPT))
    seats, positions = np.arange(NUM_ROWS), np.full(NUM_ROWS, len(PROMPT) + len(OUTPUT))
    return lambda logits: sample(logits, rows, seats, positions, choose)


def measure(cases: dict[str, Callable[[torch.Tensor], object]], logits: torch.Tensor) -> dict[str, list[float]]:
    """Seconds of each case, all of them in turn."""
    scratch = torch.empty_like(logits)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, step in cases.items():
            scratch.copy_(logits)
            begin = time.thread_time()
            step(scratch)
            seconds[name].append(time.thread_time() - begin)
    return seconds


def compare(logits: torch.Tensor) -> None:
    """Print torch beside the native kernels, on one thread each."""
    model = make_runner(make_checkpoint(num_layers=1), dtype="auto").model
    if not isinstance(model, NativeLlama):
        print("no native kernels on this machine")
        return
    print(f"us a step of {NUM_ROWS} rows                  torch   native  ratio: median, quarters")
    for shape, spread in SHAPES.items():
        for name, params in KINDS.items():
            seconds = measure({"torch": plain(params), "native": plain(params, model.sample_rows)}, logits * spread)
            one, other = seconds["torch"], seconds["native"]
            low, middle, high = quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)
            times = f"{median(one) * 1e6:8.0f} {median(other) * 1e6:8.0f}"
            print(f"  {shape + ', ' + name:30} {times} {middle:6.1f} ({low:.1f} to {high:.1f})")


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    compare(logits)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95)):
        asked = {
            "penalties": replace(params, frequency_penalty=0.5, repetition_penalty=1.1),
            "logit_bias": replace(params, logit_bias=tuple((i, 1.0) for i in range(100))),
            "logprobs": replace(params, num_logprobs=0),
            "top_logprobs 20": replace(params, num_logprobs=20),
            "mask": replace(params, constraint=Everything()),
        }
        cases = {"sample() alone": plain(params), "nothing asked for": make_step(params, params, 0)}
        for name, each in asked.items():
            cases |= {f"{name}, 1 row": make_step(params, each, 1), f"{name}, 16 rows": make_step(params, each, 16)}
        seconds = measure(cases, logits * 6)
        base = seconds["sample() alone"]
        print(f"temperature {params.temperature}, top_p {params.top_p}: us a step of {NUM_ROWS} rows")
        for name, times in seconds.items():
            more = median(a - b for a, b in zip(times, base, strict=True))
            print(f"  {name:24} {median(times) * 1e6:8.0f}  {more * 1e6:+8.1f}")


if __name__ == "__main__":
    main()
