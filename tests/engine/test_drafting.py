"""Drafts from what a sequence repeats, and what they may take of a step."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Limits
from engine.drafting import MAX_LEARNT, MAX_PLACES, NUMS_SAME, STEP_ROWS, PromptLookup, add_drafts
from engine.plan import Plan
from engine.sequence import SamplingParams, Sequence
from tests.engine.simulate import Simulation
from tests.fakes import OneOf


def draft_by_looking(token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
    """The same without an index: the latest place where the most of the last tokens stand before another one."""
    for num_same in NUMS_SAME:
        for place in range(len(token_ids) - 1, num_same - 1, -1):
            if token_ids[place - num_same : place] == token_ids[-num_same:]:
                following = list(token_ids[place:])
                while len(following) < max_tokens:
                    following.append(following[len(following) - (len(token_ids) - place)])
                return tuple(following[:max_tokens])
    return ()


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 5)), st.integers(1, 9))
def test_a_draft_is_what_followed_the_last_time(token_ids: list[int], steps: list[int], max_tokens: int) -> None:
    """Whatever it has seen before, and in whatever pieces."""
    lookup, known = PromptLookup(), 1
    for step in [*steps, len(token_ids)]:
        known = min(known + step, len(token_ids))
        draft = lookup.draft(token_ids[:known], max_tokens)
        assert draft == draft_by_looking(token_ids[:known], max_tokens)
        assert 0 < lookup.share < 1


def test_a_loop_is_drafted_beyond_its_end() -> None:
    assert PromptLookup().draft([1, 2, 3, 1, 2, 3, 1, 2], 7) == (3, 1, 2, 3, 1, 2, 3)
    assert PromptLookup().draft([9, 9, 9], 4) == (9, 9, 9, 9)


def test_what_is_new_is_not_drafted() -> None:
    assert PromptLookup().draft([1], 4) == ()
    assert PromptLookup().draft([1, 2, 3, 4, 5], 4) == ()
    assert PromptLookup().draft([1, 2, 3, 4, 2], 4) == ()  # one token that stood there before says too little


def test_the_share_follows_what_came_true() -> None:
    lookup, token_ids = PromptLookup(), [1, 2, 3, 4, 5, 6, 7, 8]
    token_ids += token_ids[:2]
    at_first = lookup.share
    assert lookup.draft(token_ids, 3) == (3, 4, 5)
    token_ids += [3, 4, 5, 6]  # all of it, and one more
    lookup.draft(token_ids, 2)
    assert lookup.share > at_first
    better = lookup.share
    token_ids += [7, 1]  # the second was to be 8
    lookup.draft(token_ids, 3)
    assert lookup.share < better
    # Nothing was drafted of what follows: nothing is learnt.
    before = lookup.share
    lookup.draft([*token_ids, 99, 98], 3)
    lookup.draft([*token_ids, 99, 98, 97], 3)
    assert lookup.share == before


def test_a_sequence_that_stops_repeating_itself_is_found_out() -> None:
    lookup, token_ids = PromptLookup(), [1, 2] * 20
    for token_id in range(10, 40):
        lookup.draft([*token_ids, 1, 2], 1)
        token_ids += [1, 2, token_id]
    assert lookup.share < 0.1
    token_ids += [1, 2] * 30
    for end in range(len(token_ids) - 40, len(token_ids)):
        lookup.draft(token_ids[:end], 1)
    assert lookup.share > 0.9


def learnt(lookup: PromptLookup, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
    """What is drafted when all has been looked at."""
    for _ in range(MAX_PLACES // MAX_LEARNT):
        draft = lookup.draft(token_ids, max_tokens)
    return draft


def test_memory_is_bounded() -> None:
    lookup = PromptLookup()
    many = list(range(MAX_PLACES + 1000))
    assert learnt(lookup, [*many, *many[-50:-46]], 2) == tuple(many[-46:-44])
    token_ids = [*many, *many[-50:-46], *many[:4]]
    assert learnt(lookup, token_ids, 2) == ()  # that was too long ago
    learnt(lookup, [*token_ids, *range(10**6, 10**6 + MAX_PLACES)], 2)
    assert lookup.num_places <= MAX_PLACES


def test_what_is_seen_again_is_remembered_longer() -> None:
    phrase, some = [1, 2, 3, 4, 5, 6], MAX_PLACES // 4 + 100  # two of them are more than is remembered
    token_ids = [*phrase, *range(100, 100 + some)]
    lookup = PromptLookup()
    learnt(lookup, token_ids, 2)
    token_ids += phrase
    learnt(lookup, token_ids, 2)
    token_ids += [*range(10**6, 10**6 + some), *phrase[:4]]
    assert learnt(lookup, token_ids, 2) == (5, 6)


def test_a_long_prompt_is_learnt_over_several_steps() -> None:
    """The first draft does not take long, and the last ones miss nothing."""
    lookup, token_ids = PromptLookup(), [*range(3 * MAX_LEARNT), 2 * MAX_LEARNT, 2 * MAX_LEARNT + 1]
    assert lookup.draft(token_ids, 1) == ()
    assert lookup.num_places <= MAX_LEARNT * len(NUMS_SAME)
    assert lookup.draft(token_ids, 1) == ()
    assert lookup.draft(token_ids, 1) == (2 * MAX_LEARNT + 2,)


def repeating(num_tokens: int, period: int = 5) -> tuple[int, ...]:
    return tuple(i % period for i in range(num_tokens))


def decoding(
    *, rows: int = 1, num_tokens: int = 40, share: float = 0.95, room: int = 64, **params: object
) -> dict[int, Sequence]:
    """Sequences that have one token to compute, and repeat themselves."""
    found = {}
    for number in range(rows):
        prompt = repeating(num_tokens - 1)
        sequence = Sequence(number, f"r{number}", prompt, SamplingParams(**params), 0.0)  # type: ignore[arg-type]
        sequence.token_ids.append((num_tokens - 1) % 5)
        sequence.num_computed_tokens, sequence.end_length = num_tokens - 1, 1000
        sequence.room, sequence.seat = room, number
        sequence.lookup = PromptLookup()
        sequence.lookup.share = share
        found[number] = sequence
    return found


def plan_for(
    live: dict[int, Sequence], *, budget: int = 64, pace: float = math.inf, drafts: int = 7, reading: int = 0
) -> Plan:
    """Everybody has got one token, and a prompt `reading` tokens."""
    plan = Plan(1, Limits(64, budget, num_speculative_tokens=drafts))
    plan.keep_within(pace)
    for sequence in live.values():
        plan.add(sequence, 1, ())
    if reading:
        sequence = Sequence(99, "r99", repeating(reading), SamplingParams(), 0.0)
        sequence.seat = 63
        plan.add(sequence, reading, ())
        live = {**live, 99: sequence}
    add_drafts(plan, live)
    return plan


def test_what_repeats_itself_is_drafted() -> None:
    plan = plan_for(decoding())
    assert plan.drafts == {0: repeating(7)}
    assert plan.tokens_left == 64 - 1 - 7
    batch = plan.freeze()
    assert (batch.counts, batch.num_draft_tokens, batch.num_tokens) == ((1,), 7, 8)


def test_nothing_is_drafted_where_it_is_switched_off_or_not_plain() -> None:
    assert plan_for(decoding(), drafts=0).drafts == {}
    for wish in (
        {"num_logprobs": 0},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 1.0),)},
        {"constraint": OneOf((b"a",))},
    ):
        assert plan_for(decoding(**wish)).drafts == {}  # type: ignore[arg-type]


def test_drafts_take_only_what_is_left_of_the_budget() -> None:
    for budget in range(1, 10):
        plan = plan_for(decoding(), budget=budget)
        assert plan.freeze().num_tokens == min(budget, 8)
    plan = plan_for(decoding(rows=4), budget=7)
    assert sorted(plan.drafts.values()) == [repeating(1)] * 3  # one each, before anybody gets a second


def test_in_a_step_that_is_kept_short_as_much_is_drafted_as_under_so_small_a_budget() -> None:
    for pace in (4, 8, 16, 32):
        assert (
            plan_for(decoding(rows=4, share=0.8), pace=pace).drafts
            == plan_for(decoding(rows=4, share=0.8), budget=pace).drafts
        )


def test_drafts_fill_the_last_block_and_no_other() -> None:
    for room in (40, 41, 44, 47, 64):
        plan = plan_for(decoding(room=room))
        assert len(plan.drafts.get(0, ())) == min(7, room - 40)
        assert not plan.new_blocks


def test_nothing_is_drafted_behind_the_end() -> None:
    for left in range(1, 9):
        live = decoding()
        live[0].end_length = 40 + left
        # The last token that is drawn needs no draft before it that is not drawn itself.
        assert len(plan_for(live).drafts.get(0, ())) == min(7, left - 1)


def test_the_more_rows_the_more_must_come_true() -> None:
    def lengths(share: float, rows: int, **more: int) -> list[int]:
        return sorted(map(len, plan_for(decoding(rows=rows, share=share), **more).drafts.values()), reverse=True)

    # One row: the step's time counts for all, and one draft more or less for little.
    assert lengths(0.95, 1) == [7]
    assert lengths(0.5, 1) == [2]
    assert lengths(1.01 / (STEP_ROWS + 1), 1) == [1]
    assert lengths(0.99 / (STEP_ROWS + 1), 1) == []
    # Sixteen: the last of the drafts must be as sure as a row is of a token.
    assert sum(lengths(0.95, 16)) >= 16
    assert lengths(0.5, 16) == []
    assert lengths(0.95, 17) == []
    # A prompt is being read.
    assert lengths(0.99, 1, reading=16) == [7]
    assert lengths(0.5, 1, reading=16) == []
    assert lengths(0.95, 1, reading=500, budget=512) == []


def test_the_surest_are_drafted_first() -> None:
    live = decoding(rows=3)
    for number, share in enumerate((0.2, 0.9, 0.6)):
        live[number].lookup.share = share  # type: ignore[union-attr]
    drafts = plan_for(live, budget=6).drafts
    assert {row: len(draft) for row, draft in drafts.items()} == {1: 2, 2: 1}


def test_of_equals_the_earlier_row_is_drafted() -> None:
    assert plan_for(decoding(rows=3), budget=4).drafts == {0: repeating(1)}
    assert plan_for(decoding(rows=3), budget=8).drafts == {0: repeating(2), 1: repeating(2), 2: repeating(1)}


def test_background_work_is_not_drafted_beside_interactive_work() -> None:
    live = decoding(rows=3)
    live[1].background = live[2].background = True
    assert plan_for(live).drafts.keys() == {0}
    live[0].background = True
    assert plan_for(live).drafts.keys() == {0, 1, 2}
    assert plan_for(live, reading=2).drafts == {}  # somebody waits for that prompt
    live[1].background = False
    assert plan_for(live).drafts.keys() == {1}


def test_whoever_loses_its_seat_forgets_its_places() -> None:
    simulation = Simulation(num_speculative_tokens=3)
    sequence = simulation.add_prompt(repeating(40), SamplingParams(max_tokens=20))
    for _ in range(4):
        simulation.step()
    assert sequence.lookup is not None
    simulation.run()
    assert sequence.lookup is None
