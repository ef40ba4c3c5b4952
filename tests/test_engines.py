"""benchmarks/engines.py without a GPU or an engine: what is timed, what counts as a kernel of this library, and merging."""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import pytest
import torch
from conftest import ROOT, load_script

from lowbatch_lmhead import elf
from lowbatch_lmhead.backends import Problem, flashinfer, hopper_stream, stream

SCRIPT = ROOT / "benchmarks" / "engines.py"
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "engines.json"
if not SCRIPT.exists():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)


engines = load_script(SCRIPT)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_way_is_as_often_the_first(count):
    calls = []
    ways = {name: lambda name=name: calls.append(name) for name in "abc"[:count]}
    times = engines.rounds_in_turn(ways)
    firsts = calls[count::count]  # after the round that is not counted
    assert {firsts.count(name) for name in ways} == {engines.ROUNDS // count}
    assert {len(values) for values in times.values()} == {engines.ROUNDS}


def test_what_is_around_a_way_is_not_timed():
    inside = []

    @contextlib.contextmanager
    def slow():
        time.sleep(0.05)
        inside.append(True)
        yield
        inside.pop()
        time.sleep(0.05)

    seen = {"a": [], "b": []}
    ways = {name: lambda name=name: seen[name].append(bool(inside)) for name in seen}
    times = engines.rounds_in_turn(ways, {"a": slow})
    assert all(seen["a"])
    assert not any(seen["b"])
    assert min(times["a"]) < 50


@pytest.mark.skipif(flashinfer.unusable() is not None, reason=flashinfer.unusable() or "")
@pytest.mark.parametrize("module", [stream, hopper_stream], ids=["stream", "hopper stream"])
def test_kernels_of_this_library_are_known_by_their_names(module):
    problem = Problem(49155, 2880, 1, torch.bfloat16, torch.bfloat16, False, "sm_90a")
    backend = stream.Stream() if module is stream else hopper_stream.HopperStream()
    (kernel,) = elf.kernels(backend.build(problem, module.default_tactic(problem))[1])
    assert any(mark in kernel.name for mark in engines.KERNELS)


def test_merging_replaces_what_was_measured_again_and_keeps_the_tokens_of_two_processes(tmp_path):
    def write(name, value):
        (tmp_path / name).write_text(json.dumps(value))
        return tmp_path / name

    old = {
        "machine": {},
        "what is missing": "much",
        "vllm": [{"eager": eager, "batch": 1, "ms": 1, "tokens": {"identical": 1}} for eager in (True, False)],
        "transformers": [{"model": "granite", "batch": 1, "ms": 1}],
    }
    out = write("engines.json", old)
    vllm = write("vllm.json", [{"eager": False, "batch": 1, "ms": 2, "tokens": [[3, 4]]}])
    models = [{"model": "granite", "batch": 1, "ms": 2}, {"model": "whisper", "batch": 1, "ms": 3}]
    arguments = {"vllm": vllm, "transformers": write("transformers.json", models), "missing": "little", "out": out}
    engines.run_merge(argparse.Namespace(**arguments))
    new = json.loads(out.read_text())
    assert new["vllm"] == [old["vllm"][0], {"eager": False, "batch": 1, "ms": 2, "tokens": {"identical": 1}}]
    assert new["transformers"] == models
    assert new["what is missing"] == "little"

    never_compared = write("other.json", [{"eager": False, "batch": 9, "tokens": [[3]]}])
    with pytest.raises(AssertionError, match="no tokens were compared"):
        engines.run_merge(argparse.Namespace(**{**arguments, "vllm": never_compared}))
    assert json.loads(out.read_text()) == new


def test_the_kernel_is_in_the_profiles_with_this_library_and_not_without():
    if not RESULTS.exists():
        pytest.skip("there are no results")
    found = json.loads(RESULTS.read_text())
    for case in found["vllm"] + found["transformers"]:
        assert case["tokens"]["identical"] == case["tokens"]["sequences"]
        profile = case.get("profile", {})
        for way, seen in profile.items():
            assert bool(seen["kernels"]) == (way in ("with", "patched")), case
            assert all(any(mark in name for mark in engines.KERNELS) for name in seen["kernels"])
