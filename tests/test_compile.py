"""Real compilations, which need no GPU: the right architecture, and what the object says of itself."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from conftest import python

from lowbatch_lmhead import backends, devices, elf, objects
from lowbatch_lmhead.backends import Problem, compiling, flashinfer
from lowbatch_lmhead.backends.compiling import WrongArchitecture

pytestmark = pytest.mark.skipif(flashinfer.unusable() is not None, reason=flashinfer.unusable() or "")

WARP, CLUSTER, DIRECT = backends.kernels()[:3]
BF16, FP32 = torch.bfloat16, torch.float32


def build(backend, arch, vocab=1000, hidden=256, rows=3, out_dtype=BF16, bias=False):
    problem = Problem(vocab, hidden, rows, BF16, out_dtype, bias, arch)
    assert backend.supports(problem) is None
    return backend.build(problem, backend.tactics(problem)[0])


def cases():
    for backend in (WARP, CLUSTER, DIRECT):
        for arch in sorted(backend.architectures):
            yield pytest.param(backend, arch, {}, id=f"{backend.name}, {arch}")
            if backend is not DIRECT:
                yield pytest.param(backend, arch, {"out_dtype": FP32}, id=f"{backend.name}, {arch}, float32")
    for arch in ("sm_90a", "sm_120a"):
        yield pytest.param(WARP, arch, {"bias": True}, id=f"bias, {arch}")
    yield pytest.param(WARP, "sm_100a", {"bias": True, "out_dtype": FP32, "vocab": 1024}, id="bias, float32")
    yield pytest.param(WARP, "sm_90a", {"vocab": 17, "hidden": 128, "rows": 32}, id="a small odd head, 32 rows")


def cases_of_tuning():
    """The tactics that only autotune measures, on one or two row tiles of each architecture."""
    for backend, arch, rows in ((WARP, "sm_90a", 1), (WARP, "sm_90a", 32), (WARP, "sm_100a", 16), (WARP, "sm_120a", 8),
                                (CLUSTER, "sm_103a", 8), (CLUSTER, "sm_100a", 32)):  # fmt: skip
        problem = Problem(1024, 1536, rows, BF16, FP32, False, arch)
        for tactic in backend.autotune_tactics(problem)[1:]:
            yield pytest.param(backend, problem, tactic, id=f"{backend.name}, {arch}, {tactic}")


@pytest.mark.parametrize(("backend", "problem", "tactic"), list(cases_of_tuning()))
def test_what_autotune_measures_compiles(backend, problem, tactic):
    key, library = backend.build(problem, tactic)
    assert elf.architectures(library) == {problem.arch}
    assert key["tactic"] == str(tactic)


def cases_of_large_heads():
    yield pytest.param(WARP, {"vocab": 256000, "hidden": 12288}, id="2**31 weights and more")
    yield pytest.param(WARP, {"vocab": 256003, "hidden": 12288, "out_dtype": FP32}, id="in two parts")


@pytest.mark.parametrize(("backend", "arch", "change"), list(cases()))
def test_object_is_for_the_architecture(backend, arch, change):
    key, library = build(backend, arch, **change)
    assert elf.architectures(library) == {arch}
    (kernel,) = elf.kernels(library)
    assert kernel.arch == arch
    assert 16 <= kernel.registers <= 255
    if backend is DIRECT:
        assert kernel.registers <= 64, "its ptxas option was lost"
    assert library.startswith(b"\x7fELF")
    assert compiling.FUNCTION.encode() in library
    assert (key["arch"], key["backend"], key["vocab"]) == (arch, backend.name, change.get("vocab", 1000))


@pytest.mark.parametrize(("backend", "change"), list(cases_of_large_heads()))
def test_large_heads(backend, change):
    _, library = build(backend, "sm_90a", **change)
    assert elf.architectures(library) == {"sm_90a"}


@pytest.mark.parametrize(("asked", "got"), [("sm_90a", "sm_100a"), ("sm_120a", "sm_90a")])
def test_wrong_architecture_is_an_error(asked, got, monkeypatch):
    """As when the compiler does not heed the option, and takes the architecture of the GPU that is there."""
    from cutlass import cute

    compile_ = cute.experimental.compile

    def without_options(*arguments, options):
        assert f"--gpu-arch={asked}" in options
        return compile_(*arguments, options=f"--enable-tvm-ffi --gpu-arch={got}")

    monkeypatch.setattr(cute.experimental, "compile", without_options)
    with pytest.raises(WrongArchitecture, match=rf"asked for {asked}, the object holds code for \['{got}'\]"):
        build(WARP, asked)


def test_tactic_beyond_shared_memory_is_an_error():
    from lowbatch_lmhead.backends.warp_splitk import Tactic

    problem = Problem(1024, 4096, 1, BF16, BF16, False, "sm_120a")
    tactic = Tactic(32, 8, 256, 8, 2)
    assert WARP.smem_bytes(tactic) > devices.ARCHITECTURES["sm_120a"].smem_per_block
    with pytest.raises(ValueError, match=r"takes \d+ bytes of shared memory; sm_120a has 101376"):
        WARP.build(problem, tactic)


def test_linker_errors_are_told(monkeypatch):
    with pytest.raises(RuntimeError, match="failed to link a kernel: "):
        compiling.link(b"not an object")
    monkeypatch.setattr(objects.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match="no linker: compiling a kernel takes one of cc, gcc, clang or ld on the PATH"
    ):
        compiling.link(b"not an object")


def test_library_runs_without_the_compiler(tmp_path):
    """TVM-FFI loads it and it checks its arguments, in a process with neither FlashInfer nor the DSL."""
    key, library = build(WARP, "sm_90a", vocab=1000)
    path = objects.write(tmp_path, key, library)
    code = """
import sys
from pathlib import Path
import torch
from lowbatch_lmhead.backends import compiling
launch = compiling._load(Path(sys.argv[1]))
weight, x, out = torch.zeros(1000, 256).bfloat16(), torch.zeros(3, 256).bfloat16(), torch.full((3, 1000), 7.0).bfloat16()
for arguments in ((weight, x, None, out), (weight, x, None), (weight, x, None, "out")):
    try:
        launch(*arguments)
    except (ValueError, TypeError) as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    else:
        raise AssertionError("nothing was raised")
assert (out == 7).all()
print({name.split(".")[0] for name in sys.modules} & {"cutlass", "flashinfer"})
"""
    device, count, type_, loaded = python(code, path).splitlines()
    assert device.startswith("ValueError Mismatched Tensor on argument #0")
    assert "expected device_type=cuda" in device
    assert count.startswith("TypeError")
    assert type_.startswith(("TypeError", "ValueError"))
    assert loaded == "set()"


@pytest.fixture(scope="module")
def library():
    return build(WARP, "sm_90a")[1]


class TestDamagedObjects:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x7fELF",
            b"\x7fELF\x02\x01",
            b"MZ" * 1000,
            b"\x7fELF\x02\x01" + b"\xff" * 200,
            b"\x7fELF\x02\x01" + b"\0" * 200,
            b"\x7fELF\x02\x01" * 50,
        ],
    )
    def test_garbage(self, data):
        assert elf.kernels(data) == []
        assert elf.architectures(data) == set()

    @pytest.mark.parametrize("offset", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
    def test_section_table_anywhere(self, offset):
        header = b"\x7fELF\x02\x01" + b"\0" * 12 + struct.pack("<H", 190) + b"\0" * 20 + struct.pack("<Q", offset)
        header += b"\0" * 10 + struct.pack("<HHH", 64, 3, 1) + b"\0" * 100
        assert all(isinstance(kernel.name, str) for kernel in elf.kernels(header))

    def test_truncated(self, library):
        start = library.rindex(b"\x7fELF\x02\x01")
        for length in [*range(start, len(library), 499), start + 6, start + 19, start + 64]:
            found = elf.kernels(library[:length])
            assert found == [] or {kernel.arch for kernel in found} <= {"sm_90a", "unknown"}
        assert elf.kernels(library[: start + 64]) == []

    def test_flipped_bytes(self, library):
        start = library.rindex(b"\x7fELF\x02\x01")
        rng = random.Random(0)
        header = struct.unpack_from("<Q", library, start + 40)[0] + start
        for _ in range(2000):
            data = bytearray(library)
            for _ in range(rng.choice([1, 4, 64])):
                low, high = rng.choice([(start, start + 64), (header, header + 640), (start, len(data))])
                data[rng.randrange(low, min(high, len(data)))] = rng.randrange(256)
            assert isinstance(elf.kernels(bytes(data)), list)
