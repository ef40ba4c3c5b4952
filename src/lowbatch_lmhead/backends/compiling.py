"""From a CuTe DSL kernel to a launch: compiled for a named architecture, linked, and loaded through TVM-FFI.

Compiling needs the DSL, which takes seconds to import; loading needs neither the DSL nor FlashInfer. So objects are
kept (objects.py) and a process that finds its objects imports nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import devices, elf, objects
from .._version import __version__
from ..log import logger
from . import flashinfer
from .base import Launch, Problem, dtype_name

# Counts towards an object's key: to be raised when the functions around the kernels change what they expect or do.
CALL_VERSION = 1
FUNCTION = "lowbatch_lmhead_launch"

_compiling = threading.Lock()  # the DSL's compiler is not documented as thread-safe


class WrongArchitecture(RuntimeError):
    """The compiler produced code for another architecture than it was asked for."""


def launches_early(arch: str) -> bool:
    """Whether the library's own kernels may be launched before the kernel in front of them has ended.

    Programmatic dependent launch (``LOWBATCH_LMHEAD_PDL=1``), which SM90 brought. They wait for its end before they touch
    memory, so what is won is the launch itself and the set-up of shared memory.
    """
    return os.environ.get("LOWBATCH_LMHEAD_PDL") == "1" and arch in devices.ARCHITECTURES


def object_key(backend: str, problem: Problem, tactic: Any) -> dict[str, Any]:
    """All that a compiled object depends on. Row counts are not among them."""
    early = {"pdl": True} if launches_early(problem.arch) else {}
    return early | {
        "backend": backend,
        "tactic": str(tactic),
        "arch": problem.arch,
        "vocab": problem.vocab,
        "hidden": problem.hidden,
        "dtype": dtype_name(problem.dtype),
        "out_dtype": dtype_name(problem.out_dtype),
        "bias": problem.has_bias,
        "lowbatch-lmhead": __version__,
        "call": CALL_VERSION,
        flashinfer.FLASHINFER[0]: flashinfer.version(flashinfer.FLASHINFER[0]) or "",
        flashinfer.CUTE_DSL[0]: flashinfer.version(flashinfer.CUTE_DSL[0]) or "",
        "cuda": objects.cuda_flavour() or 0,
        "machine": platform.machine(),
    }


class CompiledBackend(ABC):
    """A backend whose tactics are CuTe DSL kernels: a subclass gives the kernel, this class compiles, keeps and loads it."""

    name: str
    options = ""  # for the DSL's compiler
    experimental = True  # whether the kernel needs the DSL's experimental compiler, which takes SM90 and newer only

    def handicap(self, tactic: Any) -> float:
        return 0.0

    @abstractmethod
    def kernel(self, problem: Problem, tactic: Any) -> Any:
        """The jit function ``(weight, x, bias or None, out, stream)`` that launches ``tactic``. Imports the DSL."""

    def build(self, problem: Problem, tactic: Any) -> tuple[dict[str, Any], bytes]:
        """The key and the shared library of ``tactic``, compiled now. Needs no GPU."""
        return object_key(self.name, problem, tactic), link(
            compile_object(self.kernel(problem, tactic), problem, self.options, self.experimental)
        )

    def compile(self, problem: Problem, tactic: Any) -> Launch:
        """The launch of ``tactic``: from disk, or compiled now (and kept where there is a place to keep it)."""
        found = self.find(problem, tactic)
        return found if found is not None else self._adopt(*self.build(problem, tactic), tactic)

    def find(self, problem: Problem, tactic: Any) -> Launch | None:
        """The launch of ``tactic`` from disk, or None."""
        found = objects.find(object_key(self.name, problem, tactic))
        if found is None:
            return None
        try:
            launch = Launch(_load(found), self.name, str(tactic))
        except Exception as error:  # whatever the loader raises for a whole library of another machine
            logger.warning("%s is compiled again: it cannot be loaded (%s)", found, error)
            return None
        objects.counts.loaded += 1
        return launch

    def adopt(self, problem: Problem, tactic: Any, library: bytes) -> Launch:
        """The launch of ``tactic`` from the ``library`` that another process has built for it, kept like one built here."""
        return self._adopt(object_key(self.name, problem, tactic), library, tactic)

    def _adopt(self, key: dict[str, Any], library: bytes, tactic: Any) -> Launch:
        objects.counts.compiled += 1
        with tempfile.TemporaryDirectory(prefix="lowbatch-lmhead-") as scratch:
            path = objects.keep(key, library) or objects.write(Path(scratch), key, library)
            # A loaded library stays mapped when its file is gone.
            return Launch(_load(path), self.name, str(tactic))


def compile_object(function: Any, problem: Problem, options: str = "", experimental: bool = True) -> bytes:
    """The relocatable object of ``function(weight, x, bias, out, stream)`` for ``problem``'s sizes and any row count."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    types = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
    in_type, out_type = types[problem.dtype], types[problem.out_dtype]
    rows = cute.sym_int()
    # x is read 16 bytes at a time, row by row; outputs are written element by element.
    weight = make_fake_compact_tensor(in_type, (problem.vocab, problem.hidden), stride_order=(1, 0), assumed_align=16)
    x = make_fake_tensor(in_type, (rows, problem.hidden), stride=(cute.sym_int64(divisibility=8), 1), assumed_align=16)
    bias = make_fake_compact_tensor(in_type, (problem.vocab,), assumed_align=2) if problem.has_bias else None
    out = make_fake_tensor(
        out_type, (rows, problem.vocab), stride=(cute.sym_int64(), 1), assumed_align=problem.out_dtype.itemsize
    )
    with _compiling, tempfile.TemporaryDirectory(prefix="lowbatch-lmhead-") as scratch:
        compile_ = cute.experimental.compile if experimental else cute.compile
        compiled = compile_(
            function,
            weight,
            x,
            bias,
            out,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            # Without --gpu-arch the DSL compiles for a default of its own where there is no GPU.
            options=f"--enable-tvm-ffi --gpu-arch={problem.arch} {options}".rstrip(),
        )
        path = Path(scratch, "launch.o")
        compiled.export_to_c(str(path), function_name=FUNCTION)
        data = path.read_bytes()
    found = elf.architectures(data)
    if found != {problem.arch}:
        raise WrongArchitecture(f"asked for {problem.arch}, the object holds code for {sorted(found) or 'no GPU'}")
    return data


def link(data: bytes) -> bytes:
    """The shared library of a relocatable object. Its undefined symbols are in the libraries that ``_load`` opens."""
    linker = objects.linker()
    if linker is None:
        raise RuntimeError("no linker: compiling a kernel takes one of cc, gcc, clang or ld on the PATH")
    with tempfile.TemporaryDirectory(prefix="lowbatch-lmhead-") as scratch:
        source, target = Path(scratch, "launch.o"), Path(scratch, "launch.so")
        source.write_bytes(data)
        done = subprocess.run(
            [linker, "-shared", "-o", str(target), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{linker} failed to link a kernel: {done.stderr.strip()}")
        return target.read_bytes()


def _load(path: Path) -> Callable[..., Any]:
    import tvm_ffi

    objects.open_runtime()
    function: Callable[..., Any] = tvm_ffi.load_module(str(path))[FUNCTION]
    return function
