"""A model that is ready to run, as the actors see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.errors import InvalidRequestError
from engine.gpu.device import CPU, Device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from engine.stepper import Runner


class TokenizerLike(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids from 0 up to, but not including, this one can be given to the model. No text leads to others."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens with which the model ends an answer."""
        ...

    def encode(self, text: str, *, parse_control: bool, add_special: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        ...

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model and is no text."""
        ...

    def control_id(self, spelling: str) -> int | None:
        """The control token that is written like this, if there is one."""
        ...


class ChatTemplateLike(Protocol):
    """What the engine asks of a chat template."""

    @property
    def source(self) -> str:
        """The template itself."""
        ...

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template looks at beside the messages."""
        ...

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """A conversation as text; raises `InvalidRequestError` when the template refuses it."""
        ...

    def encode(
        self, messages: list[dict[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a conversation; raises `InvalidRequestError` when the template refuses it."""
        ...


class Prepared(NamedTuple):
    """A runner that is ready, with its model and its cache.

    Attributes:
        dtype: of the computation.
        num_blocks: as in `LoadedModel`, like the rest.
    """

    runner: Runner
    dtype: str
    num_blocks: int
    remarks: tuple[str, ...]
    is_batch_invariant: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that loading gives.

    Attributes:
        name: what clients call it.
        dtype: of the computation, e.g. `float32`.
        weights_kind: how the weights were stored, e.g. `Q4_1`.
        max_model_len: context length in tokens.
        num_blocks: KV blocks that the runner has memory for.
        device: what computes.
        remarks: one line each about what was chosen and why.
        is_batch_invariant: what a step computes of a sequence depends on nothing else in that step.
    """

    name: str
    dtype: str
    weights_kind: str
    max_model_len: int
    num_blocks: int
    runner: Runner
    tokenizer: TokenizerLike
    chat_template: ChatTemplateLike | None
    device: Device = CPU
    remarks: tuple[str, ...] = ()
    is_batch_invariant: bool = True


def check_in_vocabulary(tokenizer: TokenizerLike, token_ids: Collection[int], param: str) -> None:
    """Raise `InvalidRequestError` where an id is not in the vocabulary."""
    last = tokenizer.vocab_size - 1
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id <= last:
            message = f"'{param}' has token id {token_id}, which is not in the vocabulary of 0 to {last}."
            raise InvalidRequestError(message, param=param)


def require_chat_template(template: ChatTemplateLike | None) -> ChatTemplateLike:
    """A model's chat template; without one it cannot lay out a conversation, and this raises `InvalidRequestError`."""
    if template is None:
        message = "This model has no chat template, so it cannot chat; /v1/completions works."
        raise InvalidRequestError(message, param="messages", code="no_chat_template")
    return template
