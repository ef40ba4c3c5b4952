"""batch_invariant=True: the bits of a row's logits, whatever other rows there are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conftest import HIDDEN, VOCAB, Counting, assert_close, exact, inputs, linear, poisoned
from torch import nn

import lowbatch_lmhead
from lowbatch_lmhead import applies, bind, explain, project, testing, warmup
from lowbatch_lmhead.backends import Launch
from lowbatch_lmhead.plan import INVARIANT_ROWS, InvariantPlan, PlanKey, plan_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class OneOrder(Counting):
    """A kernel with a tile of its own for few and for many rows, and one order of additions for both.

    ``wrong`` is a row count that it gets wrong, ``seen`` the row counts of its launches.
    """

    name = "one order"

    def __init__(self, wrong=None):
        super().__init__()
        self.wrong, self.seen = wrong, []

    def invariant_tactic(self, problem):
        return "few" if problem.rows <= 8 else "many"

    def compile(self, problem, tactic):
        self.compiled += 1

        def call(weight, x, bias, out):
            self.seen.append(len(x))
            wide = weight.float()
            for row, logits in zip(x, out):
                total = (row.float() * wide).cumsum(1)[:, -1]  # one after the other
                logits.copy_(total if bias is None else total + bias.float())
            if len(x) == self.wrong:
                out[0, 0] += 100

        return Launch(call, self.name, str(tactic))


@pytest.fixture
def one_order():
    with testing.reference_backend(OneOrder()) as backend, torch.no_grad():
        yield backend


@pytest.fixture(params=["kernel", "no kernel"])
def anywhere(request):
    """With a kernel that serves, and without any."""
    with torch.no_grad():
        if request.param == "no kernel":
            yield None
        else:
            with testing.reference_backend(OneOrder()) as backend:
                yield backend


def alone(head, x, **arguments):
    return torch.cat([project(head, row, batch_invariant=True, **arguments) for row in x.split(1)])


@pytest.mark.parametrize("out_dtype", [None, FP32])
@pytest.mark.parametrize("rows", [2, 7, 8, 9, 64, 65, 150])
def test_a_row_has_the_same_bits_in_any_company(rows, out_dtype, anywhere):
    # Long sums in float32: the order of additions shows.
    dtype = FP32 if anywhere is None else BF16
    head, x = linear(hidden=1024, bias=True, dtype=dtype), inputs(rows, hidden=1024, dtype=dtype)
    together = project(head, x, out_dtype=out_dtype, batch_invariant=True)
    assert together.dtype == (out_dtype or dtype)
    assert torch.equal(together, alone(head, x, out_dtype=out_dtype))
    order = torch.randperm(rows)
    assert torch.equal(project(head, x[order], out_dtype=out_dtype, batch_invariant=True), together[order])
    other = torch.randn_like(x) * 100
    other[rows // 2] = x[rows // 2]
    assert torch.equal(project(head, other, out_dtype=out_dtype, batch_invariant=True)[rows // 2], together[rows // 2])
    assert_close(together, exact(x, head.weight, head.bias))


def test_more_rows_than_a_launch_takes_go_in_pieces(one_order):
    head, x = linear(), inputs(130)
    project(head, x, batch_invariant=True)
    one_order.seen.clear()
    project(head, x, batch_invariant=True)
    assert one_order.seen == [64, 64, 2]


def test_all_row_counts_are_prepared_together(one_order):
    head = linear()
    report = warmup(head, batch_invariant=True, progress=False)
    (found,) = report.heads
    assert [one.rows for one in found.decisions] == list(range(1, 65))
    assert {one.backend for one in found.decisions if one.taken and one.prepared} == {"one order"}
    assert one_order.compiled == 2  # few and many rows
    for rows in (1, 9, 64, 200):
        project(head, inputs(rows), batch_invariant=True)
    assert one_order.compiled == 2


@pytest.mark.parametrize("wrong", [1, 9, 64])
def test_a_kernel_that_is_wrong_at_one_row_count_serves_none(wrong):
    with testing.reference_backend(OneOrder(wrong)) as backend, torch.no_grad():
        head, x = linear(), inputs(20)
        warmup(head, batch_invariant=True, progress=False)
        backend.seen.clear()
        together = project(head, x, batch_invariant=True)
        assert not backend.seen
        assert torch.equal(together, alone(head, x))
        assert_close(together, exact(x, head.weight))
        decision = explain(head, inputs(3), batch_invariant=True)
        assert not decision
        assert "differ from the default GEMM" in str(decision)


def test_a_backend_that_does_not_promise_it_is_passed_over(kernel):
    head, x = linear(), inputs(3)
    assert applies(head, x)
    assert not applies(head, x, batch_invariant=True)
    assert "reference: its order of additions may differ between row counts" in str(
        explain(head, x, batch_invariant=True)
    )
    project(head, x, batch_invariant=True)
    assert not kernel.calls


def test_other_calls_have_plans_of_their_own(one_order):
    head, x = linear(), inputs(3)
    project(head, x)
    assert not explain(head, x, batch_invariant=True).prepared
    project(head, x, batch_invariant=True)
    assert explain(head, x, batch_invariant=True).prepared
    assert explain(head, inputs(65), batch_invariant=True).taken
    assert not explain(head, inputs(65)).taken


@pytest.mark.parametrize("rows", [3, 70])
def test_out(rows, anywhere):
    head, x = linear(), inputs(rows)
    expected = project(head, x, batch_invariant=True)
    whole = poisoned(rows, VOCAB)
    assert project(head, x, out=whole, batch_invariant=True) is whole
    assert torch.equal(whole, expected)
    around = poisoned(rows, VOCAB + 7)
    project(head, x, out=around[:, 3 : VOCAB + 3], batch_invariant=True)
    assert torch.equal(around[:, 3 : VOCAB + 3], expected)
    assert around[:, :3].isnan().all()
    assert around[:, VOCAB + 3 :].isnan().all()
    deep = poisoned(1, rows, VOCAB)
    project(head, x[None], out=deep, batch_invariant=True)
    assert torch.equal(deep[0], expected)
    columns = poisoned(VOCAB, rows).t()
    project(head, x, out=columns, batch_invariant=True)
    assert torch.equal(columns, expected)


@pytest.mark.parametrize("shape", [(), (2, 3), (1, 70), (0,), (2, 0)])
def test_leading_dimensions(shape, anywhere):
    head, x = linear(), inputs(*shape)
    logits = project(head, x, batch_invariant=True)
    assert logits.shape == (*shape, VOCAB)
    assert torch.equal(logits.view(-1, VOCAB), alone(head, x.view(-1, HIDDEN)) if x.numel() else logits.view(-1, VOCAB))


def test_bind(anywhere):
    head, x = linear(), inputs(9)
    step = bind(head, batch_invariant=True)
    expected = project(head, x, batch_invariant=True)
    assert torch.equal(step(x), expected)
    assert torch.equal(step(x[4:5]), expected[4:5])
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert "batch_invariant=True" in repr(copied)
        assert torch.equal(copied(x), expected)
    assert "batch_invariant" not in repr(bind(head))
    assert step.explain(x).taken == (anywhere is not None)


def test_a_new_weight(anywhere):
    head, x = linear(), inputs(5)
    project(head, x, batch_invariant=True)
    head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN).to(BF16), requires_grad=False)
    assert_close(project(head, x, batch_invariant=True), exact(x, head.weight))


def test_gradients():
    head = linear().requires_grad_(True)
    x = inputs(5).requires_grad_(True)
    logits = project(head, x, batch_invariant=True)
    logits.float().sum().backward()
    assert_close(x.grad, head.weight.detach().double().sum(0).expand(5, -1), within=1e-2)
    assert head.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(logits, alone(head, x))


@pytest.mark.parametrize("call", [project, explain, applies])
def test_a_head_that_computes_by_itself(call):
    head = linear()
    head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"batch_invariant=True takes a head that is its weight and bias.*hook"):
        call(head, inputs(2), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True takes a head"):
        bind(head, batch_invariant=True)


def test_torch_compile(anywhere):
    head, x = linear(), inputs(9)
    expected = project(head, x, batch_invariant=True)
    compiled = torch.compile(lambda x: project(head, x, batch_invariant=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    out = poisoned(9, VOCAB)
    torch.compile(lambda x, out: project(head, x, out=out, batch_invariant=True), fullgraph=True, backend="aot_eager")(
        x, out
    )
    assert torch.equal(out, expected)


def test_torch_compile_with_gradients():
    head, x = linear().requires_grad_(True), inputs(2)
    with pytest.raises(Exception, match=r"batch_invariant=True inside torch\.compile takes no gradients"):
        torch.compile(lambda x: project(head, x, batch_invariant=True), fullgraph=True, backend="eager")(x)


def test_autocast_computes_row_by_row(one_order):
    head, x = linear(dtype=FP32), inputs(5, dtype=FP32)
    with torch.autocast("cpu", dtype=BF16):
        together = project(head, x, batch_invariant=True)
        assert together.dtype == BF16
        assert torch.equal(together, alone(head, x))


def test_what_would_make_one_product_of_many_rows_is_refused(anywhere):
    head, x = linear(), inputs(5)
    for call in (
        lambda: torch.func.vmap(lambda row: project(head, row, batch_invariant=True))(x),
        lambda: torch.jit.trace(lambda x: project(head, x, batch_invariant=True), x),
    ):
        with pytest.raises(ValueError, match="batch_invariant=True takes no functorch transform"):
            call()
    with pytest.raises(ValueError, match="batch_invariant=True takes a dense x"):
        project(head, x.to_sparse(), batch_invariant=True)


def test_the_layout_of_x_does_not_matter(anywhere):
    head, x = linear(hidden=1024, dtype=FP16), inputs(7, hidden=1024, dtype=FP16)
    expected = project(head, x, batch_invariant=True)
    columns = x.t().contiguous().t()
    apart = torch.empty(7, 2048, dtype=FP16)[:, ::2].copy_(x)
    for other in (columns, apart, torch.cat((x[:1], x))[1:]):
        assert torch.equal(project(head, other, batch_invariant=True), expected)


@pytest.mark.parametrize("wrong", [1, 2, None, [], "yes", torch.tensor([True, False])], ids=repr)
def test_other_than_true_or_false(wrong, anywhere):
    head, x = linear(), inputs(2)
    for call in (project, explain, applies):
        with pytest.raises(ValueError, match="batch_invariant must be True or False, got"):
            call(head, x, batch_invariant=wrong)
    for call in (bind, warmup):
        with pytest.raises(ValueError, match="batch_invariant must be True or False, got"):
            call(head, batch_invariant=wrong)


def test_a_launch_that_refuses_is_an_error(one_order):
    # Any other way to compute these rows would be another order than that of other row counts.
    head, x = linear(), inputs(6)
    project(head, x, batch_invariant=True)
    plan = plan_for(head.weight, None, BF16, True)

    def refuse(*_):
        raise TypeError("not these")

    plan.table[6] = refuse
    with pytest.raises(ValueError, match="a launch refused what the gate let pass: not these"):
        project(head, x, batch_invariant=True)


def test_warmup_tries_once(monkeypatch, one_order):
    tried = []

    def full(problem, tactic):
        tried.append(tactic)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one_order, "compile", full)
    warmup(linear(), batch_invariant=True, progress=False)
    assert len(tried) == 1


def test_tuning_does_not_serve_it(one_order):
    head = linear()
    lowbatch_lmhead.autotune(head, max_rows=4, cache=False, progress=False)
    assert not explain(head, inputs(3), batch_invariant=True).prepared


def test_an_interruption_leaves_it_to_the_next_call(monkeypatch, one_order):
    head, x = linear(), inputs(3)
    compile_ = one_order.compile

    def interrupted(problem, tactic):
        if tactic == "many":
            raise KeyboardInterrupt
        return compile_(problem, tactic)

    monkeypatch.setattr(one_order, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        project(head, x, batch_invariant=True)
    assert not explain(head, x, batch_invariant=True).prepared
    monkeypatch.setattr(one_order, "compile", compile_)
    assert_close(project(head, x, batch_invariant=True), exact(x, head.weight))
    assert explain(head, x, batch_invariant=True).prepared


def test_out_of_memory_is_tried_again(monkeypatch, one_order):
    head, x = linear(), inputs(3)
    compile_ = one_order.compile

    def full(problem, tactic):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(one_order, "compile", full)
    assert torch.equal(project(head, x, batch_invariant=True), alone(head, x))
    monkeypatch.setattr(one_order, "compile", compile_)
    assert_close(project(head, x, batch_invariant=True), exact(x, head.weight))
    assert explain(head, x, batch_invariant=True).prepared


def test_a_backend_that_does_not_take_every_row_count_serves_none():
    class Some(OneOrder):
        def supports(self, problem):
            return "it takes up to 40 rows" if problem.rows > 40 else super().supports(problem)

    with testing.reference_backend(Some()) as backend, torch.no_grad():
        head, x = linear(), inputs(3)
        before = explain(head, x, batch_invariant=True)
        assert not before
        assert "one order: it takes up to 40 rows" in str(before)
        project(head, x, batch_invariant=True)
        assert not backend.compiled
        assert explain(head, x, batch_invariant=True).reasons == before.reasons


@pytest.mark.parametrize(
    ("hidden", "dtype", "out_dtype", "bias"),
    [(8, BF16, BF16, False), (576, BF16, FP32, True), (4096, FP16, FP16, True), (12288, FP16, FP32, False)],
)
def test_on_sm90_two_kernels_serve_every_row_count_in_one_order(hidden, dtype, out_dtype, bias):
    plan = InvariantPlan(PlanKey(torch.device("meta"), 49155, hidden, dtype, out_dtype, bias, True), "sm_90a")
    assert plan.max_rows == INVARIANT_ROWS == 64
    seen = {"hopper stream": [], "stream": []}
    for rows in range(1, 65):
        in_line, reasons = plan._in_line(rows)
        assert [backend.name for backend, _ in in_line] == ["hopper stream", "stream"]
        for backend, tactic in in_line:
            seen[backend.name].append(tactic)
        backend, tactic, against = plan.first_choice(rows)
        assert (backend, tactic, against) == ("hopper stream", str(in_line[0][1]), tuple(reasons))
        assert {reason.split(":")[0] for reason in reasons} == {"flashinfer warp split-K", "flashinfer direct"}
    # What the order of additions depends on; the rest of a tactic follows the number of rows.
    assert len({tactic.k_tile for tactic in seen["hopper stream"]}) == 1
    assert len({(tactic.k_tile, tactic.warps_k) for tactic in seen["stream"]}) == 1
    assert all(len(set(tactics)) > 1 for tactics in seen.values())


@pytest.mark.parametrize("name", ["tactics", "invariant_tactic", "autotune_tactics", "supports"])
def test_a_backend_that_raises_serves_nothing(name, monkeypatch):
    def broken(problem):
        raise KeyError("broken")

    with testing.reference_backend(OneOrder()) as backend, torch.no_grad():
        monkeypatch.setattr(backend, name, broken, raising=False)
        head, x = linear(), inputs(3)
        for batch_invariant in (False, True):
            assert_close(project(head, x, batch_invariant=batch_invariant), exact(x, head.weight))
            warmup(head, batch_invariant=batch_invariant, progress=False)
        lowbatch_lmhead.autotune(head, max_rows=2, cache=False, progress=False)
        if name in ("tactics", "supports"):
            assert "KeyError: 'broken'" in str(explain(head, x))
        if name in ("invariant_tactic", "supports"):
            assert "KeyError: 'broken'" in str(explain(head, x, batch_invariant=True))


def test_warmup_of_a_head_that_computes_by_itself():
    head = linear()
    head.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="batch_invariant=True takes a head"):
        warmup(head, batch_invariant=True)
