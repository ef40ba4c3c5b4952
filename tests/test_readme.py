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


@pytest.mark.parametrize(
    ("page", "make", "result"),
    [
        ("README.md", "tuned", "tuned.json"),
        ("docs/results.md", "heads", "core.json"),
        ("docs/results.md", "calls", "host.json"),
    ],
)
def test_tables_are_those_of_the_results(page, make, result):
    path = ROOT / "benchmarks" / "results" / "h200" / result
    if not path.exists():
        pytest.skip("a source distribution has no results")
    table = getattr(load_script(ROOT / "benchmarks" / "table.py"), make)(json.loads(path.read_text()))
    assert len(table) > 4
    assert "\n".join(table) + "\n" in (ROOT / page).read_text()


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
        f"and {first['peak_mb_above_outputs']:.0f} MB above the outputs. {first['mb_left_reserved']:.0f} MB stay",
        f"({cached['mb_left_reserved']:.0f} from the cache), {first['mb_left_allocated']:.0f} of them",
        f"{statistics.mean(seconds):.1f} s in the mean, {max(seconds):.0f} s at most",
        f"up to {summary['MB above the outputs, smaller weights, largest']:.0f} MB (tuned.json)",
    ):
        assert said in text


def test_the_comparison_is_that_of_the_results():
    folder = ROOT / "benchmarks" / "results" / "h200"
    if not folder.exists():
        pytest.skip("a source distribution has no results")
    core, tuned, kernel, tail, host = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("core", "tuned", "kernel", "decode_tail", "host")
    )
    untuned, us = core["summary"], host["host_us"]
    left = [row for row in tuned["rows"] if row["backend"] == "default GEMM"]
    (default,) = left
    assert default["us"] / default["linear_us"] == tuned["summary"]["us / linear_us, largest"]
    around = [
        row
        for row in tuned["rows"]
        if (row["model"], row["out_dtype"]) == (default["model"], default["out_dtype"])
        and abs(row["rows"] - default["rows"]) == 1
    ]
    disturbed = max(row["tuned_us"] / row["us"] for row in around)
    least = min(
        (row for row in tuned["rows"] if row["rows"] <= 8 and row["vocab"] * row["hidden"] * 2 > 200e6),
        key=lambda row: row["limit_us"] / row["us"],
    )
    graphs = [row["us"] for row in tail["rows"] if "mm_bf16" in row["us"] and row["mode"] == "graph"]
    lost = [times["ours"] / times["mm_bf16"] - 1 for times in graphs if times["mm_bf16"] < times["ours"]]
    eager = [row["us"] for row in tail["rows"] if "mm_bf16" in row["us"] and row["mode"] == "eager"]
    assert all(times["ours"] < times["mm_bf16"] for times in eager)
    slower = [row for row in kernel["rows"] if row["us"] > 1.02 * row["triton_us"]]
    many, few = ([row for row in slower if (row["rows"] > 16) is more] for more in (True, False))
    assert all(row["flashinfer_us"] < 1.02 * row["triton_us"] for row in few)
    shard = {row["mode"]: row["us"] for row in tail["rows"] if (row["model"], row["batch"]) == ("deepseek-v3 1/8", 4)}
    whole = [row for row in tuned["rows"] if row["out_dtype"] == "bfloat16" and "1/8" not in row["model"]]
    even, odd = (
        statistics.geometric_mean([row["us"] / row["linear_us"] for row in whole if (row["vocab"] % 16 > 0) is is_odd])
        for is_odd in (False, True)
    )
    ratios = [row["ratio"] for row in tail["rows"]]
    missed = next(row for row in tail["rows"] if row["model"] == "granite-3.1-2b" and row["ratio"] > 0.5)
    text = " ".join((ROOT / "README.md").read_text().split())
    for said in (
        f"in {even:.2f} of the time where the vocabulary is a multiple of 16, and in {odd:.2f} of it where it is not",
        f"in a CUDA graph | {shard['eager']['F.linear']:.0f} / {shard['graph']['F.linear']:.0f} us | "
        f"{shard['eager']['mm_bf16']:.0f} / {shard['graph']['mm_bf16']:.0f} us",
        f"| {shard['eager']['ours']:.0f} / {shard['graph']['ours']:.0f} us |",
        f"at {untuned['float32 us / bfloat16 us, geometric mean']:.2f} of the bfloat16 time",
        f"{untuned['us / linear_us, rows <= 8, vocab % 16 == 0, geometric mean']:.2f} of `F.linear`'s in the geometric mean",
        f"{untuned['us / linear_us, rows <= 8, largest']:.2f} at worst, and "
        f"{untuned['other vocabularies, geometric mean']:.2f} for other vocabularies",
        f"at most {1e3 * untuned['rel_err bfloat16, largest']:.1f}e-3 with bfloat16 logits and "
        f"{1e6 * untuned['rel_err float32, largest']:.1f}e-6 with float32 logits",
        f"at most {untuned['float32 us / upcast_us, largest']:.2f} of the time of upcasting",
        f"takes {min(ratios):.2f} to {max(ratios):.2f} of its time with `F.linear`",
        f"costs the host {us['project(head, x)']:.1f} us where `F.linear` costs {us['F.linear(x, weight)']:.1f}",
        f"{us['no_grad: project(head, x)']:.1f} and {us['no_grad: F.linear(x, weight)']:.1f} under `no_grad`",
        f"a bound one with `out` {us['bind(head)(x, out=out)']:.1f}",
        f"{len(left)} of the {len(tuned['rows'])} tuned cases stays with the default GEMM: {default['model']} at "
        f"{default['rows']} rows, {default['out_dtype']} logits",
        f"take {100 * (disturbed - 1):.0f} % more than it takes",
        f"takes {' and '.join(format(row['us'] / row['linear_us'], '.2f') for row in around)} of the default's time",
        f"at worst ({least['model']}, {least['rows']} rows, {least['out_dtype']} logits)",
        f"in one of {len(graphs)} cases in a CUDA graph, by {100 * max(lost):.1f} %",
        f"in {len(slower)} of {len(kernel['rows'])} cases: {len(many)} at {min(row['rows'] for row in many)} rows, "
        f"and {len(few)} at 1 to 16 rows",
        f"at 1 row takes {missed['ratio']:.2f} of `F.linear`'s time",
        f"{us['200 rows, which no kernel takes: project(head, x)']:.1f} us where `F.linear` costs "
        f"{us['200 rows, which no kernel takes: F.linear(x, weight)']:.1f} (200 rows)",
    ):
        assert said in text
    assert len(lost) == 1
