"""Cases of what is done with logits: draws, penalties and biases, masks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kernels import reference_sampling
from kernels.bench.cases import TOLERANCE, Case, Work, assert_close
from kernels.draws import MOST, WIDTH, Biased, Biases, Logprobs, Penalized, SamplingColumns
from kernels.gpu.logits import add_biases, apply_token_mask, count_tokens, penalize
from kernels.gpu.logprobs import drawn_logprobs, top_logprobs
from kernels.gpu.sampling import make_scratch, sample

if TYPE_CHECKING:
    from collections.abc import Callable

# (temperature, top_k, top_p, min_p) of rows in turn.
PLAIN = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0))
FILTERED = ((0.7, 0, 0.95, 0.0), (1.0, 40, 1.0, 0.0), (0.0, 5, 0.5, 0.0), (0.8, 20, 0.9, 0.0), (1.2, 0, 0.9, 0.05))
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
NAMES = dict(zip(ROUNDED, ("fp32", "bf16", "fp16"), strict=True))
ODD = (*PLAIN, *FILTERED, (1e-9, 0, 1.0, 0.0), (1.0, 3, 0.5, 0.0), (2.0, 0, 1e-6, 0.0), (1.0, 1000, 0.9999, 1.0))


def make_columns(kinds: tuple[tuple[float, int, float, float], ...], device: torch.device) -> SamplingColumns:
    """A seat of each of these kinds."""
    temperature, top_k, top_p, min_p = zip(*kinds, strict=True)
    keys = torch.arange(2 * len(kinds), dtype=torch.int32).view(-1, 2) * 0x3C6EF372 - 5
    columns = (
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        keys,
    )
    return SamplingColumns(*[column.to(device) for column in columns])


def make_draw(
    kinds: tuple[tuple[float, int, float, float], ...],
    num_rows: int,
    vocab_size: int,
    rounded: torch.dtype,
    device: torch.device,
) -> Work:
    """Draws of rows of these kinds in turn; of the logits some are equal, some -inf, and a row or two are broken.

    They are float32 numbers that were rounded to another dtype.
    """
    generator = torch.Generator().manual_seed(vocab_size) if device.type == "cpu" else None
    logits = torch.randn((num_rows, vocab_size), generator=generator, device=device) * 3
    logits = logits.to(rounded).float()
    if device.type == "cpu" and num_rows:
        logits[::3] = logits[::3].round()
        logits[:, ::7] = float("-inf")
        logits[num_rows // 2] = float("-inf")
        logits[num_rows // 3, -1] = float("nan")
        logits[num_rows // 4, 0] = float("inf")
    seats = torch.arange(num_rows - 1, -1, -1, dtype=torch.int32, device=device) % len(kinds)
    positions = torch.arange(5, num_rows + 5, dtype=torch.int32, device=device)
    columns, scratch = make_columns(kinds, device), make_scratch(num_rows, vocab_size, device)
    out = torch.full((num_rows,), -7, dtype=torch.int32, device=device)
    run = partial(sample, logits, columns, seats, positions, filtered=kinds is not PLAIN, scratch=scratch, out=out)

    def check() -> None:
        expected = reference_sampling.sample(logits, columns, seats, positions)
        differs = run() != expected
        # The compiler's logarithm may differ by its last bit from the processor's.
        allowed = 0 if device.type == "cpu" else num_rows // 100
        if int(differs.sum()) > allowed:
            raise AssertionError(f"rows {differs.nonzero().flatten().tolist()} drew {run()[differs].tolist()}")

    return Work(run, check, logits.nbytes)


def make_mask(num_masks: int, num_rows: int, vocab_size: int, device: torch.device) -> Work:
    """Masks for the last rows, in the opposite order."""
    logits = torch.randn((num_rows, vocab_size), device=device)
    words = (num_masks, -(-vocab_size // 32))
    masks = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device=device)
    rows = torch.arange(num_rows - 1, num_rows - 1 - num_masks, -1, dtype=torch.int32, device=device)
    run = partial(apply_token_mask, logits, masks, rows)
    check = partial(_check_in_place, run, partial(reference_sampling.apply_token_mask, masks=masks, rows=rows), logits)
    return Work(run, check, masks.nbytes + num_masks * vocab_size * logits.itemsize // 2)


def make_biases(num_seats: int, most: int, vocab_size: int, device: torch.device) -> Work:
    """A row of each seat, in the opposite order, with up to so many tokens; stop tokens may not come in every other."""
    logits = torch.randn((num_seats, vocab_size), device=device)
    seats = torch.arange(num_seats, dtype=torch.int32)
    lengths = 43 * seats % (most + 1)
    starts = torch.cat((seats[:1], lengths)).cumsum(0, dtype=torch.int32)
    lines = torch.arange(int(starts[-1]), dtype=torch.int32)
    token_ids = 7 * (lines - starts[:-1].repeat_interleave(lengths)) % vocab_size
    values = torch.where(lines % 3 == 0, float("-inf"), lines / len(lines))
    early_values = torch.where(lines % 5 == 0, float("-inf"), values)
    biases = Biases(*[column.to(device) for column in (starts, token_ids, values, early_values)])
    biased = Biased(*[column.to(device) for column in (seats.flip(0), seats, seats % 2)])
    run = partial(add_biases, logits, biases, biased)
    plain = partial(reference_sampling.add_biases, biases=biases, lines=biased)
    return Work(run, partial(_check_in_place, run, plain, logits), len(lines) * (3 * 4 + 2 * 32))


def make_penalties(num_lines: int, context: int, most: int, vocab_size: int, device: torch.device) -> Work:
    """Rows with a prompt and an answer of several lengths, in which many tokens come more than once.

    Args:
        most: the last tokens of each, which are not counted yet.
    """
    logits = torch.randn((num_lines + 1, vocab_size), device=device)
    token_ids = torch.randint(0, max(1, vocab_size // 2), (num_lines + 1, context), dtype=torch.int32, device=device)
    lines = torch.arange(num_lines, dtype=torch.int32, device=device)
    penalties = torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.5, 0.25], [0.8, -0.5, 1.0]], device=device)
    penalized = Penalized(
        num_lines - lines,
        lines,
        lines * context // (2 * num_lines),
        (context - lines - most).clamp(min=0),
        context - lines,
        penalties[lines.long() % 3].contiguous(),
    )
    counts = torch.zeros((num_lines + 1, vocab_size), dtype=torch.int32, device=device)

    def run() -> None:
        count_tokens(counts, token_ids, penalized, most=most, anew=context - num_lines < most)
        penalize(logits, counts, penalized)

    def check() -> None:
        counted = penalized.num_counted
        reference_sampling.count_tokens(
            counts, token_ids, penalized._replace(num_counted=torch.zeros_like(counted), num_tokens=counted)
        )
        counts[lines[counted == 0].long()] = -7  # another's
        expected, expected_counts = logits.clone(), counts.clone()
        reference_sampling.count_tokens(expected_counts, token_ids, penalized)
        reference_sampling.penalize(expected, expected_counts, penalized)
        run()
        torch.testing.assert_close(counts, expected_counts, rtol=0.0, atol=0.0)
        assert_close(logits, expected, TOLERANCE[torch.float32])

    return Work(run, check, num_lines * 4 * (most + vocab_size))


def make_top(num_lines: int, num_rows: int, vocab_size: int, num_top: int, device: torch.device) -> Work:
    """The last rows, in the opposite order; bfloat16's steps make many logits equal, some are -inf, one row is all."""
    logits = torch.randn((num_rows, vocab_size), device=device).mul_(3).bfloat16().float()
    if device.type == "cpu":
        logits[:, ::7] = float("-inf")
        logits[0] = float("-inf")
        logits[::2, 0] = 2.0
    rows = torch.arange(num_rows - 1, num_rows - 1 - num_lines, -1, dtype=torch.int32, device=device)
    drawn = torch.arange(num_rows, dtype=torch.int32, device=device) % vocab_size - 1
    kept, places = logits[:2] - 1.0, torch.arange(num_lines, dtype=torch.int32, device=device).clamp(max=2) - 1
    buffers = torch.full((2, num_lines, WIDTH), -7, dtype=torch.int32, device=device)
    found, expected = Logprobs.of(buffers[0]), Logprobs.of(buffers[1])

    def run() -> None:
        top_logprobs(logits, rows, num_top, found)
        drawn_logprobs(logits, kept, places, rows, drawn, found)

    def check() -> None:
        run()
        reference_sampling.top_logprobs(logits, rows, num_top, expected)
        reference_sampling.drawn_logprobs(logits, kept, places, rows, drawn, expected)
        torch.testing.assert_close(found.token_ids, expected.token_ids, rtol=0.0, atol=0.0)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, TOLERANCE[torch.float32])

    return Work(run, check, num_lines * vocab_size * logits.itemsize)


def _check_in_place(run: Callable[[], object], plain: Callable[[torch.Tensor], None], logits: torch.Tensor) -> None:
    expected = logits.clone()
    plain(expected)
    run()
    assert_close(logits, expected, TOLERANCE[torch.float32])


def main_cases() -> list[Case]:
    """Vocabularies of Llama 3 and Qwen 3, with few rows and with many."""
    cases = []
    for num_rows, vocab_size in ((256, 151_936), (16, 151_936), (1, 128_256)):
        shape = f"{num_rows} × {vocab_size}"
        for rounded in (torch.float32, torch.bfloat16):
            for name, kinds in (("greedy and plain", PLAIN), ("top-k, top-p, min-p", FILTERED)):
                make = partial(make_draw, kinds, num_rows, vocab_size, rounded)
                cases.append(Case("sample", f"{shape}, {name}, {NAMES[rounded]}", make))
    cases.append(Case("apply_token_mask", "64 of 256 × 151936", partial(make_mask, 64, 256, 151_936)))
    cases.append(Case("add_biases", "up to 128 of 256 × 151936", partial(make_biases, 256, 128, 151_936)))
    for most in (1, 4096):
        make = partial(make_penalties, 256, 4096, most, 151_936)
        cases.append(Case("penalize", f"256 × 4096 tokens of 151936, {most} of them new", make))
    cases.append(Case("top_logprobs", "20 of 256 × 151936", partial(make_top, 256, 256, 151_936, MOST)))
    return cases


def small_cases() -> list[Case]:
    """One token, less than a block, more than a segment."""
    cases = [
        Case("sample", f"{rows} × {vocab}, {len(kinds)} kinds, {NAMES[rounded]}", partial(make, rounded))
        for kinds, rows, vocab in ((PLAIN, 3, 1), (ODD, 11, 77), (PLAIN, 5, 9001), (FILTERED, 5, 8193), (ODD, 0, 5))
        for make in [partial(make_draw, kinds, rows, vocab)]
        for rounded in (ROUNDED if vocab == 77 else ROUNDED[:1])
    ]
    cases.append(Case("apply_token_mask", "2 of 3 × 1077", partial(make_mask, 2, 3, 1077)))
    cases.append(Case("add_biases", "up to 300 of 7 × 500", partial(make_biases, 7, 300, 500)))
    for context, most, vocab in ((150, 150, 40), (50, 45, 1100), (50, 1, 40)):
        make = partial(make_penalties, 3, context, most, vocab)
        cases.append(Case("penalize", f"3 × {context} tokens of {vocab}, {most} of them new", make))
    for lines, rows, vocab, top in ((3, 4, 4099, 20), (4, 4, 5, 20), (2, 2, 9000, 1), (1, 3, 70, 5), (2, 2, 100, 0)):
        case = partial(make_top, lines, rows, vocab, top)
        cases.append(Case("top_logprobs", f"{top} of {lines} × {vocab}", case))
    return cases
