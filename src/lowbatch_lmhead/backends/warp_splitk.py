"""FlashInfer's warp split-K kernel: a 16- or 32-row weight tile per CTA, streamed through a ring of shared memory by
cp.async; four warps share the tile's hidden dimension and add up on chip.

The kernel takes vocabularies that are a multiple of its tile and less than 2**31 weights, and fails without an error
beyond. Here a vocabulary that is no multiple of the tile is described to it as two overlapping parts of equal size,
whose common rows are computed twice, to the same bits; and a larger weight with 64-bit strides. So one launch serves
every vocabulary of 16 and more.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .. import devices
from . import flashinfer
from .base import Problem, dtype_name
from .compiling import CompiledBackend

MAX_ROWS = 32
MAX_K_TILES = 64  # the kernel unrolls its loop over the hidden dimension
COMPUTE_WARPS = 4
MAX_STAGES = 16


@dataclass(frozen=True)
class Tactic:
    """The fields of FlashInfer's WarpSplitKTactic: tile sizes in elements, ring depth, warps that load x."""

    output_tile: int
    token_tile: int
    k_tile: int
    stages: int
    b_loader_warps: int

    def __str__(self) -> str:
        return (
            f"{self.output_tile}x{self.token_tile}x{self.k_tile}, {self.stages} stages, {self.b_loader_warps} loaders"
        )


def smem_bytes(tactic: Tactic) -> int:
    """Shared memory of one CTA, in bytes: the ring, the partial sums (34 words for each 32) and the barriers."""
    ring = math.ceil(tactic.output_tile * tactic.k_tile * 2 * tactic.stages / 1024) * 1024
    ring += tactic.token_tile * tactic.k_tile * 2 * tactic.stages
    partials = COMPUTE_WARPS * tactic.output_tile * tactic.token_tile // 32 * 34 * 4
    return ring + partials + 16 * tactic.stages


def parts(vocab: int, tile: int) -> tuple[int, int]:
    """``(size, start)``: one part of ``vocab`` rows with start 0, or two of ``size`` rows at rows 0 and ``start``.

    ``size`` is a multiple of ``tile``. Two parts cover the vocabulary and overlap by less than ``2 * tile`` rows.
    """
    if vocab % tile == 0:
        return vocab, 0
    size = math.ceil(vocab / (2 * tile)) * tile
    return size, vocab - size


def default_tactic(problem: Problem) -> Tactic:
    """The tactic for an untuned launch.

    SM90: fitted to sweeps of 16 heads on an H200 at 1, 8 and 16 rows (benchmarks/results/h200/sweep.json): many small CTAs
    per SM (short rings, k_tile 128) beat few deep ones. An output tile of 16 is up to 2 % quicker still for most addresses
    of x and 8 % slower for others (writes.json beside it): each CTA reads all of x, and twice as many do.
    SM100 and SM103: FlashInfer's own choice, measured on B200 and B300, which could not be had here. SM120: what two CTAs
    per SM leave room for.
    """
    hidden, arch = problem.hidden, devices.ARCHITECTURES[problem.arch]
    token_tile = 8 if problem.rows <= 8 else 16 if problem.rows <= 16 else 32
    output_tile = 32 if problem.vocab >= 32 else 16
    if problem.arch in ("sm_100a", "sm_103a"):
        k_tile, residents = 256 if tiles_fit(hidden, 256) and hidden > 512 else 128, 2
    else:
        k_tile = 128 if tiles_fit(hidden, 128) else 256
        residents = 2
        if k_tile == 128 and problem.arch == "sm_90a":
            # With a token tile of 32 a fourth CTA would leave two stages.
            residents = 3 if token_tile == 32 else 4
    return deepest_ring(output_tile, token_tile, k_tile, residents, hidden, arch) or Tactic(
        output_tile, token_tile, k_tile, min(2, hidden // k_tile), 2
    )


def deepest_ring(
    output_tile: int, token_tile: int, k_tile: int, residents: int, hidden: int, arch: devices.Architecture
) -> Tactic | None:
    """The tactic with as many stages as let ``residents`` CTAs live on one multiprocessor; None where 2 are too many."""
    for stages in range(min(MAX_STAGES, hidden // k_tile), 1, -1):
        tactic = Tactic(output_tile, token_tile, k_tile, stages, 2)
        if arch.ctas(smem_bytes(tactic)) >= residents:
            return tactic
    return None


# (output tile, k_tile, CTAs on one multiprocessor) that autotune measures beside the default, by token tile. Chosen
# greedily from the 16 combinations of the sweep on an H200 (benchmarks/results/h200/sweep.json): at 1, 8 and 16 rows the
# best of these and the default loses at most 1.6 % to the best of all, 0.1 % in the mean; without tiles of 16 where the
# vocabulary is large (below) 2.3 and 0.5 %. The others keep less of the weight in flight or fill fewer multiprocessors.
AUTOTUNED = {
    8: ((32, 128, 3), (16, 128, 5), (16, 256, 3)),
    16: ((32, 128, 3), (16, 128, 5), (16, 128, 3)),
    32: ((16, 128, 4),),
}
# Output tiles of 16 fill the GPU where tiles of 32 are too few: up to this vocabulary they were chosen in 360 of 1568 cases
# at 1 to 16 rows (benchmarks/results/h200/tuned.json), and above, while they were measured there, in 5 of 2496 (the file of
# commit 401f521). It is two waves of four CTAs with 32 rows each on 132 multiprocessors.
SMALL_VOCAB = 2 * 4 * 32 * 132


def autotune_tactics(problem: Problem) -> list[Tactic]:
    """The default tactic, then those that beat it on some head."""
    default = default_tactic(problem)
    arch = devices.ARCHITECTURES[problem.arch]
    found = [default]
    for output_tile, k_tile, residents in AUTOTUNED[default.token_tile]:
        if output_tile == 16 and problem.vocab > SMALL_VOCAB:
            continue
        if output_tile <= problem.vocab and tiles_fit(problem.hidden, k_tile):
            tactic = deepest_ring(output_tile, default.token_tile, k_tile, residents, problem.hidden, arch)
            found += [tactic] if tactic else []
    return list(dict.fromkeys(found))


def tiles_fit(hidden: int, k_tile: int) -> bool:
    # A 256-wide tile that fits exactly twice is one that FlashInfer excludes (it generates an invalid instruction).
    return hidden % k_tile == 0 and hidden // k_tile <= MAX_K_TILES and (k_tile, hidden // k_tile) != (256, 2)


class WarpSplitK(CompiledBackend):
    name = "flashinfer warp split-K"
    architectures = frozenset(devices.ARCHITECTURES)

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype is not torch.bfloat16:
            return f"x is {dtype_name(problem.dtype)}; it takes bfloat16"
        if problem.out_dtype not in (torch.bfloat16, torch.float32):
            return f"the output is {dtype_name(problem.out_dtype)}; it writes bfloat16 or float32"
        if problem.rows > MAX_ROWS:
            return f"it takes up to {MAX_ROWS} rows"
        if problem.hidden % 128:
            return f"hidden {problem.hidden} is not a multiple of 128"
        if not (tiles_fit(problem.hidden, 128) or tiles_fit(problem.hidden, 256)):
            return (
                f"hidden {problem.hidden} is more than {MAX_K_TILES} tiles of 256 (or, not a multiple of 256, of 128)"
            )
        if problem.vocab < 16:
            return f"vocab {problem.vocab} is less than one tile of 16"
        return flashinfer.unusable()

    def tactics(self, problem: Problem) -> list[Tactic]:
        return [default_tactic(problem)]

    def autotune_tactics(self, problem: Problem) -> list[Tactic]:
        # With 32 tokens it takes three times as long to compile, and lost to hopper stream on every head of the sweep
        # (benchmarks/results/h200/kernel_sweep.json), by 8 % and more.
        return [] if problem.arch == "sm_90a" and problem.rows > 16 else autotune_tactics(problem)

    def handicap(self, tactic: Tactic) -> float:
        # Each CTA reads all of x from L2, so half the output tile is twice the reading, and hot spots: at one of 24
        # addresses of x such a launch took 8 % longer (x in benchmarks/results/h200/writes.json).
        return 0.02 if tactic.output_tile == 16 else 0.0

    def smem_bytes(self, tactic: Tactic) -> int:
        return smem_bytes(tactic)

    def kernel(self, problem: Problem, tactic: Tactic) -> Any:
        """The jit function that launches the kernel on the whole weight."""
        import cutlass
        from cutlass import cute

        module = flashinfer.kernel_module("dense_bf16_gemm_warp_splitk")
        flashinfer_tactic = module.WarpSplitKTactic(*astuple(tactic))
        hidden = problem.hidden
        size, start = parts(problem.vocab, tactic.output_tile)
        module.validate_tactic(flashinfer_tactic, 1, size, hidden)
        kernel = module.CpAsyncWarpSplitKKernel(flashinfer_tactic, False, problem.has_bias)
        limit = devices.ARCHITECTURES[problem.arch].smem_per_block
        if kernel.smem_bytes > limit:
            raise ValueError(
                f"tactic {tactic} takes {kernel.smem_bytes} bytes of shared memory; {problem.arch} has {limit}"
            )
        # The kernel computes offsets in the type of the strides it is given; 32 bits are not enough from 2**31 weights on.
        stride_type = cutlass.Int64 if problem.vocab * hidden >= 2**31 else int

        class OnWholeWeight:
            @cute.experimental.jit
            def __call__(self, weight, x, bias, out, stream):  # type: ignore[no-untyped-def]
                # The vocabulary as one mode: rows of a part, and the part where there are two.
                rows = (size, 2) if start else size
                features = (1, start) if start else 1
                weight_rows = (stride_type(hidden), stride_type(start * hidden)) if start else stride_type(hidden)
                weight = cute.make_tensor(weight.iterator, cute.make_layout((rows, hidden), stride=(weight_rows, 1)))
                out = cute.make_tensor(
                    out.iterator, cute.make_layout((x.shape[0], rows), stride=(out.stride[0], features))
                )
                # Without a bias the kernel does not read its bias argument.
                bias = out if bias is None else cute.make_tensor(bias.iterator, cute.make_layout(rows, stride=features))
                kernel(weight, x, bias, out, stream)

        return OnWholeWeight()
