"""A kernel for Hopper: a cluster of CTAs splits the hidden dimension, and each CTA keeps its part of x in shared memory.

x is read once per CTA instead of once per vocabulary tile, so the weight is all that passes through L2 again and again,
and a tile is over the sooner the more CTAs share it, so that the GPU ends its last tiles together. The partial sums of a
tile go straight into the shared memory of the CTA that writes those logits, where they are added in the order of the
hidden dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import devices
from . import flashinfer
from .base import Problem, dtype_name
from .compiling import CompiledBackend

PANEL = 64  # columns that one copy brings: 128 bytes, the widest swizzle
VOCAB_TILES = (64, 128, 256)  # a copy brings 256 rows at the most
TOKEN_TILES = (8, 16, 24, 32, 48, 64)
STAGE_PANELS = (1, 2, 4)
CLUSTERS = (1, 2, 4, 8)  # 8 CTAs are the most that every Hopper GPU launches
MAX_STAGES = 32
MAX_SUMS = 64  # fp32 sums of a thread; it holds as many accumulators besides
REGISTERS = 65536  # of a multiprocessor
OTHER_REGISTERS = 40  # that a thread gets at least, beside sums and accumulators
MULTIPROCESSORS = 132  # of an H200; on a part with fewer, the CTAs that do not fit run after the others
WRITERS = 128  # threads that add up and write logits


@dataclass(frozen=True)
class Tactic:
    """Tile sizes in elements, panels of 64 columns in a stage, ring depth, warpgroups that share a vocabulary tile, CTAs of a
    cluster, CTAs of the launch."""

    vocab_tile: int
    token_tile: int
    panels: int
    stages: int
    groups: int
    cluster: int
    ctas: int
    late: int = 0

    def __str__(self) -> str:
        tile = f"{self.vocab_tile}x{self.token_tile}x{self.panels * PANEL}"
        late = f", late {self.late}" if self.late else ""
        return f"{tile}, {self.stages} stages, {self.groups} groups, {self.ctas} CTAs in clusters of {self.cluster}{late}"


def cta_panels(hidden: int, tactic: Tactic) -> int:
    """Panels of the hidden dimension that each CTA of a cluster takes; the last one may get fewer."""
    return math.ceil(hidden / (PANEL * tactic.panels * tactic.cluster)) * tactic.panels


def slots(tactic: Tactic) -> int:
    """Pairs of tokens whose logits one CTA of a cluster writes."""
    return math.ceil(tactic.token_tile // 2 / tactic.cluster)


def smem_bytes(hidden: int, tactic: Tactic) -> int:
    """Shared memory of one CTA, in bytes: the ring, its part of x, what the cluster sends it, and the barriers."""
    ring = tactic.vocab_tile * tactic.panels * PANEL * 2 * tactic.stages
    x = tactic.token_tile * cta_panels(hidden, tactic) * PANEL * 2
    sent = tactic.cluster * slots(tactic) * tactic.vocab_tile * 2 * 4
    return ring + x + sent + 16 * tactic.stages + 64


def resident_ctas(hidden: int, tactic: Tactic, arch: devices.Architecture) -> int:
    """CTAs that one multiprocessor has the shared memory and the registers for; at least one."""
    registers = 2 * tactic.vocab_tile * tactic.token_tile // (128 * tactic.groups) + OTHER_REGISTERS
    threads = 128 * tactic.groups + WRITERS + 32
    by_registers = REGISTERS // (math.ceil(registers / 8) * 8 * threads)
    return max(1, min(arch.ctas(smem_bytes(hidden, tactic)), by_registers))


def invalid(hidden: int, tactic: Tactic, arch: devices.Architecture) -> str | None:
    """None when the kernel can be compiled with ``tactic``, else why not."""
    if (
        tactic.vocab_tile not in VOCAB_TILES
        or tactic.token_tile not in TOKEN_TILES
        or tactic.panels not in STAGE_PANELS
        or tactic.groups not in (1, 2)
        or not 2 <= tactic.stages <= MAX_STAGES
        or tactic.cluster not in CLUSTERS
        or tactic.ctas < 1
        or tactic.ctas % tactic.cluster
    ):
        return f"tactic {tactic} is out of range"
    if tactic.vocab_tile % (64 * tactic.groups):
        return f"tactic {tactic} gives a warpgroup no multiple of 64 rows"
    if tactic.vocab_tile * tactic.token_tile // (128 * tactic.groups) > MAX_SUMS:
        return f"tactic {tactic} takes too many registers"
    if (tactic.cluster - 1) * cta_panels(hidden, tactic) * PANEL >= hidden:
        return f"tactic {tactic} leaves a CTA of the cluster without a part of hidden {hidden}"
    size = smem_bytes(hidden, tactic)
    if size > arch.smem_per_block:
        return f"tactic {tactic} takes {size} bytes of shared memory; {arch.name} has {arch.smem_per_block}"
    return None


def token_tile(rows: int) -> int:
    """The smallest tile that holds ``rows``; the largest where none does."""
    return next((tile for tile in TOKEN_TILES if tile >= rows), TOKEN_TILES[-1])


def deepest_ring(
    problem: Problem, vocab_tile: int, panels: int, groups: int, cluster: int, residents: int, ctas: int, late: int = 0
) -> Tactic | None:
    """The tactic with as many stages as let ``residents`` CTAs live on one multiprocessor; None where 2 are too many."""
    arch = devices.ARCHITECTURES[problem.arch]
    for stages in range(MAX_STAGES, 1, -1):
        tactic = Tactic(vocab_tile, token_tile(problem.rows), panels, stages, groups, cluster, ctas, late)
        if resident_ctas(problem.hidden, tactic, arch) >= residents and invalid(problem.hidden, tactic, arch) is None:
            return tactic
    return None


# As deepest_ring takes them: vocab_tile, panels, groups, CTAs of a cluster, CTAs on one multiprocessor, CTAs, late.
Choice = tuple[int, int, int, int, int, int, int]


def _distinct(problem: Problem, choices: Sequence[Choice]) -> list[Tactic]:
    found = (deepest_ring(problem, *choice) for choice in choices)
    return list(dict.fromkeys(tactic for tactic in found if tactic is not None))


def default_tactic(problem: Problem) -> Tactic:
    """The tactic for an untuned launch."""
    return autotune_tactics(problem)[0]


def autotune_tactics(problem: Problem) -> list[Tactic]:
    """The default tactic, then those that beat it on some head."""
    return _distinct(
        problem,
        [
            (128, 1, 2, 8, 1, 128, 0),
            (128, 1, 2, 4, 1, 128, 0),
            (64, 2, 1, 4, 2, 264, 0),
            (64, 2, 1, 2, 2, 264, 0),
            (64, 2, 1, 1, 2, 264, 0),
            (64, 2, 1, 1, 1, 132, 0),
        ],
    )


def sweep_tactics(problem: Problem) -> list[Tactic]:
    """Every tactic worth one measurement."""
    choices = [
        (vocab_tile, panels, groups, cluster, residents, ctas, late)
        for cluster in CLUSTERS
        for vocab_tile, groups, panels in ((64, 1, 2), (128, 2, 1), (128, 2, 2))
        for residents in (1, 2)
        for ctas in ((128, 132) if residents == 1 and cluster == 4 else (128,) if residents == 1 and cluster == 8 else (132 * residents,))
        for late in ((0, 4) if residents == 1 else (0, 4, -6))
    ]
    return list(dict.fromkeys([*autotune_tactics(problem), *_distinct(problem, choices)]))


class HopperSplitK(CompiledBackend):
    name = "hopper split-K"
    architectures = frozenset({"sm_90a"})

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"x is {dtype_name(problem.dtype)}; it takes bfloat16 or float16"
        if problem.out_dtype not in (problem.dtype, torch.float32):
            return f"the output is {dtype_name(problem.out_dtype)}; it writes x's type or float32"
        if problem.hidden % 8:
            return f"hidden {problem.hidden} is not a multiple of 8"
        if not autotune_tactics(problem):
            return f"x of {problem.rows} rows and hidden {problem.hidden} does not fit the shared memory of a cluster"
        return flashinfer.unusable()

    def tactics(self, problem: Problem) -> list[Tactic]:
        return [default_tactic(problem)]

    def autotune_tactics(self, problem: Problem) -> list[Tactic]:
        return autotune_tactics(problem)

    def smem_bytes(self, tactic: Tactic) -> int | None:
        return None  # depends on the hidden dimension

    def kernel(self, problem: Problem, tactic: Tactic) -> Any:
        """The jit function that launches the kernel."""
        arch = devices.ARCHITECTURES[problem.arch]
        reason = invalid(problem.hidden, tactic, arch)
        if reason:
            raise ValueError(reason)
        residents = resident_ctas(problem.hidden, tactic, arch)
        return _kernel_class()(problem.vocab, problem.hidden, tactic, residents)


@functools.cache
def _kernel_class() -> Any:
    """The kernel's class. Imports the DSL."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
    from cutlass.memory import SmemAllocator

    # What createpolicy makes of these L2 policies. The weight is read once and must not push x out of the cache.
    evict_normal, evict_first = 0x1000000000000000, 0x12F0000000000000
    group_threads = 128
    instruction_rows, instruction_k = 64, 16
    cluster_scope = cute.nvgpu.common.nvvm.MemScopeKind.CLUSTER if False else None  # replaced below
    from cutlass._mlir.dialects import nvvm

    cluster_scope = nvvm.MemScopeKind.CLUSTER

    class SplitKKernel:
        def __init__(self, vocab: int, hidden: int, tactic: Tactic, residents: int) -> None:
            self.vocab = vocab
            self.hidden = hidden
            self.residents = residents
            self.vocab_tile = tactic.vocab_tile
            self.token_tile = tactic.token_tile
            self.stages = tactic.stages
            self.groups = tactic.groups
            self.panels = tactic.panels  # of one stage
            self.cluster = tactic.cluster
            self.cta_panels = cta_panels(hidden, tactic)
            self.all_panels = math.ceil(hidden / PANEL)
            self.vocab_tiles = math.ceil(vocab / tactic.vocab_tile)
            self.clusters = min(tactic.ctas // tactic.cluster, self.vocab_tiles)
            rounds = self.vocab_tiles // self.clusters
            if tactic.late > 0:
                rounds = rounds * 3 // 4
            self.early_tiles = self.clusters * rounds if tactic.late >= 0 else 0
            if tactic.late == 0:
                self.early_tiles = self.vocab_tiles
            if tactic.late < 0:
                self.clusters = 0
            self.late_clusters = 0 if tactic.late == 0 else math.ceil((self.vocab_tiles - self.early_tiles) / abs(tactic.late))
            self.group_rows = tactic.vocab_tile // tactic.groups
            self.blocks = self.group_rows // instruction_rows  # wgmma instructions for one step of k
            self.all_blocks = tactic.vocab_tile // instruction_rows
            self.stage_bytes = tactic.vocab_tile * tactic.panels * PANEL * 2
            self.pairs = tactic.token_tile // 2
            self.slots = slots(tactic)
            self.writing_ctas = min(self.cluster, self.pairs)  # of a cluster

        @cute.jit
        def __call__(self, weight, x, bias, out, stream):  # type: ignore[no-untyped-def]
            dtype = weight.element_type
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
            weight_ring = cute.tile_to_shape(atom, (self.vocab_tile, PANEL, self.stages * self.panels), (0, 1, 2))
            x_part = cute.tile_to_shape(atom, (self.token_tile, PANEL, self.cta_panels), (0, 1, 2))
            # Sizes that the compiler does not know keep it from folding a mode that is smaller than its tile.
            sizes = (cutlass.Int32(self.vocab), cutlass.Int32(self.hidden))
            weight = cute.make_tensor(weight.iterator, cute.make_layout(sizes, stride=(self.hidden, 1)))
            x = cute.make_tensor(x.iterator, cute.make_layout((x.shape[0], sizes[1]), stride=(x.stride[0], 1)))
            load = cpasync.CopyBulkTensorTileG2SOp()
            weight_copy, weight_coordinates = cpasync.make_tiled_tma_atom(
                load, weight, weight_ring, (self.vocab_tile, PANEL)
            )
            x_copy, x_coordinates = cpasync.make_tiled_tma_atom(load, x, x_part, (self.token_tile, PANEL))
            mma = cute.make_tiled_mma(
                warpgroup.MmaF16BF16Op(
                    dtype,
                    cutlass.Float32,
                    (instruction_rows, self.token_tile, instruction_k),
                    warpgroup.OperandSource.SMEM,
                    OperandMajorMode.K,
                    OperandMajorMode.K,
                )
            )
            self.splitk(
                mma, weight_copy, weight_coordinates, x_copy, x_coordinates, weight_ring, x_part, bias, out
            ).launch(
                grid=((self.clusters + self.late_clusters) * self.cluster, cute.ceil_div(out.shape[0], self.token_tile), 1),
                block=(group_threads * self.groups + WRITERS + 32, 1, 1),
                cluster=None if self.cluster == 1 else (self.cluster, 1, 1),
                stream=stream,
                min_blocks_per_mp=self.residents,
                preferred_smem_carveout=100,  # or the DSL asks the GPU at hand; an exported launch has it from the driver
            )

        @cute.kernel
        def splitk(  # type: ignore[no-untyped-def]
            self,
            mma,
            weight_copy,
            weight_coordinates,
            x_copy,
            x_coordinates,
            weight_ring,
            x_part,
            bias,
            out,
        ):
            thread, _, _ = cute.arch.thread_idx()
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            cta, token_block, _ = cute.arch.block_idx()
            rank = cta % self.cluster
            dtype = mma.op.a_dtype

            smem = SmemAllocator()
            weight_smem = smem.allocate_tensor(dtype, weight_ring.outer, byte_alignment=1024, swizzle=weight_ring.inner)
            x_smem = smem.allocate_tensor(dtype, x_part.outer, byte_alignment=1024, swizzle=x_part.inner)
            sent_layout = cute.make_layout(self.cluster * self.slots * self.all_blocks * 128)
            sent = smem.allocate_tensor(cutlass.Float32, sent_layout, byte_alignment=128).iterator
            full = smem.allocate_array(cutlass.Int64, self.stages)
            empty = smem.allocate_array(cutlass.Int64, self.stages)
            others = smem.allocate_array(cutlass.Int64, 3)
            x_full, sums_full, sums_read = others, others + 1, others + 2

            if warp == self.groups * 4:
                cpasync.prefetch_descriptor(weight_copy)
                cpasync.prefetch_descriptor(x_copy)
                with cute.arch.elect_one():
                    for stage in cutlass.range_constexpr(self.stages):
                        cute.arch.mbarrier_init(full + stage, 1)
                        cute.arch.mbarrier_init(empty + stage, self.groups * 4)
                    cute.arch.mbarrier_init(x_full, 1)
                    cute.arch.mbarrier_init(sums_full, 1 if self.cluster > 1 else self.groups * 4)
                    cute.arch.mbarrier_init(sums_read, self.writing_ctas)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(self.cluster == 1):
                cute.arch.barrier()
            else:
                cute.arch.cluster_arrive_relaxed()  # the fence has released the barriers
                cute.arch.cluster_wait()

            first_panel = rank * self.cta_panels
            my_panels = cutlass.min(self.all_panels - first_panel, self.cta_panels)
            k_tiles = cute.ceil_div(my_panels, self.panels)
            cluster = cta // self.cluster
            begin, end, step = cluster, cutlass.Int32(self.early_tiles), cutlass.Int32(self.clusters)
            if cluster >= self.clusters:
                begin = self.early_tiles + cluster - self.clusters
                end = cutlass.Int32(self.vocab_tiles)
                step = cutlass.Int32(self.late_clusters)
            span = (begin, end, step)
            if warp == self.groups * 4:
                self.load(
                    weight_copy,
                    weight_coordinates,
                    x_copy,
                    x_coordinates,
                    weight_smem,
                    x_smem,
                    full,
                    empty,
                    x_full,
                    first_panel,
                    k_tiles,
                    span,
                    token_block,
                )
            elif warp < self.groups * 4:
                self.multiply(
                    mma,
                    weight_smem,
                    x_smem,
                    sent,
                    full,
                    empty,
                    x_full,
                    sums_full,
                    sums_read,
                    thread,
                    rank,
                    k_tiles,
                    span,
                )
            elif rank < self.writing_ctas:
                self.write(
                    sent,
                    sums_full,
                    sums_read,
                    bias,
                    out,
                    thread - group_threads * self.groups - 32,
                    rank,
                    span,
                    token_block,
                )

        @cute.jit
        def load(  # type: ignore[no-untyped-def]
            self,
            weight_copy,
            weight_coordinates,
            x_copy,
            x_coordinates,
            weight_smem,
            x_smem,
            full,
            empty,
            x_full,
            first_panel,
            k_tiles,
            span,
            token_block,
        ):
            """The producer warp: x, then stage after stage of the weight, tile after tile."""
            weight_tiles = cute.local_tile(weight_coordinates, (self.vocab_tile, PANEL), (None, None))
            x_tiles = cute.local_tile(x_coordinates, (self.token_tile, PANEL), (token_block, None))
            weight_to, weight_from = cpasync.tma_partition(
                weight_copy,
                0,
                cute.make_layout(1),
                cute.group_modes(weight_smem, 0, 2),
                cute.group_modes(weight_tiles, 0, 2),
            )
            x_to, x_from = cpasync.tma_partition(
                x_copy, 0, cute.make_layout(1), cute.group_modes(x_smem, 0, 2), cute.group_modes(x_tiles, 0, 2)
            )
            with cute.arch.elect_one():
                # Zeros that the copy engine fills in count as transferred.
                cute.arch.mbarrier_arrive_and_expect_tx(x_full, self.token_tile * self.cta_panels * PANEL * 2)
            for panel in cutlass.range(self.cta_panels, unroll=1):
                cute.copy(
                    x_copy,
                    x_from[(None, first_panel + panel)],
                    x_to[(None, panel)],
                    tma_bar_ptr=x_full,
                    cache_policy=cutlass.Int64(evict_normal),
                )
            stage = cutlass.Int32(0)
            phase = cutlass.Int32(1)  # a new barrier counts as one whose phase 1 is over: the first round does not wait
            for tile in cutlass.range(span[0], span[1], span[2], unroll=1):
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                    for panel in cutlass.range_constexpr(self.panels):
                        cute.copy(
                            weight_copy,
                            weight_from[(None, tile, first_panel + k_tile * self.panels + panel)],
                            weight_to[(None, stage * self.panels + panel)],
                            tma_bar_ptr=full + stage,
                            cache_policy=cutlass.Int64(evict_first),
                        )
                    stage += 1
                    if stage == self.stages:
                        stage = cutlass.Int32(0)
                        phase = phase ^ 1

        @cute.jit
        def multiply(  # type: ignore[no-untyped-def]
            self,
            mma,
            weight_smem,
            x_smem,
            sent,
            full,
            empty,
            x_full,
            sums_full,
            sums_read,
            thread,
            rank,
            k_tiles,
            span,
        ):
            """A warpgroup: its share of each vocabulary tile, over the CTA's part of the hidden dimension."""
            group = cute.arch.make_warp_uniform(thread // group_threads)
            lane = thread % group_threads
            weight_share = cute.local_tile(
                weight_smem, (self.group_rows, PANEL, self.stages * self.panels), (group, 0, 0)
            )
            slice_ = mma.get_slice(0)
            weight_operand = mma.make_fragment_A(slice_.partition_A(weight_share))
            x_operand = mma.make_fragment_B(slice_.partition_B(x_smem))
            shape = mma.partition_shape_C((self.group_rows, self.token_tile))
            accumulators = cute.make_rmem_tensor(shape, cutlass.Float32)
            sums = cute.make_rmem_tensor(shape, cutlass.Float32)

            cute.arch.mbarrier_wait(x_full, 0)
            stage = cutlass.Int32(0)
            phase = cutlass.Int32(0)
            sums_phase = cutlass.Int32(1)
            for _tile in cutlass.range(span[0], span[1], span[2], unroll=1):
                sums.fill(0.0)
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    # The tensor core truncates what it adds up, so each stage is a chain of its own, added to fp32 sums.
                    mma.set(warpgroup.Field.ACCUMULATE, False)
                    warpgroup.fence()
                    for panel in cutlass.range_constexpr(self.panels):
                        for step in cutlass.range_constexpr(PANEL // instruction_k):
                            cute.gemm(
                                mma,
                                accumulators,
                                weight_operand[(None, None, step, stage * self.panels + panel)],
                                x_operand[(None, None, step, k_tile * self.panels + panel)],
                                accumulators,
                            )
                            mma.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + stage)
                    sums.store(sums.load() + accumulators.load())
                    stage += 1
                    if stage == self.stages:
                        stage = cutlass.Int32(0)
                        phase = phase ^ 1
                # Every CTA of the cluster has read what the last tile sent it.
                cute.arch.mbarrier_wait(sums_read, sums_phase)
                sums_phase = sums_phase ^ 1
                self.send(sums, sent, sums_full, group, lane, rank)
            # The other CTAs' last arrivals here: until then this CTA's shared memory must not go.
            cute.arch.mbarrier_wait(sums_read, sums_phase)

        @cute.jit
        def send(self, sums, sent, sums_full, group, lane, rank):  # type: ignore[no-untyped-def]
            """The warpgroup's sums to the CTAs that write them: tokens two by two, in turn.

            A thread holds, of each 64 rows and 8 tokens, 2 rows (8 apart) by 2 tokens: 16 bytes, one store. What is sent is
            permuted so that neither these stores nor the reads of ``write`` meet in a bank.
            """
            words = cute.recast_tensor(sums, cutlass.Int32)
            warp, row, pair_of_8 = lane // 32, lane % 32 // 4, lane % 4
            for block in cutlass.range_constexpr(self.blocks):
                for eight in cutlass.range_constexpr(self.token_tile // 8):
                    pair = eight * 4 + pair_of_8
                    at = self.place(rank, pair // self.cluster, group * self.blocks + block, warp, row)
                    first = (block * (self.token_tile // 8) + eight) * 4
                    target = sent + cute.assume(at * 4, divby=4)
                    if cutlass.const_expr(self.cluster > 1):
                        four = (words[first], words[first + 1], words[first + 2], words[first + 3])
                        cute.arch.store_async_dsmem(target, four, sums_full, pair % self.cluster)
                    else:
                        values = cute.make_rmem_tensor(4, cutlass.Float32)
                        for i in cutlass.range_constexpr(4):
                            values[i] = sums[first + i]
                        cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(4)))
            if cutlass.const_expr(self.cluster == 1):
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(sums_full)

        @cute.jit
        def place(self, source, slot, block, warp, row):  # type: ignore[no-untyped-def]
            """Where the 16 bytes of two rows and two tokens lie: which CTA's sums, pair, 64 rows, 16 rows, rows 0 to 7 of them."""
            line = slot * self.all_blocks + block
            lines = self.slots * self.all_blocks
            return ((source * lines + line) * 4 + warp) * 8 + (row ^ warp ^ (line % 2 * 4))

        @cute.jit
        def write(  # type: ignore[no-untyped-def]
            self, sent, sums_full, sums_read, bias, out, lane, rank, span, token_block
        ):
            """The writers: add up what the CTAs of the cluster have sent, and write it."""
            rows = out.shape[0]
            vector_width = cutlass.const_expr(16 // (out.element_type.width // 8))
            vectors = out.iterator.toint() % 16 == 0 and (out.shape[0] == 1 or out.stride[0] % vector_width == 0)
            mine = (self.pairs - rank + self.cluster - 1) // self.cluster  # pairs of tokens
            phase = cutlass.Int32(0)
            for tile in cutlass.range(span[0], span[1], span[2], unroll=1):
                if cutlass.const_expr(self.cluster > 1):
                    if lane == 0:
                        expected = mine * (self.cluster * self.all_blocks * 512)
                        cute.arch.mbarrier_arrive_and_expect_tx(sums_full, expected)
                cute.arch.mbarrier_wait(sums_full, phase)
                phase = phase ^ 1
                first = tile * self.vocab_tile
                if vectors and first + self.vocab_tile <= self.vocab:
                    self.write_vectors(sent, bias, out, lane, rank, first, token_block, rows, vector_width)
                else:
                    self.write_elements(sent, bias, out, lane, rank, first, token_block, rows)
                cute.arch.barrier(barrier_id=1, number_of_threads=WRITERS)
                if lane < self.cluster:
                    if cutlass.const_expr(self.cluster > 1):
                        cute.arch.mbarrier_arrive(sums_read, lane, scope=cluster_scope)
                    else:
                        cute.arch.mbarrier_arrive(sums_read)

        @cute.jit
        def write_vectors(  # type: ignore[no-untyped-def]
            self, sent, bias, out, lane, rank, first, token_block, rows, vector_width
        ):
            """16 bytes a store: consecutive threads have consecutive rows of one token."""
            vectors = instruction_rows // vector_width  # of 64 rows
            total = vectors * 2 * self.slots * self.all_blocks
            for i in cutlass.range_constexpr(math.ceil(total / WRITERS)):
                index = lane + i * WRITERS
                line = index // (vectors * 2)
                second = index // vectors % 2
                pair = line // self.all_blocks * self.cluster + rank
                token = token_block * self.token_tile + pair * 2 + second
                if index < total and pair < self.pairs and token < rows:
                    row = index % vectors * vector_width  # of 64
                    block = line % self.all_blocks
                    values = cute.make_rmem_tensor(vector_width, cutlass.Float32)
                    for j in cutlass.range_constexpr(vector_width):
                        values[j] = self.total(sent, line // self.all_blocks, block, row + j, second)
                    column = first + block * instruction_rows + row
                    if cutlass.const_expr(bias is not None):
                        for j in cutlass.range_constexpr(vector_width):
                            values[j] = values[j] + bias[column + j].to(cutlass.Float32)
                    logits = cute.make_rmem_tensor(vector_width, out.element_type)
                    logits.store(values.load().to(out.element_type))
                    address = (out.iterator + (cutlass.Int64(token) * out.stride[0] + column)).toint()
                    target = cute.make_ptr(out.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(logits, cute.make_tensor(target, cute.make_layout(vector_width)))

        @cute.jit
        def write_elements(  # type: ignore[no-untyped-def]
            self, sent, bias, out, lane, rank, first, token_block, rows
        ):
            """Element by element, as far as the vocabulary goes."""
            total = self.slots * 2 * self.vocab_tile
            for index in cutlass.range(lane, total, WRITERS, unroll=1):
                row = index % self.vocab_tile
                second = index // self.vocab_tile % 2
                slot = index // (self.vocab_tile * 2)
                pair = slot * self.cluster + rank
                token = token_block * self.token_tile + pair * 2 + second
                column = first + row
                if pair < self.pairs and token < rows and column < self.vocab:
                    value = self.total(sent, slot, row // instruction_rows, row % instruction_rows, second)
                    if cutlass.const_expr(bias is not None):
                        value = value + bias[column].to(cutlass.Float32)
                    (out.iterator + (cutlass.Int64(token) * out.stride[0] + column)).store(value.to(out.element_type))

        @cute.jit
        def total(self, sent, slot, block, row, second):  # type: ignore[no-untyped-def]
            """The sum over the cluster of one logit: of a pair of tokens the first or second, row 0 to 63 of a block."""
            within = row // 8 % 2 * 2 + second
            value = cutlass.Float32(0)
            for source in cutlass.range_constexpr(self.cluster):
                at = self.place(source, slot, block, row // 16, row % 8)
                value = value + (sent + (at * 4 + within)).load()
            return value

    return SplitKKernel
