"""What is decided about a GPU, with one that is made up; and the step on it, in Triton's interpreter."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.gpu.device import Device, choose_device
from engine.gpu.gpus import MIB, Gpus, unfit_architecture
from engine.machine import machine_facts
from engine.startup import load_model
from tests.alone import needs_triton, run_interpreted
from tests.fake_gpus import KV_BYTES, FakeGpus
from tests.tiny_models import make_config, make_tensors, write_gguf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    shape = make_config()
    path = write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", shape, make_tensors(shape))
    return EngineConfig(model=str(path), device="cuda:1", capacity_num_seqs=64, capacity_num_batched_tokens=512)


@pytest.mark.parametrize(
    ("device", "found"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_a_gpu_is_taken_where_there_is_one_and_it_is_not_forbidden(device: str, found: str) -> None:
    chosen = choose_device(EngineConfig(device=device), FakeGpus())
    assert chosen.name == found
    assert chosen.reason == ("as configured" if device == "cpu" else f"Imaginary {chosen.gpu}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "gpu"}, "can be auto, cpu, cuda, or cuda:1"),
        ({"device": "cuda:x"}, "can be auto, cpu, cuda, or cuda:1"),
        ({"device": "cuda:2"}, "there are 2 GPUs, cuda:0 to cuda:1"),
        ({"device": "cuda", "kv_cache_dtype": "int8"}, "cache.kv_cache_dtype is 'int8', which only processors have"),
        ({"device": "cuda", "block_size": 24}, "on a GPU blocks are powers of two"),
    ],
)
def test_what_no_gpu_goes_with_is_one_clear_line(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        choose_device(EngineConfig(**changes), FakeGpus())
    assert "\n" not in str(caught.value)


def test_without_a_gpu_auto_takes_the_processor_and_says_why_and_nothing_else_is_taken() -> None:
    gpus = FakeGpus(why="torch finds no GPU")
    assert choose_device(EngineConfig(), gpus) == (None, "torch finds no GPU")
    with pytest.raises(ConfigError, match=r"engine\.device is 'cuda', but torch finds no GPU: choose cpu or auto"):
        choose_device(EngineConfig(device="cuda"), gpus)


def test_auto_takes_the_processor_where_a_setting_asks_for_what_a_gpu_does_not_compute() -> None:
    chosen = choose_device(EngineConfig(kv_cache_dtype="int8"), FakeGpus())
    assert (chosen.name, chosen.reason) == ("cpu", "cache.kv_cache_dtype is 'int8', which only processors have")


def test_a_machine_without_one_says_what_is_missing() -> None:
    assert Gpus().obstacle(0) in (
        f"torch {torch.__version__} finds no GPU",
        f"torch {torch.__version__} is built for CPUs alone (the README tells of the one for GPUs)",
    )


@pytest.mark.parametrize(
    ("capability", "built_for", "why"),
    [
        ((8, 0), ["sm_75", "sm_80", "sm_90"], None),
        ((8, 9), ["sm_75", "sm_86", "sm_90"], None),
        ((10, 3), ["sm_90a", "sm_100f"], None),
        ((12, 0), ["sm_80", "compute_90"], None),
        ((9, 0), [], None),
        ((7, 5), ["sm_75", "sm_80"], "sm_75, and the kernels are for sm_80 and later"),
        ((8, 0), ["sm_86", "sm_90"], f"sm_80, and torch {torch.__version__} is built for sm_86, sm_90"),
        ((12, 0), ["sm_80", "sm_90"], f"sm_120, and torch {torch.__version__} is built for sm_80, sm_90"),
    ],
)
def test_a_gpu_that_torch_or_the_kernels_are_not_compiled_for_is_none(
    capability: tuple[int, int], built_for: list[str], why: str | None
) -> None:
    assert unfit_architecture(capability, built_for) == why


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch tells of a GPU that is there, to be changed."""
    told: dict[str, Any] = {"get_device_capability": (9, 0), "get_arch_list": ["sm_80", "sm_90"], "device_count": 1}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in told:
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, name=name: told[name])
    return told


@needs_triton
def test_auto_takes_the_processor_where_a_gpu_is_too_old_or_nothing_can_be_compiled(
    one_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header = tmp_path / "Python.h"
    header.touch()
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert Gpus().obstacle(0) is None
    header.unlink()
    assert Gpus().obstacle(0) == f"there is no {header}, which Triton wants (apt-get install python3-dev)"
    compiler.unlink()
    why = "there is no C compiler, which Triton wants (apt-get install gcc)"
    assert choose_device(EngineConfig(), Gpus()) == (None, why)
    with pytest.raises(ConfigError, match=rf"engine\.device is 'cuda', but {re.escape(why)}: choose cpu or auto"):
        choose_device(EngineConfig(device="cuda"), Gpus())
    monkeypatch.setenv("CC", "nonesuch")
    assert Gpus().obstacle(0) == "$CC is 'nonesuch', and there is no such compiler, which Triton wants"
    one_gpu["get_device_capability"] = (7, 5)
    assert choose_device(EngineConfig(), Gpus()) == (None, "cuda:0 is sm_75, and the kernels are for sm_80 and later")


def test_the_cache_takes_what_is_useful_of_what_weights_steps_and_graphs_leave(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    gpus = FakeGpus()
    with caplog.at_level(logging.INFO):
        model = load_model(config, gpus)
    # The context is 128 tokens: eight blocks for each of 64 seats.
    assert model.num_blocks == 64 * 8
    calls = [call for call in gpus.runner.calls if call[0] not in ("warm_up", "execute")]
    assert calls == [
        ("load",), ("allocate_cache", 1), ("run_empty with all", 64, 512), ("run_empty", 64, 64),
        ("allocate_cache", 512), ("reset",),
    ]  # fmt: skip
    warmed = {call[1:] for call in gpus.runner.calls if call[0] == "warm_up"}
    assert warmed >= {(1, 2), (1, 512), (64, 512)}, "a prompt's first step is not to wait for a compiler"
    assert all(rows <= min(64, tokens) for rows, tokens in warmed)
    tried = [call[1:] for call in gpus.runner.calls if call[0] == "execute"]
    assert tried == [(0, 1), (1, 1), (0, 2), (2, 1), (0, 16), (16, 1), (0, 33), (33, 1)]
    made = gpus.made
    assert (made["index"], made["dtype"], made["max_num_seqs"]) == (1, torch.bfloat16, 64)
    assert (made["max_num_batched_tokens"], made["max_model_len"], made["block_size"]) == (512, 128, 16)
    assert (model.device, model.dtype, model.is_batch_invariant) == ((1, "Imaginary 1"), "bfloat16", False)
    assert model.remarks[0] == "dtype bfloat16: multiplied by this GPU"
    assert model.remarks[1].startswith("nothing is drafted")
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "computing on cuda:1: Imaginary 1"
    assert [line.split(",")[0] for line in lines[1:]] == [
        *[f"kernels for {done} of 17 sizes of steps are ready" for done in (5, 9, 13, 17)],
        "the largest step takes 512 MiB",
        *[f"{done} of 8 sizes of decode steps captured" for done in (2, 4, 6, 8)],
    ]


def test_a_step_of_any_size_for_one_alone_is_compiled_before_the_first_request(config: EngineConfig) -> None:
    gpus = FakeGpus()
    load_model(replace(config, capacity_num_batched_tokens=500), gpus)
    assert ("warm_up", 1, 500) in gpus.runner.calls


def test_nine_tenths_where_not_all_that_is_useful_fits(config: EngineConfig) -> None:
    # 11 sizes, two graphs of 2 MiB each, and what cuBLAS takes; a step of 512 tokens, and one of 64.
    beside = 1024 + 512 + 64 + 44 + 32
    model = load_model(config, FakeGpus((beside + 5) * MIB))
    assert model.num_blocks == int(5 * MIB * 0.9) // (16 * KV_BYTES)


def test_memory_in_bytes_is_kept_to_and_checked(config: EngineConfig) -> None:
    beside = 1024 + 512 + 64 + 44 + 32
    given = replace(config, cache_memory_bytes=8 * MIB)
    assert load_model(given, FakeGpus((beside + 8) * MIB)).num_blocks == 512
    with pytest.raises(ConfigError, match=f"cache.memory is {8 * MIB} bytes, but only {7 * MIB} are free on cuda:1"):
        load_model(given, FakeGpus((beside + 7) * MIB))


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (512, "too small: the weights do not fit into 512 MiB; give a smaller model, or --device cpu"),
        (1280, "too small: a step of 512 tokens does not fit beside the weights; give fewer tokens or seats a step"),
        (1600, "Only 0 bytes are free on cuda:1 for the KV cache, and one block takes 16384: free more"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(config: EngineConfig, size: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_model(config, FakeGpus(size * MIB))


def test_graphs_that_do_not_fit_are_one_clear_line(config: EngineConfig) -> None:
    gpus = FakeGpus()
    gpus.graph_bytes = 4096 * MIB
    with pytest.raises(ConfigError, match="the KV cache or the graphs do not fit; give the cache less memory"):
        load_model(config, gpus)


def test_a_fault_of_another_kind_is_not_taken_for_a_lack_of_memory(config: EngineConfig) -> None:
    gpus = FakeGpus()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpus.runner.load = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        load_model(config, gpus)


@needs_triton
def test_a_kernel_that_wants_more_shared_memory_than_there_is_is_one_clear_line(config: EngineConfig) -> None:
    from triton.runtime.errors import OutOfResources

    gpus = FakeGpus()

    def fail(*_: object, **__: object) -> None:
        raise OutOfResources(110_592, 101_376, "shared memory")

    gpus.runner.run_empty = fail  # type: ignore[method-assign]
    why = "wants more shared memory than cuda:1 has (110592, and there are 101376): choose another [model] dtype"
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        load_model(config, gpus)
    assert "\n" not in str(caught.value)


def test_a_gpu_without_bfloat16_takes_float16(config: EngineConfig) -> None:
    gpus = FakeGpus()
    gpus.has_bfloat16 = False
    assert load_model(config, gpus).remarks[0] == "dtype float16: this GPU multiplies no bfloat16"
    assert load_model(replace(config, dtype="float32"), FakeGpus()).remarks[0] == "dtype float32: as configured"
    with pytest.raises(ConfigError, match="which cuda:1 does not multiply: choose float16 or auto"):
        load_model(replace(config, dtype="bfloat16"), gpus)


def test_a_cache_of_eight_bit_floats_is_for_gpus_that_make_them(tmp_path: Path, config: EngineConfig) -> None:
    gpus = FakeGpus()
    with pytest.raises(
        ConfigError, match="'fp8', but the model has heads of 16 numbers, and that takes 32: choose auto"
    ):
        load_model(replace(config, kv_cache_dtype="fp8"), gpus)
    shape = make_config(hidden_size=128, head_size=32)
    path = write_gguf(tmp_path / "wide.gguf", shape, make_tensors(shape))
    fp8 = replace(config, model=str(path), kv_cache_dtype="fp8")
    model = load_model(fp8, gpus)
    assert (gpus.made["dtype"], gpus.made["cache_dtype"]) == (torch.bfloat16, torch.float8_e4m3fn)
    assert model.remarks[0] == "dtype bfloat16: multiplied by this GPU; KV cache of eight-bit floats"
    load_model(config, gpus)
    assert gpus.made["cache_dtype"] == torch.bfloat16
    gpus.makes_float8 = False
    with pytest.raises(ConfigError, match="'fp8', which cuda:1 does not make; NVIDIA's do from sm_89 on: choose auto"):
        load_model(fp8, gpus)
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp4'; on a GPU it can be auto or fp8"):
        load_model(replace(config, kv_cache_dtype="fp4"), gpus)
    with pytest.raises(ConfigError, match="'fp8', which is for GPUs; on a processor it can be auto or int8"):
        load_model(replace(fp8, device="auto"), FakeGpus(why="torch finds no GPU"))


@pytest.mark.long
@needs_triton
def test_an_engine_over_the_kernels_answers_as_one_over_torch() -> None:
    assert run_interpreted("tests.engine.interpreted_gpu").splitlines() == [
        "7 sends arrive", "9 answers agree, 3 in fixed batches", "6 answers in a crowd are those alone",
        "24 tokens are likeliest over eight-bit floats",
    ]  # fmt: skip


@pytest.mark.parametrize("blocks", ["native", "int8"])
def test_weights_stay_quantized_where_blocks_are_asked_for(config: EngineConfig, blocks: str) -> None:
    gpus = FakeGpus()
    model = load_model(replace(config, dtype=blocks), gpus)
    assert (gpus.made["dtype"], gpus.made["blocks"], model.dtype) == (torch.bfloat16, blocks, blocks)
    what = "F32 made into blocks of eight bits; multiplied as bfloat16"
    assert model.remarks[0] == f"dtype {blocks}: {what}"
    load_model(config, gpus)
    assert gpus.made["blocks"] is None


def test_what_is_compared_on_a_gpu_names_it() -> None:
    facts = machine_facts(2, Device(1, "Imaginary 1"))
    assert (facts["device"], facts["processor"]) == ("cuda:1", "Imaginary 1")
    assert "threads" not in facts
    assert "device" not in machine_facts(2)


def test_a_width_that_blocks_do_not_go_with_is_one_clear_line(tmp_path: Path, config: EngineConfig) -> None:
    shape = make_config(intermediate_size=100)
    path = write_gguf(tmp_path / "odd.gguf", shape, make_tensors(shape))
    with pytest.raises(ConfigError, match="but the model has a width of 100, which is no multiple of 32: choose auto"):
        load_model(replace(config, model=str(path), dtype="int8"), FakeGpus())
