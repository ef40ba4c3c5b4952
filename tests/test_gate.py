"""The gate: every reason against a kernel, with its values, and that asking and projecting agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import HIDDEN, VOCAB, Counting, assert_close, assert_logits, exact, inputs, linear
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowbatch_lmhead import Decision, applies, bind, devices, explain, project, testing
from lowbatch_lmhead.backends import Problem, candidates, flashinfer


class Recording(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def misaligned_weight():
    weight = torch.randn(VOCAB * HIDDEN + 1).bfloat16()[1:].view(VOCAB, HIDDEN)
    assert weight.data_ptr() % 16
    return weight


# Each is a head, an x and the reason why no kernel is taken.
MORE_ROWS = "kernels serve up to 16 rows on cpu, and more where autotune finds them quicker"
LAYOUTS = {
    "transposed weight": (
        lambda: (torch.randn(HIDDEN, VOCAB).bfloat16().t(), inputs(3)),
        "the weight is not contiguous: strides (1, 100) for shape (100, 64)",
    ),
    "weight with padded rows": (
        lambda: (torch.randn(VOCAB, HIDDEN + 8).bfloat16()[:, :HIDDEN], inputs(3)),
        "the weight is not contiguous: strides (72, 1) for shape (100, 64)",
    ),
    "misaligned weight": (
        lambda: (misaligned_weight(), inputs(3)),
        "the weight does not start at a multiple of 16 bytes",
    ),
    "strided bias": (
        lambda: ((linear().weight, torch.randn(2 * VOCAB).bfloat16()[::2]), inputs(3)),
        "the bias is not contiguous: stride (2,)",
    ),
    "no rows": (lambda: (linear(), inputs(0)), "there are 0 rows"),
    "no rows in a batch": (lambda: (linear(), inputs(4, 0)), "there are 0 rows"),
    "17 rows": (lambda: (linear(), inputs(17)), MORE_ROWS),
    "20 rows in two dimensions": (lambda: (linear(), inputs(5, 4)), MORE_ROWS),
}


@pytest.mark.parametrize(("make", "reason"), LAYOUTS.values(), ids=LAYOUTS)
def test_layout_and_rows(make, reason, kernel):
    head, x = make()
    decision = explain(head, x)
    assert not decision.taken
    assert decision.backend == "default GEMM"
    assert decision.tactic is None
    assert decision.reasons == (reason,)
    weight, bias = head if isinstance(head, tuple) else (getattr(head, "weight", head), None)
    logits = project(head, x)
    assert torch.equal(logits, F.linear(x, weight, bias))
    if x.numel():
        assert_close(logits, exact(x, weight, bias))
    assert not kernel.calls


def test_not_cuda():
    decision = explain(linear(), inputs(3))
    assert decision.reasons == ("the head is on cpu, not on a CUDA GPU",)
    assert decision.rows == 3


def test_gradients(kernel):
    head, x = linear(), inputs(3)
    for tensors in ({"head": linear().requires_grad_()}, {"x": inputs(3).requires_grad_()}):
        arguments = {"head": head, "x": x, **tensors}
        with torch.enable_grad():
            assert explain(**arguments).reasons == (
                "gradients are needed: call under torch.no_grad() or torch.inference_mode()",
            )
        assert applies(**arguments)
        with torch.inference_mode():
            assert applies(**arguments)
    with torch.enable_grad():
        assert applies(head, x)
        assert not applies((head.weight, torch.zeros(VOCAB, dtype=torch.bfloat16, requires_grad=True)), x)


def test_autocast(kernel):
    head, x = linear(dtype=torch.float32), inputs(3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(head, x).reasons == ("autocast is on",)
    assert applies(head, x)


def test_dtypes_that_autocast_allows(kernel):
    head, x = linear(bias=True), inputs(3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reasons = explain(head, x).reasons
    assert reasons == ("autocast is on", "x is float32, the weight bfloat16, the bias bfloat16")


def test_functorch(kernel):
    head, x = linear(), inputs(2, 3)
    seen = []

    def logits(x):
        seen.append(explain(head, x))
        return project(head, x)

    assert_logits(torch.vmap(logits)(x), head, x)
    assert not seen[0]
    assert seen[0].reasons == ("a functorch transform (vmap, grad, jvp) is active",)


def test_functorch_gradient(kernel):
    head, x = linear(dtype=torch.float32), inputs(HIDDEN, hidden=HIDDEN, dtype=torch.float32)[0]
    gradient = torch.func.grad(lambda x: project(head, x).sum())(x)
    assert_close(gradient, head.weight.double().sum(0))


def test_prepared_head_under_functorch(kernel):
    head, x = linear(), inputs(2, 3)
    bound = bind(head)
    bound(x)
    assert_logits(torch.vmap(bound)(x), head, x)
    gradient = torch.func.grad(lambda x: bound(x).float().sum())(x)
    assert_close(gradient, head.weight.double().sum(0).expand(2, 3, HIDDEN))


def test_dispatch_mode_sees_the_operations(kernel):
    head, x = linear(), inputs(3)
    project(head, x)
    calls = kernel.calls
    with Recording():
        assert explain(head, x).reasons == ("a TorchDispatchMode is active",)
        assert_logits(project(head, x), head, x)
    assert kernel.calls == calls


def test_fake_tensors(kernel):
    with FakeTensorMode():
        head, x = torch.empty(VOCAB, HIDDEN), torch.empty(3, HIDDEN)
        reasons = explain(head, x).reasons
        assert reasons == (
            "its weight is a FakeTensor: quantized, distributed or otherwise wrapped",
            "x is a FakeTensor",
            "a TorchDispatchMode is active",
        )
        assert project(head, x).shape == (3, VOCAB)


def test_x_that_is_a_parameter(kernel):
    head, x = linear(), torch.nn.Parameter(inputs(3))
    assert applies(head, x)
    assert_logits(project(head, x), head, x)


def test_x_that_is_a_subclass(kernel):
    class Wrapped(torch.Tensor):
        pass

    head, x = linear(), inputs(3)
    assert explain(head, x.as_subclass(Wrapped)).reasons == ("x is a Wrapped",)
    logits = project(head, x.as_subclass(Wrapped))
    assert isinstance(logits, Wrapped)
    assert_logits(logits.as_subclass(torch.Tensor), head, x)


def test_sparse_x_gives_what_linear_gives(kernel):
    head, x = linear(), inputs(3).to_sparse()
    got, expected = project(head, x), F.linear(x, head.weight, head.bias)
    assert torch.equal(got.to_dense(), expected.to_dense())


def test_every_reason_is_given(kernel):
    with Recording(), torch.enable_grad():
        reasons = explain(linear().requires_grad_(), inputs(0)).reasons
    assert reasons == (
        "a TorchDispatchMode is active",
        "there are 0 rows",
        "gradients are needed: call under torch.no_grad() or torch.inference_mode()",
    )


PACKAGES = [flashinfer.FLASHINFER, flashinfer.CUTE_DSL, flashinfer.TVM_FFI]


@pytest.fixture
def sm90(monkeypatch):
    """The gate's answers for a CPU head as for an SM90 GPU."""
    monkeypatch.setattr(devices, "architecture", lambda device: "sm_90a")
    with torch.no_grad():
        yield


@pytest.fixture
def versions(monkeypatch):
    """Set the installed version of a distribution."""
    found = {name: least for name, least, _ in PACKAGES}
    monkeypatch.setattr(flashinfer, "version", lambda name: found[name])
    flashinfer.unusable.cache_clear()

    def change(name, version):
        found[name] = version
        flashinfer.unusable.cache_clear()

    yield change
    flashinfer.unusable.cache_clear()


@pytest.mark.parametrize(("name", "least", "below"), PACKAGES, ids=[name for name, *_ in PACKAGES])
@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "{name} is not installed (it takes {name}>={least},<{below})"),
        ("0.0.9", "{name} 0.0.9 is too old (it takes >={least},<{below})"),
        ("{older}", "{name} {older} is too old (it takes >={least},<{below})"),
        ("{below}", "{name} {below} is too new to be known (it takes >={least},<{below})"),
        ("99.1", "{name} 99.1 is too new to be known (it takes >={least},<{below})"),
        ("main", "{name} has the version 'main', which cannot be read (it takes >={least},<{below})"),
        ("{least}+cu130", None),
        ("{least}", None),
    ],
)
def test_package_versions(name, least, below, version, reason, versions, sm90):
    words = {"name": name, "least": least, "below": below, "older": f"{Version(least).base_version}rc1"}
    versions(name, version and version.format(**words))
    head, x = linear(vocab=128, hidden=512), inputs(2, hidden=512)
    decision = explain(head, x)
    if reason is None:
        assert (decision.taken, decision.backend) == (True, "flashinfer warp split-K")
        return
    reason = reason.format(**words)
    names = ("flashinfer warp split-K", "hopper stream", "stream", "flashinfer direct")
    assert decision.reasons == tuple(f"{name}: {reason}" for name in names)
    assert_close(project(head, x), exact(x, head.weight))


def test_installed_packages_are_usable():
    assert flashinfer.unusable() is None
    able, _ = candidates(Problem(1024, 512, 1, torch.bfloat16, torch.bfloat16, False, "sm_90a"))
    assert [backend.name for backend in able] == [
        "flashinfer warp split-K",
        "hopper stream",
        "stream",
        "flashinfer direct",
    ]


def test_reasons_of_backends_that_are_passed_over(sm90):
    decision = explain(linear(vocab=8, hidden=256), inputs(1, hidden=256))
    assert decision.taken
    assert decision.backend == "hopper stream"
    assert decision.reasons == ("flashinfer warp split-K: vocab 8 is less than one tile of 16",)
    assert str(decision) == (
        f"1 row: hopper stream ({decision.tactic}), not compiled yet\n"
        "  not flashinfer warp split-K: vocab 8 is less than one tile of 16"
    )


class TestDecision:
    def test_prints_what_serves(self, kernel):
        head, x = linear(), inputs(3)
        assert str(explain(head, x)) == "3 rows: reference (4 splits), not compiled yet"
        project(head, x)
        assert str(explain(head, x)) == "3 rows: reference (4 splits)"
        assert explain(head, x) == Decision(True, "reference", "4 splits", (), 3, prepared=True)

    def test_prints_why_not(self, kernel):
        decision = explain(linear(), inputs(17))
        assert str(decision) == f"17 rows: default GEMM\n  because {MORE_ROWS}"

    def test_is_true_when_taken(self, kernel):
        assert explain(linear(), inputs(2))
        assert not explain(linear(), inputs(0))


def test_explain_compiles_and_computes_nothing(kernel):
    head, x = linear(), inputs(3)
    for _ in range(3):
        assert applies(head, x)
    assert (kernel.compiled, kernel.calls) == (0, 0)


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 40])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_asking_and_projecting_agree(rows, out_dtype, bias):
    head, x = linear(bias=bias), inputs(rows)
    with testing.reference_backend(Counting()) as kernel, torch.no_grad():
        bound = bind(head, out_dtype=out_dtype)
        decision = explain(head, x, out_dtype=out_dtype)
        assert applies(head, x, out_dtype=out_dtype) == decision.taken == bool(bound.explain(x))
        for call in (lambda: project(head, x, out_dtype=out_dtype), lambda: bound(x)):
            call()  # the first call prepares, and that launches too
            calls = kernel.calls
            call()
            assert (kernel.calls - calls == 1) == decision.taken
        assert explain(head, x, out_dtype=out_dtype).taken == decision.taken


@pytest.mark.parametrize(
    ("x", "out_dtype", "message"),
    [
        (inputs(2, hidden=8), None, "x has the shape"),
        (inputs(2).float(), None, "x is float32"),
        (inputs(2), torch.float16, "out_dtype must be"),
        (torch.ones(()), None, "without dimensions"),
    ],
)
def test_asking_raises_what_projecting_raises(x, out_dtype, message):
    messages = []
    for call in (project, explain, applies):
        with pytest.raises(ValueError, match=message) as error:
            call(linear(), x, out_dtype=out_dtype)
        messages.append(str(error.value))
    assert len(set(messages)) == 1
