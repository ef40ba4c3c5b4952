"""benchmarks/kernel.py without a GPU: what is timed after what, and what stays; and what a result was measured on."""

from __future__ import annotations

import importlib.metadata
import platform
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_script

pytestmark = pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="needs the repository")


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load_script(ROOT / "benchmarks" / "kernel.py")


class Scripted:
    """Microseconds by position: 1000 more for what follows on no plain read at once."""

    def __init__(self, us: list[float], reader: int) -> None:
        self.us, self.reader, self.rounds = us, reader, []

    def round(self, which: list[int]) -> list[float]:
        self.rounds.append(list(which))
        before = [None, *which[:-1]]
        return [self.us[one] + (0 if last == self.reader else 1000) for one, last in zip(which, before)]


def entries(kernel):
    def call(*_):
        raise AssertionError("the contest launches, nothing else")

    kinds = (("linear", ""), ("triton", "slow"), ("read", "a"), ("hopper stream", "quick"), ("hopper stream", "usual"))
    return [kernel.Entry(kind, tactic, call, tactic == "usual") for kind, tactic in kinds]


@pytest.mark.parametrize("reading", [0, 1, 3])
def test_reads_before_each_timed_launch(kernel, reading):
    contest = Scripted([100.0, 99.0, 80.0, 84.0, 90.0], reader=2)
    row = kernel.Contested(entries(kernel), contest, 8, 4096, 0.01, reading).row("hopper stream")
    if reading:
        assert (row["us"], row["tactic"], row["default_us"]) == (84.0, "quick", 90.0)
        assert (row["linear_us"], row["triton_us"], row["read_us"]) == (100.0, 99.0, 80.0)
        assert row["limit_us"] == pytest.approx(row["read_us"] * 1.01, abs=0.01)
    else:
        assert row["linear_us"] > 1000
    assert len(contest.rounds) == row["rounds"] >= kernel.ROUNDS
    for turn in contest.rounds:
        timed = turn[reading :: reading + 1]
        assert len(set(timed)) == len(timed)
        assert turn == [one for index in timed for one in (*[2] * reading, index)]


def test_targets_end_at_64_rows(kernel):
    assert kernel.target(64, 4096) == 0.95
    row = {
        "model": "a",
        "vocab": 100000,
        "hidden": 4096,
        "rows": 128,
        "out_dtype": "float32",
        "us": 100.0,
        "linear_us": 110.0,
        "flashinfer_us": None,
        "triton_us": None,
        "limit_us": 50.0,
        **dict.fromkeys(("worst_rel_err", "last_rows_err", "linear_rel_err"), 1e-7),
    }
    figures = kernel.summary([row])
    assert figures["of the limit, above 200 MB, hidden >= 2048, rows 33-64"]["cases"] == 0


def test_what_a_result_was_measured_on(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, L2_cache_size=62914560)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    described = load_script(ROOT / "benchmarks" / "machine.py").describe()
    assert (described["gpu"], described["multiprocessors"], described["l2_bytes"]) == ("NVIDIA H200", 132, 62914560)
    assert described["python"] == platform.python_version()
    assert described["torch"] == torch.__version__
    assert described["apache-tvm-ffi"] == importlib.metadata.version("apache-tvm-ffi")
