"""How near a model's arithmetic is to float32, over ordinary text: KL divergence, changed first choices, likelihood."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from engine.loading.checks import expected_shapes
from engine.memory import available_bytes
from engine.model_runner import ModelRunner
from engine.scored_text import load_scored_text
from engine.startup import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.config import EngineConfig
    from engine.loaded import LoadedModel, TokenizerLike
    from engine.models.config import ModelConfig

PASSAGE_TOKENS: Final = 512
ROWS_AT_ONCE: Final = 8  # distributions over a large vocabulary that stay in the cache while they are compared
NOT_MEASURED: Final[dict[str, float | None]] = dict.fromkeys(
    ("kl_mean", "kl_p999", "flipped_share", "perplexity_ratio")
)


class TellsLogits(Protocol):
    """A model, or what another program said of the same tokens."""

    def logits_of(self, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, logits [n, vocab_size]) of each chunk of a sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Passage:
    """Part of a text, computed as a sequence of its own.

    Attributes:
        token_ids: what the model reads, with what its tokenizer puts before a text.
        following: the token after each of the last positions; only these are compared.
    """

    token_ids: list[int]
    following: list[int]


def ordinary_text() -> Iterator[str]:
    """English prose that comes with Python: what its `help` says about the language, in alphabetical order.

    Raises:
        ImportError: this Python was installed without it.
    """
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


def text_name() -> str:
    """The ordinary text's name: each version of Python brings its own."""
    return f"pydoc_data.topics of Python {platform.python_version()}"


def cut_passages(tokenizer: TokenizerLike, num_tokens: int, max_tokens: int) -> list[Passage]:
    """The beginning of the ordinary text.

    Args:
        num_tokens: tokens to compare; fewer where the text ends before.
        max_tokens: of the longest sequence.

    Raises:
        ImportError: there is no text.
    """
    begin = tokenizer.encode("", parse_control=False)
    token_ids: list[int] = []
    for part in ordinary_text():
        token_ids += tokenizer.encode(part, parse_control=False, add_special=False)
        if len(token_ids) > num_tokens:
            break
    length, end = max(1, min(PASSAGE_TOKENS, max_tokens - len(begin))), min(num_tokens, len(token_ids) - 1)
    passages = []
    for start in range(0, end, length):
        stop = min(start + length, end)
        passages.append(Passage([*begin, *token_ids[start:stop]], token_ids[start + 1 : stop + 1]))
    return passages


class Divergence:
    """Gathers how distributions differ from those of a reference."""

    def __init__(self) -> None:
        self._divergences: list[torch.Tensor] = []
        self._num_flipped = 0
        self._surprise = 0.0  # by how much less likely the text is than under the reference, in nats

    @torch.inference_mode()
    def add(self, reference: torch.Tensor, logits: torch.Tensor, following: list[int]) -> None:
        """Compare two [n, vocab_size] and what they say of the n tokens that follow."""
        targets = torch.tensor(following)[:, None]
        for rows in torch.arange(len(following)).split(ROWS_AT_ONCE):
            at = slice(int(rows[0]), int(rows[-1]) + 1)
            expected = torch.log_softmax(reference[at].float(), dim=-1)
            found = torch.log_softmax(logits[at].float(), dim=-1)
            terms = (expected - found).mul_(expected.exp())
            self._divergences.append(terms.sum(-1, dtype=torch.float64))
            # numpy looks for the highest many times as fast as torch does, and takes the first of equal ones, too.
            self._num_flipped += int((expected.numpy().argmax(-1) != found.numpy().argmax(-1)).sum())
            surprise = expected.gather(-1, targets[at]) - found.gather(-1, targets[at])
            self._surprise += float(surprise.sum(dtype=torch.float64))

    def figures(self) -> dict[str, float]:
        """All of it.

        Returns:
            tokens: how many were compared.
            kl_mean, kl_p999: the KL divergence from the reference in nats, its mean and its 99.9th percentile (nearest
                rank). Rounding may leave them below zero by a millionth.
            flipped_share: tokens of which the likeliest next one is another.
            perplexity_ratio: perplexity of the text over that under the reference.
        """
        divergences = torch.cat(self._divergences).numpy()
        count = len(divergences)
        return {
            "tokens": count,
            "kl_mean": float(divergences.mean()),
            "kl_p999": float(np.quantile(divergences, 0.999, method="inverted_cdf")),
            "flipped_share": self._num_flipped / count,
            "perplexity_ratio": float(torch.tensor(self._surprise / count, dtype=torch.float64).exp()),
        }


def compare_logits(
    reference: TellsLogits, other: TellsLogits, passages: list[Passage], report: Callable[[int, int], None]
) -> dict[str, float]:
    """Run both side by side, chunk by chunk: the logits of a whole text would not fit in memory.

    Args:
        passages: at least one.
        report: called with (done, total) tokens.

    Raises:
        ValueError: the two cut a sequence into different chunks.
    """
    divergence, done, total = Divergence(), 0, sum([len(passage.following) for passage in passages])
    for passage in passages:
        skipped = len(passage.token_ids) - len(passage.following)
        pairs = zip(reference.logits_of(passage.token_ids), other.logits_of(passage.token_ids), strict=True)
        for (first, expected), (again, found) in pairs:
            if (first, expected.shape) != (again, found.shape):
                raise ValueError(f"logits {list(expected.shape)} at {first} beside {list(found.shape)} at {again}")
            outside = max(0, skipped - first)
            following = passage.following[first + outside - skipped : max(0, first + len(expected) - skipped)]
            if following:
                divergence.add(expected[outside:], found[outside:], following)
            done += len(following)
            report(done, total)
    return divergence.figures()


def measure_quality(
    model: LoadedModel, runner: ModelRunner, config: EngineConfig, num_tokens: int, report: Callable[[int, int], None]
) -> dict[str, Any]:
    """How likely a short text is, and how far the model is from itself in float32.

    Args:
        runner: the model's.
        config: what it was loaded with.
        num_tokens: how many to compare with float32; 0 skips that.
        report: called with (done, total) tokens.

    Returns:
        mean_nll: mean negative log-likelihood of the short text, in nats a token.
        reference_mean_nll: the built-in model's own, by an independent implementation in float32; else `None`.
        tokens, kl_mean, kl_p999, flipped_share, perplexity_ratio: as in `Divergence.figures`; `text` says of what. All
            but the first are `None` where nothing can be told, and `why` says the reason.
    """
    scored = load_scored_text()
    token_ids = model.tokenizer.encode(scored.text, parse_control=False)[: model.max_model_len]
    scores = runner.score(token_ids)
    shape = runner.model.config
    is_reference = tuple(token_ids) == scored.token_ids and (shape.num_layers, shape.hidden_size) == (30, 576)
    return {
        "mean_nll": sum(scores) / len(scores),
        "reference_mean_nll": scored.mean_nll if is_reference else None,
        **_against_float32(model, runner, config, num_tokens, report),
    }


def _against_float32(
    model: LoadedModel, runner: ModelRunner, config: EngineConfig, num_tokens: int, report: Callable[[int, int], None]
) -> dict[str, Any]:
    why = _why_not(model, runner, num_tokens)
    if why is not None:
        return {"tokens": 0, **NOT_MEASURED, "why": why}
    try:
        passages = cut_passages(model.tokenizer, num_tokens, model.max_model_len)
    except ImportError:
        return {"tokens": 0, **NOT_MEASURED, "why": "this Python was installed without the text, pydoc_data.topics"}
    # A cache that was sized for the model itself is not wanted twice.
    exact = replace(config, dtype="float32", kv_cache_dtype="auto", cache_memory_bytes=None)
    reference = load_model(exact).runner
    if not isinstance(reference, ModelRunner):
        raise TypeError(f"cannot compare with a {type(reference).__name__}")
    figures = compare_logits(reference, runner, passages, report)
    if not all(math.isfinite(figure) for figure in figures.values()):
        return {"tokens": figures["tokens"], **NOT_MEASURED, "why": "some logits are no finite numbers"}
    return {"text": text_name(), **figures}


def _why_not(model: LoadedModel, runner: ModelRunner, num_tokens: int) -> str | None:
    """What speaks against a comparison, if anything."""
    if num_tokens == 0:
        return "not asked for"
    if model.dtype == "float32":
        return "float32 is the reference"
    needed, free = _float32_bytes(runner.model.config), available_bytes()
    if needed > free:
        return f"in float32 the model needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return None


def _float32_bytes(config: ModelConfig) -> int:
    """Memory of the weights, with a copy of the embeddings that the head packs for itself."""
    head = config.vocab_size * config.hidden_size
    return 4 * (head + sum([math.prod(shape) for shape in expected_shapes(config).values()]))
