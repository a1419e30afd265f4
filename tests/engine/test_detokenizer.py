"""Text comes out whole, whatever the tokens and the stop strings are."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

# Few letters make stop strings likely; the others are 2, 3 and 4 bytes long, with joiners and combining marks.
TEXTS = st.text(alphabet="aab\n é漢\u0301👩\u200d🚀🇪", max_size=40)
STOPS = st.lists(st.text(alphabet="aabé漢👩\u0301", min_size=1, max_size=4), max_size=4)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The bytes cut at some places, empty pieces included."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def make_detokenizer(tokens: list[bytes], stop: Sequence[str] = (), controls: Sequence[int] = ()) -> Detokenizer:
    """A detokenizer whose vocabulary is a list; token ids are places in it."""
    return Detokenizer(tokens.__getitem__, skip=set(controls).__contains__, stop=tuple(stop))


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
