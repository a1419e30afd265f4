"""Models whose matrices are stored in unlike blocks: each is used as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.loading.checkpoint import open_checkpoint
from engine.precision import choose_precision
from tests.engine.test_native_llama import logits_of, tokens_of, without_kernels
from tests.fake_checkpoint import make_runner
from tests.kernels.library import kernels_or_skip
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from engine.loading.checkpoint import Checkpoint


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    kernels_or_skip()


# As `llama-quantize` mixes them: the value projection is more precise than query and key.
MIXED = {
    "self_attn.q_proj": "Q4_K",
    "self_attn.k_proj": "Q5_K",
    "self_attn.v_proj": "Q6_K",
    "self_attn.o_proj": "Q5_K",
    "mlp.gate_proj": "Q4_K",
    "mlp.up_proj": "Q4_K",
    "mlp.down_proj": "Q6_K",
}


def k_blocks(kind: GGMLQuantizationType, rows: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """[rows, one block of 256] with any codes and scales, such that weights are some tenths."""
    data = np.random.default_rng(seed).integers(0, 256, (rows, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    floats = {"Q4_K": (2e-4, 1.5e-3), "Q5_K": (1e-4, 1.5e-3), "Q6_K": (1e-4,)}[kind.name]
    start = 208 if kind.name == "Q6_K" else 0
    data[:, start : start + 2 * len(floats)] = np.array(floats, dtype=np.float16).view(np.uint8)
    return data


def mixed_checkpoint(path: Path, **changes: str) -> Checkpoint:
    config = make_config(num_layers=1, hidden_size=256, intermediate_size=256, head_size=64)
    tensors, kinds = make_tensors(config), {**MIXED, **changes}
    names = {
        name: GGMLQuantizationType[kinds[name.removeprefix("model.layers.0.").removesuffix(".weight")]]
        for name in tensors
        if "proj" in name
    }
    raw = {name: (k_blocks(kind, len(tensors[name]), i), kind) for i, (name, kind) in enumerate(names.items())}
    return open_checkpoint(write_gguf(path, config, tensors, raw=raw))


def test_each_matrix_keeps_its_own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = mixed_checkpoint(tmp_path / "model.gguf")
    config, token_ids = checkpoint.config, tokens_of(60, checkpoint.config.vocab_size)
    precision = choose_precision("native", checkpoint)
    assert precision.reason.startswith(
        "blocks of Q4_K, Q5_K, Q6_K, as in the file; F32 made into blocks of eight bits; native kernels for "
    )
    runner = make_runner(checkpoint, dtype="native")
    native = torch.cat([logits for _, logits in runner.logits_of(token_ids)])
    halves = {"Q4_K": 10, "Q5_K": 12, "Q6_K": 14}  # of a bit for each weight, with scales and minima
    rows = {name: 256 for name in MIXED} | {"self_attn.k_proj": 128, "self_attn.v_proj": 128}
    blocks = sum(rows[name] * 256 * halves[kind] // 16 for name, kind in MIXED.items())
    embedding = -(-config.vocab_size // 32) * 32 * 256 * 17 // 16
    assert runner.model.read_bytes == blocks + embedding
    without_kernels(monkeypatch)
    plain = logits_of(checkpoint, token_ids, dtype="native")
    exact = logits_of(checkpoint, token_ids, dtype="float32")
    assert float((native - plain).abs().max()) < 0.05 * float(plain.std())
    assert float((plain - exact).abs().max()) < 0.1 * float(exact.std())


def test_gate_and_up_of_unlike_blocks_become_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = mixed_checkpoint(tmp_path / "model.gguf", **{"mlp.up_proj": "Q6_K"})
    token_ids = tokens_of(60, checkpoint.config.vocab_size)
    native = logits_of(checkpoint, token_ids, dtype="native")
    without_kernels(monkeypatch)
    plain = logits_of(checkpoint, token_ids, dtype="native")
    assert float((native - plain).abs().max()) < 0.1 * float(plain.std())
