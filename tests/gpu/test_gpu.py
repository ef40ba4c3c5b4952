"""What only a GPU shows: right logits from the compiled kernels, however x, out, the head and the stream come.

Every test takes float64 on the same inputs as its reference and outputs filled with NaN.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbatch_lmhead
from lowbatch_lmhead import backends, dispatch, objects, plan, testing, verify
from lowbatch_lmhead.backends import Problem

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF16: 2.5e-3, F16: 4e-4, F32: 1e-5}


@pytest.fixture(autouse=True)
def _inference(request):
    """Most tests serve; the ones about gradients say so."""
    with torch.set_grad_enabled("grad" in request.node.name):
        yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """One cache of compiled kernels for all tests of this file."""
    before = os.environ.get("LOWBATCH_LMHEAD_CACHE")
    folder = tmp_path_factory.mktemp("kernels")
    folder.chmod(0o700)
    yield folder
    if before is not None:
        os.environ["LOWBATCH_LMHEAD_CACHE"] = before


@pytest.fixture(autouse=True)
def _use_cache(_cache, monkeypatch):
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(_cache))
    testing.forget()


def make(vocab, hidden, rows, bias=False, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(vocab, hidden, device="cuda", generator=generator).mul_(hidden**-0.5).to(BF16)
    x = torch.randn(rows, hidden, device="cuda", generator=generator).to(BF16)
    return weight, x, torch.randn(vocab, device="cuda", generator=generator).to(BF16) if bias else None


def reference(x, weight, bias=None):
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def check(got, expected, dtype=BF16):
    assert got.dtype is dtype
    assert got.shape == expected.shape
    assert error(got, expected) < LIMIT[dtype]
    # The end of the vocabulary on its own, where a wrong split would show.
    assert error(got[..., -32:], expected[..., -32:]) < 4 * LIMIT[dtype]


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize(
    ("vocab", "hidden", "bias"),
    [(4096, 1024, False), (4096, 1024, True), (50257, 768, False), (32001, 4096, True), (51866, 1280, False),
     (49155, 2048, False), (16, 128, False), (17, 256, True), (31, 384, False), (33, 512, True), (47, 128, False),
     (1000, 8192, False), (1003, 12288, True), (128, 16384, False), (4112, 896, False), (49152, 576, False),
     (1001, 2880, True), (7, 72, True)],
)  # fmt: skip
def test_logits(vocab, hidden, bias, out_dtype):
    weight, x, b = make(vocab, hidden, 64, bias)
    asked = None if out_dtype is BF16 else F32
    head = weight if b is None else (weight, b)
    left = vocab < 16384 and vocab % 16 == 0  # beyond 48 rows: to the default GEMM, while nothing is measured
    for rows in (*range(1, 18), 24, 25, 33, 48, 49, 64):
        out = torch.full((rows, vocab), float("nan"), device="cuda", dtype=out_dtype)
        decision = lowbatch_lmhead.explain(head, x[:rows], out_dtype=asked)
        assert decision.taken is not (left and rows > 48 and hidden <= 8192), decision
        assert lowbatch_lmhead.project(head, x[:rows], out=out, out_dtype=asked) is out
        check(out, reference(x[:rows], weight, b), out_dtype)
        after = lowbatch_lmhead.explain(head, x[:rows], out_dtype=asked)
        assert (after.taken, after.prepared) == (decision.taken, True), after


@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_more_than_2_31_weights(out_dtype):
    weight = torch.empty(256000, 12288, device="cuda", dtype=BF16).normal_(std=0.01)
    x = torch.randn(16, 12288, device="cuda", dtype=BF16)
    out = torch.full((16, 256000), float("nan"), device="cuda", dtype=out_dtype)
    lowbatch_lmhead.project(weight, x, out=out, out_dtype=None if out_dtype is BF16 else F32)
    assert lowbatch_lmhead.explain(weight, x, out_dtype=None if out_dtype is BF16 else F32).taken
    for start in range(0, 256000, 16000):
        part = slice(start, start + 16000)
        assert error(out[:, part], reference(x, weight[part])) < LIMIT[out_dtype]


def test_more_than_2_31_weights_and_no_multiple_of_the_tile():
    weight = torch.empty(174801, 12288, device="cuda", dtype=BF16).normal_(std=0.01)
    x = torch.randn(3, 12288, device="cuda", dtype=BF16)
    got = lowbatch_lmhead.project(weight, x)
    assert lowbatch_lmhead.applies(weight, x)
    for start in range(0, 174801, 16000):
        part = slice(start, start + 16000)
        assert error(got[:, part], reference(x, weight[part])) < LIMIT[BF16]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("vocab", "hidden"), [(1000, 1024), (1001, 768), (7, 2304), (50257, 768), (128, 16384)])
def test_direct_backend(rows, vocab, hidden):
    weight, x, _ = make(vocab, hidden, rows)
    problem = Problem(vocab, hidden, rows, BF16, BF16, False, "sm_90a")
    backend = next(b for b in backends.kernels() if b.name == "flashinfer direct")
    assert backend.supports(problem) is None
    launch = backend.compile(problem, backend.tactics(problem)[0])
    assert verify.Reference(weight, None, rows).mistake(launch, weight, None, rows, BF16) is None
    out = torch.full((rows, vocab), float("nan"), device="cuda", dtype=BF16)
    launch.call(weight, x, None, out)
    check(out, reference(x, weight))


def test_the_next_backend_serves_when_the_first_is_wrong(monkeypatch, caplog):
    weight, x, _ = make(1024, 1024, 2)
    first = backends.kernels()[0]
    compile_ = type(first).compile

    def broken(self, problem, tactic):
        launch = compile_(self, problem, tactic)

        def call(weight, x, bias, out):
            launch.call(weight, x, bias, out)
            out[-1, -1] += 1

        return backends.Launch(call, launch.backend, launch.tactic)

    monkeypatch.setattr(type(first), "compile", broken)
    with caplog.at_level(logging.WARNING, logger="lowbatch_lmhead"):
        check(lowbatch_lmhead.project(weight, x), reference(x, weight))
    decision = lowbatch_lmhead.explain(weight, x)
    assert decision.backend == "hopper stream"
    assert "differ from the default GEMM" in str(decision)
    assert len(caplog.records) == 1


def test_the_same_bits_every_time_and_for_every_row_count_of_a_tactic():
    weight, x, _ = make(50257, 768, 8)
    first = lowbatch_lmhead.project(weight, x)
    for _ in range(20):
        assert torch.equal(lowbatch_lmhead.project(weight, x), first)
    for rows in range(1, 9):
        assert torch.equal(lowbatch_lmhead.project(weight, x[:rows]), first[:rows])


@pytest.mark.parametrize("out_dtype", [None, F32])
def test_batch_invariance(out_dtype):
    """A row's bits, whatever is computed with it: alone, of other row counts, and in the second of two pieces."""
    weight, x, bias = make(4001, 1032, 100, bias=True)
    asked = {"out_dtype": out_dtype, "batch_invariant": True}
    whole = lowbatch_lmhead.project((weight, bias), x, **asked)
    decision = lowbatch_lmhead.explain((weight, bias), x, **asked)
    assert (decision.taken, decision.backend) == (True, "hopper stream")
    check(whole, reference(x, weight, bias), F32 if out_dtype else BF16)
    for rows in (1, 2, 8, 9, 16, 17, 24, 25, 32, 33, 48, 49, 63, 64, 65):
        for first in (0, 100 - rows):
            got = lowbatch_lmhead.project((weight, bias), x[first : first + rows], **asked)
            assert torch.equal(got, whole[first : first + rows]), (rows, first)


def _inputs():
    base = torch.randn(64, 3, 1024, device="cuda", dtype=BF16)
    yield "two leading dimensions", base[:2, :2].contiguous()
    yield "last position of a batch", base[:8, -1:, :]
    yield "no leading dimension", base[0, 0]
    yield "rows apart by a multiple of 16 bytes", base[:4, 0]
    yield (
        "rows apart by an odd number of elements",
        torch.randn(4 * 1027, device="cuda", dtype=BF16).as_strided((4, 1024), (1027, 1)),
    )
    yield "not aligned", torch.randn(4 * 1024 + 3, device="cuda", dtype=BF16)[3:].view(4, 1024)
    yield "aligned to 16 bytes only", torch.randn(4 * 1024 + 8, device="cuda", dtype=BF16)[8:].view(4, 1024)
    yield "columns of a wider tensor", torch.randn(4, 1024 + 8, device="cuda", dtype=BF16)[:, :1024]
    yield "one row for all", base[:1, 0].expand(4, 1024)
    yield "one row for all of 17", base[:1, 0].expand(17, 1024)  # 9 rows and more go through the copy engine on SM90
    yield "17 rows that overlap", torch.randn(1024 + 16 * 8, device="cuda", dtype=BF16).as_strided((17, 1024), (8, 1))
    yield "transposed", torch.randn(1024, 4, device="cuda", dtype=BF16).t()
    yield "one row with a strange stride", torch.randn(1024, device="cuda", dtype=BF16).as_strided((1, 1024), (5, 1))
    yield "more rows than the plan", torch.randn(65, 1024, device="cuda", dtype=BF16)
    yield "no rows", torch.empty(0, 1024, device="cuda", dtype=BF16)
    yield "no rows in three dimensions", torch.empty(2, 0, 1024, device="cuda", dtype=BF16)


@pytest.mark.parametrize("out_dtype", [None, F32])
@pytest.mark.parametrize("bound", [False, True])
def test_any_x(bound, out_dtype):
    weight, _, _ = make(4001, 1024, 1)
    call = lowbatch_lmhead.bind(weight, out_dtype=out_dtype) if bound else None
    for name, x in _inputs():
        for _ in range(2):
            got = call(x) if call else lowbatch_lmhead.project(weight, x, out_dtype=out_dtype)
            assert got.shape == (*x.shape[:-1], 4001), name
            assert got.dtype is (out_dtype or BF16), name
            if x.numel():
                assert error(got, reference(x, weight)) < LIMIT[out_dtype or BF16], name


@pytest.mark.parametrize("rows", [4, 20])
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_any_out(rows, out_dtype):
    weight, x, _ = make(4001, 1024, rows)
    expected = reference(x, weight)
    nan = float("nan")
    wide = torch.full((rows, 4500), nan, device="cuda", dtype=out_dtype)
    flat = torch.full((rows * 4001 + 1,), nan, device="cuda", dtype=out_dtype)
    outs = [
        wide[:, 100:4101],
        torch.full((2 * rows, 4001), nan, device="cuda", dtype=out_dtype)[::2],
        flat[1:].view(rows, 4001),
        torch.full((4001, rows), nan, device="cuda", dtype=out_dtype).t(),
    ]
    for out in outs:
        asked = None if out_dtype is BF16 else F32
        assert lowbatch_lmhead.project(weight, x, out=out, out_dtype=asked) is out
        check(out, expected, out_dtype)
    assert wide[:, :100].isnan().all()
    assert wide[:, 4101:].isnan().all()
    assert flat[0].isnan()
    cube = torch.full((2, rows // 2, 4001), nan, device="cuda", dtype=out_dtype)
    lowbatch_lmhead.project(weight, x.view(2, rows // 2, 1024), out=cube, out_dtype=asked)
    check(cube.view(rows, 4001), expected, out_dtype)


def test_launches_refuse_what_does_not_fit_before_they_write():
    weight, x, bias = make(1024, 512, 4, bias=True)
    lowbatch_lmhead.project(weight, x)
    lowbatch_lmhead.project((weight, bias), x)
    without = plan.plan_for(weight, None, BF16).table[4]
    with_bias = plan.plan_for(weight, bias, BF16).table[4]
    out = torch.full((4, 1024), 7.0, device="cuda", dtype=BF16)
    wrong = [
        (without, (weight, x, bias, out)),
        (with_bias, (weight, x, None, out)),
        (with_bias, (weight, x, bias[:-1], out)),
        (without, (weight[:-16], x, None, out)),
        (without, (weight, x[:3], None, out)),
        (without, (weight, x[:, :-128], None, out)),
        (without, (weight.half(), x, None, out)),
        (without, (weight, x.float(), None, out)),
        (without, (weight, x, None, out.float())),
        (without, (weight, x.cpu(), None, out)),
        (without, (weight.cpu(), x, None, out)),
        (without, (weight, x, None, out.cpu())),
        (without, (weight.t().contiguous().t(), x, None, out)),
        (without, (weight, torch.randn(4, 513, device="cuda", dtype=BF16)[:, :512], None, out)),
        (without, (weight, torch.randn(4 * 512 + 1, device="cuda", dtype=BF16)[1:].view(4, 512), None, out)),
    ]
    for index, (launch, arguments) in enumerate(wrong):
        with pytest.raises((ValueError, TypeError)):
            launch(*arguments)
        assert (out == 7).all(), index


def test_wrong_arguments():
    weight, x, _ = make(1024, 512, 4)
    out = torch.full((4, 1024), 7.0, device="cuda", dtype=BF16)
    bound = lowbatch_lmhead.bind(weight)
    bound(x)
    lowbatch_lmhead.project(weight, x)
    shared = torch.zeros(8, 1024, device="cuda", dtype=BF16)
    for arguments, words in [
        ({"x": x[:, :-1]}, "511"),
        ({"x": x[0, 0]}, "without dimensions"),
        ({"x": x.half()}, "float16"),
        ({"x": x.cpu()}, "cpu"),
        ({"out": out[:3]}, "3, 1024"),
        ({"out": out[:, :-1]}, "1023"),
        ({"out": out.float()}, "float32"),
        ({"out": out.cpu()}, "cpu"),
        ({"out_dtype": torch.float16}, "float16"),
        ({"x": shared[:4, :512], "out": shared[2:6]}, "overlaps"),
    ]:
        keywords = {"x": x, **arguments}
        given = keywords.pop("x")
        with pytest.raises(ValueError, match=words):
            lowbatch_lmhead.project(weight, given, **keywords)
        if "out_dtype" not in keywords:
            with pytest.raises(ValueError, match=words):
                bound(given, **keywords)
        assert (out == 7).all()
        assert (shared == 0).all()


def test_side_stream():
    weight, x, _ = make(32000, 4096, 4)
    expected = reference(x, weight)
    lowbatch_lmhead.project(weight, x)
    stream = torch.cuda.Stream()
    for _ in range(5):
        x2 = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x2.copy_(x)  # a launch on another stream would read zeros
            got = lowbatch_lmhead.project(weight, x2)
        stream.synchronize()
        check(got, expected)


def test_graph_capture():
    weight, x, _ = make(4001, 1024, 4)
    lowbatch_lmhead.warmup(weight)
    bound = lowbatch_lmhead.bind(weight)
    out = torch.full((4, 4001), float("nan"), device="cuda", dtype=BF16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(x, out=out)
        other = lowbatch_lmhead.project(weight, x[:2])
    for seed in range(3):
        new = make(4001, 1024, 4, seed=seed)[1]
        x.copy_(new)
        out.fill_(float("nan"))
        other.fill_(float("nan"))
        graph.replay()
        check(out, reference(new, weight))
        check(other, reference(new[:2], weight))


def test_unprepared_head_in_a_graph_capture(caplog):
    weight, x, _ = make(4016, 1024, 4)
    F.linear(x, weight)
    torch.cuda.synchronize()
    compiled = objects.counts.compiled + objects.counts.loaded
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.WARNING, logger="lowbatch_lmhead"), torch.cuda.graph(graph):
        first = lowbatch_lmhead.project(weight, x)
        lowbatch_lmhead.project(weight, x)
    assert objects.counts.compiled + objects.counts.loaded == compiled
    assert len(caplog.records) == 1
    assert "warmup" in caplog.text
    graph.replay()
    check(first, reference(x, weight))
    lowbatch_lmhead.project(weight, x)
    assert lowbatch_lmhead.explain(weight, x).prepared


def test_inference_mode_and_parameters():
    head = nn.Linear(1024, 4001, device="cuda", dtype=BF16)
    x = torch.randn(4, 1024, device="cuda", dtype=BF16)
    with torch.inference_mode():
        expected = reference(x, head.weight, head.bias)
        check(lowbatch_lmhead.project(head, x), expected)
        check(lowbatch_lmhead.project(head, x.clone()), expected)
        assert lowbatch_lmhead.applies(head, x)


def test_changed_weights():
    head = nn.Linear(1024, 4001, bias=False, device="cuda", dtype=BF16)
    x = torch.randn(4, 1024, device="cuda", dtype=BF16)
    bound = lowbatch_lmhead.bind(head)

    def same():
        expected = reference(x, head.weight)
        check(bound(x), expected)
        check(lowbatch_lmhead.project(head, x), expected)
        assert lowbatch_lmhead.applies(head, x)

    same()
    head.weight.data.normal_()
    same()
    head.weight.data = torch.randn_like(head.weight)
    same()
    head.weight = nn.Parameter(torch.randn_like(head.weight))
    same()
    head.weight = nn.Parameter(torch.randn(2000, 1024, device="cuda", dtype=BF16))
    same()
    head.weight = nn.Parameter(torch.randn(4001, 1024, device="cuda", dtype=F16))
    expected = reference(x.half(), head.weight)
    check(bound(x.half()), expected, F16)
    assert lowbatch_lmhead.explain(head, x.half()).backend == "hopper stream"
    with pytest.raises(ValueError, match="float16"):
        bound(x)
    head.to("cpu")
    with pytest.raises(ValueError, match="cpu"):
        bound(x)
    assert error(bound(x.half().cpu()).cuda(), reference(x.half(), head.weight.cuda())) < 1e-3
    head.to("cuda", BF16)
    same()


def test_fp32_logits_of_the_default_path():
    weight, x, bias = make(4001, 1024, 100, bias=True)
    for rows in (65, 100):
        assert not lowbatch_lmhead.applies((weight, bias), x[:rows], out_dtype=F32)
        got = lowbatch_lmhead.project((weight, bias), x[:rows], out_dtype=F32)
        check(got, reference(x[:rows], weight, bias), F32)


def test_grad_takes_the_heads_own_computation():
    head = nn.Linear(1024, 4001, device="cuda", dtype=BF16)
    x = torch.randn(4, 1024, device="cuda", dtype=BF16, requires_grad=True)
    decision = lowbatch_lmhead.explain(head, x)
    assert "gradients" in str(decision)
    lowbatch_lmhead.project(head, x).sum().backward()
    ours = x.grad.clone(), head.weight.grad.clone(), head.bias.grad.clone()
    x.grad = head.weight.grad = head.bias.grad = None
    head(x).sum().backward()
    for mine, theirs in zip(ours, (x.grad, head.weight.grad, head.bias.grad)):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        assert lowbatch_lmhead.applies(head, x)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(mode):
    head = nn.Linear(1024, 4001, device="cuda", dtype=BF16)
    lowbatch_lmhead.warmup(head)
    compiled = torch.compile(lambda x: lowbatch_lmhead.project(head, x * 2).argmax(-1), fullgraph=True, mode=mode)
    logits = torch.compile(lambda x: lowbatch_lmhead.project(head, x * 2), fullgraph=True, mode=mode)
    for seed in range(4):
        x = make(8, 1024, 4, seed=seed)[1]
        got = logits(x).clone()
        check(got, reference(x * 2, head.weight, head.bias))
        assert torch.equal(compiled(x), got.argmax(-1))


def test_opcheck():
    weight, x, bias = make(1040, 256, 4, bias=True)
    from lowbatch_lmhead import ops

    for arguments in [
        (x, weight, None, None),
        (x, weight, bias, None),
        (x, weight, bias, F32),
        (x[None], weight, None, None),
    ]:
        torch.library.opcheck(ops.project_op, arguments)
    out = torch.empty(4, 1040, device="cuda", dtype=BF16)
    torch.library.opcheck(ops.project_out_op, (x, weight, bias, out, None))


@pytest.mark.parametrize("out_dtype", [F16, F32])
@pytest.mark.parametrize("bias", [False, True])
def test_float16(bias, out_dtype):
    head = nn.Linear(1032, 4001, bias=bias, device="cuda", dtype=F16)
    asked = None if out_dtype is F16 else F32
    x = torch.randn(64, 1032, device="cuda", dtype=F16)
    for rows in (1, 8, 9, 17, 33, 64):
        out = torch.full((rows, 4001), float("nan"), device="cuda", dtype=out_dtype)
        assert lowbatch_lmhead.project(head, x[:rows], out=out, out_dtype=asked) is out
        check(out, reference(x[:rows], head.weight, head.bias), out_dtype)
        decision = lowbatch_lmhead.explain(head, x[:rows], out_dtype=asked)
        assert (decision.backend, decision.prepared) == ("hopper stream", True), decision


def test_autocast_and_what_no_kernel_takes_are_left_to_the_default():
    head = nn.Linear(1024, 512, device="cuda", dtype=F32)
    x = torch.randn(4, 1024, device="cuda")
    with torch.autocast("cuda", BF16):
        got = lowbatch_lmhead.project(head, x)
        assert got.dtype is BF16
        assert torch.equal(got, head(x))
        assert "autocast" in str(lowbatch_lmhead.explain(head, x))
    odd = nn.Linear(1028, 512, device="cuda", dtype=BF16)
    for left, given, reason in ((head, x, "x is float32"), (odd, x.new_ones(4, 1028).to(BF16), "hidden 1028 is not")):
        decision = lowbatch_lmhead.explain(left, given)
        assert not decision.taken
        assert reason in str(decision)
        assert torch.equal(lowbatch_lmhead.project(left, given), left(given))


def test_missing_flashinfer(monkeypatch, caplog):
    weight, x, _ = make(1024, 512, 4)
    backends.flashinfer.unusable.cache_clear()
    monkeypatch.setattr(backends.flashinfer, "version", lambda name: None)
    try:
        with caplog.at_level(logging.WARNING, logger="lowbatch_lmhead"):
            for _ in range(3):
                check(lowbatch_lmhead.project(weight, x), reference(x, weight))
        assert not lowbatch_lmhead.applies(weight, x)
        assert "not installed" in str(lowbatch_lmhead.explain(weight, x))
        assert len(caplog.records) == 1
    finally:
        backends.flashinfer.unusable.cache_clear()


def test_freed_heads_free_their_weight():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    head = nn.Linear(1024, 40000, bias=False, device="cuda", dtype=BF16)
    lowbatch_lmhead.warmup(head)
    lowbatch_lmhead.project(head, torch.randn(2, 1024, device="cuda", dtype=BF16))
    del head
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert not [key for key in dispatch._dispatchers if dispatch._dispatchers[key][0]() is None]


def test_warmup_keeps_the_random_state_and_little_memory():
    head = nn.Linear(4096, 128256, bias=False, device="cuda", dtype=BF16)
    head(torch.randn(1, 4096, device="cuda", dtype=BF16))
    state, allocated = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
    report = lowbatch_lmhead.warmup(head)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() - allocated < 1 << 20
    assert [decision.taken for decision in report.heads[0].decisions] == [True] * 64 + [False]
    print(report)


PROCESS = textwrap.dedent("""
    import json, sys, torch, lowbatch_lmhead
    from lowbatch_lmhead import objects
    weight = torch.randn(4001, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    got = lowbatch_lmhead.project(weight, x)
    expected = x.double() @ weight.double().t()
    print(json.dumps({
        "compiled": objects.counts.compiled, "loaded": objects.counts.loaded,
        "error": ((got.double() - expected).norm() / expected.norm()).item(),
        "taken": lowbatch_lmhead.applies(weight, x),
        "imported": [name for name in ("flashinfer", "cutlass") if name in sys.modules],
    }))
""")


def _process(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_processes_share_compiled_kernels(tmp_path):
    tmp_path.chmod(0o700)
    first = _process(LOWBATCH_LMHEAD_CACHE=str(tmp_path))
    second = _process(LOWBATCH_LMHEAD_CACHE=str(tmp_path))
    assert (first["compiled"], first["loaded"]) == (1, 0)
    assert (second["compiled"], second["loaded"], second["imported"]) == (0, 1, [])
    for path in tmp_path.glob("*.so"):
        path.write_bytes(path.read_bytes()[:-100])
    third = _process(LOWBATCH_LMHEAD_CACHE=str(tmp_path))
    assert (third["compiled"], third["loaded"]) == (1, 0)
    tmp_path.chmod(0o777)
    fourth = _process(LOWBATCH_LMHEAD_CACHE=str(tmp_path))
    assert (fourth["compiled"], fourth["loaded"]) == (1, 0)
    for result in (first, second, third, fourth):
        assert result["taken"]
        assert result["error"] < LIMIT[BF16]
