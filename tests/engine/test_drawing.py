"""What a row can ask for beside a token: penalties, a bias, log-probabilities, a constraint. Others pay nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import drawing
from engine.drawing import NOT_DRAWN, Drawn, Extras, draw
from engine.errors import ConstraintError, OwnFault
from engine.sampler import SamplingRows, sample
from engine.sequence import SamplingParams
from tests.fakes import EOS, VOCAB_SIZE, OneOf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.constraint import ConstraintState

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def draw_rows(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    known: Sequence[tuple[list[int], list[int]]] = (),
) -> tuple[Drawn, dict[int, Extras]]:
    """A draw for each row of [R, V] logits, from a prompt and an answer so far."""
    known = known or [([], [])] * len(params)
    rows = SamplingRows(len(params), logits.shape[1])
    extras = {}
    for seat, (each, (prompt, output)) in enumerate(zip(params, known, strict=True)):
        rows.set(seat, each, len(prompt))
        if not each.is_plain:
            extras[seat] = Extras(each, prompt + output, len(prompt), logits.shape[1])
    positions = np.array([len(prompt) + len(output) for prompt, output in known])
    return draw(logits.clone(), rows, extras, np.arange(len(params)), positions), extras


def adjusted(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """What the definitions say, one token of the vocabulary after the other, in double precision."""
    values = logits.double().tolist()
    bias = dict(params.logit_bias)
    for token_id in range(len(values)):
        values[token_id] += bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            value, penalty = values[token_id], params.repetition_penalty
            values[token_id] = value / penalty if value > 0 else value * penalty
        values[token_id] -= params.frequency_penalty * output.count(token_id)
        values[token_id] -= params.presence_penalty * (token_id in output)
    return torch.tensor(values, dtype=torch.float64)


penalties = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
)


@settings(deadline=None)  # the first call of some of torch takes long
@given(penalties, TOKENS, TOKENS, st.integers(0, 1000))
def test_penalties_are_what_their_definitions_say(
    params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> None:
    logits = random_logits(1, VOCAB, seed)[0]
    mine = logits.clone()
    Extras(params, prompt + output, len(prompt), VOCAB).adjust(mine, np.zeros(0, dtype=np.int64))
    np.testing.assert_allclose(mine.tolist(), adjusted(logits, params, prompt, output).tolist(), rtol=1e-5, atol=1e-5)


@given(penalties, TOKENS, TOKENS)
def test_counts_that_grew_are_those_of_a_new_seat(params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    """After a preemption the counts come from the tokens; before it they came one by one."""
    logits, none = random_logits(1, VOCAB)[0], np.zeros(0, dtype=np.int64)
    grown = Extras(params, prompt, len(prompt), VOCAB)
    for token_id in output:
        grown.take(token_id)
    mine, other = logits.clone(), logits.clone()
    grown.adjust(mine, none)
    Extras(params, prompt + output, len(prompt), VOCAB).adjust(other, none)
    assert mine.tolist() == other.tolist()


def test_more_different_tokens_than_there_was_room_for() -> None:
    params = replace(GREEDY, presence_penalty=1.0)
    extra = Extras(params, [], 0, 500)
    for token_id in range(300):
        extra.take(token_id)
    logits = torch.zeros(500)
    extra.adjust(logits, np.zeros(0, dtype=np.int64))
    assert logits.tolist() == [-1.0] * 300 + [0.0] * 200


def test_a_bias_makes_and_bars_a_token() -> None:
    logits = random_logits(2, VOCAB)
    best = int(logits[1].argmax())
    params = [replace(GREEDY, logit_bias=((7, 100.0),)), replace(GREEDY, logit_bias=((best, -100.0),))]
    drawn, _ = draw_rows(logits, params)
    assert drawn.token_ids[0] == 7
    assert drawn.token_ids[1] == int(logits[1].topk(2).indices[1])


def test_neighbours_that_ask_for_nothing_are_untouched() -> None:
    logits = random_logits(6, 3000)
    plain = [SamplingParams(temperature=0.7 * (i % 2), top_p=0.9, seed=i) for i in range(6)]
    asking = [
        replace(each, presence_penalty=1.0, num_logprobs=2, logit_bias=((3, 1.0),)) if i % 2 else each
        for i, each in enumerate(plain)
    ]
    known = [([1, 2], [5, 6, 7])] * 6
    expected = draw_rows(logits, plain, known)[0].token_ids
    got, extras = draw_rows(logits, asking, known)
    assert sorted(extras) == [1, 3, 5]
    assert got.token_ids[::2].tolist() == expected[::2].tolist()
    assert sorted(got.logprobs) == [1, 3, 5]


def test_without_extras_a_draw_is_sampling_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a row that asks for nothing paid for it")

    for name in ("ModelLogits", "Penalties", "ConstraintError", "_bits"):
        monkeypatch.setattr(drawing, name, never)
    logits, rows = random_logits(4, 100), SamplingRows(4, 100)
    for seat in range(4):
        rows.set(seat, SamplingParams(seed=seat), 0)
    seats, positions = np.arange(4), np.arange(4)
    drawn = draw(logits.clone(), rows, {}, seats, positions)
    assert drawn.token_ids.tolist() == sample(logits.clone(), rows, seats, positions).tolist()
    assert [drawn.logprobs, drawn.forced, drawn.failures] == [{}, {}, {}]


@given(st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=50), st.integers(0, 60))
def test_log_probabilities_are_the_models_own(values: list[float], num_top: int) -> None:
    logits = torch.tensor([values])
    exact = torch.log_softmax(logits.double(), -1)[0].tolist()
    params = SamplingParams(
        temperature=0.3, top_k=2, presence_penalty=1.0, logit_bias=((1, 5.0),), num_logprobs=num_top, seed=4
    )
    drawn, _ = draw_rows(logits, [params], [([0], [1])])
    told = drawn.logprobs[0]
    assert told.token_id == drawn.token_ids[0]
    assert told.logprob == pytest.approx(exact[told.token_id], abs=1e-6, rel=1e-6)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:num_top]
    assert [token_id for token_id, _ in told.top] == order
    assert [logprob for _, logprob in told.top] == pytest.approx([exact[i] for i in order], abs=1e-6, rel=1e-6)


def test_log_probabilities_of_a_large_vocabulary_are_exact_to_float32() -> None:
    logits = random_logits(1, 150_000, 5)
    drawn, _ = draw_rows(logits, [replace(GREEDY, num_logprobs=20)])
    exact = torch.log_softmax(logits.double(), -1)[0]
    for token_id, logprob in drawn.logprobs[0].top:
        assert logprob == pytest.approx(exact[token_id].item(), abs=2e-6)


def test_a_row_that_is_no_number_tells_nothing() -> None:
    logits = random_logits(2, VOCAB)
    logits[0, 3] = math.nan
    params = replace(GREEDY, num_logprobs=1, frequency_penalty=1.0)
    drawn, _ = draw_rows(logits, [params, params])
    assert drawn.token_ids[0] == -1
    assert "not finite" in drawn.failures[0]
    assert list(drawn.logprobs) == [1]


def test_a_constraint_bars_what_it_does_not_allow_and_forces_what_must_follow() -> None:
    logits = random_logits(3, VOCAB_SIZE + 10)
    logits[:, VOCAB_SIZE + 1] = 50.0  # beyond the mask
    params = replace(GREEDY, constraint=OneOf((b"yes", b"no")))
    drawn, _ = draw_rows(logits, [params, GREEDY, replace(params, num_logprobs=0)])
    assert drawn.token_ids[1] == VOCAB_SIZE + 1
    for row in (0, 2):
        assert bytes([drawn.token_ids[row]]) in (b"y", b"n")
    rest = {b"y": b"es", b"n": b"o"}[bytes([drawn.token_ids[0]])]
    # With log-probabilities every token is drawn: one that was forced has none to tell.
    assert drawn.forced == {0: (*rest, EOS)}
    assert list(drawn.logprobs) == [2]


def test_a_constraint_goes_on_after_a_preemption() -> None:
    params = replace(GREEDY, constraint=OneOf((b"yes", b"yet"), forces=False))
    logits = torch.zeros(1, VOCAB_SIZE)
    for output, expected in ((b"", b"y"), (b"y", b"e"), (b"ye", b"s")):
        drawn, _ = draw_rows(logits, [params], [([1, 2, 3], list(output))])
        assert bytes(drawn.token_ids.tolist()) == expected


def test_where_only_the_end_is_left_it_need_not_wait() -> None:
    params = replace(GREEDY, min_tokens=5, stop_token_ids=frozenset({EOS}), constraint=OneOf((b"ab", b"a"), False))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS] = 9.0
    drawn, _ = draw_rows(logits, [params], [([1], list(b"a"))])
    assert drawn.token_ids.tolist() == [*b"b"]  # something else may come, so the end waits for `min_tokens`
    drawn, _ = draw_rows(logits, [params], [([1], list(b"ab"))])
    assert drawn.token_ids.tolist() == [EOS]


def test_a_stop_token_of_the_callers_own_goes_before_the_end_that_min_tokens_holds_back() -> None:
    params = replace(GREEDY, min_tokens=3, stop_token_ids=frozenset({EOS, *b"a"}), end_token_ids=frozenset({EOS}))
    params = replace(params, constraint=OneOf((b"bab", b"b"), False))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS] = 9.0
    for output, expected in ((b"b", [*b"a"]), (b"ba", [*b"b"]), (b"bab", [EOS])):
        drawn, _ = draw_rows(logits, [params], [([1], list(output))])
        assert drawn.token_ids.tolist() == expected
    drawn, _ = draw_rows(logits, [replace(params, min_tokens=1)], [([1], list(b"b"))])
    assert drawn.token_ids.tolist() == [EOS]


def test_that_only_stop_tokens_were_left_holds_for_one_draw() -> None:
    params = replace(GREEDY, min_tokens=3, stop_token_ids=frozenset(b"a"), constraint=OneOf((b"ab", b"aa"), False))
    rows = SamplingRows(1, VOCAB_SIZE)
    rows.set(0, params, 1)
    extras = {0: Extras(params, [1], 1, VOCAB_SIZE)}
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, ord("a")] = 9.0
    for position, expected in ((1, b"a"), (2, b"b")):
        drawn = draw(logits.clone(), rows, extras, np.zeros(1, dtype=np.int64), np.array([position]))
        assert bytes(drawn.token_ids.tolist()) == expected


class Broken:
    """A constraint whose states fail where they are told to."""

    def __init__(self, at: str, error: Exception | None = None) -> None:
        self.at = at
        self.error = error or ConstraintError(f"broken at {at}")

    def begin(self, token_ids: tuple[int, ...]) -> ConstraintState:
        state = OneOf((b"yes",)).begin(())

        def fail(*_: Any) -> Any:
            raise self.error

        if self.at == "begin":
            fail()
        if self.at == "empty":
            state.allowed = lambda: b"\0"  # type: ignore[method-assign]
        else:
            setattr(state, self.at, fail)
        return state


@pytest.mark.parametrize("at", ["begin", "allowed", "consume", "force", "empty"])
def test_a_constraint_that_fails_ends_its_own_row_alone(at: str) -> None:
    logits = random_logits(2, VOCAB_SIZE)
    drawn, _ = draw_rows(logits, [replace(GREEDY, constraint=Broken(at)), GREEDY])
    assert list(drawn.failures) == [0]
    assert ("No token" if at == "empty" else f"broken at {at}") in drawn.failures[0]
    assert isinstance(drawn.failures[0], OwnFault) == (at == "empty")
    assert drawn.token_ids[1] == int(logits[1].argmax())


@pytest.mark.parametrize("at", ["begin", "allowed", "consume", "force"])
def test_whatever_else_goes_wrong_with_a_row_ends_it_alone(at: str) -> None:
    logits = random_logits(2, VOCAB_SIZE)
    broken = replace(GREEDY, constraint=Broken(at, KeyError("a slip")))
    drawn, _ = draw_rows(logits, [GREEDY, broken])
    assert drawn.failures == {1: NOT_DRAWN}
    assert drawn.token_ids[0] == int(logits[0].argmax())
    with pytest.raises(MemoryError):  # which is nobody's own fault
        draw_rows(logits, [GREEDY, replace(GREEDY, constraint=Broken(at, MemoryError()))])


def test_forced_tokens_are_counted_like_drawn_ones() -> None:
    params = replace(GREEDY, frequency_penalty=3.0, constraint=OneOf((b"abbb", b"abb!")))
    extra, logits = Extras(params, [], 0, VOCAB_SIZE), torch.zeros(VOCAB_SIZE)
    extra.adjust(logits, np.array([EOS]))
    assert extra.take(ord("a")) == (*b"bb",)
    logits = torch.zeros(VOCAB_SIZE)
    extra.adjust(logits, np.array([EOS]))
    assert (logits[ord("a")], logits[ord("!")], logits[ord("b")]) == (-math.inf, 0.0, -6.0)
