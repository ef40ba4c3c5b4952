"""Our own kernel for every GPU with cp.async (SM80 and newer): a tile of the weight per CTA, streamed once through a ring
of shared memory and multiplied by mma.sync, for up to 64 rows and any vocabulary.

The vocabulary is the M side of the MMA and the rows are its N side. Every thread both loads and computes: a k tile of
the weight and of x is one cp.async group, one CTA barrier a k tile publishes it and frees the slot of the one before.
Several CTAs on a multiprocessor keep the memory busy while one of them starts or ends.

Order of additions. A k tile is split along k among ``warps_k`` warps, contiguous parts of ``k_tile / warps_k``. A warp
multiplies its part in chains of at most 64 elements, each from zero, because the tensor core truncates what it adds to
an accumulator; it adds each chain to a float32 sum, rounded to nearest. After the last k tile the sums of the warps are
added, first to last, and the bias to that. So the order is a function of (hidden, k_tile, warps_k) alone: tactics that
agree in these compute the same bits whatever their vocab_tile, token_tile, stages and warps_m, and a row's bits depend
on no other row.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from .. import devices
from . import flashinfer
from .base import Problem, dtype_name
from .compiling import CompiledBackend, launches_early

MAX_ROWS = 64
UNTUNED_ROWS = 16
MAX_HIDDEN = 2**20  # offsets inside a tile are 32-bit immediates
MAX_STAGES = 16
MAX_FRAGMENTS = 16  # 16x8 sums of a warp, 4 registers each: with more, the accumulators do not fit beside them
REGISTERS = 65536  # of a multiprocessor

ITEM = 2  # bytes of a weight or x element
CHUNK = 8  # elements of one 16-byte copy
CHUNK_BYTES = CHUNK * ITEM
CHAIN = 4  # MMAs, each 16 elements of k, that are added up inside the tensor core

# Words between the rows of the mailbox beyond the vocab tile. The stride is then 4 modulo 16, and the 32 lanes of a
# fragment, 4 token pairs by 8 vocabulary rows, write to 32 different banks.
MAILBOX_PAD = 4


@dataclass(frozen=True)
class Tactic:
    """Tile sizes in elements, ring depth, and how the warps share the tile: along the vocabulary and along k."""

    vocab_tile: int
    token_tile: int
    k_tile: int
    stages: int
    warps_m: int
    warps_k: int

    def __str__(self) -> str:
        return (
            f"{self.vocab_tile}x{self.token_tile}x{self.k_tile}, {self.stages} stages, "
            f"{self.warps_m}x{self.warps_k} warps"
        )

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_k

    @property
    def m_iters(self) -> int:
        """16-row MMA tiles of a warp."""
        return self.vocab_tile // (16 * self.warps_m)

    @property
    def n_iters(self) -> int:
        """8-token MMA tiles of a warp."""
        return self.token_tile // 8

    @property
    def k_steps(self) -> int:
        """MMAs along k that a warp does of a k tile."""
        return self.k_tile // (16 * self.warps_k)

    @property
    def row_bytes(self) -> int:
        """Of one row of a k tile, in shared memory."""
        return self.k_tile * ITEM

    @property
    def stage_bytes(self) -> int:
        return (self.vocab_tile + self.token_tile) * self.row_bytes


def invalid(tactic: Tactic) -> str | None:
    """Why the kernel has no such tactic, or None. Whether it fits an architecture is smem_bytes' to say."""
    if tactic.warps_m not in (1, 2, 4, 8, 16) or tactic.warps_k not in (1, 2, 4, 8) or tactic.threads > 512:
        return f"{tactic.warps_m}x{tactic.warps_k} warps: powers of two, 1 to 16 in all and at most 8 along k"
    if tactic.vocab_tile < 16 or tactic.vocab_tile % (16 * tactic.warps_m) or tactic.vocab_tile > 256:
        return f"vocab tile {tactic.vocab_tile}: a multiple of 16 for each of {tactic.warps_m} warps, at most 256"
    if tactic.token_tile < 8 or tactic.token_tile % 8 or tactic.token_tile > MAX_ROWS:
        return f"token tile {tactic.token_tile}: a multiple of 8 up to {MAX_ROWS}"
    if tactic.k_tile not in (64, 128, 256):
        return f"k tile {tactic.k_tile}: 64, 128 or 256"
    if tactic.k_steps < 2:  # one ldmatrix loads the x fragments of two
        return f"{tactic.warps_k} warps along a k tile of {tactic.k_tile}: each takes 32 elements at least"
    if tactic.vocab_tile * tactic.k_tile // CHUNK % tactic.threads:
        return f"a k tile of the weight is not a whole number of 16-byte copies for each of {tactic.threads} threads"
    if tactic.m_iters * tactic.n_iters > MAX_FRAGMENTS:
        return f"a warp has {tactic.m_iters * tactic.n_iters} MMA tiles: at most {MAX_FRAGMENTS}"
    if not 2 <= tactic.stages <= MAX_STAGES:
        return f"{tactic.stages} stages: 2 to {MAX_STAGES}"
    return None


def smem_bytes(tactic: Tactic) -> int:
    """Shared memory of one CTA, in bytes: the ring, and after it, in the same place, the mailbox."""
    return max(tactic.stages * tactic.stage_bytes, tactic.warps_k * mailbox_words(tactic) * 4)


def registers(tactic: Tactic, arch: str) -> int:
    """An upper estimate of a thread's registers: sums, the fragments of a chain, addresses.

    For Blackwell ptxas takes up to half as many more for the same kernel, and spills where it is given fewer.
    """
    needed = 4 * tactic.m_iters * (tactic.n_iters + min(CHAIN, tactic.k_steps)) + 48
    return needed * 3 // 2 if arch in ("sm_100a", "sm_103a", "sm_120a") else needed


# --- Index maps, in plain integer arithmetic: of Python's integers for the checks, of the DSL's in the kernel -----------


def chunk_offset(tactic: Tactic, row: Any, chunk: Any) -> Any:
    """Where in a tile the 16-byte ``chunk`` of ``row`` lies, in bytes.

    Rows are 128 bytes or a multiple, so the same chunk of 8 successive rows would be in the same banks: exchanging the
    chunks of a row by its number modulo 8 puts them in different ones, for ldmatrix. A copy, 8 lanes to 8 chunks of one
    row, writes to different banks either way.
    """
    return row * tactic.row_bytes + (chunk ^ (row & 7)) * CHUNK_BYTES


def copy_source(tactic: Tactic, thread: Any) -> tuple[Any, Any]:
    """``(row, chunk)`` of a thread's first copy; each next one is ``copy_rows`` further down, of the same chunk."""
    chunks = tactic.k_tile // CHUNK
    return thread // chunks, thread % chunks


def copy_rows(tactic: Tactic) -> int:
    return tactic.threads * CHUNK // tactic.k_tile


def weight_copies(tactic: Tactic) -> int:
    """Copies of a thread for a k tile of the weight."""
    return tactic.vocab_tile // copy_rows(tactic)


def x_copies(tactic: Tactic) -> int:
    """Copies of a thread for a k tile of x; in the last, rows beyond the token tile are left out."""
    return -(-tactic.token_tile // copy_rows(tactic))


def warp_place(tactic: Tactic, warp: Any) -> tuple[Any, Any]:
    """``(warp_m, warp_k)`` of a warp."""
    return warp & (tactic.warps_m - 1), warp >> (tactic.warps_m.bit_length() - 1)


def weight_read(tactic: Tactic, lane: Any, warp_m: Any, warp_k: Any, step: int) -> Any:
    """Where in the weight's tile a lane's row for ldmatrix.x4 begins: the first 16 rows of the warp, MMA ``step`` of 4.

    The matrices are rows 0-7, rows 8-15, and the same of the next 8 columns: the registers of an A fragment in order.
    """
    row = warp_m * (16 * tactic.m_iters) + lane % 16
    return chunk_offset(tactic, row, (warp_k * tactic.k_steps + step) * 2 + lane // 16)


def x_read(tactic: Tactic, lane: Any, warp_k: Any, pair: int) -> Any:
    """Where in x's tile a lane's row for ldmatrix.x4 begins: the first 8 tokens, MMAs ``2 * pair`` and the next.

    The matrices are four successive chunks: the two registers of a B fragment, of two MMAs.
    """
    return chunk_offset(tactic, lane % 8, (warp_k * tactic.k_steps + 2 * pair) * 2 + lane // 8)


def step_bytes(step: int) -> int:
    """What MMA ``step`` adds to the read offset of ``step % 4``: the swizzle leaves multiples of 8 chunks alone."""
    return step // 4 * 8 * CHUNK_BYTES


def fragment_place(lane: Any, value: int) -> tuple[Any, Any]:
    """``(vocab row, token)`` inside a 16x8 tile of accumulator register ``value`` of a lane."""
    return lane // 4 + 8 * (value // 2), lane % 4 * 2 + value % 2


def mailbox_stride(tactic: Tactic) -> int:
    return tactic.vocab_tile + MAILBOX_PAD


def mailbox_words(tactic: Tactic) -> int:
    """Of one warp along k: the tile, token by token."""
    return tactic.token_tile * mailbox_stride(tactic)


def mailbox_word(tactic: Tactic, warp_k: Any, vocab: Any, token: Any) -> Any:
    return warp_k * mailbox_words(tactic) + token * mailbox_stride(tactic) + vocab


# --- Tactics ---------------------------------------------------------------------------------------------------------


def token_tile(rows: int) -> int:
    return next((tile for tile in (8, 16, 32) if rows <= tile), MAX_ROWS)


def deepest_ring(
    vocab_tile: int, token_tile: int, k_tile: int, warps: tuple[int, int], residents: int, hidden: int, arch: str
) -> Tactic | None:
    """The tactic with as many stages as let ``residents`` CTAs live on one multiprocessor.

    None where 2 stages are too many, or the registers too few.
    """
    limits = devices.limits(arch)
    for stages in range(min(MAX_STAGES, max(2, -(-hidden // k_tile))), 1, -1):
        tactic = Tactic(vocab_tile, token_tile, k_tile, stages, *warps)
        if residents > 1 and residents * tactic.threads * registers(tactic, arch) > REGISTERS:
            return None
        if limits.ctas(smem_bytes(tactic)) >= residents:
            return tactic
    return None


# By token tile: (vocab tile, k tile, (warps_m, warps_k), CTAs on one multiprocessor), the default first, then what autotune
# measures beside it. Few rows: small tiles and many CTAs. Each CTA reads all of x, so many rows: tiles of 64 and more. This
# table is from a sweep on an H200 (benchmarks/results/h200/kernel_sweep.json); the others are estimates of the bytes in
# flight.
_LARGE = {
    8: ((32, 128, (1, 4), 4), (64, 64, (2, 2), 4)),
    16: ((32, 128, (1, 4), 4), (128, 128, (8, 1), 2), (64, 128, (2, 4), 2)),
    32: ((64, 128, (4, 2), 3), (64, 128, (2, 4), 2), (64, 64, (2, 2), 3)),
    64: ((128, 64, (8, 1), 2), (128, 64, (4, 1), 3), (128, 64, (4, 2), 1)),
}
# The same for multiprocessors with 164 KB.
_MIDDLE = {
    8: ((32, 128, (1, 4), 3), (32, 128, (1, 4), 2), (64, 64, (2, 2), 3)),
    16: ((32, 128, (1, 4), 3), (32, 128, (1, 4), 2), (64, 64, (2, 2), 3)),
    32: ((64, 64, (2, 2), 2), (64, 64, (2, 2), 3), (128, 64, (4, 2), 2)),
    64: ((128, 64, (4, 2), 1), (128, 64, (4, 2), 2), (64, 64, (2, 2), 2)),
}
# The same for multiprocessors with 100 KB.
_SMALL = {
    8: ((32, 128, (1, 4), 2), (32, 64, (2, 2), 3), (32, 128, (1, 4), 3)),
    16: ((32, 128, (1, 4), 2), (32, 64, (2, 2), 3), (64, 64, (2, 2), 2)),
    32: ((64, 64, (2, 2), 2), (64, 64, (2, 2), 1), (128, 64, (4, 2), 1)),
    64: ((128, 64, (4, 2), 1), (64, 64, (2, 2), 2), (64, 64, (2, 2), 1)),
}


def autotune_tactics(problem: Problem) -> list[Tactic]:
    """The default tactic, then those that may beat it on some head."""
    limits = devices.limits(problem.arch)
    table = (
        _LARGE
        if limits.smem_per_sm >= 200 * devices.KB
        else _MIDDLE
        if limits.smem_per_sm >= 128 * devices.KB
        else _SMALL
    )
    tokens = token_tile(problem.rows)
    found = [
        deepest_ring(vocab_tile, tokens, k_tile, warps, residents, problem.hidden, problem.arch)
        for vocab_tile, k_tile, warps, residents in table[tokens]
    ]
    return list(dict.fromkeys(tactic for tactic in found if tactic))


def default_tactic(problem: Problem) -> Tactic:
    """The tactic for an untuned launch."""
    return autotune_tactics(problem)[0]


# For batch invariance, by token tile: k tile and warps along k, which set the order of additions, are the same in all.
INVARIANT_K_TILE, INVARIANT_WARPS_K = 64, 2
_INVARIANT = {8: (64, 2, 4), 16: (64, 2, 4), 32: (64, 2, 3), 64: (128, 4, 2)}  # vocab tile, warps_m, most CTAs


def invariant_tactic(problem: Problem) -> Tactic:
    """The tactic for ``problem``'s rows whose order of additions is that of every other row count's."""
    tokens = token_tile(problem.rows)
    vocab_tile, warps_m, most = _INVARIANT[tokens]
    warps = (warps_m, INVARIANT_WARPS_K)
    found = (
        deepest_ring(vocab_tile, tokens, INVARIANT_K_TILE, warps, residents, problem.hidden, problem.arch)
        for residents in range(most, 0, -1)
    )
    return next(tactic for tactic in found if tactic)


def sweep_tactics(problem: Problem) -> list[Tactic]:
    """What a first sweep on a GPU measures: every shape of tile that is worth it, by the CTAs that share a multiprocessor.

    The default is first. Tiles that reread x too often, or that leave a warp more copies than products, are left out.
    """
    tokens = token_tile(problem.rows)
    tiles = (16, 32, 64, 128) if tokens <= 16 else (32, 64, 128, 256)
    found = autotune_tactics(problem)
    for tile, k_tile in itertools.product(tiles, (64, 128)):
        for warps in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            shape = Tactic(tile, tokens, k_tile, 2, *warps)
            if invalid(shape) or not 2 <= warps[0] * warps[1] <= 8 or shape.m_iters > 2:
                continue
            if shape.m_iters * tokens * shape.k_steps < 64 or (tokens >= 32 and warps[1] == 4 and k_tile == 64):
                continue
            for residents in (1, 2, 3, 4, 6):
                tactic = deepest_ring(tile, tokens, k_tile, warps, residents, problem.hidden, problem.arch)
                if tactic is None or residents * tactic.threads > 1536:
                    continue
                in_flight = residents * (tactic.stages - 1) * tile * k_tile * ITEM
                if (
                    in_flight >= devices.limits(problem.arch).smem_per_sm * 2 // 5
                    or tactic.stages * k_tile >= problem.hidden
                ):
                    found.append(tactic)
    return list(dict.fromkeys(found))


class Stream(CompiledBackend):
    name = "stream"
    architectures = frozenset({"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"})
    experimental = False

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"x is {dtype_name(problem.dtype)}; it takes bfloat16 or float16"
        if problem.out_dtype not in (problem.dtype, torch.float32):
            return f"the output is {dtype_name(problem.out_dtype)}; it writes {dtype_name(problem.dtype)} or float32"
        if problem.rows > MAX_ROWS:
            return f"it takes up to {MAX_ROWS} rows"
        if problem.hidden % CHUNK:
            return f"hidden {problem.hidden} is not a multiple of {CHUNK}"
        if problem.hidden > MAX_HIDDEN:
            return f"hidden {problem.hidden} is more than {MAX_HIDDEN}"
        return flashinfer.unusable()

    def tactics(self, problem: Problem) -> list[Tactic]:
        # Beyond 16 rows it lost to F.linear on some heads on an H200 (benchmarks/results/h200/kernel_sweep.json).
        return [default_tactic(problem)] if problem.rows <= UNTUNED_ROWS else []

    def autotune_tactics(self, problem: Problem) -> list[Tactic]:
        # On Hopper it wins, in that sweep, with few rows of heads that FlashInfer's kernels do not take.
        if problem.arch == "sm_90a" and not (
            problem.rows <= 8 and (problem.hidden % 128 or problem.dtype is torch.float16)
        ):
            return []
        return autotune_tactics(problem)

    def invariant_tactic(self, problem: Problem) -> Tactic:
        return invariant_tactic(problem)

    def smem_bytes(self, tactic: Tactic) -> int:
        return smem_bytes(tactic)

    def kernel(self, problem: Problem, tactic: Tactic) -> Any:
        """The jit function that launches the kernel."""
        reason = invalid(tactic)
        if reason:
            raise ValueError(f"tactic {tactic}: {reason}")
        limit = devices.limits(problem.arch).smem_per_block
        if smem_bytes(tactic) > limit:
            raise ValueError(
                f"tactic {tactic} takes {smem_bytes(tactic)} bytes of shared memory; {problem.arch} has {limit}"
            )
        return _kernel_class()(problem, tactic)


@functools.cache
def _kernel_class() -> Any:
    """The kernel's class. Imports the DSL."""
    import cutlass
    from cutlass import Float32, Int32, Int64, const_expr, cute
    from cutlass._mlir.dialects import llvm

    # Functions of the kernel that the DSL does not rewrite: here ``for`` and ``if`` are Python's, run while it is traced.

    def asm(result: Any, operands: list[Any], code: str, constraints: str, pure: bool = False) -> Any:
        return llvm.inline_asm(
            result,
            [operand.ir_value() for operand in operands],
            code,
            constraints,
            has_side_effects=not pure,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )

    def several(
        kind: Any, count: int, operands: list[Any], code: str, constraints: str, pure: bool = False
    ) -> list[Any]:
        """The ``count`` results of an instruction that has several of the same kind."""
        result = asm(llvm.StructType.get_literal([kind.mlir_type] * count), operands, code, constraints, pure)
        return [kind(llvm.extractvalue(kind.mlir_type, result, [i])) for i in range(count)]

    def evict_first() -> Any:
        """The L2 policy for what is read once. Made at run time: ptxas 13.0 encodes copies with a constant one wrongly."""
        code = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
        return Int64(asm(Int64.mlir_type, [], code, "=l", pure=True))

    def copy(
        target: Any, target_offset: int, source: Any, source_offset: int, size: Any, policy: Any, flag: Any = None
    ) -> None:
        """One 16-byte copy to shared memory: of zeros where ``size`` is 0 instead of 16, none at all where ``flag`` is 0."""
        operands = [target, source]
        code = f"[$0 + {target_offset}], [$1 + {source_offset}], {CHUNK_BYTES}"
        constraints = "r,l"
        if size is not None:
            code, constraints = f"{code}, ${len(operands)}", f"{constraints},r"
            operands.append(size)
        hint = ""
        if policy is not None:
            hint, code, constraints = ".L2::cache_hint", f"{code}, ${len(operands)}", f"{constraints},l"
            operands.append(policy)
        code = f"cp.async.cg.shared.global{hint} {code};"
        if flag is not None:
            code = f"{{ .reg .pred there; setp.ne.b32 there, ${len(operands)}, 0; @there {code} }}"
            constraints = f"{constraints},r"
            operands.append(flag)
        asm(None, operands, code, constraints)

    def ldmatrix(at: Any, offset: int) -> list[Any]:
        code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        return several(Int32, 4, [at], code, "=r,=r,=r,=r,r")

    def mma(a: list[Any], b: list[Any], c: list[Any], kind: str) -> list[Any]:
        code = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        return several(Float32, 4, [*a, *b, *c], code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", pure=True)

    def opaque(value: Any, lane: Any) -> Any:
        """``value``, in a register of each thread and of no origin that the compiler knows: each lane's from itself."""
        return Int32(asm(Int32.mlir_type, [value, lane], "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r"))

    def store_16_bytes(address: Any, words: list[Any]) -> None:
        asm(None, [address, *words], "st.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r")

    def if_else(condition: Any, first: Any, second: Any) -> Any:
        return Int32(llvm.select(condition.ir_value(), Int32(first).ir_value(), Int32(second).ir_value()))

    class Kernel:
        def __init__(self, problem: Problem, tactic: Tactic) -> None:
            vocab, hidden = problem.vocab, problem.hidden
            self.tactic, self.vocab, self.hidden, self.has_bias = tactic, vocab, hidden, problem.has_bias
            self.mma_type = "bf16" if problem.dtype is torch.bfloat16 else "f16"
            self.early = launches_early(problem.arch)
            # A CTA that has the multiprocessor to itself may have its registers: left alone, ptxas saves them, and spills.
            self.alone = int(devices.limits(problem.arch).ctas(smem_bytes(tactic)) < 2)
            self.k_tiles = -(-hidden // tactic.k_tile)
            self.k_tail = hidden % tactic.k_tile != 0
            self.vocab_tail = vocab % tactic.vocab_tile != 0

        @cute.jit
        def __call__(self, weight, x, bias, out, stream):  # type: ignore[no-untyped-def]
            tactic = self.tactic
            self.kernel(weight, x, bias, out).launch(
                grid=(-(-self.vocab // tactic.vocab_tile), cute.ceil_div(x.shape[0], tactic.token_tile), 1),
                block=(tactic.threads, 1, 1),
                smem=smem_bytes(tactic),
                min_blocks_per_mp=self.alone,
                use_pdl=self.early,
                stream=stream,
            )

        @cute.kernel
        def kernel(self, weight, x, bias, out):  # type: ignore[no-untyped-def]
            tactic = self.tactic
            thread, _, _ = cute.arch.thread_idx()
            vocab_block, token_block, _ = cute.arch.block_idx()
            lane = thread % 32
            warp_m, warp_k = warp_place(tactic, cute.arch.make_warp_uniform(thread // 32))
            vocab_start, token_start = vocab_block * tactic.vocab_tile, token_block * tactic.token_tile
            rows = x.shape[0]
            memory = cute.arch.get_dyn_smem(cutlass.Float32, alignment=128)
            ring = memory.toint()

            if const_expr(self.early):
                cute.arch.griddepcontrol_wait()
            loads = self.loads(weight, x, ring, thread, vocab_start, token_start, rows)
            first_target = loads[0][0]
            reads = self.reads(ring, lane, warp_m, warp_k)
            sums = cute.make_rmem_tensor(cute.make_layout(4 * tactic.m_iters * tactic.n_iters), Float32)
            sums.fill(0.0)

            for ahead in cutlass.range_constexpr(tactic.stages - 1):
                if const_expr(ahead < self.k_tiles):
                    self.load(loads, Int32(ahead * tactic.k_tile), first_target + ahead * tactic.stage_bytes)
                # Groups are counted: an empty one stands for each k tile that is not there.
                cute.arch.cp_async_commit_group()

            # The slot that is multiplied, as an offset in the ring, the same for all threads; the slot that is filled, the
            # one before it, as this thread's own address in it (see loads).
            full = Int32(0)
            target = first_target + (tactic.stages - 1) * tactic.stage_bytes
            end = first_target + tactic.stages * tactic.stage_bytes
            for k_index in cutlass.range(self.k_tiles, unroll=1):
                cute.arch.cp_async_wait_group(tactic.stages - 2)
                # Everyone's copies of this k tile have come, and everyone has done with the one before.
                cute.arch.barrier()
                if k_index < self.k_tiles - (tactic.stages - 1):
                    self.load(loads, (k_index + (tactic.stages - 1)) * tactic.k_tile, target)
                cute.arch.cp_async_commit_group()
                self.multiply(reads, full, sums)
                target = target + tactic.stage_bytes
                if target == end:
                    target = first_target
                full = full + tactic.stage_bytes
                if full == tactic.stages * tactic.stage_bytes:
                    full = Int32(0)

            # The mailbox is where the ring was.
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
            mailbox = cute.make_tensor(memory, cute.make_layout(tactic.warps_k * mailbox_words(tactic)))
            self.post(mailbox, sums, lane, warp_m, warp_k)
            cute.arch.barrier()

            # In groups of 16 bytes where out allows it, a lane a group; else, and for what is left of the vocabulary,
            # element by element. Either way successive lanes write successive addresses.
            tokens = rows - token_start
            vocab_left = self.vocab - vocab_start
            group = const_expr(128 // out.element_type.width)
            groups = const_expr(tactic.vocab_tile // group)
            whole = Int32(0)
            address = out.iterator.toint()
            pitch = Int64(out.stride[0]) * (out.element_type.width // 8)
            if ((address | pitch) & 15) == 0:
                whole = Int32(tactic.vocab_tile)
                if vocab_left < tactic.vocab_tile:
                    whole = vocab_left // group * group
            address = address + Int64(vocab_start) * (out.element_type.width // 8)
            if whole > 0:
                for index in cutlass.range(thread, groups * tactic.token_tile, tactic.threads, unroll=1):
                    token, start = index // groups, index % groups * group
                    if token < tokens and start < whole:
                        values = cute.make_rmem_tensor(cute.make_layout(group), out.element_type)
                        for i in cutlass.range_constexpr(group):
                            values[i] = self.total(mailbox, bias, vocab_start, start + i, token).to(out.element_type)
                        words = cute.recast_tensor(values, Int32)
                        place = (
                            address + Int64(token_start + token) * pitch + Int64(start * (out.element_type.width // 8))
                        )
                        store_16_bytes(place, [words[i] for i in range(4)])
            if whole < tactic.vocab_tile and whole < vocab_left:
                for index in cutlass.range(thread, tactic.vocab_tile * tactic.token_tile, tactic.threads, unroll=1):
                    token, at = index // tactic.vocab_tile, index % tactic.vocab_tile
                    if token < tokens and at >= whole and at < vocab_left:
                        value = self.total(mailbox, bias, vocab_start, at, token)
                        out[token_start + token, vocab_start + at] = value.to(out.element_type)

        def loads(
            self, weight: Any, x: Any, ring: Any, thread: Any, vocab_start: Any, token_start: Any, rows: Any
        ) -> Any:
            """What a thread's copies have in common for every k tile: addresses, sizes, the policy."""
            tactic = self.tactic
            row, chunk = copy_source(tactic, thread)
            first = vocab_start + row
            source = weight.iterator.toint() + (Int64(first) * self.hidden + Int64(chunk * CHUNK)) * ITEM
            step = copy_rows(tactic)
            # Where the rows of one copy and the next differ by a multiple of 8, the swizzle is the same.
            offsets = [chunk_offset(tactic, row + i * step, chunk) for i in range(1 if step % 8 == 0 else 8 // step)]
            # Of a thread's and a common term ptxas puts the latter in a uniform register, and then encodes a copy with a
            # policy as LDGSTS [R + UR], desc[UR] with an odd second register, which FlashInfer found to be invalid.
            targets = [opaque(ring + offset, thread % 32) for offset in offsets]
            x_source, x_size = [], []
            for i in range(x_copies(tactic)):
                token = token_start + row + i * step
                there = token < rows
                x_size.append(if_else(there, CHUNK_BYTES, 0))
                token = if_else(there, token, 0)
                x_source.append(x.iterator.toint() + (Int64(token) * Int64(x.stride[0]) + Int64(chunk * CHUNK)) * ITEM)
            in_tile = if_else(row + (x_copies(tactic) - 1) * step < tactic.token_tile, 1, 0)
            return targets, chunk, self.vocab - first, source, x_source, x_size, in_tile, evict_first()

        def load(self, loads: Any, k_start: Any, target: Any) -> None:
            """Issue a thread's copies of the k tile that begins at element ``k_start``, its first one to ``target``."""
            tactic = self.tactic
            targets, chunk, rows_left, source, x_source, x_size, in_tile, policy = loads
            step = copy_rows(tactic)
            size = if_else(k_start + chunk * CHUNK < self.hidden, CHUNK_BYTES, 0) if self.k_tail else None
            ahead = Int64(k_start * ITEM)
            targets = [target, *(target + (other - targets[0]) for other in targets[1:])]
            source = source + ahead
            for i in range(weight_copies(tactic)):
                of_row = size
                if self.vocab_tail:
                    of_row = if_else(rows_left > i * step, CHUNK_BYTES if size is None else size, 0)
                each, more = i % len(targets), i // len(targets)
                down = more * len(targets) * step * tactic.row_bytes
                copy(targets[each], down, source, i * step * self.hidden * ITEM, of_row, policy)
            for i in range(x_copies(tactic)):
                each, more = i % len(targets), i // len(targets)
                down = (tactic.vocab_tile + more * len(targets) * step) * tactic.row_bytes
                of_row = x_size[i] if size is None else x_size[i] & size
                beyond = (i + 1) * step > tactic.token_tile  # for some threads
                copy(targets[each], down, x_source[i] + ahead, 0, of_row, None, in_tile if beyond else None)

        def reads(self, ring: Any, lane: Any, warp_m: Any, warp_k: Any) -> Any:
            """Addresses in the ring's first slot that a lane reads the fragments from."""
            tactic = self.tactic
            steps = min(tactic.k_steps, 4)
            x_ring = ring + tactic.vocab_tile * tactic.row_bytes
            return (
                [ring + weight_read(tactic, lane, warp_m, warp_k, step) for step in range(steps)],
                [x_ring + x_read(tactic, lane, warp_k, pair) for pair in range(steps // 2)],
            )

        def multiply(self, reads: Any, slot: Any, sums: Any) -> None:
            """Add a warp's part of the k tile at the ring's offset ``slot`` to its sums."""
            tactic = self.tactic
            weight_at, x_at = ([at + slot for at in addresses] for addresses in reads)
            for start in range(0, tactic.k_steps, CHAIN):
                steps = range(start, min(start + CHAIN, tactic.k_steps))
                a = [
                    [ldmatrix(weight_at[step % 4], m * 16 * tactic.row_bytes + step_bytes(step)) for step in steps]
                    for m in range(tactic.m_iters)
                ]
                for n in range(tactic.n_iters):
                    b = []
                    for step in steps[::2]:
                        found = ldmatrix(x_at[step % 4 // 2], n * 8 * tactic.row_bytes + step_bytes(step))
                        b += [found[:2], found[2:]]
                    for m in range(tactic.m_iters):
                        chain = [Float32(0.0)] * 4
                        for at in range(len(steps)):
                            chain = mma(a[m][at], b[at], chain, self.mma_type)
                        for value in range(4):
                            index = (m * tactic.n_iters + n) * 4 + value
                            sums[index] = sums[index] + chain[value]

        def post(self, mailbox: Any, sums: Any, lane: Any, warp_m: Any, warp_k: Any) -> None:
            """Write a warp's sums to its part of the mailbox."""
            tactic = self.tactic
            for m in range(tactic.m_iters):
                for n in range(tactic.n_iters):
                    for value in range(4):
                        vocab, token = fragment_place(lane, value)
                        vocab = vocab + (warp_m * tactic.m_iters + m) * 16
                        word = mailbox_word(tactic, warp_k, vocab, token + n * 8)
                        mailbox[word] = sums[(m * tactic.n_iters + n) * 4 + value]

        def total(self, mailbox: Any, bias: Any, vocab_start: Any, place: Any, token: Any) -> Any:
            """The logit at ``place`` of the tile: the warps' sums, first to last, and the bias."""
            tactic = self.tactic
            value = mailbox[mailbox_word(tactic, 0, place, token)]
            for warp_k in range(1, tactic.warps_k):
                value = value + mailbox[mailbox_word(tactic, warp_k, place, token)]
            if self.has_bias:
                value = value + bias[vocab_start + place].to(Float32)
            return value

    return Kernel
