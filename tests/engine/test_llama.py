"""The Llama architecture beside transformers' own, on tiny random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import UnsupportedModelError
from engine.models.config import RopeConfig
from engine.models.rope import rope_frequencies
from tests.fake_checkpoint import FakeCheckpoint, make_runner
from tests.tiny_models import make_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def reference_model(config: Any, rope: dict[str, Any]) -> Any:
    """A random model of transformers with the shape of `config`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
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
            rope_parameters={"rope_theta": config.rope.theta, **rope},
            initializer_range=0.2,
        )
    )
    return model.eval()


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, {"rope_type": "default"}),
        ({"num_kv_heads": 4, "tie_word_embeddings": False}, {"rope_type": "default"}),
        ({"num_heads": 6, "num_kv_heads": 1, "head_size": 8, "hidden_size": 48}, {"rope_type": "default"}),
        ({"head_size": 32, "rope": RopeConfig(1e4, "linear", 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope": RopeConfig(5e5, "llama3", **LLAMA3, original_context=32), "head_size": 32},
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32},
        ),
    ],
    ids=["grouped, tied", "untied", "one key head", "linear rope", "llama3 rope"],
)
def test_logits_are_those_of_transformers(changes: dict[str, Any], rope: dict[str, Any]) -> None:
    config = make_config(**changes)
    model = reference_model(config, rope)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "rotary" not in name}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    runner = make_runner(FakeCheckpoint(config, weights), max_num_batched_tokens=37)
    token_ids = torch.randint(config.vocab_size, (100,)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    logits = torch.cat([part for _, part in runner.logits_of(token_ids)])
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=2e-4)


def test_an_unknown_rope_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="yarn"):
        rope_frequencies(RopeConfig(1e4, "yarn"), 16)
