"""GGUF files: every tensor type, every kind of damage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from engine.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from engine.loading.checkpoint import open_checkpoint
from engine.loading.checks import check_config
from engine.loading.gguf_reader import TENSOR_TYPES, MetadataReader
from engine.loading.gguf_tokenizer import make_pre_tokenizer
from engine.models.config import RopeConfig
from tests.tiny_models import TEMPLATE, make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A whole little model in float32."""
    config = make_config()
    return write_gguf(tmp_path / "tiny.gguf", config, make_tensors(config))


@pytest.mark.parametrize("tied", [True, False])
def test_float32_comes_back_exactly(tmp_path: Path, tied: bool) -> None:
    """Sizes, names and values, query and key rows back in half-split order; the head only where it is not tied."""
    config = make_config(tie_word_embeddings=tied, num_kv_heads=1)
    tensors = make_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, tensors))
    assert checkpoint.config == config
    assert (checkpoint.name, checkpoint.weights_kind) == ("tiny", "F32")
    loaded = dict(checkpoint.tensors())
    assert loaded.keys() == tensors.keys()
    assert ("lm_head.weight" in loaded) is not tied
    for name, values in tensors.items():
        assert torch.equal(loaded[name], values), name


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.Q8_0, torch.float32),
        (Kind.Q4_0, torch.float32),
        (Kind.Q4_1, torch.float32),
        (Kind.Q5_0, torch.float32),
        (Kind.Q5_1, torch.float32),
    ],
)
def test_other_types_are_near_what_was_written(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    """Half precision stays as it is stored; quantized types arrive as float32."""
    config = make_config()
    tensors = make_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, tensors, kind=kind))
    assert checkpoint.weights_kind == kind.name
    for name, values in checkpoint.tensors():
        assert values.dtype == (dtype if values.dim() == 2 else torch.float32)
        assert (values.float() - tensors[name]).abs().max() < 0.05, name
    if kind == Kind.Q8_0:
        name = "model.layers.0.mlp.down_proj.weight"
        exact = torch.from_numpy(dequantize(quantize(tensors[name].numpy(), kind), kind))
        assert torch.equal(dict(checkpoint.tensors())[name], exact)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_dequantized(tmp_path: Path, kind: Kind) -> None:
    """Blocks of 256; the package writes none, so the blocks here are random bytes with small scales."""
    config = make_config(hidden_size=256, intermediate_size=256, num_heads=4, head_size=64)
    tensors = make_tensors(config)
    name = "model.layers.1.mlp.up_proj.weight"
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (256, 256 // block * size), dtype=np.uint8)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "k.gguf", config, tensors, raw={name: (raw, kind)}))
    assert checkpoint.matrix_kinds == ("F32", kind.name)
    loaded = dict(checkpoint.tensors())[name]
    assert loaded.dtype == torch.float32
    assert np.array_equal(loaded.numpy(), dequantize(raw, kind))


def test_a_type_that_is_not_known_is_named(tmp_path: Path) -> None:
    """With the tensor that has it."""
    config = make_config(hidden_size=256, intermediate_size=256, num_heads=4, head_size=64)
    name = "model.layers.0.mlp.up_proj.weight"
    _, size = gguf.GGML_QUANT_SIZES[Kind.IQ4_XS]
    raw = {name: (np.zeros((256, size), dtype=np.uint8), Kind.IQ4_XS)}
    path = write_gguf(tmp_path / "iq.gguf", config, make_tensors(config), raw=raw)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight has type IQ4_XS"):
        open_checkpoint(path)
    assert Kind.IQ4_XS not in TENSOR_TYPES


def test_the_quick_reader_reads_what_the_package_reads(tiny: Path) -> None:
    """Every metadata key, arrays of strings and of numbers among them."""
    plain, quick = gguf.GGUFReader(tiny), MetadataReader(tiny)
    assert list(plain.fields) == list(quick.fields)
    for key, field in plain.fields.items():
        assert quick.value(key) == field.contents(), key
    assert quick.value("no.such.key") is None
    for ours, theirs in zip(quick.tensors, plain.tensors, strict=True):
        assert (ours.name, ours.data_offset) == (theirs.name, theirs.data_offset)


def test_the_real_model(checkpoint: Checkpoint) -> None:
    """Its shape as published."""
    config = checkpoint.config
    assert checkpoint.name == "smollm2-135m"
    assert checkpoint.weights_kind == "Q4_1"
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.context_length, config.head_size) == (49152, 8192, 64)
    assert config.rms_norm_eps == 1e-5
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.tie_word_embeddings


def test_text_rules_come_from_the_file(tiny: Path) -> None:
    """Tokenizer and chat template; the name may be given."""
    checkpoint = open_checkpoint(tiny, name="mine")
    assert checkpoint.name == "mine"
    assert checkpoint.tokenizer.stop_token_ids == {0, 2}
    assert checkpoint.chat_template is not None
    assert checkpoint.chat_template.source == TEMPLATE


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a12 b", ["a", "1", "2", " b"]),
        ("gpt-2", "a12 b", ["a", "12", " b"]),
        ("default", "it's 12", ["it", "'s", " 12"]),
        ("llama-bpe", "it'S 12345\n\n!", ["it", "'S", " ", "123", "45", "\n\n", "!"]),
        ("qwen2", "a12 b", ["a", "1", "2", " b"]),
    ],
)
def test_words_are_cut_as_the_file_says(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    """Each way of cutting text before merging."""
    cut = make_pre_tokenizer(pre).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words
    config = make_config()
    path = write_gguf(tmp_path / "x.gguf", config, make_tensors(config), pre=None if pre == "default" else pre)
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer.adds_bos == (pre == "llama-bpe")
    assert tokenizer.decode(tokenizer.encode(text, parse_control=False, add_special=False)) == text


@pytest.mark.parametrize(("metadata", "first"), [({}, "h"), ({"tokenizer.ggml.add_bos_token": True}, "<|im_start|>")])
def test_bos_as_the_metadata_says(tmp_path: Path, metadata: dict[str, Any], first: str) -> None:
    """None unless the file asks for it."""
    config = make_config()
    path = write_gguf(tmp_path / "x.gguf", config, make_tensors(config), metadata=metadata)
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer.decode(tokenizer.encode("h", parse_control=True)[:1]) == first


def test_llama3_rope_is_recognised_by_its_factors(tmp_path: Path) -> None:
    """The file holds divisors of the frequencies; they must be those of the settings that are derived."""
    rope = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    config = make_config(rope=rope, head_size=64, num_heads=1, num_kv_heads=1)
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    tensors = make_tensors(config)
    path = write_gguf(tmp_path / "x.gguf", config, tensors, extra={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == config
    assert {name for name, _ in checkpoint.tensors()} == tensors.keys()
    factors[-1] = 7
    path = write_gguf(tmp_path / "y.gguf", config, tensors, extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="RoPE factors of an unknown kind"):
        open_checkpoint(path)


def test_linear_rope(tmp_path: Path) -> None:
    """Positions divided by a factor."""
    config = make_config()
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "x.gguf", config, make_tensors(config), metadata=metadata)
    assert open_checkpoint(path).config.rope == RopeConfig(10000.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported"),
        ({"tokenizer": "bert"}, "tokenizer 'bert' is not supported"),
        ({"pre": "klingon"}, "pre-tokenizer 'klingon' is not supported"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling 'yarn' is not supported"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count differs"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}}, r"self_attn\.q_proj\.bias is not part"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    """At opening, in one line."""
    config = make_config()
    path = write_gguf(tmp_path / "x.gguf", config, make_tensors(config), **changes)
    with pytest.raises(UnsupportedModelError, match=cause) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "changes", "cause"),
    [
        ("model.layers.1.mlp.up_proj.weight", {}, r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (None, {"intermediate_size": 97}, r"gate_proj\.weight is \[96, 64\]; its configuration says \[97, 64\]"),
        (None, {"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_tensors_must_fit_the_sizes(tmp_path: Path, missing: str | None, changes: dict[str, int], cause: str) -> None:
    """A model with a hole, or with sizes that its tensors do not have."""
    tensors = make_tensors(make_config())
    tensors.pop(missing or "", None)
    path = write_gguf(tmp_path / "x.gguf", make_config(**changes), tensors)
    with pytest.raises(ModelFileError, match=cause):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"num_kv_heads": 3}, "cannot share 3"), ({"head_size": 15}, "in pairs"), ({"context_length": -1}, "is -1")],
)
def test_sizes_must_make_a_model(changes: dict[str, int], cause: str) -> None:
    """Whatever kind of file they come from."""
    with pytest.raises(ModelFileError, match=cause):
        check_config(make_config(**changes), Path("x"))


def test_a_file_cut_anywhere_is_one_clear_line(tiny: Path, tmp_path: Path) -> None:
    """Truncation at any place names the file and never crashes."""
    data = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(1, 200, 7), *range(200, len(data), 4001), len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match=r"cut\.gguf") as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_flipped_bytes_never_crash(tiny: Path, tmp_path: Path) -> None:
    """Damage in the metadata either goes unnoticed or is a model error."""
    data = tiny.read_bytes()
    path = tmp_path / "damaged.gguf"
    random = np.random.default_rng(0)
    for place in random.integers(4, 9000, 100):
        damaged = bytearray(data)
        damaged[place] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017  (most places, not all, make an error)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        (b"<!doctype html>", "is not a GGUF file"),
        (b"", "is empty"),
        (b"GGUF\x63\x00\x00\x00" + bytes(64), "truncated or damaged"),
    ],
)
def test_something_else_under_that_name(tmp_path: Path, content: bytes, cause: str) -> None:
    """A pointer, a web page, nothing, a version to come."""
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=cause):
        open_checkpoint(path)


def test_nothing_there(tmp_path: Path) -> None:
    """A path that leads nowhere, and weights without their configuration."""
    with pytest.raises(ModelNotFoundError, match="no model at"):
        open_checkpoint(tmp_path / "x.gguf")
    (tmp_path / "x.safetensors").write_bytes(b"1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_checkpoint(tmp_path / "x.safetensors")
