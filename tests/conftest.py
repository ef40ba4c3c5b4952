"""Fixtures and helpers that the tests share."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from lowbatch_lmhead import head as head_module
from lowbatch_lmhead import log, testing, verify

ROOT = Path(__file__).resolve().parent.parent
VOCAB, HIDDEN = 100, 64

# The largest norm(y - exact) / norm(exact) for logits of this dtype.
CLOSE = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4, torch.float32: 1e-5, torch.float64: 1e-14}


def load_script(path: Path) -> ModuleType:
    """A Python file that belongs to no package, as a module."""
    name = f"script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    """Each test has its own object cache, seed and registered types, and meets every head for the first time."""
    for name in ("LOWBATCH_LMHEAD_OBJECTS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(head_module, "_readers", dict(head_module._readers))
    log._said.clear()
    testing.forget()
    torch.manual_seed(1)
    yield
    testing.forget()


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(7)


@pytest.fixture
def kernel():
    """The reference backend, serving CPU heads; its ``compiled`` counts compilations and ``calls`` launches."""
    with testing.reference_backend(Counting()) as backend, torch.no_grad():
        yield backend


class Counting(testing.Reference):
    """The reference backend, counting."""

    def __init__(self):
        self.compiled = 0
        self.calls = 0

    def compile(self, problem, tactic):
        self.compiled += 1
        launch = super().compile(problem, tactic)

        def call(*tensors):
            self.calls += 1
            launch.call(*tensors)

        return type(launch)(call, launch.backend, launch.tactic)


def linear(vocab=VOCAB, hidden=HIDDEN, bias=False, dtype=torch.bfloat16):
    """A head with random weights."""
    head = nn.Linear(hidden, vocab, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head.requires_grad_(False)


def inputs(*leading, hidden=HIDDEN, dtype=torch.bfloat16):
    return torch.randn(*leading, hidden).to(dtype)


def poisoned(*shape, dtype=torch.bfloat16):
    """An output in which a logit that is not written shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The logits in float64."""
    logits = x.detach().double() @ weight.detach().double().t()
    return logits if bias is None else logits + bias.detach().double()


def assert_close(logits: Tensor, expected: Tensor, within: float | None = None) -> None:
    """``logits`` are ``expected`` to the accuracy of their dtype."""
    assert logits.shape == expected.shape
    assert logits.isfinite().all(), "logits were not written"
    error = (logits.double() - expected.double()).norm() / expected.double().norm()
    assert error <= (CLOSE[logits.dtype] if within is None else within), f"relative error {error:.3g}"


def assert_logits(logits: Tensor, head: nn.Module, x: Tensor) -> None:
    """``logits`` are those of ``x`` through an nn.Linear or nn.Embedding, as it is now."""
    assert_close(logits, exact(x, head.weight, getattr(head, "bias", None)))


def mistake(launch, weight, bias, rows, out_dtype):
    """What the check of a launch says of one row count."""
    return verify.Reference(weight, bias, rows).mistake(launch, weight, bias, rows, out_dtype)


def python(code: str, *arguments: object, **environment: str) -> str:
    """What ``code`` prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
