"""What the lengths alone allow, and how long a run of them should take. Nothing here is measured."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompt and answer of each request, in the order in which they come."""

    prompts: Sequence[int]
    answers: Sequence[int]

    def __len__(self) -> int:
        return len(self.answers)

    def first(self, num_requests: int) -> Lengths:
        """The first of them alone."""
        return Lengths(self.prompts[:num_requests], self.answers[:num_requests])


@dataclass(frozen=True, slots=True)
class Bound:
    """How many times as fast continuous batching can be, from the lengths alone.

    Attributes:
        continuous_over_static: the longest answer of a batch over the mean answer, whole batches in the order of
            arrival: in steps, every seat always taken, prompts free.
        continuous_over_static_with_tail: the same, but at the end seats stay empty for want of successors.
        padded_prompts: the longest prompt of a whole batch over the mean prompt: what padding multiplies reading by.
        continuous_over_static_with_prompts: in steps, with prompts read and padded under the token budget.
    """

    continuous_over_static: float
    continuous_over_static_with_tail: float
    padded_prompts: float
    continuous_over_static_with_prompts: float


def bound_of(lengths: Lengths, *, seats: int, token_budget: int) -> Bound:
    """What these requests allow at so many seats and tokens a step."""
    longest_answers = [max(batch) for batch in _batches(lengths.answers, seats)]
    longest_prompts = [max(batch) for batch in _batches(lengths.prompts, seats)]
    sizes = [len(batch) for batch in _batches(lengths.answers, seats)]
    total_answers, total_prompts = sum(lengths.answers), sum(lengths.prompts)
    # An answer's first token comes with the last of its prompt, so it costs no token of its own.
    fixed_steps = sum(
        -(-size * prompt // token_budget) + answer - 1
        for size, prompt, answer in zip(sizes, longest_prompts, longest_answers, strict=True)
    )
    tokens = total_prompts + total_answers - len(lengths)
    least_steps = max(tokens / token_budget, total_answers / seats)
    # The last batch may be of a few only; where there is a whole one it must not weigh as much as one.
    num_batches = max(1, len(lengths) // seats)
    whole = lengths.first(num_batches * seats)
    return Bound(
        continuous_over_static=fmean(longest_answers[:num_batches]) / fmean(whole.answers),
        continuous_over_static_with_tail=sum(longest_answers) / _steps_with_handover(lengths.answers, seats),
        padded_prompts=fmean(longest_prompts[:num_batches]) / fmean(whole.prompts),
        continuous_over_static_with_prompts=fixed_steps / least_steps,
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for a token of a prompt, and for a step in which every seat writes a token."""

    prompt_token: float
    step: float


def expected_seconds(policy: str, lengths: Lengths, costs: Costs, *, seats: int) -> float:
    """Roughly how long a run of these requests takes when all are there at its start."""
    prompt_tokens = sum(lengths.prompts)
    if policy == "continuous":
        steps: float = sum(lengths.answers) / seats + max(lengths.answers[-seats:])
        return prompt_tokens * costs.prompt_token + steps * costs.step
    steps = sum(max(batch) for batch in _batches(lengths.answers, seats))
    if policy != "static_dropped":
        prompt_tokens = sum(len(batch) * max(batch) for batch in _batches(lengths.prompts, seats))
    return prompt_tokens * costs.prompt_token + steps * costs.step


def _batches(values: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _steps_with_handover(answers: Sequence[int], seats: int) -> int:
    """Steps until all are answered when each seat passes to the next in the queue at once."""
    ends = [0] * min(seats, len(answers))
    heapify(ends)
    for answer in answers:
        heapreplace(ends, ends[0] + answer)
    return max(ends)
