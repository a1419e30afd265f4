"""How far ahead the scheduler looks when it gives out memory: small strategies beside its loop.

A policy says how long it expects a sequence to become. A newcomer is seated when what is expected of it, and what is
still expected of those that run, fits into the blocks that can be had.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine.kv_cache import KVCache
    from engine.sequence import Sequence

NUM_OBSERVED = 512
QUANTILE = 0.8


class AdmissionPolicy(Protocol):
    """Expectations about lengths, in tokens.

    Attributes:
        may_preempt: whether one that sits may lose its seat.
    """

    may_preempt: bool

    def expected_tokens(self, sequence: Sequence, block_size: int, /) -> int:
        """Tokens for which the sequence should find room without anybody having to leave."""
        ...

    def reserved_tokens(self, sequence: Sequence, /) -> int:
        """Tokens for which room is kept that nobody else can have."""
        ...

    def observe(self, sequence: Sequence) -> None:
        """An answer came to its own end."""
        ...


class OnDemand:
    """Grow block by block and preempt the youngest when memory runs out (vLLM).

    One more block each is kept in hand: without it a newcomer would be thrown out again at the others' next border.
    """

    may_preempt = True

    def expected_tokens(self, sequence: Sequence, block_size: int) -> int:
        """What is known, and one block more."""
        return len(sequence.token_ids) + sequence.num_pending_tokens + block_size

    def reserved_tokens(self, _sequence: Sequence, /) -> int:
        """None: who comes first to a block has it."""
        return 0

    def observe(self, sequence: Sequence) -> None:
        """Nothing is learnt."""


class Reserve:
    """Room for prompt and `max_tokens` before the first step; never preempts (Orca; TensorRT-LLM's guaranteed mode)."""

    may_preempt = False

    def expected_tokens(self, sequence: Sequence, _block_size: int, /) -> int:
        """The longest it can become; the last token needs no room."""
        return sequence.end_length - 1

    def reserved_tokens(self, sequence: Sequence, /) -> int:
        """All of that."""
        return sequence.end_length - 1

    def observe(self, sequence: Sequence) -> None:
        """Nothing is learnt."""


class Predicted:
    """Room for an answer as long as most were lately: fewer preemptions than on demand, less waste than a reservation.

    Until the first answer has ended it expects what `OnDemand` does.
    """

    may_preempt = True

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._sorted: list[int] = []

    def expected_tokens(self, sequence: Sequence, block_size: int) -> int:
        """Prompt and the length that four in five of the last answers did not exceed, if it is not past it already."""
        known = len(sequence.token_ids) + sequence.num_pending_tokens + block_size
        if not self._sorted:
            return known
        likely = self._sorted[int(QUANTILE * (len(self._sorted) - 1))]
        return max(known, min(sequence.num_prompt_tokens + likely, sequence.end_length - 1))

    def reserved_tokens(self, _sequence: Sequence, /) -> int:
        """None: an answer that grows longer than expected takes what was expected of another."""
        return 0

    def observe(self, sequence: Sequence) -> None:
        """Remember the length of the answer; the oldest of many is forgotten."""
        length = sequence.num_output_tokens
        self._arrived.append(length)
        insort(self._sorted, length)
        if len(self._arrived) > NUM_OBSERVED:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]


_ADMISSION: Final[Mapping[str, Callable[[], AdmissionPolicy]]] = {
    "on_demand": OnDemand,
    "reserve": Reserve,
    "predicted": Predicted,
}
ADMISSIONS: Final = tuple(_ADMISSION)


class Outlook:
    """What a policy expects, in blocks of a cache.

    Args:
        usable_capacity: tokens that a sequence can have at most.
    """

    def __init__(self, admission: AdmissionPolicy, kv_cache: KVCache, usable_capacity: int) -> None:
        self.admission = admission
        self._kv_cache = kv_cache
        self._usable_capacity = usable_capacity

    def expected_blocks(self, sequence: Sequence) -> int:
        """Blocks that the policy wants for a sequence, those it has included."""
        expected = self.admission.expected_tokens(sequence, self._kv_cache.block_size)
        return self._kv_cache.blocks_for(min(expected, self._usable_capacity))

    def promised_blocks(self, sequence: Sequence) -> int:
        """Blocks that the policy wants for a running sequence beyond those it has."""
        return max(0, self.expected_blocks(sequence) - len(sequence.block_ids))

    def could_sit(self, waiter: Sequence, running: list[Sequence], leaving: list[Sequence]) -> bool:
        """Whether there would be memory for one who waits if some of those that run had left."""
        staying = [sequence for sequence in running if sequence not in leaving]
        prefix = self._kv_cache.find_prefix(waiter)
        promised = sum([self.promised_blocks(sequence) for sequence in staying])
        freed = sum([self._kv_cache.num_freed(sequence, prefix) for sequence in leaving])
        return not staying or self._kv_cache.fits(self.expected_blocks(waiter), prefix, promised - freed)


def make_admission(name: str) -> AdmissionPolicy:
    """The policy of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _ADMISSION:
        raise ValueError(f"no admission policy {name!r}: there are {', '.join(ADMISSIONS)}")
    return _ADMISSION[name]()
