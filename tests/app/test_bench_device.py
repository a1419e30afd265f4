"""`relevo bench` with random weights: whole steps and a crowd of requests, on the processor."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from app.bench_device import crowd_of, device_table, run_device_bench
from engine.bench_device import measure_device
from engine.bench_offline import CROWDS, Crowd, Spread
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.gpu.gpus import MIB, HostClock
from engine.model_runner import ModelRunner
from engine.random_model import SHAPES
from tests.fake_gpus import FakeGpus

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.gpu.gpus import Clock, GpuRunnerLike
    from engine.loading.checkpoint import Checkpoint

CONFIG = EngineConfig(device="cpu", dtype="float32", num_threads=1, cache_memory_bytes=8 << 20)


def test_steps_and_a_crowd_of_requests_have_every_figure(tmp_path: Path) -> None:
    lines: list[str] = []
    target = tmp_path / "speed.json"
    code = run_device_bench(
        CONFIG,
        shape="tiny",
        batches=(1, 3),
        contexts=(20, 500),
        crowd=Crowd(3, 5, 40),
        seconds_per_row=0.0,
        json_path=target,
        echo=lines.append,
    )
    assert code == 0
    result = json.loads(target.read_text())
    assert (result["model"], result["device"]) == ("tiny shape, as Llama, random weights", "cpu")
    assert [(row["batch"], row["context"]) for row in result["rows"]] == [(1, 20), (3, 20), (1, 500), (3, 500)]
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
        assert row["share_of_floor"] == pytest.approx(row["floor_seconds"] / row["step_seconds"])
        assert row["host_seconds"] is None
    assert [(row["context"], row["new_tokens"]) for row in result["prefill"]] == [(20, 20), (500, 128)]
    workload = result["workload"]
    assert workload["requests"] == 3
    assert 15 <= workload["output_tokens"] <= 120
    assert workload["output_tokens_per_second"] == pytest.approx(workload["output_tokens"] / workload["seconds"])
    assert workload["steps"] >= workload["output_tokens"] / 3
    assert lines[0].startswith("tiny shape, as Llama, random weights in float32 on cpu: ")
    assert lines[-2].startswith("3 requests, ")


def test_of_durations_the_middle_the_end_and_the_longest_are_told() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 3.0, 3.0)
    assert Spread.of(map(float, range(200, 0, -1))) == Spread(100.5, 198.0, 200.0)


def test_what_is_cut_short_leaves_the_rows_before_it() -> None:
    kept: list[dict[str, Any]] = []

    def keep(result: dict[str, Any]) -> None:
        kept.append(deepcopy(result))
        if len(kept) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_device(
            CONFIG, shape="tiny", batches=(1, 2), contexts=(20, 30), seconds_per_row=0.0, crowd=None,
            report=lambda *_: None, keep=keep,
        )  # fmt: skip
    assert [len(each["rows"]) for each in kept] == [1, 2, 3]
    assert device_table(kept[1])[-1].split()[:2] == ["2", "20"]


def test_rows_that_do_not_fit_are_left_out_and_told(tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    small = EngineConfig(device="cpu", dtype="float32", num_threads=1, cache_memory_bytes=1 << 20)
    run_device_bench(
        small,
        shape="tiny",
        batches=(1, 2),
        contexts=(1500,),
        seconds_per_row=0.0,
        json_path=target,
        echo=lambda _: None,
    )
    result = json.loads(target.read_text())
    assert [row["batch"] for row in result["rows"]] == [1]
    assert any(remark.startswith("2 × 1500 tokens are left out") for remark in result["remarks"])
    with pytest.raises(ConfigError, match="left out"):
        run_device_bench(small, shape="tiny", batches=(4,), contexts=(3000,), echo=lambda _: None)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shape": "huge"}, "no shape 'huge'; there are qwen3-0.6b, llama-3.2-1b, llama-3.1-8b, tiny"),
        ({"shape": "tiny", "contexts": (5000,)}, "has a context of 4096 tokens: ask for less"),
        ({"shape": "tiny", "max_model_len": 500, "crowd": CROWDS["nano-vllm"]}, "up to 2048 tokens .* room for 500"),
    ],
)
def test_wrong_words_are_one_clear_line(changes: dict[str, Any], why: str) -> None:
    config = replace(CONFIG, max_model_len=changes.pop("max_model_len", None))
    with pytest.raises(ConfigError, match=why):
        run_device_bench(config, echo=lambda _: None, **changes)


def test_a_workload_has_a_name_and_as_many_requests_as_are_asked_for() -> None:
    assert crowd_of(None, None) is None
    assert crowd_of("nano-vllm", None) == Crowd(256, 100, 1024)
    assert crowd_of("nano-vllm", 8) == Crowd(8, 100, 1024)
    with pytest.raises(ConfigError, match="no workload 'all' for bench; there is nano-vllm"):
        crowd_of("all", None)
    with pytest.raises(ConfigError, match="give --workload nano-vllm, too"):
        crowd_of(None, 3)


class EagerRunner(ModelRunner):
    """The processor in a GPU's place: each step is computed when it is launched, and read one late."""

    overlaps = True

    def run_empty(self, num_rows: int, num_tokens: int, *, filtered: bool = True, params: Any = None) -> None:
        """Nothing has to be compiled."""


class SlowGpus(FakeGpus):
    """Its runner is the processor."""

    def make_runner(self, checkpoint: Checkpoint, index: int, **sizes: Any) -> GpuRunnerLike:
        dtypes = sizes.pop("dtype"), sizes.pop("cache_dtype")
        assert (index, dtypes, sizes.pop("blocks")) == (0, (torch.float32, torch.float32), None)
        return EagerRunner(checkpoint, dtype="float32", num_threads=1, **sizes)

    def peak_bytes(self, index: int, run: Callable[[], object]) -> int:
        run()
        return MIB

    def capture(self, runner: GpuRunnerLike, report: Callable[[int, int], object]) -> None:
        assert isinstance(runner, EagerRunner)

    def torch_device(self, index: int | None) -> torch.device:
        assert index == 0
        return torch.device("cpu")

    def clock(self, index: int) -> Clock:
        return HostClock()

    def rates(self, index: int) -> tuple[float, float]:
        return 4e12, 8e14


def test_on_a_gpu_steps_overlap_and_what_the_host_does_is_told(tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    lines: list[str] = []
    run_device_bench(
        replace(CONFIG, device="cuda"),
        shape="tiny",
        batches=(2,),
        contexts=(64,),
        crowd=Crowd(3, 5, 40),
        seconds_per_row=0.0,
        json_path=target,
        echo=lines.append,
        gpus=SlowGpus(),
    )
    result = json.loads(target.read_text())
    assert result["device"] == "cuda:0"
    assert result["machine"]["memory_bytes_per_second"] == 4e12
    [row] = result["rows"]
    # Of a model of 64 numbers a token the bytes decide: read at the rate of the copy.
    assert row["floor_seconds"] == pytest.approx(4 * (SHAPES["tiny"].num_products + 2 * 64 * 128) / 4e12)
    spread = row["host_seconds"]
    assert 0 < spread["p50"] <= spread["p99"] <= spread["max"]
    workload = result["workload"]
    assert (workload["requests"], workload["seats"], workload["budget"]) == (3, 256, 8192)
    assert workload["launch_seconds"] > 0
    assert {*workload["host_seconds"]} == {"p50", "p99", "max"}
    assert lines[1] == "it copies 4,000.0 GB/s, products at best 800.000 TFLOP/s"


def test_shapes_have_as_many_weights_as_their_publishers_say() -> None:
    sizes = {name: config.num_products / 1e9 for name, config in SHAPES.items()}
    assert sizes["qwen3-0.6b"] == pytest.approx(0.596, abs=0.001)
    assert sizes["llama-3.2-1b"] == pytest.approx(1.236, abs=0.001)
    assert sizes["llama-3.1-8b"] == pytest.approx(8.030 - 0.525, abs=0.001)  # of two tables only one is multiplied with
