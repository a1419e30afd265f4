"""Cores within what a container may take, on made-up trees of control groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from engine.processors import available_cores

if TYPE_CHECKING:
    from pathlib import Path

CORES = 64


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CORES)), raising=False)


def cores(tmp_path: Path, membership: str, files: dict[str, str]) -> int:
    """What a process of these groups takes; `files` lie where control groups are mounted."""
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (tmp_path / "membership").write_text(membership)
    return available_cores(tmp_path / "cgroup", tmp_path / "membership")


def v1(quota: int, period: int = 100_000, where: str = "cpu") -> dict[str, str]:
    return {f"{where}/cpu.cfs_quota_us": f"{quota}", f"{where}/cpu.cfs_period_us": f"{period}"}


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        # Version 2: a container that sees itself as the root, one that sees the host's names, and a service.
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/docker/3f2a\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/../../other\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/cpu.max": "300000 100000"}, 3),
        # The narrowest of all around it counts.
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "800000 100000", "a/b/cpu.max": "500000 100000"}, 5),
        ("0::/a\n", {"a/cpu.max": "max 100000", "b/cpu.max": "100000 100000"}, CORES),
        # Parts of a core are left; one core there always is; more than the machine has is no gift.
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "15000 5000"}, 3),
        ("0::/\n", {"cpu.max": "9900000 100000"}, CORES),
        # Version 1, under either name, and beside version 2.
        ("4:memory:/\n1:cpu,cpuacct:/docker/3f2a\n", v1(200_000), 2),
        ("1:cpu,cpuacct:/a\n", v1(-1, where="cpu,cpuacct") | v1(300_000, where="cpu,cpuacct/a"), 3),
        ("1:cpu:/\n0::/\n", v1(-1), CORES),
        ("1:cpu:/\n0::/x\n", v1(600_000) | {"unified/x/cpu.max": "500000 100000"}, 5),
        ("3:cpuset:/\n", v1(100_000), CORES),
        # Nothing there, or nothing that can be read.
        ("", {}, CORES),
        ("0::/\n", {}, CORES),
        ("0::/\n", {"cpu.max": ""}, CORES),
        ("0::/\n", {"cpu.max": "many 100000"}, CORES),
        ("0::/\n", {"cpu.max": "100000 0"}, CORES),
        ("0::/\n", {"cpu.max/not-a-file": ""}, CORES),
        ("nonsense\n:\n", {"cpu.max": "max"}, CORES),
    ],
)
def test_a_container_takes_its_share(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    assert cores(tmp_path, membership, files) == expected


def test_without_control_groups_all_cores_are_taken(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "none", tmp_path / "nothing") == CORES


def test_those_it_may_run_on_bound_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert cores(tmp_path, "0::/\n", {"cpu.max": "800000 100000"}) == 3
    assert cores(tmp_path, "0::/\n", {"cpu.max": "200000 100000"}) == 2
