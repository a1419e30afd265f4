"""Answers over a KV cache of eight-bit floats, against what torch computes from keys and values rounded so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from engine.handle import GenerationRequest, TokensPrompt
from engine.models.llama import LlamaModel
from engine.sequence import SamplingParams
from kernels.cpu import kv_write
from tests.engine.interpreted_crowd import LONGEST, SEATS, last_logits
from tests.engine.tiny_engine import CONTEXT, answer_all, open_tiny_engine
from tests.fake_checkpoint import make_checkpoint

if TYPE_CHECKING:
    from tests.late_device import LateRunner

FLOAT8 = torch.float8_e4m3fn
# Share of the logits' spread: products with the cache are taken in float16.
TOLERANCE = 0.02
convert = interpreter._convert_float


def convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """As devices do: the interpreter's own rounding up to a power of two forgets the carry, and halves the number."""
    if target != tl.float8e4nv:
        return convert(values, source, target, rounding_mode)
    exact = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    return exact.to(FLOAT8).view(torch.uint8).numpy()


def write_rounded(kv: torch.Tensor, *where: torch.Tensor) -> None:
    """Into a cache of float32, what one of eight-bit floats would hold."""
    kv_write(kv.to(FLOAT8).to(kv.dtype), *where)


def requests() -> list[GenerationRequest]:
    prompts = [
        TokensPrompt(tuple((5 + 9 * number + place) % 200 for place in range(3 + 5 * number))) for number in range(4)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    return [GenerationRequest(f"r{number}", prompt, params, ignore_eos=True) for number, prompt in enumerate(prompts)]


async def check_float8(runner: LateRunner, num_blocks: int, silent_ids: tuple[int, ...]) -> int:
    """Each token is the likeliest one, or as good as that; gives their number."""
    assert {cache.dtype for cache in runner.kv_caches} == {FLOAT8}
    held = sum(cache.nbytes for cache in runner.kv_caches)
    assert held == runner.kv_bytes_per_token * num_blocks * runner.sizes.block_size
    runner.capture()
    asked = requests()
    with patch.object(interpreter, "_convert_float", convert_float):
        async with open_tiny_engine(
            num_blocks=num_blocks, runner=runner, max_num_seqs=SEATS, capacity_num_seqs=runner.sizes.max_num_seqs,
            num_speculative_tokens=0,
        ) as engine:  # fmt: skip
            answers = await answer_all(engine, asked)
    checkpoint, agreed = make_checkpoint(context_length=CONTEXT), 0
    model = LlamaModel(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, max_model_len=LONGEST)
    with patch("engine.models.llama.kv_write", write_rounded):
        for request, answer in zip(asked, answers, strict=True):
            assert isinstance(request.prompt, TokensPrompt)
            known = list(request.prompt.token_ids)
            assert len(answer.token_ids) == request.params.max_tokens
            for token_id in answer.token_ids:
                (logits,) = last_logits(model, known).clone()
                logits[list(silent_ids)] = logits.min()
                lacks = float((logits.max() - logits[token_id]) / logits.std())
                assert lacks < TOLERANCE, f"{request.request_id}: {token_id} lacks {lacks:.3f} of the spread"
                known.append(token_id)
                agreed += 1
    return agreed
