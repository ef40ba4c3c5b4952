"""What a result was measured on."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from typing import Any

import torch

import lowbatch_lmhead
from lowbatch_lmhead.backends import flashinfer


def require_kernels() -> None:
    """End the script where no kernel could run: it would measure the default GEMM under another name."""
    reason = flashinfer.unusable() if torch.cuda.is_available() else "there is no CUDA GPU"
    if reason:
        raise SystemExit(f"nothing to measure: {reason}")


def nvidia_smi(*names: str) -> dict[str, float]:
    """What nvidia-smi says of the first GPU now: ``clocks.sm``, ``power.draw`` and so on."""
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    return dict(zip(names, map(float, said)))


def describe() -> dict[str, Any]:
    """GPU, processor count and versions."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flashinfer-python": flashinfer.version("flashinfer-python"),
        "nvidia-cutlass-dsl": flashinfer.version("nvidia-cutlass-dsl"),
        "apache-tvm-ffi": flashinfer.version("apache-tvm-ffi"),
        "lowbatch-lmhead": lowbatch_lmhead.__version__,
        "date": datetime.date.today().isoformat(),
    }
