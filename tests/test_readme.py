"""The README's code runs as it stands, block after block, in one namespace."""

from __future__ import annotations

import json
import re

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
