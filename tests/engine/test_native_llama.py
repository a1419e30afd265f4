"""The model on the native kernels: what the plain model gives, and the same bits in every company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from gguf import GGMLQuantizationType

import engine.models.llama
import engine.precision
from engine.errors import ConfigError
from engine.loading.checkpoint import open_checkpoint
from engine.models.native_llama import NativeLlama, why_not
from engine.precision import CACHE_NAMES, choose_precision
from kernels.byte_lines import from_lines, to_lines, without_nan
from kernels.cpu import kv_write
from tests.fake_checkpoint import GREEDY, FakeCheckpoint, Guest, Table, make_checkpoint, make_runner
from tests.kernels.library import kernels_or_skip
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from engine.loading.checkpoint import Checkpoint

LOGPROBS = replace(GREEDY, num_logprobs=3)


@pytest.fixture(scope="module")
def _kernels() -> None:
    kernels_or_skip()


@pytest.fixture(scope="module")
def tiny() -> FakeCheckpoint:
    return make_checkpoint(context_length=400)


def without_kernels(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str = "auto") -> None:
    """From here on torch computes, with a cache that is as exact as that of the kernels."""

    def write(kv: torch.Tensor, *where: torch.Tensor) -> None:
        kv_write(from_lines(to_lines(kv)) if kv_cache_dtype == "int8" else kv.half(), *where)

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(engine.models.llama, "kv_write", write)


def logits_of(checkpoint: Checkpoint, token_ids: list[int], **options: object) -> torch.Tensor:
    runner = make_runner(checkpoint, **options)
    return torch.cat([logits for _, logits in runner.logits_of(token_ids)])


def tokens_of(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(count)]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("kv_cache_dtype", CACHE_NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 2, "num_kv_heads": 1, "head_size": 80, "hidden_size": 160},
        {"num_heads": 8, "num_kv_heads": 1, "head_size": 64},
        {"tie_word_embeddings": False, "vocab_size": 101},
    ],
    ids=["small heads", "80 in a head", "one key head", "head of its own"],
)
def test_it_computes_what_the_plain_model_computes(
    changes: dict[str, object], kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(num_layers=1, context_length=400, **changes)
    token_ids = tokens_of(300, checkpoint.config.vocab_size)
    native = logits_of(checkpoint, token_ids, dtype="int8", max_num_batched_tokens=70, kv_cache_dtype=kv_cache_dtype)
    without_kernels(monkeypatch, kv_cache_dtype)
    plain = logits_of(checkpoint, token_ids, dtype="int8", max_num_batched_tokens=70)
    exact = logits_of(checkpoint, token_ids, dtype="float32")
    # A rounding may fall to the other side, which is a step of 1/127 in one place: far less than quantizing itself.
    assert float((native - plain).abs().mean()) < 0.1 * float((plain - exact).abs().mean())
    assert float((native - plain).abs().max()) < 0.5 * float((plain - exact).abs().max())
    allowed = {"auto": 0.2, "int8": 0.3}[kv_cache_dtype]
    assert 0 < float((native - exact).abs().max()) < allowed * float(exact.std())


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"])
def test_files_blocks_are_used_as_they_are(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(num_layers=1)
    path = write_gguf(tmp_path / "model.gguf", config, make_tensors(config), kind=GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(path)
    token_ids = tokens_of(60, config.vocab_size)
    precision = choose_precision("auto", checkpoint)
    assert precision.name == ("int8" if kind == "F16" else "native")
    assert precision.cache_dtype == torch.float16
    native = logits_of(checkpoint, token_ids, dtype="auto")
    without_kernels(monkeypatch)
    plain = logits_of(checkpoint, token_ids, dtype=precision.name)
    assert float((native - plain).abs().max()) < 0.05 * float(plain.std())


def served_alone(checkpoint: FakeCheckpoint, prompt: list[int], count: int, kv_cache_dtype: str) -> Guest:
    runner = make_runner(
        checkpoint, dtype="int8", num_blocks=100, max_num_batched_tokens=400, kv_cache_dtype=kv_cache_dtype
    )
    table = Table(runner, num_blocks=100, block_size=4, seats=1, chunks=(400,))
    guest = table.seat(prompt, count, LOGPROBS)
    table.run()
    return guest


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", CACHE_NAMES)
def test_log_probabilities_are_the_same_to_the_last_bit_in_any_company(
    tiny: FakeCheckpoint, seed: int, num_threads: int, kv_cache_dtype: str
) -> None:
    """Alone in one chunk, or in a crowd, in other chunks, put off and begun again, on other threads."""
    runner = make_runner(
        tiny,
        dtype="int8",
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=900,
        num_threads=num_threads,
        max_num_batched_tokens=400,
        max_num_seqs=10,
    )
    table = Table(runner, num_blocks=900, block_size=4, seats=6, chunks=(1, 2, 5, 17, 40), seed=seed)
    source = random.Random(seed)
    prompts = [tokens_of(source.choice((1, 20, 127, 129, 200)), tiny.config.vocab_size, i) for i in range(9)]
    guests = [table.seat(prompt, 8, LOGPROBS) for prompt in prompts]
    table.run(preempt_share=0.03)
    for guest, prompt in zip(guests, prompts, strict=True):
        alone = served_alone(tiny, prompt, 8, kv_cache_dtype)
        assert guest.output == alone.output
        assert len(alone.logprobs) == 8
        assert guest.logprobs == alone.logprobs


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("kv_cache_dtype", CACHE_NAMES)
def test_a_row_that_is_not_a_number_fails_alone(kv_cache_dtype: str) -> None:
    checkpoint = make_checkpoint(tie_word_embeddings=False)
    checkpoint.by_name["model.embed_tokens.weight"][9] = float("inf")
    runner = make_runner(checkpoint, dtype="int8", kv_cache_dtype=kv_cache_dtype)
    table = Table(runner, num_blocks=64, block_size=4, seats=3, chunks=(64,))
    good, bad, other = (table.seat(prompt, 5) for prompt in ([5, 6, 7], [5, 9, 7], [8] * 20))
    table.run()
    assert list(table.failures) == [bad.sequence_id]
    assert good.output == served_alone(checkpoint, [5, 6, 7], 5, kv_cache_dtype).output
    assert other.output == served_alone(checkpoint, [8] * 20, 5, kv_cache_dtype).output
    with torch.inference_mode():  # nothing is left behind
        for kv_cache in runner.kv_caches:
            assert torch.equal(without_nan(kv_cache[:64]).view(torch.uint8), kv_cache[:64].view(torch.uint8))


@pytest.mark.usefixtures("_kernels")
def test_a_cache_of_bytes_holds_what_the_plain_one_holds_in_half_the_memory(tiny: FakeCheckpoint) -> None:
    """The first layer's keys and values come from the same products, so they are the same bytes but for roundings."""
    table_ids = tokens_of(40, tiny.config.vocab_size)
    caches = {}
    for name in CACHE_NAMES:
        runner = make_runner(tiny, dtype="int8", kv_cache_dtype=name)
        table = Table(runner, num_blocks=64, block_size=4, seats=1, chunks=(3, 40))
        table.seat(table_ids, 1)
        table.run()
        caches[name] = runner.kv_caches[0]
        group = tiny.config.cache_spec.groups[0]
        line = {"auto": 2 * group.head_size, "int8": group.head_size + 4}[name]
        assert runner.kv_bytes_per_token == 2 * tiny.config.num_layers * group.num_kv_heads * line
        assert caches[name][0].nbytes == runner.kv_bytes_per_token * 4 // tiny.config.num_layers
    with torch.inference_mode():
        halves = caches["auto"].float()
        difference = (from_lines(caches["int8"]) - halves).abs()
        assert bool((difference <= halves.abs().amax(-1, keepdim=True) * (0.501 / 127 + 0.001)).all())
        assert float(difference.max()) > 0


def test_a_cache_of_bytes_is_for_the_native_kernels_alone(
    tiny: FakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp4'; it can be auto or int8"):
        choose_precision("auto", tiny, "fp4")
    with pytest.raises(ConfigError, match=r"only the native kernels read, and model.dtype is 'float32'"):
        choose_precision("float32", tiny, "int8")
    without_kernels(monkeypatch)
    for name in ("auto", "int8"):
        chosen = choose_precision(name, tiny, "int8")
        assert chosen.cache_dtype == choose_precision(name, tiny).cache_dtype
        assert chosen.reason.endswith("; the KV cache is as with auto, for int8 needs native kernels")


@pytest.mark.usefixtures("_kernels")
def test_a_cache_of_bytes_is_told(tiny: FakeCheckpoint) -> None:
    chosen = choose_precision("int8", tiny, "int8")
    assert chosen.cache_dtype == torch.int8
    assert chosen.reason.endswith("; KV cache of eight bits")


@pytest.mark.usefixtures("_kernels")
def test_a_step_beyond_what_was_made_room_for_is_refused(tiny: FakeCheckpoint) -> None:
    runner = make_runner(tiny, dtype="int8", max_num_batched_tokens=8)
    assert isinstance(runner.model, NativeLlama)
    table = Table(runner, num_blocks=64, block_size=4, seats=1, chunks=(9,))
    table.seat([1] * 9, 1)
    with pytest.raises(ValueError, match="a step of 9 tokens, made for 8"):
        table.run()


@pytest.mark.usefixtures("_kernels")
def test_a_step_that_names_what_does_not_exist_touches_no_memory(tiny: FakeCheckpoint) -> None:
    for num_blocks, prompt in ((2, [1] * 20), (64, [1, tiny.config.vocab_size])):
        table = Table(
            make_runner(tiny, dtype="int8", num_blocks=num_blocks), num_blocks=64, block_size=4, seats=1, chunks=(40,)
        )
        table.seat(prompt, 1)
        with pytest.raises(IndexError, match="a token, a block or a position that does not exist"):
            table.run()


@pytest.mark.usefixtures("_kernels")
def test_where_the_time_went_is_told_and_counted_once(tiny: FakeCheckpoint) -> None:
    runner = make_runner(tiny, dtype="int8")
    list(runner.logits_of([1, 2, 3]))
    spent = runner.take_seconds()
    assert spent.keys() >= {"glue", "products", "attention", "head"}
    assert all(seconds > 0 for seconds in spent.values())
    assert set(runner.model.take_seconds().values()) == {0.0}
    assert runner.model.product_rate() > 0
    assert runner.model.read_bytes > 0


def test_shapes_that_the_kernels_cannot_do_are_named() -> None:
    assert why_not(make_config()) is None
    assert why_not(make_config(head_size=24)) == "2 heads of size 24 under one key head"
    assert why_not(make_config(head_size=512)) == "2 heads of size 512 under one key head"
    assert why_not(make_config(hidden_size=72)) == "a width of 72, which is no multiple of 32"
    with pytest.raises(ConfigError, match=r"width of 72.*choose auto or float32"):
        choose_precision("int8", make_checkpoint(hidden_size=72))
    chosen = choose_precision("auto", make_checkpoint(hidden_size=72))
    assert chosen.name in {"float32", "bfloat16"}
    assert "a width of 72" in chosen.reason


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_floats_are_taken_by_name(tiny: FakeCheckpoint, name: str) -> None:
    chosen = choose_precision(name, tiny)
    assert (chosen.name, chosen.cache_dtype, chosen.library) == (name, getattr(torch, name), None)
    assert chosen.reason == "as configured"


def test_an_unknown_name_tells_those_there_are(tiny: FakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match="auto, float32, bfloat16, float16, native or int8"):
        choose_precision("int3", tiny)


def test_without_a_compiler_auto_takes_floats_and_says_why(
    tiny: FakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    chosen = choose_precision("auto", tiny)
    assert chosen.name in {"float32", "bfloat16"}
    assert "no such compiler" in chosen.reason
    asked = choose_precision("int8", tiny)
    assert (asked.library, asked.cache_dtype) == (None, torch.float32)
    assert "computed by torch, slowly" in asked.reason


def test_float16_is_close_to_float32(tiny: FakeCheckpoint) -> None:
    token_ids = tokens_of(50, tiny.config.vocab_size)
    exact = logits_of(tiny, token_ids)
    assert float((logits_of(tiny, token_ids, dtype="float16") - exact).abs().max()) < 0.02 * float(exact.std())
