"""Text comes out whole, whatever the tokens and the stop strings are."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import TokenLogprobs
from engine.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

# Few letters make stop strings likely; the others are 2, 3 and 4 bytes long, with joiners and combining marks.
TEXTS = st.text(alphabet="aab\n é漢\u0301👩\u200d🚀🇪", max_size=40)
# Right to left, with marks that change direction, beside left to right.
MIXED = st.text(alphabet="aש\u05b8لا\u200f\u202e漢\u0301", max_size=40)
# Text in which characters are cut and broken.
BYTES = st.lists(
    st.sampled_from([b"a", b"b", "é".encode(), "漢".encode(), "👩".encode(), b"\xf0\x9f", b"\xc3", b"\xff"])
)
STOPS = st.lists(st.text(alphabet="aabé漢👩\u0301", min_size=1, max_size=4), max_size=4)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The bytes cut at some places, empty pieces included."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def make_detokenizer(tokens: list[bytes], stop: Sequence[str] = (), controls: Sequence[int] = ()) -> Detokenizer:
    """A detokenizer whose vocabulary is a list; token ids are places in it."""
    return Detokenizer(tokens.__getitem__, skip=set(controls).__contains__, stop=tuple(stop))


def follow(tokens: list[bytes], stop: Sequence[str] = ()) -> tuple[list[tuple[str, list[int]]], Detokenizer]:
    """Every delta with the tokens whose log-probabilities came with it."""
    detokenizer = make_detokenizer(tokens, stop)
    deltas = []
    for token_id in range(len(tokens)):
        text = detokenizer.push(token_id, logprobs=TokenLogprobs(token_id, -float(token_id)))
        deltas.append((text, [entry.token_id for entry in detokenizer.take_logprobs()]))
    text = detokenizer.finish()
    return [*deltas, (text, [entry.token_id for entry in detokenizer.take_logprobs()])], detokenizer


def run(tokens: list[bytes], stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """Every delta, and the stop string that ended the text."""
    detokenizer = make_detokenizer(tokens, stop)
    deltas = [detokenizer.push(token_id) for token_id in range(len(tokens))]
    return [*deltas, detokenizer.finish()], detokenizer.stopped


def ends_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """What is shown of a text that is known as a whole: up to the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            word = max(complete, key=len)
            return text[: end - len(word)], word
    return text, None


@given(TEXTS, st.lists(st.integers(0, 200)), STOPS)
def test_any_cut_gives_the_text_up_to_the_stop(text: str, places: list[int], stop: list[str]) -> None:
    """The deltas join to what a reader of the whole text would show, and no delta holds half a character."""
    deltas, stopped = run(cut(text.encode(), places), stop)
    assert ("".join(deltas), stopped) == ends_at(text, stop)
    assert "\ufffd" not in "".join(deltas)


@given(st.binary(max_size=30), st.lists(st.integers(0, 200)))
def test_invalid_bytes_become_the_same_text_in_any_cut(data: bytes, places: list[int]) -> None:
    """Bytes that are no UTF-8 turn into what decoding them at once gives."""
    assert "".join(run(cut(data, places))[0]) == data.decode("utf-8", errors="replace")


@given(TEXTS, st.lists(st.integers(0, 200)), STOPS)
def test_no_more_than_needed_is_held_back(text: str, places: list[int], stop: list[str]) -> None:
    """After each token everything is out except an unfinished character and the longest possible stop beginning."""
    tokens = cut(text.encode(), places)
    detokenizer = make_detokenizer(tokens, stop)
    shown, seen = "", b""
    for token_id, token in enumerate(tokens):
        shown += detokenizer.push(token_id)
        seen += token
        known = seen.decode(errors="ignore")  # without the unfinished character at the end
        visible, stopped = ends_at(known, stop)
        if stopped:
            assert shown == visible
            return
        held = max((n for word in stop for n in range(1, len(word)) if known.endswith(word[:n])), default=0)
        assert shown == known[: len(known) - held]


def test_a_stop_string_over_several_tokens_is_never_shown() -> None:
    """The first part of it waits until it is clear, and then nothing more comes."""
    detokenizer = make_detokenizer([b"Hi ", b"EN", b"X ", b"E", b"N", b"D, more"], ["END"])
    assert [detokenizer.push(i) for i in range(6)] == ["Hi ", "", "ENX ", "", "", ""]
    assert detokenizer.stopped == "END"
    assert detokenizer.push(0) == ""
    assert detokenizer.finish() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    """A beginning of a stop string that stays one is text."""
    deltas, stopped = run([b"a", b"E", b"N"], ["END"])
    assert deltas == ["a", "", "", "EN"]
    assert stopped is None


def test_a_character_that_stays_cut_is_replaced_once() -> None:
    """Half an emoji at the end is one replacement character, and only at the end."""
    deltas, _ = run([b"a\xf0\x9f", b"\x9a"])
    assert deltas == ["a", "", "\ufffd"]


def test_control_tokens_are_not_shown_and_do_not_part_a_character() -> None:
    """The bytes around a control token belong together."""
    detokenizer = make_detokenizer([b"\xc3", b"<|im_end|>", b"\xa9"], controls=[1])
    assert [detokenizer.push(i) for i in range(3)] == ["", "", "é"]


@pytest.mark.parametrize("stop", [(), ("",)])
def test_without_stop_strings_text_comes_at_once(stop: tuple[str, ...]) -> None:
    """An empty stop string stops nothing."""
    assert run([b"a", b"b"], stop) == (["a", "b", ""], None)


@given(MIXED, st.lists(st.integers(0, 200)))
def test_text_of_both_directions_comes_in_the_order_of_its_characters(text: str, places: list[int]) -> None:
    """Deltas are joined by whoever reads, so nothing is reordered or normalized on the way."""
    deltas, _ = run(cut(text.encode(), places))
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)


@given(BYTES, st.lists(st.integers(0, 200)), STOPS)
def test_following_log_probabilities_changes_no_text(pieces: list[bytes], places: list[int], stop: list[str]) -> None:
    """Whatever the bytes: the same deltas, and what is told of never runs ahead of the text."""
    tokens = cut(b"".join(pieces), places)
    deltas, detokenizer = follow(tokens, stop)
    assert ([text for text, _ in deltas], detokenizer.stopped) == run(tokens, stop)
    shown, told = "", []
    for text, entries in deltas:
        shown += text
        told += entries
        if detokenizer.stopped is None:
            assert shown.startswith(b"".join(tokens[i] for i in told).decode(errors="replace").removesuffix("\ufffd"))
    assert told == list(range(len(told)))
    assert detokenizer.stopped is not None or len(told) == len(tokens)


@given(TEXTS, st.lists(st.integers(0, 200)), STOPS)
def test_log_probabilities_leave_with_the_text_of_their_tokens(text: str, places: list[int], stop: list[str]) -> None:
    """At every moment those are told of whose text is out, and at a stop the one that it cuts: no more, no fewer."""
    tokens = [token for token in cut(text.encode(), places) if token]
    ends = list(accumulate(map(len, tokens)))
    detokenizer = make_detokenizer(tokens, stop)
    told: list[TokenLogprobs] = []
    out = 0
    for token_id in range(len(tokens)):
        out += len(detokenizer.push(token_id, logprobs=TokenLogprobs(token_id, 0.0)).encode())
        told += detokenizer.take_logprobs()
        if detokenizer.stopped is None:
            assert len(told) == sum(end <= out for end in ends)
    out += len(detokenizer.finish().encode())
    told += detokenizer.take_logprobs()
    assert [entry.token_id for entry in told] == [i for i, end in enumerate(ends) if end - len(tokens[i]) < out]


def test_the_token_that_a_stop_string_cuts_is_told_of_at_the_end() -> None:
    deltas, _ = follow([b"Hi ", b"you E", b"N", b"Dx"], ["END"])
    assert deltas == [("Hi ", [0]), ("you ", []), ("", []), ("", [1]), ("", [])]


def test_log_probabilities_of_a_character_in_pieces_come_with_the_character() -> None:
    deltas, _ = follow([b"a\xf0", b"\x9f", b"\x9a\x80b", b"\xc3"])
    assert deltas == [("a", []), ("", []), ("🚀b", [0, 1, 2]), ("", []), ("\ufffd", [3])]
