"""How near a model is to float32: the figures on logits made by hand, and on tiny models side by side."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine import quality
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.quality import Divergence, Passage, compare_logits, cut_passages, measure_quality, ordinary_text
from engine.startup import load_model
from tests.bench import kl_file
from tests.fake_checkpoint import make_checkpoint, make_runner
from tests.fakes import FakeTokenizer
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def silent(done: int, total: int) -> None:
    """Nobody watches."""


def logits(*rows: list[float]) -> torch.Tensor:
    """Logits of these probabilities, shifted: a constant in a row changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log().float() + 3.0


def test_figures_by_hand() -> None:
    divergence = Divergence()
    divergence.add(logits([0.5, 0.25, 0.25], [0.5, 0.25, 0.25]), logits([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]), [2, 0])
    figures = divergence.figures()
    # 0.5 ln(0.5/0.25) + 0.25 ln(0.25/0.25) + 0.25 ln(0.25/0.5) on the second row, nothing on the first.
    assert figures["kl_mean"] == pytest.approx(0.125 * math.log(2), abs=1e-6)
    assert figures["kl_p999"] == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert (figures["tokens"], figures["flipped_share"]) == (2, 0.5)
    assert figures["perplexity_ratio"] == pytest.approx(math.sqrt(2))  # the second token is half as likely


def test_the_divergence_is_from_the_reference_and_not_to_it() -> None:
    divergence = Divergence()
    divergence.add(logits([0.9, 0.1]), logits([0.5, 0.5]), [0])
    assert divergence.figures()["kl_mean"] == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-6)


def test_the_percentile_is_the_one_row_in_a_thousand() -> None:
    """Of 2,000 rows the third worst counts; the two beyond it do not."""
    found = torch.zeros(2000, 2)
    for row, extra in ((7, 5.0), (900, 4.0), (1999, 1.0)):
        found[row, 0] = extra
    divergence = Divergence()
    divergence.add(torch.zeros(2000, 2), found, [0] * 2000)
    odds = 1 / (1 + math.exp(-1.0))
    figures = divergence.figures()
    assert figures["kl_p999"] == pytest.approx(-0.5 * math.log(4 * odds * (1 - odds)), abs=1e-6)
    assert (figures["tokens"], figures["flipped_share"]) == (2000, 0.0)


def test_to_call_impossible_what_is_not_is_infinitely_far() -> None:
    divergence = Divergence()
    divergence.add(logits([0.5, 0.5]), logits([1.0, 0.0]), [0])
    assert divergence.figures()["kl_p999"] == math.inf


def tiny_passages(count: int = 60) -> list[Passage]:
    return [Passage([1, *range(3, count + 2)], list(range(4, count + 3))), Passage([9, 8], [8, 7]), Passage([5], [6])]


def test_a_model_beside_itself_and_beside_another() -> None:
    same = compare_logits(make_runner(make_checkpoint()), make_runner(make_checkpoint()), tiny_passages(), silent)
    assert same == {"tokens": 62, "kl_mean": 0.0, "kl_p999": 0.0, "flipped_share": 0.0, "perplexity_ratio": 1.0}
    narrow = make_runner(make_checkpoint(), dtype="bfloat16")
    rounded = compare_logits(make_runner(make_checkpoint()), narrow, tiny_passages(), silent)
    other = compare_logits(
        make_runner(make_checkpoint()), make_runner(make_checkpoint(seed=1)), tiny_passages(), silent
    )
    assert 0 < rounded["kl_mean"] < rounded["kl_p999"] < 1e-2 < other["kl_mean"]
    assert other["flipped_share"] > 0.5


@pytest.mark.parametrize("chunk", [1, 7, 59])
def test_how_it_is_cut_does_not_matter(chunk: int) -> None:
    def measure(max_num_batched_tokens: int) -> dict[str, float]:
        first, second = (
            make_runner(make_checkpoint(seed=seed), max_num_batched_tokens=max_num_batched_tokens) for seed in (0, 1)
        )
        return compare_logits(first, second, tiny_passages(), silent)

    assert measure(chunk) == pytest.approx(measure(64), rel=1e-4)


def test_unlike_chunks_are_never_compared() -> None:
    first, second = (make_runner(make_checkpoint(), max_num_batched_tokens=count) for count in (8, 16))
    with pytest.raises(ValueError, match=r"\[8, .* beside \[16, "):
        compare_logits(first, second, tiny_passages(), silent)


class Told:
    """Says of token n that n + 1 follows; with `stumbles`, of token 49 something else."""

    def __init__(self, chunk: int, *, stumbles: bool = False) -> None:
        self.chunk, self.stumbles = chunk, stumbles

    def logits_of(self, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, len(token_ids), self.chunk):
            part = token_ids[first : first + self.chunk]
            rows = torch.zeros(len(part), 51)
            for row, token_id in enumerate(part):
                rows[row, 0 if self.stumbles and token_id == 49 else token_id + 1] = 9.0
            yield first, rows


@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_what_the_tokenizer_puts_before_a_text_is_not_compared(chunk: int) -> None:
    """It is read all the same; the last of it tells the text's first token, which nobody compares either."""
    seen: list[tuple[int, int]] = []
    passages = [Passage([49, 49, 49, 1, 2, 3, 4], [2, 3, 4, 5]), Passage([7], [8])]
    figures = compare_logits(
        Told(chunk), Told(chunk, stumbles=True), passages, lambda done, total: seen.append((done, total))
    )
    assert (figures["tokens"], figures["kl_mean"], figures["perplexity_ratio"]) == (5, 0.0, 1.0)
    assert seen[-1] == (5, 5)
    passages = [Passage([1, 49], [2, 3])]
    assert compare_logits(Told(chunk), Told(chunk, stumbles=True), passages, silent)["flipped_share"] == 0.5


class Opening(FakeTokenizer):
    """Puts one token before each text that stands alone."""

    def encode(self, text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
        return [*([258] if add_special else []), *super().encode(text, parse_control=parse_control)]


def test_the_text_is_cut_into_passages_that_each_begin_like_a_text() -> None:
    text = "".join(ordinary_text()).encode()
    passages = cut_passages(Opening(), 1000, 2048)
    assert [len(passage.token_ids) for passage in passages] == [513, 489]
    assert {passage.token_ids[0] for passage in passages} == {258}
    assert bytes(token_id for passage in passages for token_id in passage.token_ids[1:]) == text[:1000]
    assert bytes(token_id for passage in passages for token_id in passage.following) == text[1:1001]
    short = cut_passages(Opening(), 10, 4)  # no sequence is longer than the model takes
    assert [len(passage.token_ids) for passage in short] == [4, 4, 4, 2]


def test_a_text_that_ends_early_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "ordinary_text", lambda: iter(["abc", "de"]))
    (passage,) = cut_passages(FakeTokenizer(), 1000, 2048)
    assert (bytes(passage.token_ids), bytes(passage.following)) == (b"abcd", b"bcde")


def tiny_config(tmp_path: Path, dtype: str) -> EngineConfig:
    config = make_config()
    path = write_gguf(tmp_path / "tiny.gguf", config, make_tensors(config))
    return EngineConfig(model=str(path), dtype=dtype, num_threads=1, cache_memory_bytes=1 << 20)


def measure(config: EngineConfig, num_tokens: int) -> dict[str, Any]:
    model = load_model(config)
    assert isinstance(model.runner, ModelRunner)
    return measure_quality(model, model.runner, config, num_tokens, silent)


def test_a_model_is_compared_with_itself_in_float32(tmp_path: Path) -> None:
    figures = measure(tiny_config(tmp_path, "bfloat16"), 300)
    assert figures["mean_nll"] > 0
    assert figures["tokens"] == 300
    assert figures["text"].startswith("pydoc_data.topics of Python 3.")
    assert 0 < figures["kl_mean"] < figures["kl_p999"] < 1e-2
    assert figures["perplexity_ratio"] == pytest.approx(1.0, abs=0.01)


def test_what_cannot_be_compared_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(config: EngineConfig, num_tokens: int) -> str:
        figures = measure(config, num_tokens)
        assert figures["mean_nll"] > 0
        assert {figures[name] for name in ("kl_mean", "kl_p999", "flipped_share", "perplexity_ratio")} == {None}
        return str(figures["why"])

    config = tiny_config(tmp_path, "bfloat16")
    assert why(tiny_config(tmp_path, "float32"), 100) == "float32 is the reference"
    assert why(config, 0) == "not asked for"
    with monkeypatch.context() as patch:
        patch.setattr(quality, "available_bytes", lambda: 1000)
        assert "0.0 GB are free" in why(config, 100)
    with monkeypatch.context() as patch:
        patch.setattr(Divergence, "figures", lambda self: {"tokens": 100, "kl_mean": math.nan})
        assert why(config, 100) == "some logits are no finite numbers"
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "installed without the text" in why(config, 100)


def test_logits_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written as that program would: one sequence after the other, each token's row; rounded to float16."""
    config = tiny_config(tmp_path, "float32")
    ids, rows = tmp_path / "ids.jsonl", tmp_path / "rows.npy"
    words = ["--model", config.model, "--tokens", "300"]
    kl_file.main([*words, "--ids", str(ids)])
    runner = load_model(config).runner
    assert isinstance(runner, ModelRunner)
    sequences = [json.loads(line) for line in ids.read_text().splitlines()]
    found = [part.numpy() for sequence in sequences for _, part in runner.logits_of(sequence)]
    np.save(rows, np.concatenate(found).astype(np.float16))
    kl_file.main([*words, "--logits", str(rows)])
    assert "over 300 tokens of text: KL mean 0.000000, p99.9 0.0000 nats" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"wanted is float16 or float32 \(200, "):
        kl_file.main(["--model", config.model, "--tokens", "200", "--logits", str(rows)])
