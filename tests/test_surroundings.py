"""What is going on around a call: ambient defaults, tracing, other kinds of differentiation, failures that pass."""

from __future__ import annotations

import os
import pickle
import stat

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from conftest import assert_logits, inputs, linear
from torch import nn

from lowbatch_lmhead import Projection, bind, devices, explain, objects, project, testing, verify, warmup
from lowbatch_lmhead.backends import Launch


class Raw(testing.Reference):
    """Computes outside PyTorch's sight, as a compiled launch does."""

    def compile(self, problem, tactic):
        launch = super().compile(problem, tactic)

        def call(weight, x, bias, out):
            if torch._C._get_tracing_state() is not None:
                out.data.fill_(float("nan"))  # nothing of a launch is recorded
                return
            plain = [None if t is None else forward_ad.unpack_dual(t).primal.detach() for t in (weight, x, bias, out)]
            launch.call(*plain)

        return Launch(call, launch.backend, launch.tactic)


@pytest.fixture
def raw():
    with torch.no_grad(), testing.reference_backend(Raw()):
        yield


@pytest.mark.parametrize("prepare", [project, lambda head, x, **_: warmup(head, out_dtype=torch.float32)])
@pytest.mark.parametrize("default", ["dtype", "device"])
def test_ambient_defaults(default, prepare, kernel):
    head, x = linear(), inputs(3)
    before = torch.get_default_dtype()
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.bfloat16)
            prepare(head, x, out_dtype=torch.float32)
        else:
            with torch.device("meta"):
                prepare(head, x, out_dtype=torch.float32)
    finally:
        torch.set_default_dtype(before)
    decision = explain(head, x, out_dtype=torch.float32)
    assert decision.taken, decision
    assert decision.prepared


@pytest.mark.filterwarnings("ignore")
def test_jit_trace(raw):
    head, x, other = linear(), inputs(3), inputs(3)
    project(head, x)
    traced = torch.jit.trace(lambda x: project(head, x), x, check_trace=False)
    assert_logits(traced(other), head, other)


def test_forward_mode_differentiation(raw):
    head, x, tangent = linear(), inputs(3), inputs(3)
    project(head, x)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(project(head, forward_ad.make_dual(x, tangent)))
        assert got.tangent is not None
        assert torch.equal(got.tangent, tangent @ head.weight.t())


def test_a_weight_loaded_later_is_taken_then(kernel, caplog):
    head, x = linear(), inputs(3)
    good = head.weight.detach().clone()
    with torch.no_grad():
        for bad in (float("nan"), 0.0):
            head.weight.fill_(bad)
            project(head, x)
            assert not explain(head, x).prepared
            assert warmup(head).compiled == 0
        head.weight.copy_(good)
    assert len(caplog.records) == 1
    assert_logits(project(head, x), head, x)
    assert explain(head, x).prepared


def test_out_of_memory_passes(monkeypatch):
    compile_, failures = testing.Reference.compile, [torch.OutOfMemoryError("no memory"), MemoryError()]

    def fails_first(self, problem, tactic):
        if failures:
            raise failures.pop()
        return compile_(self, problem, tactic)

    monkeypatch.setattr(testing.Reference, "compile", fails_first)
    head, x = linear(), inputs(3)
    with torch.no_grad(), testing.reference_backend():
        for _ in range(2):
            assert_logits(project(head, x), head, x)
            assert not explain(head, x).prepared
        project(head, x)
        assert explain(head, x).prepared


def test_linear_forward_patched_after_use(kernel, monkeypatch):
    class Own(nn.Linear):
        pass

    head, x = Own(64, 100, bias=False).bfloat16(), inputs(3)
    project(head, x)
    monkeypatch.setattr(Own, "forward", lambda self, x: nn.functional.linear(x, self.weight) * 2)
    assert torch.equal(project(head, x), head(x))
    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight) * 3)
    assert torch.equal(project(head, x), head(x))
    assert not explain(head, x).taken


def test_freed_weight_is_not_launched_on(kernel):
    head, x = linear(), inputs(3)
    project(head, x)
    head.weight.untyped_storage().resize_(0)
    assert "freed" in str(explain(head, x))
    calls = kernel.calls
    with pytest.raises(RuntimeError):
        project(head, x)
    assert kernel.calls == calls


def test_projection_is_pickled_after_use(kernel):
    head, x = linear(), inputs(3)
    step = bind(head)
    expected = step(x)
    again = pickle.loads(pickle.dumps(step))
    assert isinstance(again, Projection)
    assert torch.equal(again(x), expected)


def test_model_with_several_heads(kernel):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([linear(), linear()])

        def get_output_embeddings(self):
            return self.heads

    assert [head.name for head in warmup(Model()).heads] == ["heads.0", "heads.1"]


def test_kept_kernels_are_readable_by_the_user_who_serves(tmp_path):
    key = {"backend": "b", "arch": "sm_90a", "vocab": 1, "hidden": 1, "out_dtype": "float32", "tactic": "t"}
    path = objects.write(tmp_path, key, b"library")
    for file in (path, *tmp_path.glob("*.json")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_a_kernel_that_others_can_write_is_not_loaded(tmp_path, monkeypatch, caplog):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", str(tmp_path))
    key = {"backend": "b", "arch": "sm_90a", "vocab": 1, "hidden": 1, "out_dtype": "float32", "tactic": "t"}
    path = objects.write(tmp_path, key, b"library")
    assert objects.find(key) == path.resolve()
    os.chmod(path, 0o666)
    assert objects.find(key) is None
    assert "can be written by another user" in caplog.text


def test_more_rows_than_the_reference_has_at_least(monkeypatch):
    monkeypatch.setattr(devices, "untuned_rows", lambda arch: 32)
    with torch.no_grad(), testing.reference_backend():
        report = warmup(linear())
    assert [decision.taken for decision in report.heads[0].decisions] == [True] * 32 + [False]


def test_a_weight_that_cannot_be_checked_is_looked_at_once(kernel, monkeypatch):
    made, reference = [], verify.Reference.__init__

    def counting(self, *arguments):
        made.append(arguments)
        reference(self, *arguments)

    monkeypatch.setattr(verify.Reference, "__init__", counting)
    head, x = linear(), inputs(3)
    with torch.no_grad():
        head.weight.zero_()
        for _ in range(5):
            project(head, x)
        assert len(made) == 1
        head.weight.normal_()
        project(head, x)
    assert explain(head, x).prepared


def test_compiled_forward_mode_transform(kernel):
    head, x, tangent = linear(dtype=torch.float32).requires_grad_(False), inputs(3, dtype=torch.float32), inputs(3)

    @torch.compile(backend="aot_eager")
    def push(x, tangent):
        return torch.func.jvp(lambda x: project(head, x), (x,), (tangent,))[1]

    torch.testing.assert_close(push(x, tangent.float()), tangent.float() @ head.weight.t())
