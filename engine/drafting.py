"""Drafts: tokens that a sequence may have next, computed in one step with its last known one (speculative decoding).

What followed the last tokens of a sequence when they stood in it before is likely to follow them again: code that is
edited, text that is quoted (prompt look-up decoding, Saxena; vLLM's n-gram speculator). The step computes the drafts as
if they were known and draws a token behind each of them, with the noise of its position. A draft that equals what was
drawn before it was right, and so is what was drawn behind it. Drafts save steps, and change no token.

Rows are not free. A step takes the time of `STEP_ROWS` rows and of those it has, and gives as many tokens as come true.
A draft is computed only where that makes more tokens of the step's time, by what came true of its sequence lately: with
few rows nearly always, in a full batch where nearly all of them do, beside a prompt that is read hardly ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.plan import Plan
    from engine.sequence import Sequence

# Steps with more rows have no drafts: it would be a gain of a few per cent, and a search for each row.
MAX_DRAFTING_ROWS = 16
# What a step takes beside its rows, as a number of rows: reading the weights, planning. Measured, see RESULTS.md.
STEP_ROWS = 6.0
# How many of the last tokens must have stood there before; the longer is looked for first.
NUMS_SAME = (4, 2)
# Places that are remembered of a sequence; the one that was seen least lately is forgotten.
MAX_PLACES = 32_768
# Tokens that are looked at in one call: a long prompt is learnt over some steps, and holds none of them up.
MAX_LEARNT = 2048
# How far a draft that came true, or did not, moves the share of those that do.
RATE = 0.125


class PromptLookup:
    """Drafts how one sequence goes on, from its own tokens.

    Attributes:
        share: of drafted tokens those that came true, where the ones before them had; of the latest most.
    """

    __slots__ = ("_draft", "_drafted_at", "_num_seen", "_places", "share")

    def __init__(self) -> None:
        self.share = 0.5
        # Some tokens to where another one followed them, the last time.
        self._places: dict[tuple[int, ...], int] = {}
        self._num_seen = 0
        self._draft: tuple[int, ...] = ()
        self._drafted_at = 0

    @property
    def num_places(self) -> int:
        """Places that are remembered, at most `MAX_PLACES`."""
        return len(self._places)

    def draft(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        """What may follow; nothing where the last tokens are new, or a long prompt is not learnt yet.

        Whether it is computed or not, the next call sees what came of it, so that a sequence that begins to repeat
        itself is noticed without a trial.

        Args:
            token_ids: of the sequence: those of the last call, and more.
            max_tokens: the longest draft.
        """
        self._learn(token_ids)
        draft: list[int] = []
        for num_same in NUMS_SAME:
            place = self._places.get(tuple(token_ids[-num_same:]))
            if place is not None:
                draft = token_ids[place : place + max_tokens]
                period = len(token_ids) - place
                while len(draft) < max_tokens:  # it repeats itself: the draft goes on in the draft
                    draft.append(draft[len(draft) - period])
                break
        self._draft, self._drafted_at = tuple(draft), len(token_ids)
        return self._draft

    def _learn(self, token_ids: list[int]) -> None:
        """Look at each token once: what it says of the last draft, and what it follows."""
        for drafted, token_id in zip(self._draft, token_ids[self._drafted_at :], strict=False):
            self.share += RATE * ((drafted == token_id) - self.share)
            if drafted != token_id:
                break
        places, first = self._places, max(self._num_seen, len(token_ids) - MAX_PLACES // len(NUMS_SAME))
        self._num_seen = min(first + MAX_LEARNT, len(token_ids))
        for place in range(first, self._num_seen):
            for num_same in NUMS_SAME:
                if place >= num_same:
                    key = tuple(token_ids[place - num_same : place])
                    places.pop(key, None)  # so that it stands behind all others
                    places[key] = place
            while len(places) > MAX_PLACES:
                del places[next(iter(places))]


def add_drafts(plan: Plan, live: Mapping[int, Sequence]) -> None:
    """Spend tokens that nobody else has a use for in this step on drafts, where they are worth it.

    Drafts fill the last block that a sequence has: none is taken for them.

    Args:
        plan: everybody has been given tokens.
        live: the sequences of its rows.
    """
    most = plan.limits.num_speculative_tokens
    if not most or not plan.tokens_left or len(plan.rows) > MAX_DRAFTING_ROWS:
        return
    has_interactive = any(not live[sequence_id].background for _, sequence_id, *_ in plan.rows)
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for row, (_, sequence_id, start, _, _, decodes) in enumerate(plan.rows):
        sequence = live[sequence_id]
        if not decodes or not sequence.params.is_plain:
            continue
        if has_interactive and sequence.background:
            continue  # the others would wait for its drafts
        # Behind the token that ends the answer nothing is drawn.
        max_tokens = min(most, sequence.room - start - 1, sequence.end_length - start - 2)
        if max_tokens > 0:
            if sequence.lookup is None:
                sequence.lookup = PromptLookup()
            draft = sequence.lookup.draft(sequence.token_ids, max_tokens)
            found.append((sequence.lookup.share, row, draft))
    found.sort(key=lambda each: -each[0])  # the surest first, of equals the earlier row
    num_rows = plan.token_budget - plan.tokens_left
    num_gained = float(num_rows)
    for length in range(1, most + 1):
        for share, row, draft in found:
            # Tokens by time, with the draft and without: (gained + chance) / (time + 1) > gained / time.
            chance = share**length
            if length <= len(draft) and plan.tokens_left and chance * (STEP_ROWS + num_rows) > num_gained:
                plan.drafts[row] = draft[:length]
                plan.tokens_left -= 1
                num_rows += 1
                num_gained += chance
