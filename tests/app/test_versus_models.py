"""The models that the comparison makes: a folder out of a GGUF file, and random weights of a known shape."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from gguf.quants import dequantize

from engine.loading.checkpoint import open_checkpoint
from engine.models.config import RopeConfig
from tests.bench.versus import random_weights, to_hugging_face
from tests.bench.versus.random_weights import SHAPES, random_blocks
from tests.bench.versus.to_hugging_face import write_folder
from tests.fake_checkpoint import GREEDY, Table, make_runner
from tests.tiny_models import TOKENS, make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint

PROMPT = [9, 300, 7, 51, 4, 120, 33, 260, 80, 11]
TEXTS = ["hello world", "a<|im_end|>b", "né\u0301e 4321 \n\n x", "<mark>hello"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model whose tokenizer is taken."""
    config = make_config(vocab_size=len(TOKENS) + 1)
    more = {"<mark>": TokenType.USER_DEFINED}
    return write_gguf(tmp_path / "source.gguf", config, make_tensors(config), more_tokens=more)


def same_model(one: Checkpoint, other: Checkpoint) -> None:
    """Weights but for rounding to bfloat16, sizes, tokens, template."""
    assert one.config == other.config
    theirs = dict(other.tensors())
    for name, tensor in one.tensors():
        assert torch.equal(theirs.pop(name), tensor.to(torch.bfloat16)), name
    assert not theirs
    for text in TEXTS:
        for control in (True, False):
            ids = one.tokenizer.encode(text, parse_control=control)
            assert other.tokenizer.encode(text, parse_control=control) == ids
            assert other.tokenizer.decode(ids) == one.tokenizer.decode(ids)
    for what in ("vocab_size", "bos_token_id", "eos_token_id", "adds_bos", "silent_ids"):
        assert getattr(one.tokenizer, what) == getattr(other.tokenizer, what), what
    assert one.chat_template is not None
    assert other.chat_template is not None
    talk = [{"role": "user", "content": "hello"}]
    assert one.chat_template.encode(talk, one.tokenizer) == other.chat_template.encode(talk, other.tokenizer)


# A folder out of a file


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, {}),
        (
            {"tie_word_embeddings": False, "rope": RopeConfig(1e4, "linear", 4.0)},
            {"tokenizer.ggml.add_bos_token": True},
        ),
    ],
)
def test_a_folder_is_the_same_model(
    tmp_path: Path, changes: dict[str, Any], told: dict[str, Any], shard_bytes: int
) -> None:
    config = make_config(vocab_size=len(TOKENS) + 1, **changes)
    more = {"<mark>": TokenType.USER_DEFINED}
    if config.rope.kind == "linear":
        told |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": config.rope.factor}
    tensors = make_tensors(config)
    file = write_gguf(tmp_path / "m.gguf", config, tensors, kind=Kind.Q8_0, metadata=told, more_tokens=more)
    write_folder(file, tmp_path / "m", shard_bytes=shard_bytes)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == (len(tensors) if shard_bytes == 1 else 1)
    same_model(open_checkpoint(file), open_checkpoint(tmp_path / "m"))


def test_llama3_positions_keep_all_their_settings() -> None:
    rope = RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)
    assert to_hugging_face.rope_scaling(rope) == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("why", ["pre-tokenizer 'qwen2' is not written here", "is not a GGUF file"])
def test_what_cannot_be_converted_is_told_in_a_line(tmp_path: Path, why: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"no model")
    if "qwen2" in why:
        write_gguf(file, make_config(), make_tensors(make_config()), pre="qwen2")
    with pytest.raises(SystemExit, match=why):
        to_hugging_face.main([str(file), str(tmp_path / "m")])
    assert not (tmp_path / "m").exists()


# Random weights


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_both_forms_are_one_model_that_answers(
    source: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    random_weights.main(["tiny", str(folder), "--kind", kind, "--tokenizer", str(source)])
    made = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert made == [folder / f"tiny-{kind}.gguf", folder / "tiny-bf16"]
    file, other = (open_checkpoint(path) for path in made)
    assert (file.config, file.weights_kind, other.weights_kind) == (SHAPES["tiny"], kind, "bfloat16")
    same_model(file, other)
    for checkpoint in (file, other):
        table = Table(make_runner(checkpoint, dtype="auto"), num_blocks=64, block_size=4, seats=1, chunks=(3,))
        guest = table.seat(PROMPT, 12, replace(GREEDY, num_logprobs=0))
        table.run()
        assert len(guest.output) == len(guest.logprobs) == 12
        # No draw is certain, and none is a choice among equals.
        assert all(-math.log(SHAPES["tiny"].vocab_size) < told.logprob < -0.1 for told in guest.logprobs)
    exact, rounded = (logits_of(checkpoint) for checkpoint in (file, other))
    assert 0.3 < float(exact.std()) < 3
    assert 0 < float((exact - rounded).abs().max()) < 0.1 * float(exact.std())


def logits_of(checkpoint: Checkpoint) -> torch.Tensor:
    return torch.cat([logits for _, logits in make_runner(checkpoint).logits_of(PROMPT)])


def test_every_token_has_a_text_that_nobody_can_write(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    random_weights.write_gguf(file, "tiny", kind=Kind.Q4_1, tokenizer=source)
    tokenizer = open_checkpoint(file).tokenizer
    assert (tokenizer.vocab_size, tokenizer.silent_ids) == (320, ())
    filler = tokenizer.decode([319])
    assert filler == "[PAD319]"
    assert max(tokenizer.encode(filler, parse_control=True)) < len(TOKENS)


def test_a_vocabulary_grows_to_that_of_the_tokenizer(tmp_path: Path) -> None:
    config = make_config(vocab_size=len(TOKENS) + 100)
    more = {f"<{i}>": TokenType.NORMAL for i in range(100)}
    source = write_gguf(tmp_path / "source.gguf", config, make_tensors(config), more_tokens=more)
    random_weights.write_gguf(tmp_path / "m.gguf", "tiny", kind=Kind.Q4_0, tokenizer=source)
    assert open_checkpoint(tmp_path / "m.gguf").config.vocab_size == len(TOKENS) + 100 > SHAPES["tiny"].vocab_size


@pytest.mark.parametrize("kind", random_weights.SPREAD)
def test_random_weights_are_of_one_size_in_every_kind(kind: Kind) -> None:
    cols = 1024
    weights = dequantize(random_blocks(kind, 64, cols, np.random.default_rng(1)), kind)
    assert weights.shape == (64, cols)
    assert abs(weights).max() < 8 * cols**-0.5
    assert weights.std() == pytest.approx(cols**-0.5, rel=0.1)
    assert abs(weights.mean()) < 0.05 * cols**-0.5


def test_a_tokenizer_that_is_none_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="There is no model"):
        random_weights.main(["tiny", str(tmp_path), "--tokenizer", "no-such.gguf"])
