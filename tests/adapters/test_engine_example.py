"""The Python of docs/engines.md runs as it stands, with and without a kernel that serves."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from conftest import ROOT, Counting

import lowbatch_lmhead
from lowbatch_lmhead import testing

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engines.md").read_text(), re.DOTALL)
CUDA = torch.cuda.is_available()


def run(block):
    namespace = {"__name__": "example"}
    exec(compile(block, "docs/engines.md", "exec"), namespace)
    return namespace


def block_with(words):
    (block,) = [block for block in BLOCKS if words in block]
    return block


def test_every_block_is_run_here():
    """vLLM's and SGLang's sections have no Python so far; a block that is added needs a test beside these."""
    assert [("register_head" in block, "adapter.patch" in block) for block in BLOCKS] == [(False, True), (True, False)]


@pytest.mark.parametrize("served", [False, True], ids=["default GEMM", "kernel"])
def test_any_other_engine(served, capsys, monkeypatch):
    if served and CUDA:
        pytest.skip("the reference backend serves the CPU")
    if served:  # measured on a CPU it would lose
        monkeypatch.setattr(lowbatch_lmhead, "autotune", lowbatch_lmhead.warmup)
    with testing.reference_backend(Counting()) if served else contextlib.nullcontext() as backend:
        names = run(block_with("register_head"))
        assert len(names["generated"]) == 5
        for hidden, tokens in names["generated"]:
            logits = hidden.double() @ names["whole"].double().t()
            best = logits.gather(1, tokens[:, None])[:, 0]
            assert tokens.shape == (3,)
            assert (best >= logits.max(1).values * (1 - 2**-8)).all(), "not the largest logit, up to a tie in bfloat16"
        if backend:
            # 5 steps of 2 shards, after a check, two launches, for each of 8 row counts of 2 shapes.
            assert backend.calls == 10 + 2 * 16
            assert "reference" in capsys.readouterr().out
        else:
            assert "default GEMM" in capsys.readouterr().out or CUDA


@pytest.mark.filterwarnings("ignore")
def test_transformers(capsys):
    transformers = pytest.importorskip("transformers", minversion="4.57")
    with testing.reference_backend(Counting()) if not CUDA else contextlib.nullcontext() as backend:
        names = run(block_with("adapter.patch"))
        assert isinstance(names["model"], transformers.LlamaForCausalLM)
        assert type(names["model"].lm_head) is torch.nn.Linear
        assert names["tokens"].shape == (2, 16)
        assert not backend or backend.calls >= 8
        assert "lm_head: patched" in capsys.readouterr().out
