"""Finding FlashInfer and the CuTe DSL without importing them, and loading one kernel file of FlashInfer's.

Importing ``flashinfer`` takes seconds and pulls in much that a projection never uses, so a kernel's source file is
loaded by its path: it needs torch and the DSL only.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

from packaging.version import InvalidVersion, Version

from ..log import warn_once

# Name, least version, first version that is not known: what the tests ran with, at the least, and FlashInfer's minor
# version, within which the kernels' files stayed what they are.
FLASHINFER = ("flashinfer-python", "0.7.2", "0.8")
CUTE_DSL = ("nvidia-cutlass-dsl", "4.8.0", "5")
TVM_FFI = ("apache-tvm-ffi", "0.1.11", "0.2")


@functools.cache
def version(distribution: str) -> str | None:
    """The installed version of ``distribution``, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unusable(requirement: tuple[str, str, str]) -> str | None:
    name, least, below = requirement
    found = version(name)
    if found is None:
        return f"{name} is not installed (it takes {name}>={least},<{below})"
    try:
        parsed = Version(found)
    except InvalidVersion:
        return f"{name} has the version {found!r}, which cannot be read (it takes >={least},<{below})"
    if parsed < Version(least):
        return f"{name} {found} is too old (it takes >={least},<{below})"
    if parsed >= Version(below):
        return f"{name} {found} is too new to be known (it takes >={least},<{below})"
    return None


@functools.cache
def unusable() -> str | None:
    """None when compiled kernels can be used here, else which package is missing, too old or too new (logged once)."""
    for requirement in (FLASHINFER, CUTE_DSL, TVM_FFI):
        reason = _unusable(requirement)
        if reason:
            warn_once(f"the default GEMM serves: {reason}")
            return reason
    return None


_executing = threading.Lock()  # what another thread is still executing is in sys.modules already


def kernel_module(name: str) -> ModuleType:
    """The module of FlashInfer's ``gemm/kernels/<name>.py``, executed by itself. ImportError when it cannot be."""
    with _executing:
        return _kernel_module(name)


def _kernel_module(name: str) -> ModuleType:
    qualified = f"lowbatch_lmhead._flashinfer_{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    package = importlib.util.find_spec("flashinfer")
    if package is None or not package.submodule_search_locations:
        raise ImportError("flashinfer is not importable")
    path = Path(package.submodule_search_locations[0], "gemm", "kernels", f"{name}.py")
    spec = importlib.util.spec_from_file_location(qualified, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"this FlashInfer has no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[qualified]
        raise
    return module
