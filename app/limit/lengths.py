"""Where the lengths of requests come from. The same seed gives the same ones, first to last."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from engine.errors import ConfigError
from engine.workload import WorkItem, Workload, generate, scaled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# Multiples of this lie as far apart on a ring as so many points can.
GOLDEN: Final = (5**0.5 - 1) / 2
NAMES_APART: Final = 1 << 40
# Who speaks in files like ShareGPT's.
ASKING: Final = ("human", "user")
ANSWERING: Final = ("gpt", "chatgpt", "assistant")


class Lengths(Protocol):
    """Gives requests with their lengths, at arrivals of its own."""

    def take(self, num_requests: int, seed: int, factor: float = 1.0, max_model_len: int | None = None) -> Workload:
        """So many of them.

        Args:
            factor: lengths are divided by it.
            max_model_len: what is longer is cut, and counted.
        """


@dataclass(frozen=True, slots=True)
class Fitted:
    """As in one of the published traces (`engine/fitted_lengths.py`)."""

    name: str

    def take(self, num_requests: int, seed: int, factor: float = 1.0, max_model_len: int | None = None) -> Workload:
        """Drawn from the fitted distributions."""
        return generate(self.name, num_requests, seed=seed, factor=factor, max_model_len=max_model_len)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests that were written down; another seed begins at another place of them."""

    workload: Workload

    def take(self, num_requests: int, seed: int, factor: float = 1.0, max_model_len: int | None = None) -> Workload:
        """A stretch of them, begun again from the front at its end."""
        items = self.workload.items
        start = int(seed * GOLDEN % 1 * len(items))
        gap = 1 / self.workload.requests_per_second
        span = items[-1].arrival_seconds - items[0].arrival_seconds + gap
        stretch = []
        for place in range(start, start + num_requests):
            round_, index = divmod(place, len(items))
            # Another time round, what prompts have in common they have among themselves alone.
            names = tuple([name + round_ * NAMES_APART for name in items[index].prefix_ids])
            arrival = items[index].arrival_seconds + round_ * span
            stretch.append(replace(items[index], arrival_seconds=arrival, prefix_ids=names))
        return scaled(replace(self.workload, items=tuple(stretch)), factor, max_model_len)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Lengths drawn evenly between a shortest and a longest one, in tokens."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def take(self, num_requests: int, seed: int, factor: float = 1.0, max_model_len: int | None = None) -> Workload:
        """So many of them, a second apart."""
        prompts, outputs = (random.Random(f"{what} {seed}") for what in ("prompts", "outputs"))  # noqa: S311
        items = [
            WorkItem(float(place), prompts.randint(*self.prompt), outputs.randint(*self.output))
            for place in range(num_requests)
        ]
        return scaled(
            Workload(f"{_words(self.prompt)} in, {_words(self.output)} out", tuple(items)), factor, max_model_len
        )


def _words(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return f"{low} tokens" if low == high else f"{low} to {high} tokens"


def read_conversations(path: Path, count: Callable[[str], int], max_requests: int) -> Recorded:
    """The first question and answer of each conversation in a file like ShareGPT's, as lengths.

    The file is a JSON list of objects whose `conversations` are turns with `from` and `value`: one of `ASKING`, and one
    of `ANSWERING` behind it. What comes before is left out, as are conversations without both; nothing is known of
    when they were held, so they come a second apart.

    Args:
        count: tokens of a text.

    Raises:
        ConfigError: the file cannot be read, or has no such conversation.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The conversations {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON; conversations are a list as in ShareGPT's files.") from None
    pairs = [pair for entry in (found if isinstance(found, list) else []) if (pair := _first_pair(entry))]
    if not pairs:
        raise ConfigError(f"{path} has no conversations with a question and an answer, as ShareGPT's files do.")
    items = [
        WorkItem(float(place), max(1, count(question)), max(1, count(answer)))
        for place, (question, answer) in enumerate(pairs[:max_requests])
    ]
    return Recorded(Workload(path.name, tuple(items)))


def _first_pair(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    said = [(turn.get("from"), turn.get("value")) for turn in turns or () if isinstance(turn, dict)]
    for (asks, question), (answers, answer) in pairwise(said):
        is_pair = asks in ASKING and answers in ANSWERING
        if is_pair and isinstance(question, str) and isinstance(answer, str) and question and answer:
            return question, answer
    return None
