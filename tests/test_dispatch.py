"""project and bind: every layout of x and out, heads that change, wrong arguments, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from conftest import CLOSE, HIDDEN, VOCAB, Counting, assert_close, assert_logits, exact, inputs, linear, poisoned
from torch import nn
from torch.nn.utils import parametrizations

from lowbatch_lmhead import autotune, bind, dispatch, explain, project, testing, warmup
from lowbatch_lmhead import head as head_module

SENTINEL = 123.0


def strided_rows(rows, hidden=HIDDEN, dtype=torch.bfloat16):
    return inputs(3 * rows, hidden=hidden, dtype=dtype)[::3]


def sliced(rows, start=8):
    return inputs(rows, hidden=HIDDEN + 24)[:, start : start + HIDDEN]


def offset(rows, by=1):
    x = torch.randn(rows * HIDDEN + by).bfloat16()[by:].view(rows, HIDDEN)
    assert x.data_ptr() % 16
    return x


X_LAYOUTS = {
    "contiguous": lambda: inputs(5),
    "one row": lambda: inputs(1),
    "1-D": lambda: inputs(),
    "1-D, strided": lambda: inputs(hidden=2 * HIDDEN)[::2],
    "3-D": lambda: inputs(2, 3),
    "4-D": lambda: inputs(2, 1, 3),
    "last position of a sequence": lambda: inputs(3, 7)[:, -1:, :],
    "transposed batch": lambda: inputs(3, 2).transpose(0, 1),
    "strided rows": lambda: strided_rows(4),
    "columns of a wider one": lambda: sliced(4),
    "misaligned columns of a wider one": lambda: sliced(4, start=3),
    "rows of odd length": lambda: inputs(4, hidden=HIDDEN + 1)[:, :HIDDEN],
    "misaligned": lambda: offset(4),
    "expanded": lambda: inputs(1).expand(4, HIDDEN),
    "expanded in its last dimension": lambda: torch.randn(4, 1).bfloat16().expand(4, HIDDEN),
    "expanded batch": lambda: inputs(1, 2).expand(3, 2, HIDDEN),
    "transposed": lambda: torch.randn(HIDDEN, 4).bfloat16().t(),
    "reversed": lambda: inputs(4).flip(0),
}

OUT_LAYOUTS = {
    "contiguous": lambda rows, dtype: poisoned(rows, VOCAB, dtype=dtype),
    "strided rows": lambda rows, dtype: poisoned(2 * rows, VOCAB, dtype=dtype)[::2],
    "columns of a wider one": lambda rows, dtype: poisoned(rows, VOCAB + 30, dtype=dtype)[:, 7 : 7 + VOCAB],
    "transposed": lambda rows, dtype: poisoned(VOCAB, rows, dtype=dtype).t(),
    "every other column": lambda rows, dtype: poisoned(rows, 2 * VOCAB, dtype=dtype)[:, ::2],
    "misaligned": lambda rows, dtype: poisoned(rows * VOCAB + 1, dtype=dtype)[1:].view(rows, VOCAB),
}


@pytest.fixture(params=[False, True], ids=["project", "bind"])
def call(request):
    """project, or a bound head, as ``call(head, x, ...)``."""
    if not request.param:
        return project
    bound = {}

    def through_bind(head, x, out=None, out_dtype=None):
        key = (id(head), out_dtype)
        if key not in bound:
            bound[key] = bind(head, out_dtype=out_dtype)
        return bound[key](x, out=out)

    return through_bind


def base_of(tensor):
    return tensor if tensor._base is None else tensor._base


class TestInputs:
    @pytest.mark.parametrize("make", X_LAYOUTS.values(), ids=X_LAYOUTS)
    @pytest.mark.parametrize("bias", [False, True])
    def test_layout(self, make, bias, call, kernel):
        head, x = linear(bias=bias), make()
        before = x.clone()
        for _ in range(3):  # unprepared, then prepared
            calls = kernel.calls
            assert_logits(call(head, x), head, x)
            assert kernel.calls > calls
        assert torch.equal(x, before)

    @pytest.mark.parametrize("rows", range(41))
    def test_every_row_count(self, rows, call, kernel):
        head, x = linear(bias=rows % 2 == 1), inputs(rows)
        for out_dtype in (None, torch.float32):
            logits = call(head, x, out_dtype=out_dtype)
            assert logits.dtype == (out_dtype or x.dtype)
            assert logits.shape == (rows, VOCAB)
            if rows:
                assert_logits(logits, head, x)
        assert bool(kernel.calls) == (1 <= rows <= 16)

    def test_row_counts_through_one_head(self, call, kernel):
        head = linear()
        for rows in [3, 17, 3, 0, 16, 40, 1, 0, 3]:
            x = inputs(rows)
            logits = call(head, x)
            assert logits.shape == (rows, VOCAB)
            if rows:
                assert_logits(logits, head, x)

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
    def test_zero_rows(self, shape, call, kernel):
        head = linear(bias=True)
        for dtype in (None, torch.float32):
            assert call(head, inputs(*shape), out_dtype=dtype).shape == (*shape, VOCAB)
            out = torch.empty(*shape, VOCAB, dtype=dtype or torch.bfloat16)
            assert call(head, inputs(*shape), out=out, out_dtype=dtype) is out

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_dtypes(self, dtype, call, kernel):
        head = linear(bias=True, dtype=dtype)
        for rows in (3, 20):
            x = inputs(rows, dtype=dtype)
            logits = call(head, x)
            assert logits.dtype == dtype
            # The reference backend adds up in float32.
            within = CLOSE[torch.float32] if dtype == torch.float64 else None
            assert_close(logits, exact(x, head.weight, head.bias), within)

    @pytest.mark.parametrize("rows", [1, 8, 16, 17, 40])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("served", [False, True], ids=["default GEMM", "kernel"])
    def test_float32_logits_are_not_rounded(self, rows, bias, served, call):
        head, x = linear(bias=bias), inputs(rows)
        rounded = F.linear(x, head.weight, head.bias).float()
        if served:
            with testing.reference_backend(), torch.no_grad():
                logits = call(head, x, out_dtype=torch.float32)
        else:
            logits = call(head, x, out_dtype=torch.float32)
        assert logits.dtype is torch.float32
        assert_logits(logits, head, x)
        assert not torch.equal(logits, rounded)

    def test_result_is_new_memory(self, call, kernel):
        head, x = linear(), inputs(3)
        first = call(head, x)
        expected = first.clone()
        call(head, inputs(3))
        assert torch.equal(first, expected)


class TestOut:
    @pytest.mark.parametrize("make", OUT_LAYOUTS.values(), ids=OUT_LAYOUTS)
    @pytest.mark.parametrize("rows", [1, 5, 20])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_layout(self, make, rows, dtype, call, kernel):
        head, x = linear(bias=True), inputs(rows)
        for _ in range(3):
            out = make(rows, dtype)
            unwritten = base_of(out).isnan().sum() - out.numel()
            assert call(head, x, out=out, out_dtype=dtype) is out
            assert_logits(out, head, x)
            assert base_of(out).isnan().sum() == unwritten, "memory beside out was written"

    @pytest.mark.parametrize("make", X_LAYOUTS.values(), ids=X_LAYOUTS)
    def test_with_every_layout_of_x(self, make, call, kernel):
        head, x = linear(), make()
        for _ in range(3):
            out = poisoned(*x.shape[:-1], VOCAB)
            assert call(head, x, out=out) is out
            assert_logits(out, head, x)

    def test_of_more_dimensions_and_strided(self, call, kernel):
        head, x = linear(), inputs(2, 3)
        for _ in range(3):
            out = poisoned(3, 2, VOCAB + 1)[..., :VOCAB].transpose(0, 1)
            call(head, x, out=out)
            assert_logits(out, head, x)

    def test_beside_x_in_one_buffer(self, call, kernel):
        head, buffer = linear(), poisoned(3, HIDDEN + VOCAB).view(-1)
        x, out = buffer[: 3 * HIDDEN].view(3, HIDDEN), buffer[3 * HIDDEN :].view(3, VOCAB)
        x.copy_(inputs(3))
        for _ in range(3):
            assert_logits(call(head, x, out=out), head, x)


def _swap_data(head):
    head.weight.data = torch.randn(VOCAB, HIDDEN).bfloat16()


def _copy_into(head):
    head.weight.data.copy_(torch.randn(VOCAB, HIDDEN))


def _new_parameter(head):
    head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN).bfloat16(), requires_grad=False)


def _more_vocab(head):
    head.weight = nn.Parameter(torch.randn(VOCAB + 7, HIDDEN).bfloat16(), requires_grad=False)
    head.bias = None


def _less_vocab(head):
    head.weight.data = torch.randn(VOCAB - 7, HIDDEN).bfloat16()
    head.bias = None


def _transposed_weight(head):
    head.weight.data = torch.randn(HIDDEN, VOCAB).bfloat16().t()


def _no_bias(head):
    head.bias = None


def _new_bias(head):
    head.bias = nn.Parameter(torch.randn(VOCAB).bfloat16(), requires_grad=False)


def _deleted_parameter(head):
    weight = head.weight.data * 3
    del head.weight
    head.weight = weight


CHANGES = [
    _swap_data,
    _copy_into,
    _new_parameter,
    _more_vocab,
    _less_vocab,
    _transposed_weight,
    _no_bias,
    _new_bias,
    _deleted_parameter,
]


class TestChangingHeads:
    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("rows", [4, 20])
    def test_change(self, change, bias, rows, call, kernel):
        head, x = linear(bias=bias), inputs(rows)
        for _ in range(2):
            assert_logits(call(head, x), head, x)
        change(head)
        for _ in range(2):
            assert_logits(call(head, x), head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_moved_to_another_dtype(self, rows, call, kernel):
        head = linear(bias=True)
        for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
            head.to(dtype)
            x = inputs(rows, dtype=dtype)
            assert_logits(call(head, x), head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_other_hidden_size(self, rows, call, kernel):
        head, x = linear(), inputs(rows)
        call(head, x)
        head.weight = nn.Parameter(torch.randn(VOCAB, 32).bfloat16(), requires_grad=False)
        with pytest.raises(ValueError, match=r"\(\d+, 64\); the head's weight \(100, 32\)"):
            call(head, x)
        x = inputs(rows, hidden=32)
        assert_logits(call(head, x), head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_moved_to_meta(self, rows, call, kernel):
        head, x = linear(), inputs(rows)
        call(head, x)
        head.to("meta")
        with pytest.raises(ValueError, match="x is on cpu, the head's weight on meta"):
            call(head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_bias_of_another_dtype(self, rows, call, kernel):
        head, x = linear(bias=True), inputs(rows)
        call(head, x)
        head.bias.data = head.bias.data.double()
        with pytest.raises(ValueError, match="the head's bias is float64 on cpu, its weight bfloat16"):
            call(head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_bias_of_another_length(self, rows, call, kernel):
        head, x = linear(bias=True), inputs(rows)
        call(head, x)
        head.bias.data = head.bias.data[:7]
        with pytest.raises(ValueError, match=r"\(vocab,\) = \(100,\), got \(7,\)"):
            call(head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_hooks_added_and_removed(self, rows, call, kernel):
        head, x = linear(), inputs(rows)
        call(head, x)
        hooks = [
            head.register_forward_hook(lambda module, args, output: output * 2),
            head.register_forward_pre_hook(lambda module, args: (args[0] * 4,)),
        ]
        assert torch.equal(call(head, x), 2 * F.linear(4 * x, head.weight))
        for hook in hooks:
            hook.remove()
        assert_logits(call(head, x), head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_forward_replaced_and_restored(self, rows, call, kernel):
        head, x = linear(), inputs(rows)
        call(head, x)
        head.forward = lambda x: F.linear(x, head.weight) - 1
        assert torch.equal(call(head, x), F.linear(x, head.weight) - 1)
        del head.forward
        assert_logits(call(head, x), head, x)

    @pytest.mark.parametrize("rows", [4, 20])
    def test_parametrized_and_back(self, rows, call, kernel):
        head, x = linear(dtype=torch.float32), inputs(rows, dtype=torch.float32)
        call(head, x)
        parametrizations.weight_norm(head)
        head.parametrizations.weight.original0.data.mul_(3)
        assert torch.equal(call(head, x), head(x))
        torch.nn.utils.parametrize.remove_parametrizations(head, "weight")
        head.requires_grad_(False)
        assert_logits(call(head, x), head, x)

    def test_hooked_when_bound(self, kernel):
        head, x = linear(), inputs(4)
        hook = head.register_forward_hook(lambda module, args, output: output * 2)
        bound = bind(head)
        assert torch.equal(bound(x), 2 * F.linear(x, head.weight))
        hook.remove()
        assert_logits(bound(x), head, x)

    def test_bound_before_its_backend_is_taken_away(self):
        head, x = linear(), inputs(4)
        with testing.reference_backend(Counting()) as kernel, torch.no_grad():
            bound = bind(head)
            bound(x)
        calls = kernel.calls
        with torch.no_grad():
            assert_logits(bound(x), head, x)
        assert kernel.calls == calls > 0

    def test_class_changed(self, call, kernel):
        class Doubled(nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        head, x = linear(), inputs(4)
        call(head, x)
        head.__class__ = Doubled
        assert torch.equal(call(head, x), 2 * F.linear(x, head.weight))

    def test_tuple_with_changing_parts(self, kernel):
        head, x = linear(bias=True), inputs(4)
        for bias in (None, head.bias, torch.randn(VOCAB).bfloat16(), None):
            assert_close(project((head.weight, bias), x), exact(x, head.weight, bias))

    def test_one_head_in_two_dtypes(self, kernel):
        head, x = linear(), inputs(4)
        for _ in range(3):
            assert_logits(project(head, x), head, x)
            assert_logits(project(head, x, out_dtype=torch.float32), head, x)
            assert project(head, x, out_dtype=torch.bfloat16).dtype is torch.bfloat16


class TestLifetime:
    @pytest.mark.parametrize("make", [linear, lambda: nn.Embedding(VOCAB, HIDDEN).bfloat16(), lambda: linear().weight])
    def test_deleted_head_is_forgotten_and_freed(self, make, kernel):
        head = make()
        weight = weakref.ref(getattr(head, "weight", head))
        project(head, inputs(3))
        project(head, inputs(3), out_dtype=torch.float32)
        assert len(dispatch._dispatchers) == 2
        del head
        gc.collect()
        assert weight() is None
        assert not dispatch._dispatchers

    def test_deleted_tuple_is_forgotten(self, kernel):
        head = linear(bias=True)
        weight, bias = weakref.ref(head.weight), weakref.ref(head.bias)
        project((head.weight, head.bias), inputs(3))
        assert len(dispatch._dispatchers) == 1
        del head
        gc.collect()
        assert weight() is None
        assert bias() is None
        assert not dispatch._dispatchers

    def test_tuples_of_one_weight_share_what_is_kept(self, kernel):
        head = linear(bias=True)
        for _ in range(10):
            project((head.weight, head.bias), inputs(3))
        assert len(dispatch._dispatchers) == 1

    def test_wrong_calls_leave_nothing_behind(self, kernel):
        head = linear()
        for wrong in ("float32", 5, torch.int8):
            with pytest.raises(ValueError, match="out_dtype"):
                project(head, inputs(3), out_dtype=wrong)
        del head
        gc.collect()
        assert not dispatch._dispatchers

    def test_bound_head_lives_as_long_as_the_projection(self, kernel):
        head, x = linear(), inputs(3)
        weight, expected = weakref.ref(head.weight), exact(x, head.weight)
        bound = bind(head)
        del head
        gc.collect()
        assert_close(bound(x), expected)
        del bound
        gc.collect()
        assert weight() is None

    def test_replaced_weight_is_freed(self, call, kernel):
        head = linear()
        weight = weakref.ref(head.weight)
        call(head, inputs(3))
        _new_parameter(head)
        gc.collect()
        assert weight() is None

    def test_head_at_the_address_of_a_dead_one(self, kernel):
        x, seen = inputs(3), set()
        for _ in range(50):
            head = linear()
            assert_logits(project(head, x), head, x)
            seen.add(id(head))
            del head
        assert len(seen) < 50, "no address was used again, so nothing was tested"

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda head: pickle.loads(pickle.dumps(head))])
    def test_copies_of_a_projected_head(self, duplicate, kernel):
        head, x = linear(bias=True), inputs(3)
        project(head, x)
        twin = duplicate(head)
        twin.weight = nn.Parameter(twin.weight * 2, requires_grad=False)
        assert_logits(project(twin, x), twin, x)
        assert_logits(project(head, x), head, x)

    def test_copies_of_a_bound_head(self, kernel):
        head, x = linear(), inputs(3)
        bound = bind(head)
        bound(x)
        twin = copy.deepcopy(bound)
        head.weight.data.mul_(2)
        assert_close(twin(x), exact(x, head.weight) / 2)
        assert_logits(bound(x), head, x)


class TestModes:
    def test_autocast(self, call, kernel):
        head, x = linear(bias=True, dtype=torch.float32), inputs(3, dtype=torch.float32)
        call(head, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = call(head, x)
            assert torch.equal(logits, F.linear(x, head.weight, head.bias))
            assert logits.dtype is torch.bfloat16
            wide = call(head, x, out_dtype=torch.float32)
            out = poisoned(3, VOCAB)
            assert torch.equal(call(head, x, out=out), logits)
        assert_logits(wide, head, x)
        assert_logits(call(head, x), head, x)

    def test_inference_mode(self, call, kernel):
        head = linear().requires_grad_()
        with torch.inference_mode():
            x = inputs(3)
            for _ in range(2):
                assert_logits(call(head, x), head, x)
                assert_logits(call(head, x, out=poisoned(3, VOCAB)), head, x)
            assert kernel.calls
        x = inputs(3)
        assert_logits(call(head, x), head, x)

    @pytest.mark.parametrize("rows", [3, 20])
    @pytest.mark.parametrize("out_dtype", [None, torch.float32])
    def test_gradients_flow(self, rows, out_dtype, call, kernel):
        head, x = linear(bias=True, dtype=torch.float32).requires_grad_(), inputs(rows, dtype=torch.float32)
        call(head, x, out_dtype=out_dtype)
        calls = kernel.calls
        gradients = []
        with torch.enable_grad():
            for compute in (
                lambda x: call(head, x, out_dtype=out_dtype),
                lambda x: F.linear(x, head.weight, head.bias),
            ):
                leaf = x.clone().requires_grad_()
                gradients.append(torch.autograd.grad(compute(leaf).square().sum(), [leaf, head.weight, head.bias]))
        for gradient, expected in zip(*gradients):
            assert_close(gradient, expected)
        assert kernel.calls == calls

    def test_float32_logits_have_gradients(self, call, kernel):
        head, x = linear(), inputs(3)
        call(head, x, out_dtype=torch.float32)
        x.requires_grad_()
        with torch.enable_grad():
            call(head, x, out_dtype=torch.float32).sum().backward()
        assert_close(x.grad, head.weight.double().sum(0).expand(3, HIDDEN))

    @pytest.mark.parametrize("prepared", [False, True])
    @pytest.mark.parametrize("which", ["x", "weight", "out"])
    def test_out_in_autograd_is_a_value_error(self, which, prepared, call, kernel):
        head, x, out = linear(), inputs(3), torch.full((3, VOCAB), SENTINEL, dtype=torch.bfloat16)
        if prepared:
            call(head, x)
        {"x": x, "weight": head.weight, "out": out}[which].requires_grad_()
        with torch.enable_grad(), pytest.raises(ValueError, match="out= takes no part in autograd"):
            call(head, x, out=out)
        assert (out == SENTINEL).all()


def wrong_calls():
    """Arguments that no path can serve: what of x, out and out_dtype, and what the error says."""
    x = inputs(3)
    yield "hidden", {"x": inputs(3, hidden=65)}, r"x has the shape \(3, 65\).*\(100, 64\) takes \(..., 64\)"
    yield "hidden, many rows", {"x": inputs(30, hidden=8)}, r"\(30, 8\).*\(100, 64\)"
    yield "transposed", {"x": inputs(4, hidden=3).mT}, r"\(3, 4\)"
    yield "0-d", {"x": torch.tensor(1.0).bfloat16()}, r"\(..., 64\), got a tensor without dimensions"
    yield "dtype", {"x": x.float()}, r"x is float32, the head's weight bfloat16; .*x.to\(torch.bfloat16\)"
    yield "dtype, many rows", {"x": inputs(30).half()}, "x is float16, the head's weight bfloat16"
    yield "integers", {"x": torch.ones(3, HIDDEN, dtype=torch.int64)}, "floating-point values, got int64"
    yield "complex", {"x": torch.ones(3, HIDDEN, dtype=torch.complex64)}, "floating-point values, got complex64"
    yield "x on meta", {"x": torch.empty(3, HIDDEN, dtype=torch.bfloat16, device="meta")}, "x is on meta.* on cpu"
    yield "x a list", {"x": x.tolist()}, r"x must be a tensor of shape \(..., hidden\), got list"
    yield "x None", {"x": None}, "x must be a tensor.*got NoneType"
    yield "out rows", {"out": (4, VOCAB)}, r"out has the shape \(4, 100\); the logits have \(3, 100\)"
    yield "out vocab", {"out": (3, VOCAB + 1)}, r"out has the shape \(3, 101\); the logits have \(3, 100\)"
    yield "out dimensions", {"out": (1, 3, VOCAB)}, r"\(1, 3, 100\); the logits have \(3, 100\)"
    yield "out for 1-D x", {"x": x[0], "out": (1, VOCAB)}, r"\(1, 100\); the logits have \(100,\)"
    yield "out dtype", {"out": torch.float16}, "out is float16; the logits are bfloat16"
    yield (
        "out float32",
        {"out": torch.float32},
        "out is float32; the logits are bfloat16; float32 logits are asked for with out_dtype=torch.float32",
    )
    yield "out rounded", {"out": torch.bfloat16, "out_dtype": torch.float32}, "out is bfloat16; the logits are float32"
    yield "out on meta", {"out": torch.empty(3, VOCAB, dtype=torch.bfloat16, device="meta")}, "out is on meta, x on cpu"
    yield "out a list", {"out": [1.0]}, "out must be a tensor, got list"
    yield "out expanded", {"out": torch.zeros(1, VOCAB).bfloat16().expand(3, VOCAB)}, r"share memory.*strides \(0, 1\)"
    yield (
        "out with overlapping rows",
        {"out": torch.zeros(4 * VOCAB).bfloat16().as_strided((3, VOCAB), (10, 1))},
        r"share memory.*strides \(10, 1\)",
    )
    yield (
        "out_dtype",
        {"out_dtype": torch.float16},
        "out_dtype must be None, torch.float32 or torch.bfloat16, got float16",
    )
    yield "out_dtype int", {"out_dtype": torch.int32}, "out_dtype must be .* got int32"
    yield "out_dtype string", {"out_dtype": "float32"}, "out_dtype must be .* got 'float32'"
    yield "out_dtype type", {"out_dtype": float}, "out_dtype must be .* got <class 'float'>"
    yield "out_dtype list", {"out_dtype": []}, r"out_dtype must be .* got \[\]"


WRONG = {name: (arguments, message) for name, arguments, message in wrong_calls()}


@pytest.mark.parametrize("prepared", [False, True], ids=["unprepared", "prepared"])
class TestWrongArguments:
    @pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
    def test_value_error_names_the_values(self, arguments, message, prepared, kernel):
        head, x = linear(), inputs(3)
        if prepared:
            for out_dtype in (None, torch.float32):
                project(head, x, out_dtype=out_dtype)
        arguments = {"x": x, "out": (3, VOCAB), **arguments}
        if isinstance(arguments["out"], tuple):
            arguments["out"] = torch.zeros(arguments["out"], dtype=torch.bfloat16)
        elif isinstance(arguments["out"], torch.dtype):
            arguments["out"] = torch.zeros(3, VOCAB, dtype=arguments["out"])
        out = arguments["out"]
        written = isinstance(out, torch.Tensor) and out.device.type == "cpu"
        if written:
            base_of(out).fill_(SENTINEL)
        with pytest.raises(ValueError, match=message):
            project(head, **arguments)
        if written:
            assert (out == SENTINEL).all()
        assert_logits(project(head, x), head, x)

    @pytest.mark.parametrize("rows", [3, 20])
    def test_out_overlaps_x(self, rows, prepared, call, kernel):
        head, buffer = linear(vocab=HIDDEN), inputs(rows + 5)
        x, before = buffer[:rows], buffer.clone()
        if prepared:
            call(head, x)
        for out in (x, buffer[1 : rows + 1], buffer.view(-1)[: rows * HIDDEN].view(HIDDEN, rows).t()):
            with pytest.raises(ValueError, match="out overlaps x in memory"):
                call(head, x, out=out)
        assert torch.equal(buffer, before)

    @pytest.mark.parametrize("rows", [3, 20])
    def test_out_overlaps_the_weight(self, rows, prepared, call, kernel):
        head, x = linear(vocab=HIDDEN), inputs(rows)
        before = head.weight.clone()
        if prepared:
            call(head, x)
        with pytest.raises(ValueError, match="out overlaps the head's weight in memory"):
            call(head, x, out=head.weight.data[-rows:])
        assert torch.equal(head.weight, before)

    def test_out_overlaps_the_bias(self, prepared, call, kernel):
        head, x = linear(bias=True), inputs(1)
        before = head.bias.clone()
        if prepared:
            call(head, x)
        with pytest.raises(ValueError, match="out overlaps the head's bias in memory"):
            call(head, x, out=head.bias.data.view(1, VOCAB))
        assert torch.equal(head.bias, before)


@pytest.mark.parametrize("wrong", [torch.float16, torch.int8, "float32", float, []], ids=str)
def test_bind_checks_out_dtype(wrong):
    with pytest.raises(ValueError, match=r"out_dtype must be None, torch.float32 or torch.bfloat16"):
        bind(linear(), out_dtype=wrong)


@pytest.mark.parametrize("wrong", [torch.int8, "float32", float, 1, []], ids=str)
@pytest.mark.parametrize("call", [bind, warmup, autotune], ids=lambda call: call.__name__)
def test_out_dtype_is_checked_for_a_head_that_computes_by_itself(call, wrong, monkeypatch):
    class Own(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    monkeypatch.setattr(head_module, "_readers", {Own: lambda head: None})
    with pytest.raises(ValueError, match=r"^out_dtype must be None, torch.float32 or x's dtype, got "):
        call(Own(HIDDEN, VOCAB), out_dtype=wrong)


class TestThreads:
    def run(self, functions):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(len(functions)) as pool:
                for future in [pool.submit(function) for function in functions]:
                    future.result()
        finally:
            sys.setswitchinterval(interval)

    def test_one_unprepared_head(self):
        with testing.reference_backend(Counting()) as kernel:
            head = linear()
            start = threading.Barrier(8)

            def serve():
                x = inputs(4)
                with torch.no_grad():
                    start.wait()
                    for _ in range(20):
                        assert_logits(project(head, x), head, x)

            self.run([serve] * 8)
            assert kernel.compiled == 1

    def test_different_shapes_and_row_counts(self):
        with testing.reference_backend(Counting()) as kernel:
            heads = [linear(), linear(bias=True), linear(vocab=90)]
            bound = [bind(head) for head in heads]

            def serve():
                with torch.no_grad():
                    for rows in random.sample(range(1, 20), 12):
                        for head, projection in zip(heads, bound):
                            x = inputs(rows)
                            assert_logits(projection(x), head, x)

            self.run([serve] * 8)
            assert kernel.compiled == 3

    @pytest.mark.parametrize("first", ["prepared", "unprepared"])
    @pytest.mark.parametrize("other", ["serves", "needs gradients", "has no rows", "uses autocast"])
    def test_a_call_between_any_two_lines_of_another(self, first, other):
        """While one thread is anywhere inside a call, another is served by the same head."""

        def interleaved(at):
            """The lines that the call has, after another thread's call before its line ``at``."""
            lines = 0
            head = linear()
            bound = bind(head)

            def serve():
                x = inputs(4)
                with torch.no_grad():
                    assert_logits(bound(x), head, x)

            def trace(frame, event, argument):
                nonlocal lines
                if frame.f_code.co_filename != dispatch.__file__:
                    return None
                if event == "line":
                    lines += 1
                    if lines == at:
                        self.run([serve])
                return trace

            x = inputs(0 if other == "has no rows" else 5)
            x.requires_grad_(other == "needs gradients")
            testing.forget()
            if first == "prepared":
                serve()
            with torch.autocast("cpu", enabled=other == "uses autocast"):
                sys.settrace(trace)
                try:
                    logits = bound(x)
                finally:
                    sys.settrace(None)
            if len(x):
                assert_logits(logits, head, x)
            return lines

        with testing.reference_backend():
            at, lines = 0, 1
            while at < lines:
                at += 1
                lines = interleaved(at)
            assert lines > 5


def random_view(rng, shape, dtype, fill):
    """A tensor of ``shape`` with strides, gaps and an offset of its own."""
    order = list(range(len(shape)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    steps = [rng.choice([1, 1, 1, 2]) for _ in shape]
    extra = [rng.choice([0, 0, 0, 1, 8]) for _ in shape]
    full = [size * step + more for size, step, more in zip(shape, steps, extra)]
    offset = rng.choice([0, 0, 1, 4, 8])
    numel = 1
    for size in full:
        numel *= size
    storage = fill(numel + offset).to(dtype)[offset:]
    view = storage.view([full[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    for dim, (size, step) in enumerate(zip(shape, steps)):
        start = rng.randint(0, view.shape[dim] - size * step)
        view = view.narrow(dim, start, size * step)[(slice(None),) * dim + (slice(None, None, step),)]
    assert view.shape == tuple(shape)
    return view


@pytest.mark.parametrize("seed", range(8))
def test_fuzz_against_linear(seed, kernel):
    rng = random.Random(seed)
    heads = [
        linear(vocab=rng.choice([1, 3, 17, 64, 100]), hidden=rng.choice([1, 5, 8, 64, 72]), bias=rng.random() < 0.5)
        for _ in range(4)
    ]
    bound = {(i, dtype): bind(head, out_dtype=dtype) for i, head in enumerate(heads) for dtype in (None, torch.float32)}
    for _ in range(60):
        index = rng.randrange(len(heads))
        head = heads[index]
        leading = [rng.choice([1, 1, 2, 3, 5, 9]) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]
        x = random_view(rng, [*leading, head.in_features], torch.bfloat16, torch.randn)
        out_dtype = rng.choice([None, torch.float32])
        shape = (*leading, head.out_features)
        out = None
        if rng.random() < 0.5:
            out = random_view(rng, shape, out_dtype or torch.bfloat16, lambda n: torch.full((n,), float("nan")))
            unwritten = base_of(out).isnan().sum() - out.numel()
        if rng.random() < 0.5:
            logits = project(head, x, out=out, out_dtype=out_dtype)
        else:
            logits = bound[index, out_dtype](x, out=out)
        expected = F.linear(x, head.weight, head.bias)
        if out_dtype is not None or explain(head, x).taken:
            # A single logit may be half a unit in the last place off: more than the many of the other tests on average.
            assert_close(logits, exact(x, head.weight, head.bias), None if out_dtype else 2**-8)
        # PyTorch rounds before it adds a bias, so it can be further off than that.
        assert_close(logits, expected, 0.05)
        if out is not None:
            assert logits is out
            assert base_of(out).isnan().sum() == unwritten, "memory beside out was written"


def test_warmup_prepares_what_project_and_bind_use(kernel):
    head = linear()
    warmup(head)
    compiled, checks = kernel.compiled, kernel.calls
    for rows in range(1, 17):
        assert explain(head, inputs(rows)).prepared
        project(head, inputs(rows))
        bind(head)(inputs(rows))
    assert kernel.compiled == compiled
    assert kernel.calls == checks + 32


@pytest.mark.parametrize("fails", [False, True])
def test_the_tensors_device_is_current_while_a_launch_runs(fails, kernel, monkeypatch):
    # What a machine with two GPUs does, on the CPU: its "device" -1 is not the current one.
    head, x = linear(), inputs(3)
    step = bind(head)
    expected = step(x)
    dispatcher = step._run.__self__
    current, during = [0], []

    def exchange(index):
        before, current[0] = current[0], index
        return before

    def launch(*tensors):
        during.append(current[0])
        if fails:
            raise RuntimeError("CUDA error")
        tensors[3].copy_(expected)

    monkeypatch.setattr(dispatcher, "_guard", True)
    monkeypatch.setattr(dispatch, "_current_device", lambda: current[0])
    monkeypatch.setattr(dispatch, "_exchange_device", exchange)
    monkeypatch.setattr(dispatch, "_maybe_exchange_device", exchange)
    dispatcher._table[3] = launch
    if fails:
        with pytest.raises(RuntimeError, match="CUDA error"):
            step(x)
    else:
        assert torch.equal(step(x), expected)
        assert torch.equal(step(x, out=poisoned(3, VOCAB)), expected)
    assert set(during) == {-1}
    assert current == [0]
