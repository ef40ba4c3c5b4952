"""The command line ``lowbatch-lmhead``: what runs here, what would serve a head, and compiling without a GPU.

    lowbatch-lmhead doctor
    lowbatch-lmhead explain --vocab 128256 --hidden 4096 --rows 8
    lowbatch-lmhead compile --arch sm_90a --vocab 128256 --hidden 4096 --out kernels

Every answer comes from the gate, the plan and the backends that serve; nothing is decided here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from . import backends, devices, objects
from ._version import __version__
from .backends import Backend, Problem, flashinfer
from .backends.base import dtype_name
from .backends.compiling import CompiledBackend
from .gate import Decision
from .plan import Plan, PlanKey

T = TypeVar("T")
Line = dict[str, Any]

PACKAGES = (flashinfer.FLASHINFER[0], flashinfer.CUTE_DSL[0], flashinfer.TVM_FFI[0])
ENGINES = ("transformers", "vllm", "sglang")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST = 2**31 - 1  # of a size: tensors and kernels count vocabulary, hidden and rows in 32 bits
# What doctor asks each backend about: a head that they all take, so that a refusal is about the machine.
USUAL = Problem(131072, 4096, 1, torch.bfloat16, torch.bfloat16, False, "sm_90a")

# Heads of well-known models, (vocab, hidden) as in their config.json.
MODELS = {
    "deepseek-v3": (129280, 7168),
    "gemma3-27b": (262208, 5376),
    "gpt2": (50257, 768),
    "llama3-70b": (128256, 8192),
    "llama3-8b": (128256, 4096),
    "qwen3-0.6b": (151936, 1024),
    "qwen3-8b": (151936, 4096),
}


class Size(NamedTuple):
    vocab: int
    hidden: int


# --- a head on an architecture that need not be here -----------------------------------------------------------------


class PaperPlan(Plan):
    """The plan of a head on an architecture given by name. It answers what would serve; it cannot prepare."""

    def __init__(self, arch: str, size: Size, dtype: torch.dtype, out_dtype: torch.dtype, bias: bool) -> None:
        super().__init__(PlanKey(torch.device("meta"), *size, dtype, out_dtype, bias))
        self.arch = arch
        self.max_rows = devices.untuned_rows(arch)
        self.entries = [None] * (self.max_rows + 1)
        self.table = [None] * (self.max_rows + 1)


def _paper_plan(arch: str, size: Size, args: argparse.Namespace) -> PaperPlan:
    return PaperPlan(arch, size, args.dtype, args.out_dtype, args.bias)


def _describe(size: Size, args: argparse.Namespace) -> str:
    bias = ", with a bias" if args.bias else ""
    return f"{size.vocab}x{size.hidden} head, {dtype_name(args.dtype)} to {dtype_name(args.out_dtype)}{bias}"


def _server(decision: Decision) -> str:
    return f"{decision.backend} ({decision.tactic})" if decision.tactic else decision.backend


# --- doctor ----------------------------------------------------------------------------------------------------------


@dataclass
class Probes:
    """Questions to an environment that may be broken: what one raises is noted, and the report goes on."""

    problems: list[str] = field(default_factory=list)

    def ask(self, what: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception as error:  # a report must come out whatever is broken
            self.problems.append(f"{what}: {_error(error)}")
            return otherwise


def _error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _report() -> Line:
    probes = Probes()
    gpus: list[Line] = probes.ask("GPUs", _gpus, [])
    return {
        "versions": _versions(probes),
        "cuda": {
            "torch": torch.version.cuda,
            "driver": probes.ask("driver", objects._driver_major, None),
            "dsl": probes.ask("CuTe DSL runtime", objects.cuda_flavour, None),
        },
        "linker": probes.ask("linker", objects.linker, None),
        "loading": _loading(),
        "cache": probes.ask("cache folder", lambda: _folder(objects.cache_folder()), None),
        "objects": probes.ask("LOWBATCH_LMHEAD_OBJECTS", lambda: [_folder(f) for f in objects.folders()[:-1]], []),
        "gpus": gpus,
        "backends": [_backend(backend, gpus, probes) for backend in backends.kernels()],
        "problems": probes.problems,
    }


def _versions(probes: Probes) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "lowbatch-lmhead": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in PACKAGES + ENGINES:
        found[name] = probes.ask(name, lambda name=name: flashinfer.version(name), None)  # type: ignore[misc]
    return found


def _loading() -> str | None:
    """Why a compiled kernel could not be loaded in this process, or None."""
    try:
        importlib.import_module("tvm_ffi")
        objects.open_runtime()
    except Exception as error:
        return _error(error)
    return None


def _folder(folder: Path) -> Line:
    """What is in ``folder`` and whether it is used. It is not created."""
    exists = folder.is_dir()
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    # In a sticky folder such as /tmp, ours would be our own: what counts is what that folder lies in.
    sticky = nearest != folder and nearest.stat().st_mode & stat.S_ISVTX
    return {
        "folder": str(folder),
        "exists": exists,
        "kernels": sum(1 for _ in folder.glob("*.so")) if exists else 0,
        "distrust": objects.distrust(nearest.parent if sticky else nearest),
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    }


def _gpus() -> list[Line]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        arch = devices.architecture(torch.device("cuda", index))
        found.append(
            {
                "index": index,
                "name": torch.cuda.get_device_name(index),
                "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
                "architecture": arch,
                "untuned_rows": devices.untuned_rows(arch) if arch else 0,
            }
        )
    return found


def _backend(backend: Backend, gpus: list[Line], probes: Probes) -> Line:
    here = {gpu["architecture"] for gpu in gpus}
    usable = [arch for arch in _ordered(backend.architectures) if arch in here]
    reasons = []
    if not gpus:
        reasons.append("there is no CUDA GPU")
    elif not usable:
        reasons.append("no GPU here has such an architecture")
    problem = USUAL._replace_arch(usable) if False else _usual(usable or _ordered(backend.architectures))
    refusal = probes.ask(backend.name, lambda: backend.supports(problem), "it cannot be asked")
    if refusal:
        reasons.append(refusal)
    elif isinstance(backend, CompiledBackend) and (loading := _loading()):
        reasons.append(f"compiled kernels cannot be loaded: {loading}")
    return {
        "name": backend.name,
        "architectures": _ordered(backend.architectures),
        "runs_here": not reasons,
        "reasons": reasons,
    }
