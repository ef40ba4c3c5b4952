"""What once went wrong: the store path that is checked, errors that pass, types registered late, and other arguments."""

from __future__ import annotations

import errno

import pytest
import torch
from conftest import HIDDEN, VOCAB, assert_logits, inputs, linear
from scripted import Script, Tactics, steady
from torch import nn

import lowbatch_lmhead
from lowbatch_lmhead import autotune, bind, devices, explain, project, testing, verify, warmup
from lowbatch_lmhead.backends import Launch
from lowbatch_lmhead.tuning import tune

BF16 = torch.bfloat16


class ByPitch(testing.Reference):
    """Wrong where the rows of the output are, or are not, a multiple of 16 bytes apart."""

    def __init__(self, wrong_if_aligned: bool) -> None:
        super().__init__()
        self.wrong_if_aligned, self.seen = wrong_if_aligned, set()

    def compile(self, problem, tactic):
        right = super().compile(problem, tactic)

        def call(weight, x, bias, out):
            aligned = (out.data_ptr() | out.stride(0) * out.element_size()) % 16 == 0
            self.seen.add(aligned)
            right.call(weight, x, bias, out)
            if aligned == self.wrong_if_aligned:
                out[:, -1] += 1000

        return Launch(call, self.name, str(tactic))


@pytest.mark.parametrize("vocab", [96, 97, 103, 104])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("wrong_if_aligned", [False, True])
def test_a_launch_is_checked_with_rows_of_both_kinds(vocab, out_dtype, wrong_if_aligned):
    weight, x = torch.randn(vocab, HIDDEN).to(BF16), inputs(3)
    with testing.reference_backend(ByPitch(wrong_if_aligned)) as backend, torch.inference_mode():
        logits = project(weight, x, out_dtype=out_dtype)
        assert backend.seen == ({False, True} if wrong_if_aligned else {False})
        assert not explain(weight, x, out_dtype=out_dtype).taken
        exact = x.float() @ weight.float().t()
        assert (logits.float() - exact).abs().max() < 1


class Once:
    """A backend whose first compilation fails."""

    def __init__(self, error: Exception, *arguments: str) -> None:
        super().__init__(*arguments)
        self.error: Exception | None = error

    def compile(self, problem, tactic):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().compile(problem, tactic)


class FailsOnce(Once, testing.Reference):
    pass


class TacticsOnce(Once, Tactics):
    pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_full_disk_is_not_the_kernels_fault(number):
    head, x = linear(), inputs(3)
    with testing.reference_backend(FailsOnce(OSError(number, "no room"))), torch.inference_mode():
        assert_logits(project(head, x), head, x)
        project(head, x)
        assert explain(head, x).taken


def test_another_error_of_the_system_is():
    head, x = linear(), inputs(3)
    with testing.reference_backend(FailsOnce(OSError(errno.ENOENT, "no linker"))), torch.inference_mode():
        project(head, x)
        assert not explain(head, x).taken
        assert "no linker" in str(explain(head, x))


def test_a_default_gemm_that_fails_is_not_the_kernels_fault(monkeypatch):
    head, x, made = linear(), inputs(3), []
    reference = verify.Reference

    def fails_once(*arguments):
        made.append(arguments)
        if len(made) == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return reference(*arguments)

    monkeypatch.setattr(verify, "Reference", fails_once)
    with testing.reference_backend(), torch.inference_mode():
        assert_logits(project(head, x), head, x)
        project(head, x)
        assert explain(head, x).taken


def test_what_a_passing_error_left_out_is_not_kept(tmp_path, monkeypatch):
    weight = torch.randn(VOCAB, HIDDEN).to(BF16)
    monkeypatch.setattr("lowbatch_lmhead.tuning.timing.timer_for", Script(steady(default=10.0, a=5.0)))
    with (
        testing.reference_backend(TacticsOnce(OSError(errno.ENOSPC, "No space left on device"), "a")),
        torch.inference_mode(),
    ):
        autotune(weight, max_rows=4, cache=tmp_path)
        assert not list(tmp_path.glob("*.json"))
    testing.forget()
    with testing.reference_backend(Tactics("a")), torch.inference_mode():
        (found,) = autotune(weight, max_rows=4, cache=tmp_path).heads
    assert found.source == "measured"
    assert all(row.tactic == "a" for row in found.rows)


def test_a_type_registered_late_is_read_by_every_way():
    class Scaled(nn.Linear):
        pass

    head = Scaled(HIDDEN, VOCAB, bias=False, dtype=BF16)
    x = inputs(3)
    try:
        with testing.reference_backend(), torch.inference_mode():
            bound = bind(head)
            before = project(head, x)
            bound(x)
            lowbatch_lmhead.register_head(Scaled, lambda module: (module.weight * 2, None))
            for got in (project(head, x), bound(x), bind(head)(x)):
                torch.testing.assert_close(got, before * 2)
    finally:
        lowbatch_lmhead.head._readers.pop(Scaled, None)


def test_a_head_of_another_type_meets_its_own_plan(monkeypatch):
    class HalfOnly(testing.Reference):
        def supports(self, problem):
            return None if problem.dtype is torch.float16 else "no"

    calls, linear_ = [], torch.nn.functional.linear
    with testing.reference_backend(HalfOnly()), torch.inference_mode():
        head, x = linear(), inputs(3)
        bound = bind(head)
        bound(x)
        head.half()
        warmup(head)
        monkeypatch.setattr("torch.nn.functional.linear", lambda *given: calls.append(given) or linear_(*given))
        for _ in range(3):
            bound(x.half())
        assert explain(head, x.half()).taken
        assert not calls


def test_warmup_inside_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    with testing.reference_backend(), pytest.raises(ValueError, match="inside a CUDA graph capture"):
        warmup(linear())


def test_batch_invariant_is_a_bool_whatever_was_called_before():
    head, x = linear(), inputs(3)
    with testing.reference_backend(), torch.inference_mode():
        project(head, x)
        project(head, x, batch_invariant=True)
        for wrong in (0, 1, 1.0, "yes", []):
            with pytest.raises(ValueError, match="batch_invariant must be True or False"):
                project(head, x, batch_invariant=wrong)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_weight_that_no_gemm_multiplies(dtype):
    weight = torch.ones(VOCAB, HIDDEN).to(dtype)
    with pytest.raises(
        ValueError, match=r"the head's weight is \w+; one of a floating-point type with 16 bits or more"
    ):
        project(weight, inputs(3))
    assert "no floating-point type with 16 bits or more" in str(warmup(weight))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_inputs(layout):
    x = torch.nested.nested_tensor([inputs(2), inputs(3)], layout=layout)
    for call in (project, explain):
        with pytest.raises(ValueError, match="x is a nested tensor"):
            call(linear(), x)


def test_odd_arguments_of_autotune_and_warmup():
    with testing.reference_backend():
        with pytest.raises(ValueError, match="refresh must be True or False"):
            autotune(linear(), refresh=torch.zeros(2))
        for call in (autotune, warmup):
            with pytest.raises(ValueError, match="progress must be True, False or None, got 'y'"):
                call(linear(), progress="y")
        autotune(linear(), budget_s=10**400, max_rows=1, cache=False)


def test_the_key_of_a_choice_names_what_makes_another_kernel(monkeypatch):
    from lowbatch_lmhead.plan import Plan, PlanKey

    plan = Plan(PlanKey(torch.device("cpu"), VOCAB, HIDDEN, BF16, BF16, False), arch="sm_90a")
    usual = tune.cache_key(plan)
    monkeypatch.setenv("LOWBATCH_LMHEAD_PDL", "1")
    assert tune.cache_key(plan) != usual
