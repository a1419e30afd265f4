"""Decode steps of transformers' `generate`, with a model of the same shape whose weights are random, too."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import torch

from engine.random_model import SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HEADER = ("batch", "context", "generate: step ms", "Relevo: step ms", "times as fast")


class Missing(Exception):  # noqa: N818
    """Nothing to compare with is here; says what to do."""


def compare(
    shape: str,
    sizes: Sequence[tuple[int, int]],
    device: str,
    new_tokens: int,
    ours: Mapping[tuple[int, int], Mapping[str, Any]],
    keep: Callable[[dict[str, Any]], object],
) -> None:
    """A row for each size, or why there is none.

    Args:
        sizes: (batch, context).
        new_tokens: steps to take the mean of.
        ours: rows of `engine.bench_device` by size.
        keep: told all rows so far behind each.

    Raises:
        Missing: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Missing("transformers is not installed here: pip install 'transformers>=5,<6'")
    model = make_model(shape, torch.device(device))
    figures: dict[str, Any] = {"shape": shape, "dtype": str(model.dtype).removeprefix("torch."), "rows": []}
    for batch, context in sizes:
        row: dict[str, Any] = {"batch": batch, "context": context}
        try:
            row["step_seconds"] = step_seconds(model, batch, context, new_tokens)
        except torch.OutOfMemoryError:
            row["why"] = "out of memory"
        if own := ours.get((batch, context)):
            row["own_step_seconds"] = own["step_seconds"]
        figures["rows"].append(row)
        keep(figures)
        if device == "cuda":
            torch.cuda.empty_cache()


def make_model(shape: str, device: torch.device) -> Any:
    """A Llama that never ends before it must; in bfloat16 on a GPU, with the attention that transformers takes itself.

    Raises:
        ValueError: the shape stretches its rotations.
    """
    import transformers

    config = SHAPES[shape]
    if config.rope.kind != "default":
        raise ValueError(f"{shape} has rotations of another kind")
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
    try:
        with device:
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=config.vocab_size,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    num_hidden_layers=config.num_layers,
                    num_attention_heads=config.num_heads,
                    num_key_value_heads=config.num_kv_heads,
                    head_dim=config.head_size,
                    max_position_embeddings=config.context_length,
                    rms_norm_eps=config.rms_norm_eps,
                    tie_word_embeddings=config.tie_word_embeddings,
                    rope_parameters={"rope_theta": config.rope.theta, "rope_type": "default"},
                )
            )
    finally:
        torch.set_default_dtype(usual)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def step_seconds(model: Any, batch: int, context: int, new_tokens: int) -> float:
    """Of a decode step: what so many tokens more than one take, after a run that is not counted."""
    _generate(model, batch, context, 2)
    one = _generate(model, batch, context, 1)
    return (_generate(model, batch, context, 1 + new_tokens) - one) / new_tokens


@torch.inference_mode()
def _generate(model: Any, batch: int, context: int, count: int) -> float:
    """Seconds of `count` tokens behind prompts of `context`, greedily."""
    prompt = torch.randint(1, model.config.vocab_size, (batch, context), device=model.device)
    began = time.perf_counter()
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    given = len(output[0].tolist()) - context  # has come when it is read
    seconds = time.perf_counter() - began
    if given != count:
        raise RuntimeError(f"generate gave {given} tokens and not {count}")
    return seconds


def table(figures: Mapping[str, Any]) -> list[str]:
    """The rows, or that there are none."""
    if "missing" in figures:
        return [f"Not compared: {figures['missing']}"]
    lines = [f"transformers' generate, {figures['shape']} in {figures['dtype']}", "  ".join(HEADER)]
    for row in figures["rows"]:
        theirs, own = row.get("step_seconds"), row.get("own_step_seconds")
        cells = (
            f"{row['batch']}",
            f"{row['context']}",
            row["why"] if theirs is None else f"{theirs * 1e3:.2f}",
            "" if own is None else f"{own * 1e3:.2f}",
            f"{theirs / own:.1f}" if theirs and own else "",
        )
        lines.append("  ".join([cell.rjust(len(name)) for cell, name in zip(cells, HEADER, strict=True)]))
    return lines
