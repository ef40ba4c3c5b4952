"""benchmarks/two_gpus.py without a GPU: its checks on tiny heads, in one process and in two ranks under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "two_gpus.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the benchmarks are not part of this distribution")


def run(out, *arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "LOWBATCH_LMHEAD_CACHE": str(out.parent / "cache"),
    }
    command = [sys.executable, SCRIPT, *arguments, "--device", "cpu", "--small", "--out", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    return run(tmp_path_factory.mktemp("two_gpus") / "two_gpus.json", "all")


@pytest.mark.parametrize("part", ["one-process", "ranks", "tail"])
def test_each_part_ends_well(result, part):
    assert "error" not in result[part], result[part]["error"] + result[part]["end of its output"]


def test_one_process(result):
    found = result["one-process"]
    assert len(found["checks"]) == 8
    assert all(one["ok"] for one in found["checks"].values()), found["checks"]
    assert found["largest error over what is allowed"] <= 1
    assert {"one GPU", "current", "not current"} == found["host_us"]["us"].keys()


def test_the_gathered_logits_are_those_of_the_whole_head(result):
    """Bit for bit: the reference backend has one tactic, which serves the shards and the whole alike."""
    assert [head["shard_vocab"] for head in result["ranks"]["heads"]] == [256, 320, 256]
    for head in result["ranks"]["heads"]:
        for row in head["rows"]:
            assert row["ok"], row
            assert row["plans_agree"], row
            assert row["equal"], row
    assert {row["out_dtype"] for head in result["ranks"]["heads"] for row in head["rows"]} == {"bfloat16", "float32"}


def test_the_ranks_choose_alike(result):
    for head in result["ranks"]["heads"]:
        assert head["ok"], head
        assert head["autotune"]["choice"] == [[rows, "reference", "4 splits"] for rows in range(1, 17)]
        assert head["from the cache"]["sources"] == ["cache", "cache"]


def test_a_rank_that_fails(result):
    failures = result["ranks"]["failures"]
    assert len(failures) == 5
    for name, found in failures.items():
        assert found["ok"], (name, found)
        assert found["in_time"], (name, found)


def test_the_tail(result):
    rows = result["tail"]["rows"]
    assert len(rows) == 3 * 3 * 2  # heads, row counts, collectives
    for row in rows:
        assert row["served_by"] == ["reference", "4 splits"], row
        assert row["us"].keys() == {"ours", "linear", "linear_again"}
        assert row["same_tokens"] >= 0.5  # logits of bfloat16 tie now and then
    assert result["tail"]["summary"]["eager"].keys() == {"largest", "geometric mean", "targets_met"}


def test_a_part_that_fails_is_in_the_result(tmp_path):
    """Without torchrun's limits: a part that cannot run says why, and the others run."""
    code = (
        "import sys; sys.argv[0] = sys.argv.pop(1); sys.path.insert(0, sys.argv.pop(1)); import two_gpus;"
        "two_gpus.__file__ = sys.argv[0]; two_gpus.LIMITS_S['one-process'] = 0.5; two_gpus.main()"
    )
    out = tmp_path / "out.json"
    arguments = ["all", "--parts", "one-process", "vllm", "--device", "cpu", "--small", "--out", out]
    subprocess.run([sys.executable, "-c", code, SCRIPT, SCRIPT.parent, *arguments],
                   env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True, capture_output=True)  # fmt: skip
    found = json.loads(out.read_text())
    assert found["one-process"]["error"] == "not done within 0.5 s"
    assert "skipped" in found["vllm"]
    assert not found["one-process"]["ok"]
