"""Whether a tokenizer and the embedding it is used with belong together.

A fine-tune often adds a token to the tokenizer, for padding say, and leaves the embedding as it was: such tokens are
lost. A model can do without a few of them, but not without those that stand in every prompt or end every answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.errors import InvalidRequestError, ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

    from engine.loading.checkpoint import Checkpoint
    from engine.tokenizer import Tokenizer

MAX_NAMED: Final = 8


def check_vocabulary(checkpoint: Checkpoint, path: Path) -> None:
    """Refuse a model that lacks a token it cannot do without.

    Raises:
        ModelFileError: the token stands around every text or in every conversation, or is the only one that ends an
            answer.
    """
    tokenizer = checkpoint.tokenizer
    lost = tokenizer.lost_tokens
    if not lost:
        return
    end = tokenizer.eos_token_id
    needed = {
        "which ends its answers": [] if tokenizer.stop_token_ids or end is None else [end],
        "which its tokenizer puts around every text": tokenizer.encode("", parse_control=False),
        "which its chat template writes in every conversation": _in_every_conversation(checkpoint),
    }
    for what, token_ids in needed.items():
        for token_id in token_ids:
            if token_id in lost:
                raise ModelFileError(
                    f"{path}: the embedding has {checkpoint.config.vocab_size} rows and none for token {token_id} "
                    f"({lost[token_id]!r}), {what}. Use the tokenizer that the weights were made with."
                )


def vocabulary_remarks(tokenizer: Tokenizer) -> list[str]:
    """What an operator should know about tokens that are lost; nothing where none is."""
    lost = tokenizer.lost_tokens
    if not lost:
        return []
    named = ", ".join([f"{token_id} {text!r}" for token_id, text in list(lost.items())[:MAX_NAMED]])
    more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
    return [f"the tokenizer has tokens that the model lacks; requests that hold one are refused: {named}{more}"]


def _in_every_conversation(checkpoint: Checkpoint) -> list[int]:
    """Control tokens of the shortest conversation there is."""
    template = checkpoint.chat_template
    if template is None:
        return []
    try:
        text = template.render([{"role": "user", "content": "Hello"}])
    except InvalidRequestError:
        return []  # the template wants more than that; what it writes then is looked at with each request
    return [piece for piece in checkpoint.tokenizer.split_control(text) if isinstance(piece, int)]
