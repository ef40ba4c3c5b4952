"""What each backend takes, its tactics beside FlashInfer's own rules, and what importing costs."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import sys
import types

import pytest
import torch
from conftest import ROOT, python
from packaging.version import Version

from lowbatch_lmhead import backends, devices
from lowbatch_lmhead.backends import Problem, cluster_splitk, direct, flashinfer, hopper_stream, warp_splitk

HEADS = json.loads((ROOT / "benchmarks" / "heads.json").read_text())
WARP, CLUSTER, HOPPER, STREAM, DIRECT, MM = backends.kernels()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLACKWELL = ("sm_100a", "sm_103a")
USUAL = Problem(1024, 512, 2, BF16, BF16, False, "sm_90a")


def problem(**changes):
    return dataclasses.replace(USUAL, **changes)


def test_names_and_architectures():
    assert [backend.name for backend in backends.kernels()] == [
        "flashinfer warp split-K",
        "flashinfer cluster split-K",
        "hopper stream",
        "stream",
        "flashinfer direct",
        "flashinfer mm_bf16",
    ]
    assert WARP.architectures == DIRECT.architectures == set(devices.ARCHITECTURES)
    assert CLUSTER.architectures == MM.architectures == set(BLACKWELL)
    assert HOPPER.architectures == {"sm_90a"}
    assert STREAM.architectures == {*devices.ARCHITECTURES, "sm_80", "sm_86", "sm_89"}


def usual_changes():
    """A change of USUAL, and what each backend says of it: None for yes, or part of the reason."""
    rows = "it takes up to {}"
    yield {}, None, None, None, None
    yield {"out_dtype": FP32}, None, None, "to float32; it takes and writes bfloat16", "to float32; it takes and"
    yield {"has_bias": True}, None, "the head has a bias", "the head has a bias", None
    yield {"dtype": FP16, "out_dtype": FP16}, "x is float16", "x is float16", "float16 to float16", "float16 to float16"
    yield {"dtype": FP32, "out_dtype": FP32}, "x is float32", "x is float32", "float32 to float32", "float32 to float32"
    yield {"out_dtype": FP16}, "the output is float16", "the output is float16", "to float16", "bfloat16 to float16"
    yield {"rows": 1}, None, None, None, None
    yield {"rows": 4}, None, None, "3", None
    yield {"rows": 32}, None, None, "3", None
    yield {"rows": 33}, rows.format(32), rows.format(32), "3", rows.format(32)
    yield {"vocab": 16}, None, None, None, None
    yield {"vocab": 15}, "vocab 15 is less than one tile of 16", None, None, "15x512; it takes vocab % 16 == 0"
    yield {"vocab": 1}, "vocab 1 is less than one tile of 16", None, None, "1x512; it takes vocab % 16 == 0"
    yield {"vocab": 1001}, None, None, None, "1001x512; it takes vocab % 16 == 0"
    for hidden in (576, 1600, 2880):
        no = f"hidden {hidden} is not a multiple of"
        yield {"hidden": hidden}, f"{no} 128", f"{no} 128", f"{no} 256", "hidden % 128 == 0"
    yield {"hidden": 128}, None, None, "hidden 128 is not a multiple of 256", None
    yield {"hidden": 640}, None, None, "hidden 640 is not a multiple of 256", None
    yield {"hidden": 16384}, None, None, None, None
    yield {"hidden": 8320}, "hidden 8320 is more than 64 tiles", None, "hidden 8320 is not a multiple of 256", None
    yield {"hidden": 16640}, "hidden 16640 is more than 64 tiles", None, None, None
    huge = f"vocab * hidden is {256000 * 12288}; its 32-bit offsets end at 2**31"
    yield {"vocab": 256000, "hidden": 12288}, None, None, huge, huge
    yield {"vocab": 262144, "hidden": 8192}, None, None, "is 2147483648", "is 2147483648"
    yield {"vocab": 262128, "hidden": 8192}, None, None, None, None


@pytest.mark.parametrize(
    ("change", "warp", "cluster", "direct", "mm"),
    list(usual_changes()),
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_supports(change, warp, cluster, direct, mm):
    for arch in BLACKWELL:
        given = problem(**change, arch=arch)
        for backend, expected in ((WARP, warp), (CLUSTER, cluster), (DIRECT, direct), (MM, mm)):
            reason = backend.supports(given)
            assert (reason is None) == (expected is None), f"{backend.name}: {reason}"
            assert expected is None or expected in reason


def test_candidates_are_those_of_the_architecture():
    names = {arch: [b.name for b in backends.candidates(problem(arch=arch))[0]] for arch in devices.ARCHITECTURES}
    assert names["sm_90a"] == [WARP.name, HOPPER.name, STREAM.name, DIRECT.name]
    assert names["sm_120a"] == [WARP.name, STREAM.name, DIRECT.name]
    assert names["sm_100a"] == names["sm_103a"] == [WARP.name, CLUSTER.name, STREAM.name, DIRECT.name, MM.name]
    assert backends.candidates(problem(arch="sm_75")) == ([], [])
    able, reasons = backends.candidates(problem(vocab=8, rows=9, hidden=580))
    assert able == []
    assert [reason.split(": ")[0] for reason in reasons] == [WARP.name, HOPPER.name, STREAM.name, DIRECT.name]


def test_hopper_stream_comes_first_beyond_8_rows():
    for rows in range(1, 65):
        for change in ({}, {"has_bias": True}, {"out_dtype": FP32}):
            able, _ = backends.candidates(problem(rows=rows, **change))
            others = [WARP, STREAM] if rows <= warp_splitk.MAX_ROWS else [STREAM]
            expected = [WARP, HOPPER, STREAM] if rows <= 8 else [HOPPER, *others]
            assert [backend for backend in able if backend is not DIRECT] == expected
    assert backends.candidates(problem(rows=4, hidden=576))[0] == [HOPPER, STREAM]


def test_a_backend_that_cannot_be_asked_whether_it_is_first_is_not(monkeypatch):
    monkeypatch.setattr(type(HOPPER), "first", lambda self, problem: 1 / 0)
    able, reasons = backends.candidates(problem(rows=9))
    assert able == [WARP, HOPPER, STREAM]
    assert [reason.split(": ")[0] for reason in reasons] == [DIRECT.name]
    monkeypatch.delattr(type(HOPPER), "first")
    able, _ = backends.candidates(problem(rows=9))
    assert able == [WARP, HOPPER, STREAM]


def test_rows_that_are_served_unmeasured():
    assert {arch: devices.untuned_rows(arch) for arch in devices.ARCHITECTURES} == {
        "sm_90a": 64, "sm_100a": 32, "sm_103a": 32, "sm_120a": 16,
    }  # fmt: skip
    for rows in range(1, 65):
        found, reasons = backends.untuned(problem(vocab=128256, hidden=4096, rows=rows))
        assert found[0][0] is (WARP if rows <= 8 else HOPPER)
        assert (STREAM in [backend for backend, _ in found]) is (rows <= 16)
        assert not [reason for reason in reasons if reason.startswith(("stream:", "hopper stream:"))]


@pytest.mark.parametrize(
    ("vocab", "last"),
    [(128256, 64), (16384, 64), (4096, 48), (4008, 64), (132 * 64, 48), (132 * 64 + 16, 64), (18992, 48), (20480, 64)],
)
def test_few_tiles_are_left_to_the_default_gemm_beyond_48_rows(vocab, last):
    """Up to 132 tiles for 132 multiprocessors, and 265 to 316: unless cuBLAS is slow at the vocabulary."""
    by_rows = {rows: backends.untuned(problem(vocab=vocab, hidden=4096, rows=rows)) for rows in range(1, 65)}
    assert [rows for rows, (found, _) in by_rows.items() if found] == list(range(1, last + 1))
    reason = "hopper stream: it serves this row count only where autotune with such a max_rows finds it quicker"
    for rows, (_, reasons) in by_rows.items():
        assert (reason in reasons) is (rows > last)


def test_what_serves_unmeasured_is_close_to_the_best_that_was_measured():
    """On shards and whole heads, by the results for all choices of hopper stream and FlashInfer's."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "h200" / "hopper_default.json").read_text())
    ways = {tuple(choice): name for name, choice in measured["choices"].items()}
    assert len(measured["rows"]) > 200
    for row in measured["rows"]:
        given = problem(vocab=row["vocab"], hidden=row["hidden"], rows=row["rows"])
        found, _ = backends.untuned(given)
        if not found:
            assert row["linear_us"] < 1.03 * min(row["us"].values()), row
            continue
        name = "FlashInfer's warp split-K" if found[0][0] is WARP else ways[hopper_stream.default_choice(given)]
        assert row["us"][name] <= 1.08 * min(row["us"].values()), (row, name)
        assert row["us"][name] <= 0.99 * row["linear_us"], (row, name)


@pytest.mark.parametrize("backend", [HOPPER, STREAM], ids=lambda backend: backend.name)
def test_what_the_stream_kernels_take(backend):
    for change in (
        {}, {"out_dtype": FP32}, {"has_bias": True}, {"dtype": FP16, "out_dtype": FP16}, {"dtype": FP16, "out_dtype": FP32},
        {"rows": 64}, {"vocab": 1}, {"vocab": 50257}, {"hidden": 8}, {"hidden": 2880}, {"vocab": 256000, "hidden": 12288},
    ):  # fmt: skip
        assert backend.supports(problem(**change)) is None, change
    for change, reason in (
        ({"dtype": FP32, "out_dtype": FP32}, "x is float32; it takes bfloat16 or float16"),
        ({"out_dtype": FP16}, "the output is float16; it writes"),
        ({"hidden": 580}, "hidden 580 is not a multiple of 8"),
    ):
        assert reason in backend.supports(problem(**change))


@pytest.mark.parametrize("rows", range(1, 17))
def test_heads_of_known_models(rows):
    """On SM90 all 44 have a kernel; FlashInfer's leave out 4, whose hidden size is no multiple of 128."""
    assert len(HEADS) == 44
    refused = set()
    for head in HEADS:
        given = problem(vocab=head["vocab_size"], hidden=head["hidden_size"], rows=rows)
        able, reasons = backends.candidates(given)
        assert HOPPER in able
        if WARP not in able:
            refused.add(head["model"])
            assert f"{WARP.name}: hidden {head['hidden_size']} is not a multiple of 128" in reasons
    assert refused == {"gpt2-xl", "smollm2-135m", "smollm2-360m", "gpt-oss-20b"}


class TestParts:
    @pytest.mark.parametrize("tile", [16, 32])
    def test_cover_every_row(self, tile):
        for vocab in range(tile, 2001):
            size, start = warp_splitk.parts(vocab, tile)
            assert size % tile == 0
            covered = set(range(size))
            if start:
                assert start + size <= vocab
                covered |= set(range(start, start + size))
                assert 2 * size - vocab < 2 * tile
            assert covered == set(range(vocab)), (vocab, size, start)

    def test_one_part_where_the_tile_fits(self):
        assert warp_splitk.parts(128256, 32) == (128256, 0)
        assert warp_splitk.parts(50257, 32) == (25152, 25105)

    def test_no_head_is_larger_than_its_parts(self):
        """Also with the tile that the default tactic takes for this vocabulary."""
        for vocab in range(16, 2001):
            tactic = warp_splitk.default_tactic(problem(vocab=vocab))
            size, start = warp_splitk.parts(vocab, tactic.output_tile)
            assert start >= 0
            assert max(size, start + size) == vocab


@pytest.fixture(scope="module")
def warp():
    return flashinfer.kernel_module("dense_bf16_gemm_warp_splitk")


@pytest.fixture(scope="module")
def cluster():
    return flashinfer.kernel_module("dense_bf16_gemm_sm100_splitk")


@pytest.fixture(scope="module")
def direct_kernel():
    return flashinfer.kernel_module("dense_bf16_gemm_direct")


def shapes():
    for head in HEADS:
        yield head["vocab_size"], head["hidden_size"]
    yield from itertools.product([16, 17, 31, 32, 33, 48, 1000], [128, 256, 384, 512, 640, 1024, 7168, 8192, 16384])


def problems(backend, rows):
    for (vocab, hidden), arch in itertools.product(shapes(), sorted(backend.architectures)):
        for count in rows:
            given = problem(vocab=vocab, hidden=hidden, arch=arch, rows=count)
            if backend.supports(given) is None:
                yield given


class TestWarpTactics:
    def test_shared_memory_is_flashinfers(self, warp):
        compared = 0
        for fields in itertools.product((16, 32), (8, 16, 32), (128, 256), range(1, 17), (1, 2)):
            expected = warp._smem_bytes(warp.WarpSplitKTactic(*fields))
            assert warp_splitk.smem_bytes(warp_splitk.Tactic(*fields)) == expected, fields
            compared += 1
        assert compared == 384

    @pytest.mark.parametrize("fields", [(32, 8, 128, 6, 2), (16, 16, 256, 3, 1), (32, 32, 128, 2, 2)])
    def test_shared_memory_is_the_kernels(self, fields, warp):
        kernel = warp.CpAsyncWarpSplitKKernel(warp.WarpSplitKTactic(*fields), False, False)
        tactic = warp_splitk.Tactic(*fields)
        assert WARP.smem_bytes(tactic) == warp_splitk.smem_bytes(tactic) == kernel.smem_bytes

    def test_defaults_are_valid_and_fit(self, warp):
        seen = set()
        for given in problems(WARP, (1, 8, 9, 16, 17, 32)):
            (tactic,) = WARP.tactics(given)
            size, _ = warp_splitk.parts(given.vocab, tactic.output_tile)
            warp.validate_tactic(warp.WarpSplitKTactic(*dataclasses.astuple(tactic)), given.rows, size, given.hidden)
            assert tactic.token_tile >= given.rows
            limit = devices.ARCHITECTURES[given.arch]
            assert WARP.smem_bytes(tactic) <= limit.smem_per_block
            assert WARP.smem_bytes(tactic) + devices.RESERVED_SMEM <= limit.smem_per_sm
            seen.add((given.arch, tactic))
        assert {arch for arch, _ in seen} == set(devices.ARCHITECTURES)
        assert len(seen) > 40

    def test_what_autotune_measures_is_valid_and_fits(self, warp):
        most = dict.fromkeys(devices.ARCHITECTURES, 0)
        for given in problems(WARP, (1, 8, 9, 16, 17, 32)):
            tactics = warp_splitk.autotune_tactics(given)
            assert tactics[0] == WARP.tactics(given)[0]
            assert len(set(tactics)) == len(tactics) <= 4
            for tactic in tactics:
                size, _ = warp_splitk.parts(given.vocab, tactic.output_tile)
                warp.validate_tactic(
                    warp.WarpSplitKTactic(*dataclasses.astuple(tactic)), given.rows, size, given.hidden
                )
                assert tactic.token_tile >= given.rows
                assert WARP.smem_bytes(tactic) <= devices.ARCHITECTURES[given.arch].smem_per_block
            most[given.arch] = max(most[given.arch], len(tactics))
        assert min(most.values()) >= 3

    def test_on_sm90_it_is_measured_up_to_16_rows(self):
        for rows, arch in itertools.product((1, 16, 17, 32), devices.ARCHITECTURES):
            given = problem(vocab=128256, hidden=4096, rows=rows, arch=arch)
            expected = [] if arch == "sm_90a" and rows > 16 else warp_splitk.autotune_tactics(given)
            assert WARP.autotune_tactics(given) == expected

    def test_what_autotune_measures_serves_a_bucket_of_row_counts(self):
        """So that a choice at the end of a bucket can be made inside it."""
        for given in problems(WARP, (1,)):
            for first, last in ((1, 8), (9, 16), (17, 32)):
                found = {
                    tuple(warp_splitk.autotune_tactics(dataclasses.replace(given, rows=r)))
                    for r in range(first, last + 1)
                }
                assert len(found) == 1

    def test_a_small_output_tile_is_for_small_vocabularies(self):
        for vocab, small in ((4000, True), (33792, True), (33793, False), (128256, False)):
            given = [Problem(vocab, 4096, rows, BF16, BF16, False, "sm_90a") for rows in (1, 16, 32)]
            assert all(any(t.output_tile == 16 for t in warp_splitk.autotune_tactics(one)) is small for one in given)
        assert sum(len(warp_splitk.autotune_tactics(one)) for one in given) == 5

    def test_a_small_output_tile_has_a_handicap(self):
        assert WARP.handicap(warp_splitk.Tactic(16, 8, 128, 7, 2)) > 0
        assert WARP.handicap(warp_splitk.Tactic(32, 8, 128, 7, 2)) == 0

    def test_the_deepest_ring(self):
        sm90 = devices.ARCHITECTURES["sm_90a"]
        for residents in (1, 2, 3, 4):
            tactic = warp_splitk.deepest_ring(32, 8, 128, residents, 8192, sm90)
            fits = sm90.smem_per_sm // (warp_splitk.smem_bytes(tactic) + devices.RESERVED_SMEM)
            deeper = warp_splitk.smem_bytes(dataclasses.replace(tactic, stages=tactic.stages + 1))
            assert fits >= residents
            assert tactic.stages == 16 or sm90.smem_per_sm < residents * (deeper + devices.RESERVED_SMEM)
        assert warp_splitk.deepest_ring(32, 32, 256, 4, 8192, sm90) is None

    def test_few_tactics_for_all_row_counts(self):
        for given in problems(WARP, (1,)):
            for first, last in ((1, 8), (9, 16), (17, 32)):
                tactics = {str(WARP.tactics(dataclasses.replace(given, rows=r))[0]) for r in range(first, last + 1)}
                assert len(tactics) == 1

    def test_name_says_all_fields(self):
        assert str(warp_splitk.Tactic(32, 8, 128, 6, 2)) == "32x8x128, 6 stages, 2 loaders"
        names = {
            str(warp_splitk.Tactic(*fields)) for fields in itertools.product((16, 32), (8, 16), (128,), (2, 3), (1, 2))
        }
        assert len(names) == 16


class TestClusterTactics:
    def test_shared_memory_is_enough(self, cluster):
        for fields in itertools.product((64, 128), (8, 16, 32), (1, 2, 4), range(1, 19)):
            expected = cluster._smem_bytes(cluster.SplitKTactic(*fields), fields[-1])
            ours = cluster_splitk.smem_bytes(cluster_splitk.Tactic(*fields))
            assert expected <= ours <= expected + 512, fields

    def test_defaults_are_valid_and_fit(self, cluster):
        count = 0
        for given in problems(CLUSTER, (1, 8, 9, 16, 17, 32)):
            (tactic,) = CLUSTER.tactics(given)
            capacity = devices.ARCHITECTURES[given.arch].smem_per_block
            cluster.validate_tactic(
                cluster.SplitKTactic(*dataclasses.astuple(tactic)),
                given.rows,
                given.vocab,
                given.hidden,
                smem_capacity=capacity,
            )
            assert tactic.mma_n >= given.rows
            assert CLUSTER.smem_bytes(tactic) <= capacity
            tactics = CLUSTER.autotune_tactics(given)
            assert tactics[0] == tactic
            assert {one.split_k for one in tactics} == {k for k in (1, 2, 3, 4) if given.hidden // 128 % k == 0}
            for one in tactics:
                theirs = cluster.SplitKTactic(*dataclasses.astuple(one))
                cluster.validate_tactic(theirs, given.rows, given.vocab, given.hidden, smem_capacity=capacity)
            count += 1
        assert count > 500


class TestDirectTactics:
    def test_defaults_are_flashinfers(self, direct_kernel):
        count = 0
        for given in problems(DIRECT, (1, 2, 3)):
            (tactic,) = DIRECT.tactics(given)
            expected = direct_kernel.default_tactic(given.rows, given.vocab, given.hidden)
            # FlashInfer 0.7.2 chose other block sizes for its direct kernel.
            if Version(flashinfer.version("flashinfer-python")) >= Version("0.7.4"):
                assert dataclasses.astuple(tactic) == dataclasses.astuple(expected)
            theirs = direct_kernel.DirectTactic(*dataclasses.astuple(tactic))
            direct_kernel.validate_tactic(theirs, given.rows, given.vocab, given.hidden)
            assert DIRECT.smem_bytes(tactic) <= 48 * 1024
            count += 1
        assert count > 500

    def test_names_differ_by_row_count(self):
        assert len({str(DIRECT.tactics(problem(rows=rows))[0]) for rows in (1, 2, 3)}) == 3
        assert str(direct.Tactic(64, 2, 3)) == "64 threads, 2 outputs, 3 rows"

    def test_autotune_measures_it_where_it_can_win(self):
        counts = {rows: len(DIRECT.autotune_tactics(problem(rows=rows))) for rows in (1, 2, 3)}
        assert counts == {1: 1, 2: 0, 3: 0}  # beyond one row it lost to warp split-K wherever that serves
        assert len(DIRECT.autotune_tactics(problem(rows=3, vocab=15))) == 1


class TestMmBf16Tuning:
    """FlashInfer's own tuner, stood for by a module that notes how it is called."""

    @pytest.fixture
    def fake(self, monkeypatch):
        module, calls = types.ModuleType("flashinfer"), []

        @contextlib.contextmanager
        def autotune(tune_mode):
            calls.append(("tuning", tune_mode))
            yield
            calls.append(("done",))

        def mm_bf16(x, weight, bias, out, backend):
            calls.append((tuple(x.shape), tuple(weight.shape), tuple(out.shape), backend))

        module.autotune, module.mm_bf16 = autotune, mm_bf16
        monkeypatch.setitem(sys.modules, "flashinfer", module)
        return calls

    def test_it_runs_inside_flashinfers_tuner(self, fake, monkeypatch, tmp_path):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").write_text("")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        state = torch.get_rng_state()
        assert MM.tune(problem(arch="sm_100a"), torch.empty(1024, 512, dtype=BF16), None) is None
        assert fake == [("tuning", True), ((2, 512), (512, 1024), (2, 1024), "cute-dsl"), ("done",)]
        assert torch.equal(torch.get_rng_state(), state)

    def test_without_nvcc_it_says_that_it_could_not(self, fake, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        note = MM.tune(problem(arch="sm_100a"), torch.empty(1024, 512, dtype=BF16), None)
        assert "nvcc" in note
        assert not fake


def test_mm_bf16_has_one_tactic():
    assert MM.tactics(problem(arch="sm_100a")) == ["its own choice"]
    assert MM.smem_bytes("its own choice") is None


LOADED = "\nimport sys\nprint(sorted({name.split('.')[0] for name in sys.modules} & set(sys.argv[1:])))"


def test_import_takes_torch_and_nothing_else():
    heavy = ["flashinfer", "cutlass", "tvm_ffi", "transformers", "triton", "tensorflow", "vllm", "sglang"]
    code = "import lowbatch_lmhead, torch; lowbatch_lmhead.warmup(torch.nn.Linear(8, 8))" + LOADED
    assert python(code, *heavy).strip() == "[]"


@pytest.mark.parametrize(
    "name", ["dense_bf16_gemm_warp_splitk", "dense_bf16_gemm_sm100_splitk", "dense_bf16_gemm_direct"]
)
def test_kernel_file_loads_without_importing_flashinfer(name):
    code = (
        f"""
from lowbatch_lmhead.backends import flashinfer
module = flashinfer.kernel_module({name!r})
assert module is flashinfer.kernel_module({name!r})
assert module.__file__.endswith({name!r} + ".py")
"""
        + LOADED
    )
    assert python(code, "flashinfer", "cutlass").strip() == "['cutlass']"


def test_kernel_file_that_is_not_there(tmp_path):
    with pytest.raises(ImportError, match=r"this FlashInfer has no .*dense_bf16_gemm_other\.py"):
        flashinfer.kernel_module("dense_bf16_gemm_other")


def test_kernel_file_that_does_not_run_leaves_nothing_behind(tmp_path, monkeypatch):
    import sys

    folder = tmp_path / "flashinfer" / "gemm" / "kernels"
    folder.mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise RuntimeError('broken install')")
    (folder / "broken.py").write_text("raise ImportError('no cutlass.experimental')")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with pytest.raises(ImportError, match=r"no cutlass\.experimental"):
            flashinfer.kernel_module("broken")
    assert not [name for name in sys.modules if name.endswith("broken")]


def test_threads_wait_for_a_kernel_file_that_one_of_them_executes(tmp_path, monkeypatch):
    folder = tmp_path / "flashinfer" / "gemm" / "kernels"
    folder.mkdir(parents=True)
    (tmp_path / "flashinfer" / "__init__.py").touch()
    (folder / "slow.py").write_text("import time\ntime.sleep(0.2)\nAT_THE_END = 1")
    monkeypatch.syspath_prepend(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: flashinfer.kernel_module("slow").AT_THE_END, range(4))) == [1] * 4


def test_flashinfer_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="flashinfer is not importable"):
        flashinfer.kernel_module("dense_bf16_gemm_other")
