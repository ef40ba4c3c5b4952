"""A kernel for Hopper: the bulk copy engine streams weight tiles through a ring of shared memory into wgmma.

The vocabulary is the long side of the tensor-core instruction and the rows of x the short one, so eight rows cost no more
than one. One warp keeps the copy engine busy; the ring does not end with a vocabulary tile, so the next tile's weight
arrives while the last one's logits are written. The copy engine fills with zeros what lies outside the weight or x, so the
kernel takes every vocabulary and every hidden dimension whose rows are a multiple of 16 bytes apart.
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
from .compiling import CompiledBackend, launches_early

PANEL = 64  # columns that one copy brings: 128 bytes, the widest swizzle
VOCAB_TILES = (64, 128, 192, 256)  # a copy brings 256 rows at the most
TOKEN_TILES = (8, 16, 24, 32, 48, 64, 96, 128)
K_TILES = (64, 128, 256)
MAX_STAGES = 32
MAX_SUMS = 64  # fp32 sums of a thread; it holds as many accumulators besides
REGISTERS = 16384  # of a quarter of a multiprocessor, in which a warp stays
OTHER_REGISTERS = 32  # that a thread gets at least, beside sums and accumulators
MULTIPROCESSORS = 132  # of an H200; on a part with fewer, the CTAs that do not fit run after the others
# What createpolicy makes of these L2 policies.
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000
# Bytes of logits up to which the weight, which is read once, makes room for them in L2: a third of an H200's. What does not
# fit would be written to memory in any case, and what stays takes the place through which the weight streams
# (benchmarks/results/h200/kept_logits.json).
KEPT_LOGITS = 20 << 20
PADDING = 4  # fp32 words after each token of the staging buffer: a warp's stores then hit 32 banks


@dataclass(frozen=True)
class Tactic:
    """Tile sizes in elements, ring depth, warpgroups that share a vocabulary tile, CTAs (0: one for each tile).

    The CTAs of a cluster, one, two or four, take a vocabulary tile each and share what they read of x.
    """

    vocab_tile: int
    token_tile: int
    k_tile: int
    stages: int
    groups: int
    ctas: int
    cluster: int = 1

    def __str__(self) -> str:
        grid = f"{self.ctas} CTAs" if self.ctas else "a CTA per tile"
        pairs = {1: "", 2: " in pairs", 4: " in fours"}[self.cluster]
        tile = f"{self.vocab_tile}x{self.token_tile}x{self.k_tile}"
        return f"{tile}, {self.stages} stages, {self.groups} warpgroups, {grid}{pairs}"


def box_tokens(token_tile: int) -> int:
    """Tokens of x that one copy brings.

    Where a tile has several, the last copy begins early enough to end with the last token: filling in zeros for what lies
    outside of x takes longer than reading x, 2 to 9 % of a launch of pairs at 33 and 49 tokens
    (benchmarks/results/h200/outside_x.json). What is staged at a time comes from one copy.
    """
    if token_tile <= 16:
        return token_tile
    half = token_tile // 2
    return half if half % staged_tokens(token_tile) == 0 else token_tile // 3


def staged_tokens(token_tile: int) -> int:
    """Tokens that pass through the staging buffer at a time."""
    return 16 if token_tile % 16 == 0 else 8


def smem_bytes(tactic: Tactic) -> int:
    """Shared memory of one CTA, in bytes: the ring, the staging buffer and two barriers a stage."""
    ring = (tactic.vocab_tile + tactic.token_tile) * tactic.k_tile * 2 * tactic.stages
    staging = staged_tokens(tactic.token_tile) * (tactic.vocab_tile + PADDING * tactic.groups) * 4
    return ring + staging + 16 * tactic.stages


def resident_ctas(tactic: Tactic, arch: devices.Architecture) -> int:
    """CTAs that one multiprocessor has the shared memory and the registers for; at least one."""
    registers = 2 * tactic.vocab_tile * tactic.token_tile // (128 * tactic.groups) + OTHER_REGISTERS
    warps = 4 * (REGISTERS // (32 * registers))
    return max(1, min(arch.ctas(smem_bytes(tactic)), warps // (4 * tactic.groups + 1)))


def invalid(tactic: Tactic, arch: devices.Architecture) -> str | None:
    """None when the kernel can be compiled with ``tactic``, else why not."""
    if (
        tactic.vocab_tile not in VOCAB_TILES
        or tactic.token_tile not in TOKEN_TILES
        or tactic.k_tile not in K_TILES
        or tactic.groups not in (1, 2)
        or not 2 <= tactic.stages <= MAX_STAGES
        or tactic.ctas < 0
        or tactic.cluster not in (1, 2, 4)
        or tactic.ctas % tactic.cluster
    ):
        return f"tactic {tactic} is out of range"
    if tactic.vocab_tile % (64 * tactic.groups):
        return f"tactic {tactic} gives a warpgroup no multiple of 64 rows"
    if tactic.vocab_tile * tactic.token_tile // (128 * tactic.groups) > MAX_SUMS:
        return f"tactic {tactic} takes too many registers"
    if smem_bytes(tactic) > arch.smem_per_block:
        return (
            f"tactic {tactic} takes {smem_bytes(tactic)} bytes of shared memory; {arch.name} has {arch.smem_per_block}"
        )
    return None


def token_tile(rows: int) -> int:
    """The smallest tile that holds ``rows``; the largest where none does."""
    return next((tile for tile in TOKEN_TILES if tile >= rows), TOKEN_TILES[-1])


def deepest_ring(
    problem: Problem, vocab_tile: int, k_tile: int, groups: int, residents: int, persistent: bool, cluster: int = 1
) -> Tactic | None:
    """The tactic with as many stages as let ``residents`` CTAs live on one multiprocessor; None where 2 are too many.

    A persistent CTA's ring goes on into its next tile; otherwise more stages than k tiles would be of no use.
    """
    arch = devices.ARCHITECTURES[problem.arch]
    ctas = residents * MULTIPROCESSORS if persistent else 0
    k_tiles = math.ceil(problem.hidden / k_tile)
    most = MAX_STAGES if persistent else max(2, min(MAX_STAGES, k_tiles))
    for stages in range(most, 1, -1):
        tactic = Tactic(vocab_tile, token_tile(problem.rows), k_tile, stages, groups, ctas, cluster)
        if resident_ctas(tactic, arch) >= residents and invalid(tactic, arch) is None:
            return tactic
    return None


# As deepest_ring takes them: vocab_tile, k_tile, groups, CTAs on one multiprocessor, persistent, CTAs of a cluster.
Choice = tuple[int, int, int, int, bool, int]

# Beside each other on 17 shards and 12 whole heads at 4 to 64 rows (benchmarks/results/h200/hopper_default.json). Many small
# CTAs beat few large ones, and pairs that share what they read of x win at every row count where there are tiles for several
# rounds. There fours lose 1 to 41 %.
_PAIRS: Choice = (64, 128, 1, 2, True, 2)
_LARGE_PAIRS: Choice = (128, 128, 2, 2, True, 2)
_PER_TILE: Choice = (64, 128, 1, 3, False, 1)
_TWO: Choice = (64, 128, 1, 2, True, 1)
_ONE: Choice = (64, 128, 1, 1, True, 1)
# What autotune measures, by token tile.
_FEW = (_PAIRS, _PER_TILE, _TWO)
_MIDDLE = (_PAIRS, _PER_TILE, _TWO, _LARGE_PAIRS)
_MANY = (_PAIRS, _PER_TILE, _TWO, _LARGE_PAIRS, _ONE)
# Beyond 64 rows nothing serves unmeasured, and this list is an estimate.
_MOST = ((64, 64, 1, 2, True, 2), (64, 64, 1, 2, True, 1), (64, 128, 1, 2, False, 1), (128, 64, 2, 1, True, 2))
AUTOTUNED: dict[int, tuple[Choice, ...]] = {
    8: _FEW, 16: _FEW, 24: _MIDDLE, 32: _MIDDLE, 48: _MANY, 64: _MANY, 96: _MOST, 128: _MOST,
}  # fmt: skip


def _distinct(problem: Problem, choices: Sequence[Choice]) -> list[Tactic]:
    found = (deepest_ring(problem, *choice) for choice in choices)
    return list(dict.fromkeys(tactic for tactic in found if tactic is not None))


def _rounds(problem: Problem) -> float:
    """Vocabulary tiles for each CTA where two live on every multiprocessor."""
    return math.ceil(problem.vocab / _PAIRS[0]) / (2 * MULTIPROCESSORS)


def default_choice(problem: Problem) -> Choice:
    """What serves unmeasured."""
    tokens, rounds = token_tile(problem.rows), _rounds(problem)
    if tokens > 64:
        return _MOST[0]
    if rounds <= 0.5:  # each CTA has a multiprocessor to itself
        return _ONE if tokens >= 32 else _TWO
    if rounds <= 1:
        return _TWO if tokens >= 32 else _PER_TILE
    # Persistent CTAs save the start of the next tile, but if the last round is nearly empty, the GPU is for most of it.
    if math.ceil(rounds) > 1.1 * rounds:
        return _PER_TILE
    return _LARGE_PAIRS if tokens == 64 and problem.hidden >= 2048 and rounds > 2 else _PAIRS


def default_tactic(problem: Problem) -> Tactic:
    """The tactic for an untuned launch: several CTAs on a multiprocessor, so that one's epilogue meets another's stream."""
    return autotune_tactics(problem)[0]


def autotune_tactics(problem: Problem) -> list[Tactic]:
    """The default tactic, then those that beat it on some head."""
    return _distinct(problem, [default_choice(problem), *AUTOTUNED[token_tile(problem.rows)]])


def invariant_tactic(problem: Problem) -> Tactic:
    """The tactic for ``problem``'s rows whose order of additions is that of every other row count's.

    Each k tile is a chain of its own in the tensor core, whatever the other tile sizes, and the chains are added in turn:
    the order depends on the hidden dimension and the k tile alone.
    """
    tactic = deepest_ring(problem, 64, 64, 1, 2, True)
    assert tactic is not None
    return tactic


def sweep_tactics(problem: Problem) -> list[Tactic]:
    """Every tactic worth one measurement."""
    tiles = ((64, 1), (128, 1), (128, 2), (256, 2))
    choices = [
        (vocab_tile, k_tile, groups, residents, persistent, cluster)
        for cluster in (1, 2)
        for vocab_tile, groups in tiles
        for k_tile in K_TILES
        for residents in (1, 2, 3, 4)
        for persistent in (True, False)
        # What is in flight on a multiprocessor is at least two stages of each CTA, and one CTA that is not persistent
        # leaves its multiprocessor idle between two tiles.
        if (persistent or residents > 1) and vocab_tile * k_tile <= max(128 * 128, vocab_tile * 128)
    ]
    found = [*autotune_tactics(problem), *_distinct(problem, choices)]
    return list(dict.fromkeys(found))


class HopperStream(CompiledBackend):
    name = "hopper stream"
    architectures = frozenset({"sm_90a"})

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"x is {dtype_name(problem.dtype)}; it takes bfloat16 or float16"
        if problem.out_dtype not in (problem.dtype, torch.float32):
            return f"the output is {dtype_name(problem.out_dtype)}; it writes x's type or float32"
        if problem.hidden % 8:
            return f"hidden {problem.hidden} is not a multiple of 8"
        return flashinfer.unusable()

    def first(self, problem: Problem) -> bool:
        # Up to 8 rows warp split-K took 0.89 to 1.04 of the time of pairs on an H200, but 1.01 to 1.08 of the default's
        # where the second round is nearly empty (hopper_default.json).
        return problem.rows > 8 or 1 < _rounds(problem) <= 1.25

    def tactics(self, problem: Problem) -> list[Tactic]:
        # With few vocabulary tiles, or few in the second round, cuBLAS was up to 6 % quicker at 64 rows than the best choice
        # and never 3 % slower, if it likes the vocabulary (hopper_default.json: bfloat16 logits, no bias; taken to hold for
        # the others).
        few = (_rounds(problem) <= 0.5 and problem.hidden <= 8192) or 1 < _rounds(problem) <= 1.2
        return [] if problem.rows > 48 and few and problem.vocab % 16 == 0 else [default_tactic(problem)]

    def autotune_tactics(self, problem: Problem) -> list[Tactic]:
        return autotune_tactics(problem)

    def invariant_tactic(self, problem: Problem) -> Tactic:
        return invariant_tactic(problem)

    def smem_bytes(self, tactic: Tactic) -> int:
        return smem_bytes(tactic)

    def kernel(self, problem: Problem, tactic: Tactic) -> Any:
        """The jit function that launches the kernel."""
        arch = devices.ARCHITECTURES[problem.arch]
        reason = invalid(tactic, arch)
        if reason:
            raise ValueError(reason)
        early = launches_early(problem.arch)
        return _kernel_class()(problem.vocab, problem.hidden, tactic, resident_ctas(tactic, arch), early)


@functools.cache
def _kernel_class() -> Any:
    """The kernel's class. Imports the DSL."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
    from cutlass.memory import SmemAllocator

    group_threads = 128
    instruction_rows, instruction_k = 64, 16

    class StreamKernel:
        def __init__(self, vocab: int, hidden: int, tactic: Tactic, residents: int, early: bool) -> None:
            self.early = early
            self.vocab = vocab
            self.hidden = hidden
            self.residents = residents
            self.vocab_tile = tactic.vocab_tile
            self.token_tile = tactic.token_tile
            self.stages = tactic.stages
            self.groups = tactic.groups
            self.panels = tactic.k_tile // PANEL  # of one stage
            self.k_tiles = math.ceil(hidden / tactic.k_tile)
            self.cluster = tactic.cluster
            # The CTAs of a cluster go the same number of rounds: the last tile may lie outside of the weight as a whole.
            self.vocab_tiles = math.ceil(vocab / tactic.vocab_tile / self.cluster) * self.cluster
            self.ctas = min(tactic.ctas or self.vocab_tiles, self.vocab_tiles)
            self.group_rows = tactic.vocab_tile // tactic.groups
            self.blocks = self.group_rows // instruction_rows  # wgmma instructions for one step of k
            self.stage_bytes = (tactic.vocab_tile + tactic.token_tile) * tactic.k_tile * 2
            self.box_tokens = box_tokens(tactic.token_tile)
            self.boxes = tactic.token_tile // self.box_tokens
            self.staged_tokens = staged_tokens(tactic.token_tile)
            self.pitch = self.group_rows + PADDING

        @cute.jit
        def __call__(self, weight, x, bias, out, stream):  # type: ignore[no-untyped-def]
            dtype = weight.element_type
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
            ring = self.stages * self.panels
            weight_ring = cute.tile_to_shape(atom, (self.vocab_tile, PANEL, ring), (0, 1, 2))
            x_ring = cute.tile_to_shape(atom, (self.token_tile, PANEL, ring), (0, 1, 2))
            # The same places, by what one copy brings.
            x_boxes = cute.tile_to_shape(atom, (self.box_tokens, PANEL, ring * self.boxes), (0, 1, 2))
            # Sizes that the compiler does not know keep it from folding a mode that is smaller than its tile.
            sizes = (cutlass.Int32(self.vocab), cutlass.Int32(self.hidden))
            weight = cute.make_tensor(weight.iterator, cute.make_layout(sizes, stride=(self.hidden, 1)))
            x = cute.make_tensor(x.iterator, cute.make_layout((x.shape[0], sizes[1]), stride=(x.stride[0], 1)))
            weight_copy, weight_coordinates = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), weight, weight_ring, (self.vocab_tile, PANEL)
            )
            x_op = cpasync.CopyBulkTensorTileG2SOp if self.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp
            x_copy, x_coordinates = cpasync.make_tiled_tma_atom(x_op(), x, x_boxes, (self.box_tokens, PANEL))
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
            self.stream(
                mma, weight_copy, weight_coordinates, x_copy, x_coordinates, weight_ring, x_ring, x_boxes, bias, out
            ).launch(
                grid=(self.ctas, cute.ceil_div(out.shape[0], self.token_tile), 1),
                block=(group_threads * self.groups + 32, 1, 1),
                cluster=None if self.cluster == 1 else (self.cluster, 1, 1),
                stream=stream,
                # Left alone, the compiler takes up to twice the registers that it needs, and one CTA fits instead of two.
                min_blocks_per_mp=self.residents,
                use_pdl=self.early,
                preferred_smem_carveout=100,  # or the DSL asks the GPU at hand; an exported launch has it from the driver
            )

        @cute.kernel
        def stream(  # type: ignore[no-untyped-def]
            self,
            mma,
            weight_copy,
            weight_coordinates,
            x_copy,
            x_coordinates,
            weight_ring,
            x_ring,
            x_boxes,
            bias,
            out,
        ):
            thread, _, _ = cute.arch.thread_idx()
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
            cta, token_block, _ = cute.arch.block_idx()
            dtype = mma.op.a_dtype

            smem = SmemAllocator()
            weight_smem = smem.allocate_tensor(dtype, weight_ring.outer, byte_alignment=1024, swizzle=weight_ring.inner)
            x_smem = smem.allocate_tensor(dtype, x_ring.outer, byte_alignment=1024, swizzle=x_ring.inner)
            staging = smem.allocate_array(cutlass.Float32, self.groups * self.staged_tokens * self.pitch)
            full = smem.allocate_array(cutlass.Int64, self.stages)
            empty = smem.allocate_array(cutlass.Int64, self.stages)

            if warp == self.groups * 4:
                cpasync.prefetch_descriptor(weight_copy)
                cpasync.prefetch_descriptor(x_copy)
                with cute.arch.elect_one():
                    for stage in cutlass.range_constexpr(self.stages):
                        cute.arch.mbarrier_init(full + stage, 1)
                        cute.arch.mbarrier_init(empty + stage, self.cluster * self.groups * 4)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(self.early):
                cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(self.cluster == 1):
                cute.arch.barrier()
            else:
                cute.arch.cluster_arrive_relaxed()  # the fence has released the barriers
                cute.arch.cluster_wait()

            if warp == self.groups * 4:
                self.load(
                    weight_copy,
                    weight_coordinates,
                    x_copy,
                    x_coordinates,
                    weight_smem,
                    cute.make_tensor(x_smem.iterator, x_boxes.outer),
                    full,
                    empty,
                    out,
                    cta,
                    token_block,
                )
            else:
                self.multiply(mma, weight_smem, x_smem, staging, full, empty, bias, out, thread, cta, token_block)

        @cute.jit
        def first_token(self, own, rows):  # type: ignore[no-untyped-def]
            """The first token of the box whose own tokens begin at ``own``: the box ends where x does, or earlier."""
            return cutlass.max(cutlass.min(own, rows - self.box_tokens), 0)

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
            out,
            cta,
            token_block,
        ):
            """The producer warp: fills stage after stage, tile after tile."""
            weight_tiles = cute.local_tile(weight_coordinates, (self.vocab_tile, PANEL), (None, None))
            weight_to, weight_from = cpasync.tma_partition(
                weight_copy,
                0,
                cute.make_layout(1),
                cute.group_modes(weight_smem, 0, 2),
                cute.group_modes(weight_tiles, 0, 2),
            )
            x_to: Any = None  # the same for every box
            x_from: list[Any] = []
            for box in cutlass.range_constexpr(self.boxes):
                token = self.first_token(token_block * self.token_tile + box * self.box_tokens, out.shape[0])
                x_tiles = cute.local_tile(
                    cute.domain_offset((token, 0), x_coordinates), (self.box_tokens, PANEL), (0, None)
                )
                x_to, x_tiles = cpasync.tma_partition(
                    x_copy, 0, cute.make_layout(1), cute.group_modes(x_smem, 0, 2), cute.group_modes(x_tiles, 0, 2)
                )
                x_from.append(x_tiles)
            policy = cutlass.Int64(EVICT_FIRST)
            if out.shape[0] > KEPT_LOGITS // (self.vocab * (out.element_type.width // 8)):
                policy = cutlass.Int64(EVICT_NORMAL)
            stage = cutlass.Int32(0)
            phase = cutlass.Int32(1)  # a new barrier counts as one whose phase 1 is over: the first round does not wait
            for tile in cutlass.range(cta, self.vocab_tiles, self.ctas, unroll=1):
                for k_tile in cutlass.range(self.k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    with cute.arch.elect_one():
                        # Zeros that the copy engine fills in count as transferred.
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                    for panel in cutlass.range_constexpr(self.panels):
                        source = k_tile * self.panels + panel
                        target = stage * self.panels + panel
                        cute.copy(
                            weight_copy,
                            weight_from[(None, tile, source)],
                            weight_to[(None, target)],
                            tma_bar_ptr=full + stage,
                            cache_policy=policy,
                        )
                        # The CTAs of a cluster take turns. A box goes to the same place in both rings, and counts there.
                        for box in cutlass.range_constexpr(self.boxes):
                            if (source * self.boxes + box) % self.cluster == cta % self.cluster:
                                cute.copy(
                                    x_copy,
                                    x_from[box][(None, source)],
                                    x_to[(None, target * self.boxes + box)],
                                    tma_bar_ptr=full + stage,
                                    mcast_mask=cutlass.Int16(2**self.cluster - 1),
                                    cache_policy=cutlass.Int64(EVICT_NORMAL),
                                )
                    stage += 1
                    if stage == self.stages:
                        stage = cutlass.Int32(0)
                        phase = phase ^ 1
            if cutlass.const_expr(self.cluster > 1):
                # Shared memory must outlive what the other CTA does to it: its copies, which the consumers have waited for,
                # and its arrivals. A barrier of the cluster would also wait for the logits to be written.
                for _ in cutlass.range(self.stages, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    stage += 1
                    if stage == self.stages:
                        stage = cutlass.Int32(0)
                        phase = phase ^ 1

        @cute.jit
        def multiply(  # type: ignore[no-untyped-def]
            self, mma, weight_smem, x_smem, staging, full, empty, bias, out, thread, cta, token_block
        ):
            """A consumer warpgroup: its share of each vocabulary tile."""
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
            staging = staging + group * (self.staged_tokens * self.pitch)
            # A thread holds the rows (and the rows 8 further) of its place in a warp's 16, of each instruction's 64.
            row = lane // 32 * 16 + lane % 32 // 4
            biases = cute.make_rmem_tensor((2, self.blocks), cutlass.Float32)
            vector_width = 16 // (out.element_type.width // 8)
            vectors = out.iterator.toint() % 16 == 0 and (out.shape[0] == 1 or out.stride[0] % vector_width == 0)

            stage = cutlass.Int32(0)
            phase = cutlass.Int32(0)
            for tile in cutlass.range(cta, self.vocab_tiles, self.ctas, unroll=1):
                first = tile * self.vocab_tile + group * self.group_rows
                if cutlass.const_expr(bias is not None):
                    # Read now: the loads are over when the sums are complete.
                    for i in cutlass.range_constexpr(2 * self.blocks):
                        index = first + row + i % 2 * 8 + i // 2 * instruction_rows
                        biases[i] = cutlass.Float32(0)
                        if index < self.vocab:
                            biases[i] = bias[index].to(cutlass.Float32)
                sums.fill(0.0)
                for _ in cutlass.range(self.k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    # The tensor core truncates what it adds up, so each stage is a chain of its own, added to fp32 sums.
                    mma.set(warpgroup.Field.ACCUMULATE, False)
                    warpgroup.fence()
                    for panel in cutlass.range_constexpr(self.panels):
                        for step in cutlass.range_constexpr(PANEL // instruction_k):
                            at = (None, None, step, stage * self.panels + panel)
                            cute.gemm(mma, accumulators, weight_operand[at], x_operand[at], accumulators)
                            mma.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    # The stream, not the tensor core, sets the pace: a stage is given back at once rather than when the
                    # next one has arrived.
                    warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        for peer in cutlass.range_constexpr(self.cluster):
                            cute.arch.mbarrier_arrive(empty + stage, None if self.cluster == 1 else peer)
                    sums.store(sums.load() + accumulators.load())
                    stage += 1
                    if stage == self.stages:
                        stage = cutlass.Int32(0)
                        phase = phase ^ 1
                self.write(sums, biases, staging, bias, out, group, lane, row, first, token_block, vectors)

        @cute.jit
        def write(  # type: ignore[no-untyped-def]
            self, sums, biases, staging, bias, out, group, lane, row, first, token_block, vectors
        ):
            """The logits of a warpgroup's share, a few tokens at a time, through shared memory."""
            # For 64 tokens and 128 rows: 8 barriers and, with two warpgroups, 120 instructions of each warp (with one up to
            # 325; element by element four to five times as many), in all about 1 us. The default's two rings hold 128 KB of
            # weight: 4 us of the 33 bytes per ns that a multiprocessor gets from an H200's memory.
            rows = out.shape[0]
            vector_width = cutlass.const_expr(16 // (out.element_type.width // 8))
            chunks = self.token_tile // self.staged_tokens
            block_sums = self.token_tile // 2  # of one instruction
            for chunk in cutlass.range_constexpr(chunks):
                place = chunk * self.staged_tokens
                own = token_block * self.token_tile + place // self.box_tokens * self.box_tokens
                token = self.first_token(own, rows) + place % self.box_tokens
                if token + self.staged_tokens > own and token < rows:
                    # The staging buffer has been read: by the last chunk, or the last tile.
                    cute.arch.barrier(barrier_id=group + 1, number_of_threads=group_threads)
                    column = lane % 4 * 2
                    for block in cutlass.range_constexpr(self.blocks):
                        for i in cutlass.range_constexpr(self.staged_tokens // 2):
                            value = sums[block * block_sums + chunk * (self.staged_tokens // 2) + i]
                            if cutlass.const_expr(bias is not None):
                                value = value + biases[block * 2 + i // 2 % 2]
                            offset = (i // 4 * 8 + i % 2) * self.pitch + i // 2 % 2 * 8 + block * instruction_rows
                            (staging + column * self.pitch + row + offset).store(value)
                    cute.arch.barrier(barrier_id=group + 1, number_of_threads=group_threads)
                    if vectors and first + self.group_rows <= self.vocab:
                        self.write_vectors(staging, out, lane, first, token, own, vector_width)
                    else:
                        self.write_elements(staging, out, lane, first, token, own)

        @cute.jit
        def write_vectors(self, staging, out, lane, first, token, own, vector_width):  # type: ignore[no-untyped-def]
            """Staged tokens, from ``own`` on, to global memory, 16 bytes a store."""
            per_token = self.group_rows // vector_width
            total = self.staged_tokens * per_token
            for i in cutlass.range_constexpr(math.ceil(total / group_threads)):
                index = lane + i * group_threads
                line = index // per_token
                if index < total and own <= token + line and token + line < out.shape[0]:
                    column = index % per_token * vector_width
                    source = staging + cute.assume(line * self.pitch + column, divby=4)
                    values = cute.make_rmem_tensor(vector_width, cutlass.Float32)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(vector_width)), values)
                    logits = cute.make_rmem_tensor(vector_width, out.element_type)
                    logits.store(values.load().to(out.element_type))
                    address = (out.iterator + (cutlass.Int64(token + line) * out.stride[0] + first + column)).toint()
                    target = cute.make_ptr(out.element_type, address, cute.AddressSpace.gmem, assumed_align=16)
                    cute.autovec_copy(logits, cute.make_tensor(target, cute.make_layout(vector_width)))

        @cute.jit
        def write_elements(self, staging, out, lane, first, token, own):  # type: ignore[no-untyped-def]
            """Staged tokens, from ``own`` on, to global memory one by one, as far as the vocabulary goes."""
            total = self.staged_tokens * self.group_rows
            for index in cutlass.range(lane, total, group_threads, unroll=4):
                line = index // self.group_rows
                column = index % self.group_rows
                if own <= token + line and token + line < out.shape[0] and first + column < self.vocab:
                    logit = (staging + line * self.pitch + column).load().to(out.element_type)
                    (out.iterator + (cutlass.Int64(token + line) * out.stride[0] + first + column)).store(logit)

    return StreamKernel
