"""The README's code runs as it stands, block after block, in one namespace."""

from __future__ import annotations

import json
import re
import statistics

import pytest
import torch
from conftest import ROOT, load_script

from lowbatch_lmhead import head


def test_python_blocks_run(monkeypatch, capsys):
    monkeypatch.setattr(head, "_readers", {})
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict = {}
    for block in blocks:
        exec(block, namespace)
    x, weight = namespace["x"], namespace["head"].weight
    expected = (x.double() @ weight.double().t()).detach()
    for name, limit in (("logits", 2.5e-3), ("exact", 1e-5)):
        got = namespace[name].double()
        assert (got - expected).norm() / expected.norm() < limit
    assert torch.isfinite(namespace["out"]).all()
    assert "default GEMM" in capsys.readouterr().out or torch.cuda.is_available()


@pytest.mark.parametrize(("make", "result"), [("tuned", "tuned.json"), ("heads", "core.json"), ("calls", "host.json")])
def test_tables_are_those_of_the_results(make, result):
    path = ROOT / "benchmarks" / "results" / "h200" / result
    if not path.exists():
        pytest.skip("a source distribution has no results")
    table = getattr(load_script(ROOT / "benchmarks" / "table.py"), make)(json.loads(path.read_text()))
    assert len(table) > 4
    assert "\n".join(table) + "\n" in (ROOT / "README.md").read_text()


def test_numbers_about_tuning_are_those_of_the_results():
    folder = ROOT / "benchmarks" / "results" / "h200"
    if not folder.exists():
        pytest.skip("a source distribution has no results")
    tuned, again, cold = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("tuned", "tuned_again", "tuned_cold")
    )
    summary, first, cached = tuned["summary"], cold["cold"], cold["from the cache"]
    seconds = [tuning["seconds"] for tuning in tuned["tunings"]]
    text = " ".join((ROOT / "README.md").read_text().split())
    for said in (
        f"{len(tuned['rows'])} cases",
        f"Slowest case: {summary['us / linear_us, largest']:.3f}",
        f"within {100 * summary['F.linear against itself, 99 of 100 below']:.1f} % in 99 of 100 cases, "
        f"{100 * summary['F.linear against itself, largest']:.1f} % at worst",
        f"reach {100 * summary['limit_us / us, rows 1-8, above 200 MB, geometric mean']:.0f} % of the read limit",
        f"{100 * summary['limit_us / us, rows 1-8, above 200 MB, least']:.1f} % at worst",
        f"the same backend for {100 * again['same backend in all three']:.0f} % of {again['rows']} row counts of "
        f"{len(again['heads'])} heads, and the same tactic for {100 * again['same tactic in all three']:.0f} %",
        f"within {100 * (again['differing choices, slowest over quickest, largest'] - 1):.1f} % of each other",
        f"took {first['seconds']:.1f} s, compiling {first['compiled']} kernels, {cached['seconds']:.2f} s from the cache, "
        f"and {first['peak_mb_above_outputs']:.0f} MB above the outputs",
        f"{statistics.mean(seconds):.1f} s in the mean, {max(seconds):.0f} s at most",
        f"up to {summary['MB above the outputs, smaller weights, largest']:.0f} MB (tuned.json)",
    ):
        assert said in text
