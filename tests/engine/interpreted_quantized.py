"""A tiny model whose weights stay quantized on the device, through the Triton kernels; to be started with
TRITON_INTERPRET=1. Its logits are held against those of the same weights, dequantized, computed by torch in float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.gpu.llama import GpuLlama
from engine.gpu.weights import in_blocks
from engine.models.llama import LlamaModel, ModelInputs
from engine.precision import rounded
from kernels.gpu.inputs import TokenInputs
from kernels.paged_attention import AttentionRows
from tests.engine.test_mixed_blocks import mixed_checkpoint
from tests.quick_interpreter import stay_dressed

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint

BLOCK_SIZE = 16
NUM_TOKENS = 21
CPU = torch.device("cpu")
# Shares of the logits' spread: float32 keeps what blocks hold; the others round weights, activations and cache.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.02, torch.bfloat16: 0.08}


def make_caches(checkpoint: Checkpoint, dtype: torch.dtype) -> list[torch.Tensor]:
    config = checkpoint.config
    shape = (4, 2, config.num_kv_heads, BLOCK_SIZE, config.head_size)
    return [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]


def plain_logits(checkpoint: Checkpoint, token_ids: torch.Tensor, *, eight_bits: bool) -> torch.Tensor:
    """[N, vocab_size] float32."""
    weights = rounded(checkpoint.weights(), eight_bits=eight_bits)
    model = LlamaModel(checkpoint.config, weights, dtype=torch.float32, max_model_len=NUM_TOKENS)
    positions = torch.arange(NUM_TOKENS)
    rows = AttentionRows(torch.tensor([[1, 3]]), torch.tensor([0, NUM_TOKENS]), torch.tensor([NUM_TOKENS]))
    block_ids = rows.block_tables[0, positions // BLOCK_SIZE]
    inputs = ModelInputs(token_ids, positions, block_ids, positions % BLOCK_SIZE, rows)
    return model.logits(model.forward(inputs, make_caches(checkpoint, torch.float32)))


def device_logits(
    checkpoint: Checkpoint, token_ids: torch.Tensor, dtype: torch.dtype, *, eight_bits: bool
) -> torch.Tensor:
    """The same: all but the last token in one step, that one in a step of its own."""
    model = GpuLlama(
        checkpoint.config, in_blocks(checkpoint.weights(), eight_bits=eight_bits), dtype=dtype, device=CPU,
        max_model_len=NUM_TOKENS, num_multiprocessors=1,
    )  # fmt: skip
    assert model.read_bytes < 1.2 * checkpoint.config.num_products, "something was made into floats"
    caches, hidden = make_caches(checkpoint, dtype), []
    tables = torch.tensor([[1, 3]], dtype=torch.int32)
    for first, last in ((0, NUM_TOKENS - 1), (NUM_TOKENS - 1, NUM_TOKENS)):
        positions = torch.arange(first, last, dtype=torch.int32)
        slots = tables[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        tokens = TokenInputs(token_ids[first:last].to(torch.int32), positions, slots)
        loc, seq_lens = torch.tensor([0, last - first], dtype=torch.int32), torch.tensor([last], dtype=torch.int32)
        rows = AttentionRows(tables, loc, seq_lens)
        hidden.append(model.forward(tokens, rows, caches, max_query_len=last - first))
    return model.logits(torch.cat(hidden), torch.empty(NUM_TOKENS, checkpoint.config.vocab_size))


def check_logits(folder: Path) -> int:
    """In each dtype, with the file's own blocks and with such of eight bits; gives the number of cases."""
    checkpoint = mixed_checkpoint(folder / "mixed.gguf")
    token_ids = torch.arange(NUM_TOKENS) * 7 % checkpoint.config.vocab_size
    agreed = 0
    for eight_bits, dtypes in ((False, [torch.float32, torch.bfloat16]), (True, [torch.float16])):
        expected = plain_logits(checkpoint, token_ids, eight_bits=eight_bits)
        for dtype in dtypes:
            found = device_logits(checkpoint, token_ids, dtype, eight_bits=eight_bits)
            worst = float((found - expected).abs().max() / expected.std())
            print(f"{dtype}, {'eight bits' if eight_bits else 'own blocks'}: at most {worst:.2g} of the spread away")
            assert worst < TOLERANCE[dtype]
            agreed += 1
    return agreed


if __name__ == "__main__":
    stay_dressed()
    with torch.inference_mode():
        print(f"{check_logits(Path(sys.argv[1]))} cases agree")
