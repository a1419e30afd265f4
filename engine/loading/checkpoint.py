"""What every kind of model file offers, and opening one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.errors import ModelFileError, ModelNotFoundError
from engine.loading.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from engine.chat_template import ChatTemplate
    from engine.models.config import ModelConfig
    from engine.tokenizer import Tokenizer
    from kernels.blocks import Blocks


class Checkpoint(Protocol):
    """An opened model: its shape, its text rules, its tensors.

    Attributes:
        name: what the model is called when nothing else was asked for.
        config: its sizes, checked.
        chat_template: `None` where the model has none: it can complete text, not chat.
        weights_kind: how most weights are stored (`Q4_1`, `bfloat16`), for display.
        matrix_kinds: how matrices are stored, the kind of most weights first.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    weights_kind: str
    matrix_kinds: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, under its Hugging Face name (`model.layers.0.self_attn.q_proj.weight`).

        Matrices are [out, in]; query and key rows are in half-split RoPE order. Quantized tensors arrive as float32,
        others as they are stored. `lm_head.weight` comes only where the embeddings are not tied. The set of names
        and the shapes were checked when the checkpoint was opened.

        Raises:
            ModelFileError: the file changed or broke since it was opened.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
        """The same with `Blocks` for what is stored in blocks that the native kernels know."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether the matrices are stored in blocks of a few bits."""
        ...


def open_checkpoint(path: Path, *, name: str | None = None) -> Checkpoint:
    """Open a `.gguf` file or a directory in Hugging Face form; weights are not read yet.

    Args:
        name: overrides the name that the file or folder suggests.

    Raises:
        ModelNotFoundError: there is nothing at this path.
        ModelFileError: truncated, not what it claims to be, or its tokenizer belongs to another model.
        UnsupportedModelError: architecture, tensor type, tokenizer or RoPE kind that is not known here.
    """
    checkpoint = _open(path, name)
    check_vocabulary(checkpoint, path)
    return checkpoint


def _open(path: Path, name: str | None) -> Checkpoint:
    # Imported here: each of the two brings libraries that the other does not need.
    if path.is_dir():
        from engine.loading.hugging_face import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path, name=name)
    if not path.is_file():
        raise ModelNotFoundError(f"There is no model at {path}.")
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path} holds weights alone; give the directory that also has config.json.")
    from engine.loading.gguf import GgufCheckpoint

    return GgufCheckpoint(path, name=name)
