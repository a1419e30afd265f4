"""A short text with the score that the built-in model reaches on it, to tell whether a model computes rightly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text and what to expect of it.

    Attributes:
        token_ids: ids under the built-in model's tokenizer.
        mean_nll: mean negative log-likelihood of every token after the first, in nats, by an independent
            implementation in float32 of the built-in model.
    """

    text: str
    token_ids: tuple[int, ...]
    mean_nll: float


def load_scored_text() -> ScoredText:
    """Read the text that travels with the package."""
    data = json.loads(files("engine.data").joinpath("scored_text.json").read_text(encoding="utf-8"))
    return ScoredText(data["text"], tuple(data["token_ids"]), float(data["mean_nll"]))
