"""The stream kernels on a GPU: right logits from every tactic, at the sizes where something ends.

Run as a program (``python tests/gpu/test_gpu_stream.py``) it launches each awkward case once and checks nothing: that is for
``compute-sanitizer --tool memcheck`` and ``--tool racecheck``.
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from lowbatch_lmhead import devices, verify
from lowbatch_lmhead.backends import Problem, hopper_stream, stream

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF16: 2.5e-3, FP16: 4e-4, FP32: 2e-6}
BACKENDS = {"stream": (stream, stream.Stream()), "hopper stream": (hopper_stream, hopper_stream.HopperStream())}
AWKWARD = ((1, 8), (17, 72), (49155, 576), (65, 136), (50257, 768), (1000, 2880), (300, 64), (256, 8192))
AWKWARD_ROWS = (1, 7, 8, 9, 16, 17, 32, 33, 64)


@pytest.fixture(scope="session", autouse=True)
def _kernels(tmp_path_factory):
    """One cache of compiled kernels for all tests of this file."""
    folder = tmp_path_factory.mktemp("kernels")
    folder.chmod(0o700)
    return folder


@pytest.fixture(autouse=True)
def _use_cache(_kernels, monkeypatch):
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(_kernels))
    with torch.inference_mode():
        yield


@pytest.fixture(params=list(BACKENDS))
def kind(request):
    module, backend = BACKENDS[request.param]
    if devices.architecture(torch.device("cuda")) not in backend.architectures:
        pytest.skip("not for this GPU")
    return module, backend


def problem(vocab, hidden, rows, dtype=BF16, out_dtype=BF16, bias=False) -> Problem:
    return Problem(vocab, hidden, rows, dtype, out_dtype, bias, devices.architecture(torch.device("cuda")))


def make(vocab, hidden, rows, dtype=BF16, bias=False):
    generator = torch.Generator("cuda").manual_seed(vocab + hidden + rows)
    weight = torch.randn(vocab, hidden, device="cuda", generator=generator).mul_(hidden**-0.5).to(dtype)
    # Rows of x apart, and what lies between them not a number: what is read beyond a row shows.
    x = torch.full((rows, hidden + 8), float("nan"), device="cuda", dtype=dtype)[:, :hidden]
    x.copy_(torch.randn(rows, hidden, device="cuda", generator=generator))
    return weight, x, torch.randn(vocab, device="cuda", generator=generator).to(dtype) if bias else None


def outputs(rows, vocab, dtype):
    """(what, whole, out): outputs with guard bands; contiguous, aligned to 16 bytes, and aligned like their elements."""
    for what, offset, pitch in (("aligned", 0, -(-vocab // 8) * 8), ("contiguous", 16, vocab), ("odd", 3, vocab + 5)):
        whole = torch.full((offset + rows * pitch + 32,), float("nan"), device="cuda", dtype=dtype)
        yield what, whole, whole[offset : offset + rows * pitch].view(rows, pitch)[:, :vocab]


def run(backend, tactic, asked, weight, x, bias) -> torch.Tensor:
    """The logits, the same in every kind of output, with nothing written around them."""
    launch = backend.compile(asked, tactic).call
    found = []
    for what, whole, out in outputs(len(x), asked.vocab, asked.out_dtype):
        launch(weight, x, bias, out)
        logits = out.clone()
        assert logits.isfinite().all(), f"{tactic}: {what}: a logit was not written"
        out.fill_(float("nan"))
        assert whole.isnan().all(), f"{tactic}: {what}: something outside of the output was written"
        found.append(logits)
    assert all(torch.equal(logits, found[0]) for logits in found), f"{tactic}: the output's place changes the bits"
    return found[0]


def check(logits, weight, x, bias, tactic) -> None:
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    error = ((logits.double() - expected).norm() / expected.norm()).item()
    assert error < LIMIT[logits.dtype], f"{tactic}: relative error {error:.3g}"
    last = ((logits[:, -32:].double() - expected[:, -32:]).norm() / expected[:, -32:].norm()).item()
    assert last < 4 * LIMIT[logits.dtype], f"{tactic}: relative error {last:.3g} at the end of the vocabulary"


@pytest.mark.parametrize("head", AWKWARD, ids=str)
def test_every_tactic_where_something_ends(kind, head):
    _module, backend = kind
    # Nine row counts and four kinds: each head begins with another one, so that row counts and kinds meet in all ways.
    types = [(BF16, BF16, False), (BF16, FP32, True), (FP16, FP16, True), (FP16, FP32, False)]
    for index, rows in enumerate(AWKWARD_ROWS, AWKWARD.index(head)):
        dtype, out_dtype, bias = types[index % len(types)]
        weight, x, b = make(*head, rows, dtype, bias)
        asked = problem(*head, rows, dtype, out_dtype, bias)
        assert backend.supports(asked) is None
        for tactic in backend.autotune_tactics(asked):
            check(run(backend, tactic, asked, weight, x, b), weight, x, b, tactic)


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_every_row_count(kind, out_dtype):
    module, backend = kind
    weight, whole, bias = make(3001, 1160, 128, bias=True)
    for rows in (*range(1, 66), 80, 96, 97, 127, 128):
        asked, x = problem(3001, 1160, rows, BF16, out_dtype, True), whole[:rows]
        tactic = module.default_tactic(asked)
        launch = backend.compile(asked, tactic)
        out = torch.full((rows, 3001), float("nan"), device="cuda", dtype=out_dtype)
        launch.call(weight, x, bias, out)
        check(out, weight, x, bias, tactic)
        assert verify.Reference(weight, bias, rows).mistake(launch, weight, bias, rows, out_dtype) is None


@pytest.mark.parametrize("rows", [90, 128])
def test_every_tactic_for_more_than_64_rows(kind, rows):
    _, backend = kind
    weight, x, bias = make(1003, 2056, rows, bias=True)
    for out_dtype in (BF16, FP32):
        asked = problem(1003, 2056, rows, BF16, out_dtype, True)
        for tactic in backend.autotune_tactics(asked):
            check(run(backend, tactic, asked, weight, x, bias), weight, x, bias, tactic)


@pytest.mark.parametrize(("rows", "out_dtype"), [(40, FP32), (64, BF16), (64, FP32)])
def test_more_logits_than_are_kept_in_l2(kind, rows, out_dtype):
    _, backend = kind
    vocab = 3 * hopper_stream.KEPT_LOGITS // (2 * rows * out_dtype.itemsize) // 2 * 2 + 1  # the end of a tile is inside
    weight, x, bias = make(vocab, 72, rows, bias=True)
    asked = problem(vocab, 72, rows, BF16, out_dtype, True)
    for tactic in backend.autotune_tactics(asked):
        check(run(backend, tactic, asked, weight, x, bias), weight, x, bias, tactic)


@pytest.mark.parametrize("fitted", [8, 16, 24, 32, 48, 64])
def test_more_and_fewer_rows_than_a_tile_holds(kind, fitted):
    """Several tiles of tokens, the last one full or not, and fewer tokens than one copy of x brings."""
    module, backend = kind
    weight, x, _ = make(1000, 520, 80)
    full = problem(1000, 520, fitted)
    for tactic in dict.fromkeys([module.default_tactic(full), *backend.autotune_tactics(full)]):
        for rows in (3, 9, 20, 33, 50, 64, 80):
            asked = problem(1000, 520, rows)
            if backend.supports(asked) is None:
                check(run(backend, tactic, asked, weight, x[:rows], None), weight, x[:rows], None, (tactic, rows))


@pytest.mark.parametrize(("vocab", "hidden"), [(256000, 12288), (174801, 12296)])
def test_more_than_2_31_weights(kind, vocab, hidden):
    module, backend = kind
    weight = torch.empty(vocab, hidden, device="cuda", dtype=BF16).normal_(std=0.01)
    for rows in (3, 33):
        x = torch.randn(rows, hidden, device="cuda", dtype=BF16)
        out = torch.full((rows, vocab), float("nan"), device="cuda", dtype=FP32)
        asked = problem(vocab, hidden, rows, BF16, FP32)
        backend.compile(asked, module.default_tactic(asked)).call(weight, x, None, out)
        for start in range(0, vocab, 16000):
            part = slice(start, start + 16000)
            check(out[:, part], weight[part], x, None, start)


def test_the_same_bits_every_time_and_whatever_the_other_rows_are(kind):
    _, backend = kind
    for rows in (5, 16, 40):
        weight, x, _ = make(5003, 2056, rows)
        asked = problem(5003, 2056, rows, BF16, FP32)
        for tactic in backend.autotune_tactics(asked):
            launch = backend.compile(asked, tactic).call
            first, again, other = (torch.empty(rows, 5003, device="cuda", dtype=FP32) for _ in range(3))
            launch(weight, x, None, first)
            for _ in range(20):
                launch(weight, x, None, again)
                assert torch.equal(first, again), f"{tactic}: other bits at another time"
            changed = torch.randn_like(x) * 50
            changed[rows // 2] = x[rows // 2]
            launch(weight, changed, None, other)
            assert torch.equal(first[rows // 2], other[rows // 2]), f"{tactic}: a row depends on the others"


def test_invariant_tactics_give_a_row_the_same_bits_at_every_row_count(kind):
    _, backend = kind
    weight, x, bias = make(5003, 2056, 64, bias=True)
    rows_of = {}
    for rows in range(1, 65):
        asked = problem(5003, 2056, rows, BF16, FP32, True)
        out = torch.empty(rows, 5003, device="cuda", dtype=FP32)
        backend.compile(asked, backend.invariant_tactic(asked)).call(weight, x[:rows], bias, out)
        rows_of[rows] = out
    for rows, out in rows_of.items():
        assert torch.equal(out, rows_of[64][:rows]), rows


def test_cuda_graph_and_streams(kind):
    module, backend = kind
    weight, x, _ = make(4099, 1032, 12)
    asked = problem(4099, 1032, 12)
    launch = backend.compile(asked, module.default_tactic(asked)).call
    out = torch.full((12, 4099), float("nan"), device="cuda", dtype=BF16)
    launch(weight, x, None, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(weight, x, None, out)
    x.mul_(2)
    out.fill_(float("nan"))
    graph.replay()
    check(out, weight, x, None, "graph")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x.mul_(3)
        launch(weight, x, None, out)
    torch.cuda.current_stream().wait_stream(side)
    check(out, weight, x, None, "side stream")


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_early_launch_waits_for_what_comes_before(kind, monkeypatch, in_graph):
    """Programmatic dependent launch: x is written by the kernel in front, and overwritten by the one behind."""
    module, backend = kind
    weight, x, _ = make(4099, 1032, 12)
    source, asked = torch.randn(40, 12, 1032, device="cuda", dtype=BF16), problem(4099, 1032, 12)
    usual = backend.compile(asked, module.default_tactic(asked)).call
    expected, found = (torch.full((40, 12, 4099), float("nan"), device="cuda", dtype=BF16) for _ in range(2))
    for one, out in zip(source, expected):
        usual(weight, one, None, out)
    monkeypatch.setenv("LOWBATCH_LMHEAD_PDL", "1")
    early = backend.compile(asked, module.default_tactic(asked)).call
    early(weight, x, None, torch.empty_like(found[0]))
    torch.cuda.synchronize()

    def work() -> None:
        for one, out in zip(source, found):
            x.copy_(one)
            early(weight, x, None, out)
            x.fill_(float("nan"))

    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
    else:
        work()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight, x, out: (weight, x[:, :-8], out),
        lambda weight, x, out: (weight[:-1], x, out),
        lambda weight, x, out: (weight, x.float(), out),
        lambda weight, x, out: (weight, x, out.float()),
        lambda weight, x, out: (weight, x, out[:-1]),
        lambda weight, x, out: (weight.cpu(), x, out),
        lambda weight, x, out: (weight, x.t().contiguous().t(), out),
    ],
)
def test_a_launch_refuses_before_it_writes(kind, change):
    module, backend = kind
    weight, x, _ = make(1000, 520, 4)
    asked = problem(1000, 520, 4)
    launch = backend.compile(asked, module.default_tactic(asked)).call
    out = torch.full((4, 1000), float("nan"), device="cuda", dtype=BF16)
    weight, x, changed = change(weight, x, out)
    with pytest.raises((ValueError, TypeError)):
        launch(weight, x, None, changed)
    torch.cuda.synchronize()
    assert out.isnan().all()


def main() -> None:
    os.environ.setdefault("LOWBATCH_LMHEAD_CACHE", "/tmp/lowbatch-lmhead-sanitized")
    with torch.inference_mode():
        for module, backend in BACKENDS.values():
            for (vocab, hidden), rows in itertools.product(((1, 8), (17, 72), (49155, 576)), (1, 7, 33, 64)):
                for out_dtype in (BF16, FP32):
                    asked = problem(vocab, hidden, rows, BF16, out_dtype)
                    weight, x, _ = make(vocab, hidden, rows)
                    launch = backend.compile(asked, module.default_tactic(asked)).call
                    for _, _, out in outputs(rows, vocab, out_dtype):
                        launch(weight, x, None, out)
                    torch.cuda.synchronize()
                    print(backend.name, vocab, hidden, rows, out_dtype, flush=True)


if __name__ == "__main__":
    main()
