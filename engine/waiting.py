"""Who is seated next: the queue of one class of work, and fairness between the keys that ask.

Fairness is that of virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):
every key has a counter of the service it was given, and the key with the smallest one is served next.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import TypeAlias

    from engine.sequence import Sequence

    # Where a sequence stands in a line: put back or not, priority, number; the number is unique, so that the
    # sequences themselves are never compared.
    _Entry: TypeAlias = tuple[int, int, int, Sequence]

# What a token costs, the paper's w_p and w_q. A prompt token that was in the cache costs next to nothing to serve.
PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
CACHED_WEIGHT = 0.1
# How far a key may be ahead of the least served and still go first because it lacks seats, in weighted tokens.
SHARE_SLACK = 1000.0
# Accounts of so many keys that have nothing here are kept, those that left last.
MAX_IDLE_ACCOUNTS = 256


@dataclass(slots=True)
class Account:
    """What one key was given, and what it asks for now.

    Attributes:
        identity: which key it is; of all keys there ever are each has another.
        name: what people call it. One that was revoked and a later one may share it.
        counter: its virtual counter, in weighted tokens; lifted when it returns.
        served: weighted tokens that it was really charged for.
        num_waiting: how many of its sequences wait.
        num_seats: how many seats it holds.
    """

    identity: str
    name: str
    counter: float = 0.0
    served: float = 0.0
    num_waiting: int = 0
    num_seats: int = 0


class Fairness:
    """Virtual token counters by key, and who holds how many seats, in one class of work.

    It differs from the published algorithm (VTC, algorithm 2) in this:
    - Output is charged when a pick between keys is due and when a sequence leaves its seat, not after every step:
      the counters are the same whenever they are compared, and a step pays nothing.
    - A prompt token from the prefix cache costs `CACHED_WEIGHT`.
    - What was preempted returns with its prompt already charged, and does not lift its key: it never left.
    - A key that holds less than its share of the seats goes first, the one with fewest foremost, while it is at most
      `SHARE_SLACK` ahead of the least served: counters alone do not bound its wait for a seat. The paper's bound on
      the difference in service grows by as much.

    Keys are made and revoked while the server runs, so accounts go by their identity, not by their name, and of those
    that have nothing here the `MAX_IDLE_ACCOUNTS` that left last are kept. One that returns after so many others have
    left is treated as a newcomer: it is lifted, and what it had beyond that is forgotten.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}  # in the order in which they left
        self._seated: dict[int, Sequence] = {}
        self._last_left: Account | None = None
        self._num_busy = 0

    @property
    def accounts(self) -> Mapping[str, Account]:
        """By identity every key that has something here, or had lately; to be read only.

        The counters are true after `settle`.
        """
        return self._accounts

    def share(self, num_seats: int) -> int:
        """Of so many seats, those that belong to each key with anything waiting or running."""
        return -(-num_seats // max(1, self._num_busy))

    @property
    def seated_now(self) -> Iterable[Sequence]:
        """Everybody who sits."""
        return self._seated.values()

    def seated(self, sequence: Sequence) -> None:
        """A sequence took a seat, and `num_cached_tokens` of it is known: its prompt is charged, once in its life."""
        account = self._account(sequence)
        self._count(account, seats=1)
        self._seated[sequence.sequence_id] = sequence
        if sequence.num_charged_tokens == 0:
            cached = sequence.num_cached_tokens
            self._charge(account, PROMPT_WEIGHT * (sequence.num_prompt_tokens - cached) + CACHED_WEIGHT * cached)
            sequence.num_charged_tokens = sequence.num_prompt_tokens

    def vacated(self, sequence: Sequence) -> None:
        """A sequence left its seat: ended, aborted or preempted."""
        del self._seated[sequence.sequence_id]
        account = self._account(sequence)
        self._settle(sequence, account)
        self._count(account, seats=-1)

    def begin_anew(self) -> None:
        """Nobody waits or sits any more, as far as this was told; what each was charged stays."""
        self._seated.clear()
        self._num_busy = 0
        for account in self._accounts.values():
            account.num_waiting = account.num_seats = 0
        self._idle = dict(self._accounts)

    def settle(self) -> None:
        """Charge everybody who sits for the output that was not charged yet."""
        for sequence in self._seated.values():
            self._settle(sequence, self._account(sequence))

    def joined(self, sequence: Sequence, *, lift: bool) -> None:
        """A sequence began to wait (told by the queue). `lift`: it is a newcomer.

        A key of which nothing waited is lifted to the smallest counter of those that wait, or to that of the key
        that left the queue last: it cannot save up service by staying away.
        """
        account = self._account(sequence)
        if lift and not account.num_waiting and len(self._accounts) > 1:
            self.settle()
            waiting = [other.counter for other in self._accounts.values() if other.num_waiting]
            if waiting:
                account.counter = max(account.counter, min(waiting))
            elif self._last_left is not None:
                account.counter = max(account.counter, self._last_left.counter)
        self._count(account, waiting=1)

    def left(self, sequence: Sequence) -> None:
        """A sequence no longer waits (told by the queue)."""
        self._last_left = account = self._account(sequence)
        self._count(account, waiting=-1)

    def _account(self, sequence: Sequence) -> Account:
        identity = sequence.key_identity
        account = self._accounts.get(identity)
        if account is None:
            account = self._accounts[identity] = Account(identity, sequence.key_name)
        return account

    def _count(self, account: Account, *, waiting: int = 0, seats: int = 0) -> None:
        was_busy = account.num_waiting + account.num_seats > 0
        account.num_waiting += waiting
        account.num_seats += seats
        is_busy = account.num_waiting + account.num_seats > 0
        if is_busy == was_busy:
            return
        self._num_busy += is_busy - was_busy
        if is_busy:
            self._idle.pop(account.identity, None)
            return
        self._idle[account.identity] = account
        if len(self._idle) > MAX_IDLE_ACCOUNTS:
            longest = next(iter(self._idle))
            del self._idle[longest], self._accounts[longest]

    def _settle(self, sequence: Sequence, account: Account) -> None:
        num_new = len(sequence.token_ids) - sequence.num_charged_tokens
        self._charge(account, OUTPUT_WEIGHT * num_new)
        sequence.num_charged_tokens += num_new

    def _charge(self, account: Account, cost: float) -> None:
        account.counter += cost
        account.served += cost


def served_by_key(*classes: Fairness) -> dict[str, int]:
    """Weighted tokens by the name of the key they were served to, all classes of work together; charges nothing.

    Since the start, or since the key's account was opened anew; keys of the same name count as one here.
    """
    served: dict[str, float] = {}
    for fairness in classes:
        for account in fairness.accounts.values():
            served[account.name] = served.get(account.name, 0.0) + account.served
        for sequence in fairness.seated_now:
            served[sequence.key_name] += OUTPUT_WEIGHT * (len(sequence.token_ids) - sequence.num_charged_tokens)
    return {name: round(tokens) for name, tokens in served.items() if name}


class WaitingQueue:
    """The sequences of one class of work that wait.

    The order: first those that were preempted for memory, the last put back first. Then between keys, as `Fairness`
    says; of equal ones the one whose first has waited longest. Within a key the lower `priority`, then who came first.
    With one key only that is first come, first served within a priority.

    Args:
        fairness: the counters of this class; each class has its own.
    """

    def __init__(self, fairness: Fairness) -> None:
        self.fairness = fairness
        self.num_tokens = 0
        self._front: list[_Entry] = []
        self._lines: dict[str, list[_Entry]] = {}
        self._places: dict[int, tuple[list[_Entry], _Entry]] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def __iter__(self) -> Iterator[Sequence]:
        """Everybody who waits, in the order in which they joined."""
        return iter([entry[3] for _, entry in self._places.values()])

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._places

    def add(self, sequence: Sequence, *, lift: bool = True) -> None:
        """A newcomer: behind those of its key with the same or a lower number of priority; see `Fairness.joined`."""
        self.fairness.joined(sequence, lift=lift)
        line = self._lines.setdefault(sequence.key_identity, [])
        self._join(line, (1, sequence.priority, self._next_number, sequence))

    def put_back(self, sequence: Sequence) -> None:
        """Preempted for memory: to the very front of the class, whatever its key."""
        self.fairness.joined(sequence, lift=False)
        self._join(self._front, (0, 0, -self._next_number, sequence))

    def put_back_own(self, sequence: Sequence) -> None:
        """Gave its seat to another key: to the front of its own key's line."""
        self.fairness.joined(sequence, lift=False)
        line = self._lines.setdefault(sequence.key_identity, [])
        self._join(line, (0, 0, -self._next_number, sequence))

    def remove(self, sequence: Sequence) -> None:
        """It is seated or aborted. Who seats it tells `fairness.seated` when the cached tokens are known.

        Raises:
            KeyError: it does not wait here.
        """
        line, entry = self._places.pop(sequence.sequence_id)
        del line[bisect_left(line, entry)]
        if not line and line is not self._front:
            del self._lines[sequence.key_identity]
        self.num_tokens -= sequence.num_tokens
        self.fairness.left(sequence)

    def candidates(self, num_seats: int = 0, *, with_followers: bool = False) -> Iterator[Sequence]:
        """Those who wait, in the order in which they are to be seated.

        Args:
            num_seats: seats that the busy keys share; 0 lets the counters alone decide.
            with_followers: also those whose prompt is still to be computed for their leader, as where batches are
                fixed: they would miss theirs. Others keep their place meanwhile.

        The queue may change between two of them: each is chosen by the counters and seats of its moment. One that is
        not taken is passed over. A pick costs time in the number of keys, not of sequences.
        """
        entry: _Entry | None = None
        while entry := _after(self._front, entry):
            yield entry[3]
        if len(self._lines) > 1:
            self.fairness.settle()
        passed: dict[str, _Entry] = {}
        while entry := self._next(passed, num_seats):
            passed[entry[3].key_identity] = entry
            if with_followers or not entry[3].awaits_leader:
                yield entry[3]

    def check_integrity(self) -> None:
        """Hold lines, places and token count against each other.

        Raises:
            RuntimeError: they differ.
        """
        entries = sorted([entry for line in (self._front, *self._lines.values()) for entry in line])
        if entries != sorted([entry for _, entry in self._places.values()]):
            raise RuntimeError("the lines of the queue and its places differ")
        if self.num_tokens != sum([sequence.num_tokens for sequence in self]):
            raise RuntimeError(f"{self.num_tokens} waiting tokens do not match the queue")

    def _join(self, line: list[_Entry], entry: _Entry) -> None:
        sequence = entry[3]
        self._next_number += 1
        insort(line, entry)
        self._places[sequence.sequence_id] = line, entry
        self.num_tokens += sequence.num_tokens

    def _next(self, passed: dict[str, _Entry], num_seats: int) -> _Entry | None:
        """The first, beyond those passed, of the key whose turn it is."""
        heads = [(key, entry) for key, line in self._lines.items() if (entry := _after(line, passed.get(key)))]
        if len(heads) < 2:
            return heads[0][1] if heads else None
        accounts, share = self.fairness.accounts, self.fairness.share(num_seats)
        limit = min([accounts[key].counter for key, _ in heads]) + SHARE_SLACK

        def order(head: tuple[str, _Entry]) -> tuple[int, float, int]:
            account = accounts[head[0]]
            lacks_seats = account.num_seats < share and account.counter <= limit
            return account.num_seats if lacks_seats else share, account.counter, head[1][2]

        return min(heads, key=order)[1]


def _after(line: list[_Entry], entry: _Entry | None) -> _Entry | None:
    """What stands behind an entry that may have left meanwhile; the first of all behind `None`."""
    index = 0 if entry is None else bisect_right(line, entry)
    return line[index] if index < len(line) else None
