"""The operators for torch.compile: their contracts, compiled models, exported ones."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import HIDDEN, VOCAB, Counting, assert_close, assert_logits, exact, inputs, linear, poisoned
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import lowbatch_lmhead
import lowbatch_lmhead.ops  # registers the operators
from lowbatch_lmhead import bind, project, testing

project_op = torch.ops.lowbatch_lmhead.project.default
project_out_op = torch.ops.lowbatch_lmhead.project_out.default


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[False, True], ids=["default GEMM", "kernel"])
def served(request):
    """With and without the reference backend; the backend or None."""
    with testing.reference_backend(Counting()) if request.param else contextlib.nullcontext() as backend:
        yield backend


@pytest.fixture(
    params=[
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")),
    ]
)
def compiler(request):
    return request.param


X_SHAPES = {
    "2-D": lambda: inputs(3),
    "1-D": lambda: inputs(),
    "3-D": lambda: inputs(2, 3),
    "strided": lambda: inputs(3, 7)[:, -1, :],
    "transposed": lambda: inputs(3, 2).transpose(0, 1),
    "many rows": lambda: inputs(20),
    "no rows": lambda: inputs(0),
}


class TestContracts:
    @pytest.mark.parametrize("make", X_SHAPES.values(), ids=X_SHAPES)
    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    @pytest.mark.parametrize("bias", [False, True])
    def test_project(self, make, out_dtype, bias, served):
        head = linear(bias=bias)
        torch.library.opcheck(project_op, (make(), head.weight, head.bias, out_dtype))

    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    @pytest.mark.parametrize("bias", [False, True])
    def test_project_with_gradients(self, out_dtype, bias, served):
        head = linear(bias=bias, dtype=torch.float32).requires_grad_()
        x = inputs(3, dtype=torch.float32).requires_grad_()
        torch.library.opcheck(project_op, (x, head.weight, head.bias, out_dtype))

    @pytest.mark.parametrize("make", X_SHAPES.values(), ids=X_SHAPES)
    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    @pytest.mark.parametrize("bias", [False, True])
    def test_project_out(self, make, out_dtype, bias, served):
        head, x = linear(bias=bias), make()
        out = torch.empty(*x.shape[:-1], VOCAB, dtype=out_dtype or torch.bfloat16)
        torch.library.opcheck(project_out_op, (x, head.weight, head.bias, out, out_dtype))

    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    def test_values(self, out_dtype, served):
        head, x = linear(bias=True), inputs(2, 3)
        assert_logits(project_op(x, head.weight, head.bias, out_dtype), head, x)
        out = poisoned(2, 3, VOCAB, dtype=out_dtype or torch.bfloat16)
        project_out_op(x, head.weight, head.bias, out, out_dtype)
        assert_logits(out, head, x)
        assert served is None or served.calls

    @pytest.mark.parametrize("shape", [(5,), (2, 5)])
    def test_gradients(self, shape, served):
        head = linear(vocab=7, hidden=4, bias=True, dtype=torch.float64).requires_grad_()
        x = inputs(*shape[:-1], hidden=4, dtype=torch.float64).requires_grad_()
        expected = torch.autograd.grad(F.linear(x, head.weight, head.bias).square().sum(), [x, head.weight, head.bias])
        logits = project_op(x, head.weight, head.bias, None)
        for gradient, right in zip(torch.autograd.grad(logits.square().sum(), [x, head.weight, head.bias]), expected):
            assert_close(gradient, right, 1e-5)

    @pytest.mark.parametrize("needed", ["x", "weight", "bias"])
    def test_gradients_that_nobody_needs_are_not_computed(self, needed):
        class Recording(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                ran.append(func.overloadpacket)
                return func(*args, **(kwargs or {}))

        ran: list = []
        given = {"x": inputs(3, hidden=4), "weight": linear(vocab=7, hidden=4).weight.detach(), "bias": torch.ones(7)}
        given = {name: tensor.double().requires_grad_(name == needed) for name, tensor in given.items()}
        logits = project_op(*given.values(), None)
        with Recording():
            torch.autograd.grad(logits.square().sum(), given[needed])
        assert ran.count(torch.ops.aten.mm) == (0 if needed == "bias" else 1)


def unbroken(function, compiler, **options):
    return torch.compile(function, backend=compiler, fullgraph=True, **options)


@pytest.fixture(params=["project", "bind"])
def make_call(request):
    """``make_call(head, out_dtype)`` gives a function of (x, out) that projects."""

    def make(head, out_dtype=None):
        if request.param == "bind":
            bound = bind(head, out_dtype=out_dtype)
            return lambda x, out=None: bound(x, out)
        return lambda x, out=None: project(head, x, out=out, out_dtype=out_dtype)

    return make


class TestCompiled:
    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("rows", [3, 20])
    def test_project(self, rows, out_dtype, bias, make_call, compiler, served):
        head, x = linear(bias=bias), inputs(rows)
        call = make_call(head, out_dtype)
        compiled = unbroken(lambda x: (call(x.relu()) * 2).tanh(), compiler)
        with torch.no_grad():
            logits = compiled(x)
        assert logits.dtype == (out_dtype or torch.bfloat16)
        # tanh is flat, and rounded once more.
        assert_close(logits, (2 * exact(x.relu(), head.weight, head.bias)).tanh(), 5e-3)
        assert served is None or bool(served.calls) == (rows <= 16)

    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    def test_exact_logits(self, out_dtype, make_call, compiler, served):
        head, x = linear(bias=True), inputs(3)
        call = make_call(head, out_dtype)
        with torch.no_grad():
            assert_logits(unbroken(call, compiler)(x), head, x)
            assert_logits(unbroken(call, compiler)(x[0]), head, x[0])
            last = inputs(2, 5)[:, -1:]
            assert_logits(unbroken(call, compiler)(last), head, last)

    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    @pytest.mark.parametrize("rows", [3, 20])
    def test_out(self, rows, out_dtype, make_call, compiler, served):
        head, x = linear(bias=True), inputs(rows)
        call = make_call(head, out_dtype)
        out = poisoned(rows, VOCAB, dtype=out_dtype or torch.bfloat16)
        with torch.no_grad():
            result = unbroken(lambda x, out: call(x, out) + 1, compiler)(x, out)
        assert_logits(out, head, x)
        assert_close(result, out + 1, 1e-6)

    def test_row_counts_do_not_compile_again(self, make_call, compiler, served):
        head = linear()
        compiled = unbroken(make_call(head), compiler)
        with torch.no_grad():
            for rows in (3, 5, 7, 9, 11, 16, 17, 24, 40):
                x = inputs(rows)
                assert_logits(compiled(x), head, x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
        assert served is None or served.compiled == 1

    def test_dynamic_from_the_start(self, make_call, served):
        head = linear()
        compiled = unbroken(make_call(head), "aot_eager", dynamic=True)
        with torch.no_grad():
            for rows in (2, 9, 30):
                x = inputs(rows)
                assert_logits(compiled(x), head, x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    def test_gradients(self, out_dtype, make_call, compiler, served):
        head = linear(bias=True, dtype=torch.float32).requires_grad_()
        x = inputs(3, dtype=torch.float32).requires_grad_()
        leaves = [x, head.weight, head.bias]
        call = make_call(head, out_dtype)
        gradients = torch.autograd.grad(unbroken(lambda x: call(x).square().sum(), compiler)(x), leaves)
        expected = torch.autograd.grad(F.linear(x, head.weight, head.bias).square().sum(), leaves)
        for gradient, right in zip(gradients, expected):
            assert_close(gradient, right)

    @pytest.mark.parametrize("prepared", [False, True])
    def test_prepared_beforehand(self, prepared, make_call):
        with testing.reference_backend(Counting()) as kernel, torch.no_grad():
            head, x = linear(), inputs(3)
            if prepared:
                lowbatch_lmhead.warmup(head)
            compiled = unbroken(make_call(head), "aot_eager")
            before = kernel.compiled, kernel.calls
            assert_logits(compiled(x), head, x)
            assert (kernel.compiled, kernel.calls) == ((1, before[1] + 1) if prepared else (1, 3))

    def test_weight_that_changes(self, make_call, compiler, served):
        head, x = linear(), inputs(3)
        compiled = unbroken(make_call(head), compiler)
        with torch.no_grad():
            compiled(x)
            head.weight.mul_(2)
            assert_logits(compiled(x), head, x)
            head.weight.data = torch.randn(VOCAB, HIDDEN).bfloat16()
            assert_logits(compiled(x), head, x)
            head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN).bfloat16(), requires_grad=False)
            assert_logits(compiled(x), head, x)

    def test_hooked_head_gives_its_own_logits(self, make_call, served):
        head, x = linear(), inputs(3)
        head.register_forward_hook(lambda module, args, output: output * 5)
        with torch.no_grad():
            assert_close(unbroken(make_call(head), "aot_eager")(x), 5 * exact(x, head.weight), 5e-3)
        assert served is None or not served.calls

    def test_own_forward_and_out_dtype(self, make_call, served):
        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        head, x = Doubled(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(False), inputs(3)
        out = poisoned(3, VOCAB, dtype=torch.float32)
        with torch.no_grad():
            unbroken(make_call(head, torch.float32), "aot_eager")(x, out)
        assert_close(out, 2 * exact(x, head.weight), 2.5e-3)

    def test_autocast(self, make_call, served):
        head, x = linear(dtype=torch.float32), inputs(3, dtype=torch.float32)
        call = make_call(head)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = unbroken(call, "aot_eager")(x)
        assert logits.dtype is torch.bfloat16
        assert_close(logits, exact(x, head.weight), 5e-3)
        assert served is None or not served.calls

    @pytest.mark.parametrize("given", ["embedding", "weight", "tuple", "registered"])
    def test_other_heads(self, given, compiler, served):
        plain, x = linear(bias=given in ("tuple", "registered")), inputs(3)
        if given == "embedding":
            head = nn.Embedding.from_pretrained(plain.weight)
        elif given == "weight":
            head = plain.weight
        elif given == "tuple":
            head = (plain.weight, plain.bias)
        else:
            head = Projector(plain)
            lowbatch_lmhead.register_head(Projector, lambda head: (head.plain.weight, head.plain.bias))
        with torch.no_grad():
            assert_logits(unbroken(lambda x: project(head, x), compiler)(x), plain, x)
        assert served is None or served.calls

    def test_wrong_arguments_while_tracing(self, make_call):
        with torch.no_grad(), pytest.raises(Exception, match=r"\(100, 64\) takes \(\.\.\., 64\)"):
            torch.compile(make_call(linear()), backend="eager")(inputs(3, hidden=8))

    @pytest.mark.parametrize(
        ("out", "message"),
        [
            (lambda: poisoned(4, VOCAB), "out"),
            (lambda: poisoned(3, VOCAB, dtype=torch.float32), "out"),
            (lambda: poisoned(1, VOCAB).expand(3, VOCAB), "share memory"),
        ],
        ids=["shape", "dtype", "expanded"],
    )
    def test_wrong_out(self, out, message, make_call, served):
        out = out()
        with torch.no_grad(), pytest.raises(Exception, match=message):
            torch.compile(make_call(linear()), backend="eager")(inputs(3), out)
        assert out.isnan().all()

    def test_out_that_overlaps(self, make_call, served):
        head, x = linear(vocab=HIDDEN), inputs(3)
        before = x.clone()
        with torch.no_grad(), pytest.raises(Exception, match="out overlaps x"):
            torch.compile(make_call(head), backend="eager")(x, x)
        assert torch.equal(x, before)

    def test_out_in_autograd_is_an_error_as_it_is_eagerly(self, make_call):
        head, x, out = linear(), inputs(3).requires_grad_(), poisoned(3, VOCAB)
        with pytest.raises(Exception, match="out= takes no part in autograd"):
            torch.compile(make_call(head), backend="eager")(x, out)


class Projector(nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.plain = plain


class Model(nn.Module):
    """The end of a language model."""

    def __init__(self, out_dtype=None):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)
        self.lm_head = linear(bias=True)
        self.out_dtype = out_dtype

    def forward(self, x):
        return project(self.lm_head, self.norm(x), out_dtype=self.out_dtype)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
class TestGraphs:
    def test_compiled_module(self, out_dtype, compiler, served):
        model = Model(out_dtype).eval()
        with torch.no_grad():
            expected = exact(model.norm(x := inputs(3)), model.lm_head.weight, model.lm_head.bias)
            # The compiler may keep more of the norm's precision.
            assert_close(unbroken(model, compiler)(x), expected, 1e-2)

    def test_export(self, out_dtype, served):
        model = Model(out_dtype).eval().requires_grad_(False)
        rows = torch.export.Dim("rows", min=1, max=64)
        with torch.no_grad():
            exported = torch.export.export(model, (inputs(4),), dynamic_shapes=({0: rows},))
            assert "lowbatch_lmhead.project" in str(exported.graph)
            for count in (1, 3, 20):
                x = inputs(count)
                assert_logits(exported.module()(x), model.lm_head, model.norm(x))
        assert served is None or served.calls

    def test_make_fx(self, out_dtype, served):
        """A tracer that sees operations gets the default GEMM's, and the traced function is right."""
        model = Model(out_dtype).eval()
        with torch.no_grad():
            traced = make_fx(model)(inputs(3))
            x = inputs(3)
            assert_logits(traced(x), model.lm_head, model.norm(x))

    def test_make_fx_of_the_operator(self, out_dtype, served):
        head, x = linear(), inputs(3)
        traced = make_fx(lambda x, weight: project_op(x, weight, None, out_dtype))(x, head.weight)
        assert "lowbatch_lmhead.project" in str(traced.graph)
        x = inputs(3)
        assert_logits(traced(x, head.weight), head, x)
