"""What config.json says about the model's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import ModelFileError, UnsupportedModelError
from engine.loading.checks import check_architecture
from engine.models.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from pathlib import Path


class _Reader:
    """Takes typed values from config.json; `null` means absent."""

    def __init__(self, values: dict[str, Any], path: Path, where: str = "") -> None:
        self._values = values
        self._path = path
        self._where = where

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if value != int(value):
            raise ModelFileError(f"{self._path / 'config.json'}: {self._where}{key} is {value}, not a whole number.")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default))

    def _number(self, key: str, default: float | None) -> float:
        value = self._values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            what = "is missing" if value is None else f"is {value!r}, not a number"
            raise ModelFileError(f"{self._path / 'config.json'}: {self._where}{key} {what}.")
        return value


def read_config(values: dict[str, Any], path: Path) -> ModelConfig:
    """The shape of the model in a directory.

    Args:
        values: the contents of config.json.
        path: the directory, for messages.

    Raises:
        ModelFileError: a size is missing or no number.
        UnsupportedModelError: architecture, RoPE kind or option that is not known here.
    """
    check_architecture(_architecture(values), path)
    _refuse_options(values, path)
    reader = _Reader(values, path)
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    head_size = reader.size("head_dim", hidden_size // max(num_heads, 1))
    context_length = reader.size("max_position_embeddings", 2048)
    return ModelConfig(
        architecture="llama",
        num_layers=reader.size("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=reader.size("num_key_value_heads", num_heads),
        head_size=head_size,
        vocab_size=reader.size("vocab_size"),
        context_length=context_length,
        rms_norm_eps=reader.real("rms_norm_eps", 1e-6),
        rope=_read_rope(values, path, context_length),
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
    )


def _architecture(values: dict[str, Any]) -> str:
    """`llama` for the plain language model; otherwise the name that tells most."""
    names = values.get("architectures") or []
    model_type = str(values.get("model_type"))
    if isinstance(names, list) and names and names[0] != "LlamaForCausalLM":
        return str(names[0])
    return model_type


def _refuse_options(values: dict[str, Any], path: Path) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise UnsupportedModelError(f"{path}: {key} = true is not supported.")
    activation = values.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"{path}: activation {activation!r} is not supported; supported: 'silu'.")
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(f"{path}: quantization {method!r} is not supported for safetensors.")
    if (values.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModelError(f"{path}: partial_rotary_factor other than 1 is not supported.")


def _read_rope(values: dict[str, Any], path: Path, context_length: int) -> RopeConfig:
    """From `rope_parameters` (new), or `rope_scaling` beside `rope_theta`; the kind is `rope_type` or `type` (old)."""
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    scaling = values.get(key) or {}
    if not isinstance(scaling, dict):
        raise ModelFileError(f"{path / 'config.json'}: {key} is not an object.")
    reader = _Reader(scaling, path, where=f"{key}.")
    theta = _Reader({"rope_theta": scaling.get("rope_theta") or values.get("rope_theta")}, path).real(
        "rope_theta", 10000.0
    )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if (scaling.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModelError(f"{path}: partial_rotary_factor other than 1 is not supported.")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=reader.real("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=reader.real("factor"),
            low_freq_factor=reader.real("low_freq_factor"),
            high_freq_factor=reader.real("high_freq_factor"),
            original_context=reader.size("original_max_position_embeddings", context_length),
        )
    raise UnsupportedModelError(f"{path}: RoPE kind {kind!r} is not supported; supported: default, linear, llama3.")
