"""Ids as the reference has them, and no way from text to a control token but the one that is asked for."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.panics import PanicError
from engine.scored_text import load_scored_text
from engine.tokenizer import Tokenizer
from tests.tiny_models import CONTROLS, make_backend

if TYPE_CHECKING:
    from engine.loading.checkpoint import Checkpoint

CONTROL_WORDS = st.sampled_from([*CONTROLS, "<|", "im_end", "|>", "a", " ", "é", "<"])


def make_tokenizer(**changes: Any) -> Tokenizer:
    """A byte-level tokenizer of 265 tokens: three controls, the bytes, six merges."""
    values: dict[str, Any] = {"byte_level": True, "stop_token_ids": [2], "bos_token_id": 1, "eos_token_id": 2}
    return Tokenizer(make_backend(), **{**values, **changes})


def test_ids_and_text_are_those_of_the_reference(checkpoint: Checkpoint, reference: dict[str, Any]) -> None:
    """All texts of the reference, there and back."""
    tokenizer = checkpoint.tokenizer
    for case in reference["tokenize"]:
        assert tokenizer.encode(case["text"], parse_control=True) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["decoded"], case["text"]
    for case in reference["greedy"]:
        plain = [token_id for token_id in case["output_ids"] if not tokenizer.is_control(token_id)]
        assert tokenizer.decode(plain) == case["text"]


def test_the_scored_text_is_that_of_the_reference(checkpoint: Checkpoint, reference: dict[str, Any]) -> None:
    """The copy inside the package agrees with the reference and with the tokenizer."""
    scored = load_scored_text()
    assert scored.text == reference["score"]["text"]
    assert scored.mean_nll == reference["score"]["mean_nll"]
    assert list(scored.token_ids) == reference["score"]["ids"]
    assert checkpoint.tokenizer.encode(scored.text, parse_control=False) == list(scored.token_ids)


class PanicException(BaseException):
    """What a library in Rust raises when it comes upon a fault of its own."""


class PanickingBackend:
    """A tokenizer's rules that fall over one text."""

    def __init__(self) -> None:
        self._backend = make_backend()

    def encode(self, text: str, **options: Any) -> Any:
        if text == "panic":
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return self._backend.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def test_a_panic_of_the_library_is_an_error_like_any_other() -> None:
    backend: Any = PanickingBackend()
    tokenizer = Tokenizer(backend, byte_level=True, stop_token_ids=[2])
    with pytest.raises(PanicError, match="unwrap"):
        tokenizer.encode("panic", parse_control=True)
    assert tokenizer.encode("fine", parse_control=True) == make_tokenizer().encode("fine", parse_control=True)[-4:]


def test_the_real_model_stops_at_its_end_of_turn(checkpoint: Checkpoint) -> None:
    """SmolLM2: no BOS for plain text, `<|im_end|>` ends a turn, all of its controls are known as such."""
    tokenizer = checkpoint.tokenizer
    assert not tokenizer.adds_bos
    assert tokenizer.eos_token_id == 2
    assert tokenizer.stop_token_ids == {0, 2}
    assert [i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)] == list(range(17))


@given(st.text())
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    """Nothing is lost or changed on the way."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, parse_control=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


@given(st.lists(CONTROL_WORDS, max_size=8).map("".join))
def test_a_spelling_is_text_unless_control_tokens_are_asked_for(text: str) -> None:
    """Without `parse_control` no control token comes out; with it, each spelling is one."""
    tokenizer = make_tokenizer()
    assert not any(map(tokenizer.is_control, tokenizer.encode(text, parse_control=False)))
    ids = tokenizer.encode(text, parse_control=True)
    spelled = sum(text.count(word) for word in CONTROLS)
    assert sum(map(tokenizer.is_control, ids)) == spelled
    assert tokenizer.decode(ids) == text


def test_parsing_agrees_with_the_library() -> None:
    """Our own splitting at control tokens gives what the library's gives."""
    text = " hello<|im_end|>\n<|im_start|>user hello <|im_end|"
    assert make_tokenizer().encode(text, parse_control=True) == make_backend().encode(text).ids


def test_spaces_around_a_control_token_go_where_it_says_so() -> None:
    """`lstrip` and `rstrip` of an added token are kept."""
    backend = make_backend()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", lstrip=True, rstrip=True, special=True)])
    expected = backend.encode("a  <end> \n b<end>").ids
    tokenizer = Tokenizer(backend, byte_level=True, stop_token_ids=[2])
    assert tokenizer.encode("a  <end> \n b<end>", parse_control=True) == expected


def test_a_bos_is_added_once() -> None:
    """A text that brings its own keeps that one."""
    tokenizer = make_tokenizer(prefix_ids=[1])
    assert tokenizer.adds_bos
    assert tokenizer.encode("a", parse_control=False)[0] == 1
    assert tokenizer.encode("<|im_start|>a", parse_control=True).count(1) == 1
    assert 1 not in tokenizer.encode("a", parse_control=True, add_special=False)


def test_an_id_outside_the_vocabulary() -> None:
    """Padding of the embedding has no bytes; a request that names such an id is told the range."""
    tokenizer = make_tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    with pytest.raises(InvalidRequestError, match="ids go from 0 to 264"):
        tokenizer.decode([tokenizer.vocab_size])


def test_a_token_that_the_model_lacks_comes_from_no_text() -> None:
    """Where it is asked for, the text is refused; where its spelling is only written, that is ordinary text."""
    backend = make_backend()
    backend.add_special_tokens(["[PAD]"])
    backend.add_tokens(["<more>"])
    size = backend.get_vocab_size()
    tokenizer = Tokenizer(backend, byte_level=True, stop_token_ids=[2, 10**9], num_rows=size - 2)
    assert tokenizer.vocab_size == size - 2
    assert tokenizer.lost_tokens == {size - 2: "[PAD]", size - 1: "<more>", 10**9: ""}
    assert tokenizer.stop_token_ids == {2}
    for spelling, token_id in (("[PAD]", size - 2), ("<more>", size - 1)):
        assert tokenizer.control_id(spelling) is None
        assert tokenizer.token_bytes(token_id) == b""
        ids = tokenizer.encode(f"a {spelling}.", parse_control=False)
        assert max(ids) < tokenizer.vocab_size
        assert tokenizer.decode(ids) == f"a {spelling}."
        with pytest.raises(InvalidRequestError, match=rf"token {token_id} of the tokenizer.*0 to {size - 3} only"):
            tokenizer.encode(f"a {spelling}.", parse_control=True)


def test_rows_that_stand_for_nothing_are_told_apart_from_tokens() -> None:
    """Padding, gaps and what only fills the vocabulary; but never a token that ends an answer."""
    backend = make_backend()
    size = backend.get_vocab_size()
    assert make_tokenizer().silent_ids == ()
    tokenizer = Tokenizer(backend, byte_level=True, stop_token_ids=[2, size + 1], num_rows=size + 4, unused_ids=[7])
    assert tokenizer.stop_token_ids == {2, size + 1}
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.silent_ids == (7, size, size + 2, size + 3)
    assert not tokenizer.lost_tokens


def test_half_a_surrogate_pair_is_refused() -> None:
    """JSON can carry one; UTF-8 cannot."""
    with pytest.raises(InvalidRequestError, match="surrogate"):
        make_tokenizer().encode("a\ud800", parse_control=True)


def test_a_vocabulary_of_pieces_with_byte_fallback() -> None:
    """Spaces are written as U+2581 there and single bytes as <0xNN>; only a text's first word gets a space."""
    vocabulary = {"<s>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xC3>": 4, "<0xA9>": 5, "<unk>": 6}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["<s>"])
    expected = [backend.encode(text).ids for text in ("a<s>a a", "é")]
    tokenizer = Tokenizer(backend, byte_level=False, stop_token_ids=[])
    assert tokenizer.encode("a<s>a a", parse_control=True) == expected[0] == [3, 0, 2, 3]
    assert tokenizer.encode("é", parse_control=True) == expected[1] == [1, 4, 5]
    assert tokenizer.decode([3, 2, 4, 5]) == " aaé"


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """The backend holds them all up while it works on one text, but not while it works on a list of them."""
    tokenizer = make_tokenizer()
    text = "the quick brown fox " * 10_000
    found: list[int] = []
    worker = threading.Thread(target=lambda: found.extend(tokenizer.encode(text, parse_control=False)))
    worker.start()
    beats = -1  # one more comes when it is over
    while worker.is_alive():
        time.sleep(0.001)
        beats += 1
    assert beats >= 10
    assert tokenizer.decode(found) == text
    one = tokenizer.encode("the quick brown fox ", parse_control=False)
    assert found == one * 10_000


def test_long_prompts_take_time_in_proportion(checkpoint: Checkpoint) -> None:
    """Four times the text takes about four times as long, also for one long word; 16 times would be quadratic."""

    def seconds(text: str) -> float:
        start = time.perf_counter()
        checkpoint.tokenizer.encode(text, parse_control=True)
        return time.perf_counter() - start

    for text in ("The quick brown fox <|im_end|> jumps. " * 1000, "ab" * 20_000):
        short, long = (min(seconds(text * times) for _ in range(5)) for times in (1, 4))
        assert long < 10 * short
