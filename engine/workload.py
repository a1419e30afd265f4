"""What is asked of a server in a measurement: when requests arrive, how long their prompts and answers are.

A workload is made by a generator fitted to a published trace (`generate`; see `engine/fitted_lengths.py` for the
sources), or read from a trace file by the layer above. The same seed gives the same lengths at every rate and for every
number of requests, so that runs can be compared request by request.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.fitted_lengths import FITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.fitted_lengths import Fit

# How Mooncake's prompts repeat earlier ones. All begin with the same block; besides, the longer a prompt, the more
# likely it continues one of the last `NUM_REMEMBERED`: of `NUM_CANDIDATES` of them the longest that it can contain.
CONTINUED_SHARE = 0.387  # of all prompts, measured
NUM_REMEMBERED, NUM_CANDIDATES = 1000, 7

TABLE_LENGTH = 65_537
HEADER_BITS = 40


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request.

    Attributes:
        arrival_seconds: from the start of the workload; never decreases from one item to the next.
        num_prompt_tokens: at least 1.
        num_output_tokens: at least 1.
        prefix_ids: names of the prompt's leading blocks; equal names stand for equal tokens.
        is_background: work that waits for the interactive.
    """

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
        name: e.g. "Azure conversation, fitted", or the name of the trace's file.
        factor: lengths were divided by this.
        prefix_block_tokens: tokens of one prefix block, after scaling.
        max_output_tokens: the longest answer: what a client would ask for as `max_tokens`.
        num_shortened: requests that were cut to the context.
        num_skipped: bad lines of a trace file that were left out.
    """

    name: str
    items: tuple[WorkItem, ...]
    factor: float = 1.0
    prefix_block_tokens: int = 0
    max_output_tokens: int = 0
    num_shortened: int = 0
    num_skipped: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens of all requests."""
        return sum([item.num_prompt_tokens + item.num_output_tokens for item in self.items])

    @property
    def requests_per_second(self) -> float:
        """Mean rate of arrival; infinite where all come at once."""
        span = self.items[-1].arrival_seconds - self.items[0].arrival_seconds if self.items else 0.0
        return (len(self.items) - 1) / span if span > 0 else math.inf

    def prompt_token_ids(self, index: int, vocab_size: int, salt: int = 0) -> tuple[int, ...]:
        """The prompt of one item: the same for the same arguments, and unlike that of every other index or salt.

        Only ordinary ids: the lowest and the highest eighth of the vocabulary, where control tokens are kept, are left
        out. Each prompt, and each prefix block, begins with tokens that spell its number, so that nothing is shared
        with another but blocks of equal names.
        """
        item = self.items[index]
        length, size = item.num_prompt_tokens, self.prefix_block_tokens
        if not item.prefix_ids or not size:
            return _tokens(2 * index, salt, length, vocab_size)
        token_ids: list[int] = []
        for name in item.prefix_ids[: -(-length // size)]:
            token_ids.extend(_tokens(2 * name + 1, salt, size, vocab_size))
        if len(token_ids) < length:
            token_ids.extend(_tokens(2 * index, salt, length - len(token_ids), vocab_size))
        return tuple(token_ids[:length])


@lru_cache(maxsize=4)
def _table(vocab_size: int) -> tuple[int, tuple[int, ...], int]:
    """Lowest ordinary id, random ordinary ids, and the digits it takes to spell a number of `HEADER_BITS` bits."""
    low, high = vocab_size // 8, vocab_size - vocab_size // 8
    span = max(2, high - low)
    rng = random.Random(0)  # noqa: S311 (filling, not a secret)
    table = tuple([low + rng.randrange(span) for _ in range(TABLE_LENGTH)])
    return low, table * 2, math.ceil(HEADER_BITS / math.log2(span))


def _tokens(number: int, salt: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """`length` tokens that begin with the spelling of `number` and `salt` together."""
    low, table, num_digits = _table(vocab_size)
    span = max(2, vocab_size - 2 * (vocab_size // 8))
    # Odd factors permute the numbers of `HEADER_BITS` bits, so no two numbers of one salt meet, nor two salts of one.
    mixed = (number * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9) % (1 << HEADER_BITS)
    offset = mixed % TABLE_LENGTH
    header = []
    for _ in range(min(num_digits, length)):
        mixed, digit = divmod(mixed, span)
        header.append(low + digit)
    filling = table[offset : offset + length - len(header)]
    while len(header) + len(filling) < length:
        filling += table[: min(TABLE_LENGTH, length - len(header) - len(filling))]
    return (*header, *filling)


def generate(
    name: str,
    num_requests: int,
    *,
    seed: int = 0,
    rate: float | None = None,
    factor: float = 1.0,
    max_model_len: int | None = None,
) -> Workload:
    """Requests as in one of the fitted traces.

    Args:
        name: `azure-conversation`, `azure-code` or `mooncake`.
        rate: requests a second on average; `None` is the trace's own.
        factor: lengths are divided by it.
        max_model_len: context in tokens; what is longer is cut and counted.

    Raises:
        ConfigError: an unknown name, or a number out of range.
    """
    if name not in FITS:
        near = get_close_matches(name, FITS, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(f"There is no workload {name!r}: there are {', '.join(FITS)}{hint}")
    if num_requests < 1:
        raise ConfigError(f"A workload needs at least one request, not {num_requests}.")
    fit = FITS[name]
    # A stream of its own for each, so that one more draw of the one does not change the others.
    lengths, arrivals, names = (random.Random(f"{what} {seed}") for what in ("lengths", "arrivals", "names"))  # noqa: S311
    gaps = _unit_gaps(fit, arrivals)
    scale = 1.0 / _checked_rate(fit.requests_per_second if rate is None else rate)
    prefixes = _Prefixes(fit.prefix_block_tokens, names)
    items, now = [], 0.0
    for _ in range(num_requests):
        share = lengths.random()
        prompt, answer = round(fit.prompts.at(share)), round(fit.answers.at(lengths.random()))
        prompt, answer = max(1, prompt), max(1, answer)
        items.append(WorkItem(now, prompt, answer, prefixes.of(prompt, share)))
        now += scale * next(gaps)
    whole = Workload(fit.title, tuple(items), prefix_block_tokens=fit.prefix_block_tokens)
    return scaled(whole, factor, max_model_len)


class _Prefixes:
    """Names for the blocks of Mooncake's prompts, so that they repeat earlier ones about as often as in the trace."""

    def __init__(self, block_tokens: int, rng: random.Random) -> None:
        self._size, self._rng = block_tokens, rng
        self._remembered: list[tuple[int, ...]] = []
        self._num_names, self._num_prompts = 1, 0

    def of(self, num_tokens: int, share: float) -> tuple[int, ...]:
        """Names for a prompt of so many tokens, `share` of all prompts being shorter."""
        if not self._size:
            return ()
        num_blocks = -(-num_tokens // self._size)
        known = self._continued(num_tokens // self._size) if self._rng.random() < 2 * CONTINUED_SHARE * share else (0,)
        fresh = range(self._num_names, self._num_names + num_blocks - len(known))
        self._num_names += len(fresh)
        names = (*known, *fresh)
        if len(self._remembered) < NUM_REMEMBERED:
            self._remembered.append(names)
        else:
            self._remembered[self._num_prompts % NUM_REMEMBERED] = names
        self._num_prompts += 1
        return names

    def _continued(self, num_whole_blocks: int) -> tuple[int, ...]:
        """The longest of some earlier prompts that fits into so many blocks; its last block may not have been full."""
        best: tuple[int, ...] = (0,)
        for _ in range(min(NUM_CANDIDATES, len(self._remembered))):
            names = self._rng.choice(self._remembered)[:-1]
            if len(best) < len(names) <= num_whole_blocks:
                best = names
        return best


def _unit_gaps(fit: Fit, rng: random.Random) -> Iterator[float]:
    """Gaps between arrivals with a mean of 1, for ever."""
    if fit.gaps is not None:
        mean = fit.gaps.mean
        while True:
            yield fit.gaps.at(rng.random()) / mean
    shape = 1.0 / fit.gap_cv**2
    while True:
        yield rng.gammavariate(shape, 1.0 / shape)


def scaled(workload: Workload, factor: float, max_model_len: int | None = None) -> Workload:
    """Divide all lengths by `factor`, at least one token each; then cut what exceeds the context, and count it.

    The prompt is cut first, but not below half of the context; then the answer.

    Raises:
        ConfigError: a number out of range.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ConfigError(f"Lengths cannot be divided by {factor}; the factor must be above 0.")
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError(f"A context of {max_model_len} tokens holds no prompt and answer; it needs at least 2.")
    whole = workload.prefix_block_tokens / factor
    size = workload.prefix_block_tokens and max(1, round(whole))
    items, num_shortened = [], workload.num_shortened
    for item in workload.items:
        prompt, answer = max(1, round(item.num_prompt_tokens / factor)), max(1, round(item.num_output_tokens / factor))
        if max_model_len is not None and prompt + answer > max_model_len:
            num_shortened += 1
            prompt = min(prompt, max(max_model_len - answer, max_model_len // 2))
            answer = min(answer, max_model_len - prompt)
        names = item.prefix_ids[: -(-prompt // size)] if size else ()
        if whole < size == 1:  # a block is never shorter than a token: then fewer of them
            names = names[: round(len(item.prefix_ids) * whole)]
        items.append(WorkItem(item.arrival_seconds, prompt, answer, names, item.is_background))
    return replace(
        workload,
        items=tuple(items),
        factor=workload.factor * factor,
        prefix_block_tokens=size,
        max_output_tokens=max([item.num_output_tokens for item in items], default=0),
        num_shortened=num_shortened,
    )


def choose_factor(workload: Workload, max_model_len: int, max_tokens: int | None = None) -> float:
    """A factor that suits a model: the least at which 99 % of the requests fit into its context.

    Args:
        max_tokens: tokens that the whole workload may have, prompts and answers, for a machine that computes no more
            in the time there is; `None` is no limit.

    Returns:
        1 or more, rounded up to two digits; a user may take another.
    """
    lengths = sorted([item.num_prompt_tokens + item.num_output_tokens for item in workload.items])
    if not lengths:
        return 1.0
    needed = max(1.0, lengths[max(0, math.ceil(0.99 * len(lengths)) - 1)] / max_model_len)
    if max_tokens is not None:
        needed = max(needed, workload.num_tokens / max_tokens)
    digit = 10.0 ** (math.floor(math.log10(needed)) - 1)
    return round(math.ceil(round(needed / digit, 6)) * digit, 6)


def at_rate(workload: Workload, rate: float) -> Workload:
    """The same requests in the same pattern, at another mean rate of arrival (requests a second).

    Raises:
        ConfigError: the rate is not above 0, or all requests arrive at once and have no pattern.
    """
    _checked_rate(rate)
    if math.isinf(workload.requests_per_second):
        raise ConfigError(f"The requests of {workload.name} all arrive at once: there is no rate to change.")
    stretch, start = workload.requests_per_second / rate, workload.items[0].arrival_seconds
    moved = [replace(item, arrival_seconds=(item.arrival_seconds - start) * stretch) for item in workload.items]
    return replace(workload, items=tuple(moved))


def _checked_rate(rate: float) -> float:
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"Requests cannot arrive at {rate} a second; the rate must be above 0.")
    return rate
