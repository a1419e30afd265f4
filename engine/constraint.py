"""What an answer may consist of: the seam between the sampler and a grammar of any kind.

All calls of a state are made on the thread that runs the model, in this order for each token: `allowed`, `consume`,
and `force` where tokens may follow without a draw.
"""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    """Part of a request. It never changes, and everybody who answers the request shares it."""

    def begin(self, token_ids: tuple[int, ...]) -> ConstraintState:
        """The state behind the tokens that the answer has so far: none, or after a preemption those it had.

        Raises:
            ConstraintError: there is no such state.
        """
        ...


class ConstraintState(Protocol):
    """How far one answer has come. Each method may raise `ConstraintError`, which ends this answer alone."""

    def allowed(self) -> bytes:
        """Which tokens may come next: one bit a token, token 0 in the lowest bit of the first byte.

        Tokens beyond the end of the mask may not come. Where the answer is complete, only stop tokens may.
        """
        ...

    def consume(self, token_id: int) -> None:
        """This token was drawn."""
        ...

    def force(self) -> tuple[int, ...]:
        """The tokens that must follow now, often none; they are consumed with this call."""
        ...
