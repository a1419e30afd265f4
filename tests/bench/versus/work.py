"""What every server is asked: the same lengths and the same prompts for all, unlike those of any other run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from app.limit.prompts import make_text
from engine.workload import WorkItem, Workload

# Lengths in tokens: shortest, longest, mean.
PROMPTS: Final = (32, 512, 148)
ANSWERS: Final = (16, 256, 82)
ALONE: Final = 128  # prompt and answer of the single stream
NUM_REQUESTS: Final = {1: 8, 16: 64, 32: 96}
WARM_UP_PROMPT, WARM_UP_ANSWER = 64, 16


@dataclass(frozen=True, slots=True)
class Style:
    """How a server wants to be asked.

    Attributes:
        by_ids: prompts are token ids; else text of about as many tokens.
        can_ignore_end: takes `ignore_eos` and `min_tokens`; else an answer may end before its length is reached.
    """

    by_ids: bool = True
    can_ignore_end: bool = True


STYLES: Final = (Style(), Style(by_ids=False), Style(can_ignore_end=False), Style(by_ids=False, can_ignore_end=False))


def make_work(num_streams: int, num_requests: int | None = None) -> Workload:
    """The requests of so many streams: the same at every call.

    Lengths are the middles of equal shares of a skewed distribution, in an order of their own, so that the means are
    the same however many requests there are: of a quantity between `low` and `high`, share `u` is below
    `low + (high - low) * u**k`, whose mean is `low + (high - low) / (k + 1)`.
    """
    count = num_requests or NUM_REQUESTS.get(num_streams, 4 * num_streams)
    if num_streams == 1:
        return _workload("1 stream", [(ALONE, ALONE)] * count)
    pairs = zip(_lengths("prompts", count, *PROMPTS), _lengths("answers", count, *ANSWERS), strict=True)
    return _workload(f"{num_streams} streams", list(pairs))


def make_warm_up(num_requests: int) -> Workload:
    """A few short requests, of which nothing is reported."""
    return _workload("warm-up", [(WARM_UP_PROMPT, WARM_UP_ANSWER)] * num_requests)


def make_bodies(work: Workload, style: Style, *, model: str, salt: int, vocab_size: int) -> list[dict[str, Any]]:
    """The bodies of the requests: greedy, streamed, with usage. Prompts of another `salt` share no beginning."""
    bodies = []
    for index, item in enumerate(work.items):
        body: dict[str, Any] = {
            "model": model,
            "prompt": make_text(item.num_prompt_tokens, f"{salt} {index}"),
            "max_tokens": item.num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if style.by_ids:
            body["prompt"] = list(work.prompt_token_ids(index, vocab_size, salt))
        if style.can_ignore_end:
            body |= {"ignore_eos": True, "min_tokens": item.num_output_tokens}
        bodies.append(body)
    return bodies


def _lengths(what: str, count: int, low: int, high: int, mean: int) -> list[int]:
    power = (high - low) / (mean - low) - 1
    lengths = [round(low + (high - low) * ((rank + 0.5) / count) ** power) for rank in range(count)]
    random.Random(f"{what} {count}").shuffle(lengths)
    return lengths


def _workload(name: str, lengths: list[tuple[int, int]]) -> Workload:
    return Workload(name, tuple([WorkItem(0.0, prompt, answer) for prompt, answer in lengths]))
