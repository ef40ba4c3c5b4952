"""The GPUs that kernels are compiled for, and what a tactic needs to know of them.

Nothing here asks for the number of multiprocessors: a tactic depends on the architecture alone, so that an object
compiled on a machine without a GPU is the one that a serving machine asks for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

KB = 1024
RESERVED_SMEM = 1024  # what the driver takes from each resident CTA


@dataclass(frozen=True)
class Architecture:
    """A compilation target. Shared memory in bytes, from the CUDA programming guide's table of technical specifications."""

    name: str  # as ptxas spells it, for example "sm_90a"
    smem_per_block: int
    smem_per_sm: int
    untuned_rows: int  # rows up to which the default tactics serve without a measurement on the spot

    def ctas(self, smem: int) -> int:
        """CTAs with ``smem`` bytes of shared memory that one multiprocessor has the memory for; 0 where none can have it."""
        return self.smem_per_sm // (smem + RESERVED_SMEM) if smem <= self.smem_per_block else 0


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        # What serves untuned took at most 0.985 of F.linear's time on an H200 (benchmarks/results/h200/hopper_default.json).
        Architecture("sm_90a", 227 * KB, 228 * KB, untuned_rows=64),
        Architecture("sm_100a", 227 * KB, 228 * KB, untuned_rows=32),
        Architecture("sm_103a", 227 * KB, 228 * KB, untuned_rows=32),
        Architecture("sm_120a", 99 * KB, 100 * KB, untuned_rows=16),
    )
}

# What the portable kernel compiles for besides. No GPU is taken for one of these: nothing was measured on them.
_OLDER = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 163 * KB, 164 * KB, untuned_rows=16),
        Architecture("sm_86", 99 * KB, 100 * KB, untuned_rows=16),
        Architecture("sm_89", 99 * KB, 100 * KB, untuned_rows=16),
    )
}


def limits(arch: str) -> Architecture:
    """What ``arch`` has, of all that a kernel is compiled for."""
    return ARCHITECTURES.get(arch) or _OLDER[arch]


_BY_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}

# What stands for an architecture where no GPU is: only the reference backend of lowbatch_lmhead.testing runs on it.
CPU = "cpu"


@functools.cache
def _cuda_architecture(index: int) -> str | None:
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(index))


def architecture(device: torch.device) -> str | None:
    """The architecture that kernels for ``device`` are compiled for, or None for a GPU that no backend knows."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _cuda_architecture(device.index if device.index is not None else torch.cuda.current_device())


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream of ``device``, whichever device is current."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def untuned_rows(arch: str | None) -> int:
    """The largest row count that is taken without tuning on ``arch``."""
    known = ARCHITECTURES.get(arch or "")
    return known.untuned_rows if known else 16
