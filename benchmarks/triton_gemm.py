"""A Triton GEMM for the same product as ours, to be compared with: tensor descriptors, the vocabulary on the M side.

    python benchmarks/triton_gemm.py check            (on the CPU with TRITON_INTERPRET=1, or on a GPU: the numbers)
    python benchmarks/triton_gemm.py compile          (needs no GPU: every configuration for SM90)

The weight and x are read through host descriptors, so the copy engine brings both and fills in zeros beyond their ends.
Float32 accumulators; the logits are written with a masked store, or through a descriptor where their rows are a multiple of
16 bytes. One compiled kernel serves every head: sizes are arguments, and only whether the vocabulary is a multiple of 16 is
compiled in.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowbatch_lmhead.backends.base import dtype_name

SMEM_PER_BLOCK, SMEM_PER_SM, RESERVED_SMEM = 227 * 1024, 228 * 1024, 1024  # SM90
TOKEN_BLOCKS = (16, 32, 64)


@dataclass(frozen=True)
class Config:
    """Tile sizes in elements, pipeline depth, warps, programs on one multiprocessor (0: one per tile), how it stores."""

    block_v: int
    block_k: int
    stages: int
    warps: int
    residents: int
    descriptor: bool

    def __str__(self) -> str:
        grid = f"{self.residents} per SM" if self.residents else "a program per tile"
        store = "descriptor" if self.descriptor else "masked"
        return f"{self.block_v}x{self.block_k}, {self.stages} stages, {self.warps} warps, {grid}, {store} store"


# (block_v, block_k, stages, warps, programs on one multiprocessor), each with both stores.
_BOTH_STORES = (
    (64, 128, 3, 4, 0),
    (128, 128, 5, 4, 1),
    (128, 128, 5, 8, 1),
    (128, 64, 5, 4, 2),
    (128, 128, 3, 4, 0),
    (128, 128, 4, 8, 0),
)
# The same, with the masked store alone.
_MASKED = (
    (64, 128, 4, 4, 0),
    (64, 128, 5, 4, 2),
    (128, 128, 4, 4, 1),
    (128, 64, 3, 4, 2),
    (128, 64, 3, 8, 2),
    (128, 64, 4, 4, 0),
    (128, 128, 3, 8, 0),
    (128, 128, 4, 4, 0),
)


def token_block(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def smem_bytes(config: Config, rows: int) -> int:
    """Shared memory of the pipeline: what a program takes at the least."""
    return config.stages * (config.block_v + token_block(rows)) * config.block_k * 2


def configs(vocab: int, rows: int, out_dtype: torch.dtype) -> list[Config]:
    """What is worth a measurement. A pipeline that does not fit is made shorter, to two stages at the least."""
    aligned = vocab * out_dtype.itemsize % 16 == 0
    found = []
    for shape in (*_BOTH_STORES, *_MASKED):
        for descriptor in (False, True) if aligned and shape in _BOTH_STORES else (False,):
            for stages in range(shape[2], 1, -1):
                config = Config(*shape[:2], stages, *shape[3:], descriptor)
                smem = smem_bytes(config, rows)
                # Barriers come on top and, with a descriptor store or a pipeline that goes on, the tile of logits.
                logits = config.block_v * token_block(rows) * out_dtype.itemsize
                extra = logits if descriptor or config.residents else 0
                fits = smem + extra + 1024 <= SMEM_PER_BLOCK
                if fits and (config.residents or 1) * (smem + extra + RESERVED_SMEM) <= SMEM_PER_SM:
                    found.append(config)
                    break
    return list(dict.fromkeys(found))


@triton.jit
def _tile(weight, x, out, tile, vocab, hidden, rows, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
          DESCRIPTOR: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    first = tile * BLOCK_V
    sums = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    for k_tile in range(tl.cdiv(hidden, BLOCK_K)):
        part = weight.load([first, k_tile * BLOCK_K])
        sums = tl.dot(part, x.load([0, k_tile * BLOCK_K]).T, sums)
    if DESCRIPTOR:
        out.store([0, first], sums.to(OUT).T)
    else:
        features, tokens = first + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_T)
        target = out + tokens[None, :] * vocab + features[:, None]
        tl.store(target, sums.to(OUT), mask=(tokens[None, :] < rows) & (features[:, None] < vocab))


@triton.jit(do_not_specialize=["hidden", "rows"])
def project(weight, x, out, vocab, hidden, rows, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
            PERSISTENT: tl.constexpr, DESCRIPTOR: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """``out`` (rows, vocab), contiguous, or its descriptor."""
    if PERSISTENT:
        # Flattened, the pipeline goes on from one tile into the next.
        for tile in tl.range(tl.program_id(0), tl.cdiv(vocab, BLOCK_V), tl.num_programs(0), flatten=True):
            _tile(weight, x, out, tile, vocab, hidden, rows, BLOCK_V, BLOCK_T, BLOCK_K, DESCRIPTOR, OUT)
    else:
        _tile(weight, x, out, tl.program_id(0), vocab, hidden, rows, BLOCK_V, BLOCK_T, BLOCK_K, DESCRIPTOR, OUT)


def launch(config: Config, multiprocessors: int) -> Callable[..., Any]:
    """``call(weight, x, None, out)``, all contiguous."""

    def call(weight: Tensor, x: Tensor, _: None, out: Tensor) -> Any:
        (vocab, hidden), rows = weight.shape, x.shape[0]
        block_t = token_block(rows)
        tiles = triton.cdiv(vocab, config.block_v)
        return project[(min(tiles, config.residents * multiprocessors) if config.residents else tiles,)](
            TensorDescriptor(weight, [vocab, hidden], [hidden, 1], [config.block_v, config.block_k]),
            TensorDescriptor(x, [rows, hidden], [hidden, 1], [block_t, config.block_k]),
            TensorDescriptor(out, [rows, vocab], [vocab, 1], [block_t, config.block_v]) if config.descriptor else out,
            vocab,
            hidden,
            rows,
            BLOCK_V=config.block_v,
            BLOCK_T=block_t,
            BLOCK_K=config.block_k,
            PERSISTENT=config.residents > 0,
            DESCRIPTOR=config.descriptor,
            OUT=tl.bfloat16 if out.dtype is torch.bfloat16 else tl.float32,
            num_warps=config.warps,
            num_stages=config.stages,
        )

    return call


# --- compiled beforehand, by several processes ---

Job = tuple[Config, int, torch.dtype, bool]  # the configuration, rows, the type of the logits, whether vocab % 16 == 0


def jobs(shapes: Sequence[tuple[int, int]], row_counts: Sequence[int], out_dtypes: Sequence[torch.dtype]) -> list[Job]:
    """Each kernel that these heads need, once."""
    found = {
        (config, token_block(rows), out_dtype, vocab % 16 == 0)
        for vocab, _ in shapes
        for rows in row_counts
        for out_dtype in out_dtypes
        for config in configs(vocab, rows, out_dtype)
    }
    return sorted(found, key=str)


def _run_small(mine: list[Job]) -> list[str]:
    """Compile by launching on a small head, which has the kernels of every head; they stay in Triton's own cache."""
    failed = []
    for config, rows, out_dtype, even in mine:
        # A descriptor takes an odd vocabulary where its rows are a multiple of 16 bytes all the same.
        vocab = 512 if even else 520 if config.descriptor else 513
        weight = torch.zeros(vocab, 512, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, vocab, device="cuda", dtype=out_dtype)
        try:
            launch(config, 1)(weight, weight[:rows], None, out)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{config}, {rows} rows, {out_dtype}: {type(error).__name__}: {str(error)[:200]}")
    return failed


def prepare(todo: list[Job], workers: int | None = None) -> list[str]:
    """Compile ``todo``, in processes of their own; returns what failed."""
    workers = workers or max(1, min(12, (os.cpu_count() or 1) - 1))
    shares = [todo[index::workers] for index in range(workers) if todo[index::workers]]
    if not shares:
        return []
    with concurrent.futures.ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        return [line for lines in pool.map(_run_small, shares) for line in lines]


# --- checks ---


def check() -> None:
    """Every configuration on small awkward shapes, against float64, with the output full of NaN and guarded.

    Triton's interpreter multiplies no bfloat16 and truncates to it; there the weight and x are float16, the bound is wider.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device, dtype = ("cpu", torch.float16) if interpreted else ("cuda", torch.bfloat16)
    generator, worst = torch.Generator(device).manual_seed(0), {}
    for vocab, hidden in ((300, 200), (257, 72), (256, 256), (130, 136)):
        weight = torch.randn(vocab, hidden, device=device, generator=generator).to(dtype)
        for rows in (1, 16, 24, 33, 64):
            x = torch.randn(rows, hidden, device=device, generator=generator).to(dtype)
            exact = x.double() @ weight.double().t()
            for out_dtype in (torch.bfloat16, torch.float32):
                for config in configs(vocab, rows, out_dtype):
                    memory = torch.full((rows * vocab + 128,), float("nan"), device=device, dtype=out_dtype)
                    out = memory[64:-64].view(rows, vocab)
                    launch(config, 1)(weight, x, None, out)
                    error = ((out.double() - exact).norm() / exact.norm()).item()
                    limit = 1e-5 if out_dtype is torch.float32 else 5e-3 if interpreted else 2.5e-3
                    clean = memory[:64].isnan().all() and memory[-64:].isnan().all()
                    if not (error < limit and clean):
                        raise SystemExit(
                            f"WRONG {vocab}x{hidden}, {rows} rows, {out_dtype}, {config}: {error}, {clean}"
                        )
                    worst[out_dtype] = max(worst.get(out_dtype, 0.0), error)
        print(f"{vocab}x{hidden}", {dtype_name(key): f"{error:.1e}" for key, error in worst.items()}, flush=True)


def compile_all() -> None:
    """Every configuration for SM90, with what it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for config, rows, out_dtype, even in jobs([(512, 512), (513, 512)], TOKEN_BLOCKS, (torch.bfloat16, torch.float32)):
        block_t, kind = token_block(rows), "bf16" if out_dtype is torch.bfloat16 else "fp32"
        constants = {
            "BLOCK_V": config.block_v,
            "BLOCK_T": block_t,
            "BLOCK_K": config.block_k,
            "PERSISTENT": config.residents > 0,
            "DESCRIPTOR": config.descriptor,
            "OUT": tl.bfloat16 if kind == "bf16" else tl.float32,
        }
        signature = {
            "weight": f"tensordesc<bf16[{config.block_v},{config.block_k}]>",
            "x": f"tensordesc<bf16[{block_t},{config.block_k}]>",
            "out": f"tensordesc<{kind}[{block_t},{config.block_v}]>" if config.descriptor else f"*{kind}",
            "vocab": "i32",
            "hidden": "i32",
            "rows": "i32",
        } | dict.fromkeys(constants, "constexpr")
        divisible = [["tt.divisibility", 16]]
        attributes = {} if config.descriptor else {(2,): divisible}
        attributes |= {(3,): divisible} if even else {}
        compiled = triton.compile(
            ASTSource(project, signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": config.warps, "num_stages": config.stages},
        )
        ptx = compiled.asm["ptx"]
        print(
            f"{config}, {block_t} rows, {kind}, vocab % 16 {'==' if even else '!='} 0: {compiled.metadata.shared} bytes, "
            f"{ptx.count('wgmma.mma_async.sync')} wgmma, {ptx.count('cp.async.bulk.tensor')} bulk copies, "
            f"{ptx.count('st.global.v4')} wide stores",
            flush=True,
        )


if __name__ == "__main__":
    {"check": check, "compile": compile_all}[sys.argv[1]]()
