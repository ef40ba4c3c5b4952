"""The stream kernels without a GPU: their index maps, one CTA after the other in Python, and what compiles."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from lowbatch_lmhead import devices, elf
from lowbatch_lmhead.backends import Problem, flashinfer, hopper_stream, stream
from lowbatch_lmhead.backends.stream import Tactic

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ARCHITECTURES = sorted(stream.Stream.architectures)
HEADS = ((1, 8), (17, 72), (49155, 576), (16160, 1024), (128256, 2880), (129280, 7168), (256000, 12288), (1000, 16384))
compiles = pytest.mark.skipif(flashinfer.unusable() is not None, reason=flashinfer.unusable() or "")


def usual(**changes) -> Problem:
    return dataclasses.replace(Problem(49155, 2880, 1, BF16, BF16, False, "sm_90a"), **changes)


# --- A CTA in Python, by the index functions that the kernel calls -----------------------------------------------------


class Ring:
    """The ring in shared memory, in chunks of 16 bytes; NaN where nothing has been written."""

    def __init__(self, size: int) -> None:
        self.data = np.full(size // stream.ITEM, np.nan)

    def __getitem__(self, at: int) -> np.ndarray:
        assert at % stream.CHUNK_BYTES == 0
        assert 0 <= at <= 2 * len(self.data) - stream.CHUNK_BYTES
        return self.data[at // stream.ITEM : at // stream.ITEM + stream.CHUNK]


def without_conflicts(addresses: list[int]) -> None:
    """Eight lanes at a time go to eight different groups of four banks."""
    for start in range(0, len(addresses), 8):
        group = addresses[start : start + 8]
        assert len({at // stream.CHUNK_BYTES % 8 for at in group}) == len(group)


def load(tactic, ring, weight, x, vocab_start, token_start, k_tile, slot) -> None:
    """All threads' copies of one k tile."""
    (vocab, hidden), rows = weight.shape, len(x)
    step, k_start, written = stream.copy_rows(tactic), k_tile * tactic.k_tile, {}
    for thread in range(tactic.threads):
        row, chunk = stream.copy_source(tactic, thread)
        offsets = [stream.chunk_offset(tactic, row + i * step, chunk) for i in range(math.lcm(8, step) // step)]
        column = k_start + chunk * stream.CHUNK
        copies = [("weight", i, weight, vocab_start, vocab, 0) for i in range(stream.weight_copies(tactic))]
        copies += [("x", i, x, token_start, rows, tactic.vocab_tile) for i in range(stream.x_copies(tactic))]
        for what, i, source, start, end, place in copies:
            if what == "x" and row + i * step >= tactic.token_tile:
                continue
            at = slot + offsets[i % len(offsets)]
            at += (place + i // len(offsets) * len(offsets) * step) * tactic.row_bytes
            there = start + row + i * step < end and column < hidden
            ring[at][:] = source[start + row + i * step, column : column + stream.CHUNK] if there else 0
            written.setdefault((what, i), []).append(at)
    every = [at for some in written.values() for at in some]
    assert len(set(every)) == len(every) == tactic.stage_bytes // stream.CHUNK_BYTES, (
        "a stage is written whole, and once"
    )
    for some in written.values():
        without_conflicts(some)


def ldmatrix(ring, addresses) -> list[np.ndarray]:
    """ldmatrix.x4: of matrix i, lane l gets row l // 4, columns 2 * (l % 4) and the next."""
    without_conflicts(addresses)
    matrices = [np.stack([ring[at] for at in addresses[start : start + 8]]) for start in range(0, 32, 8)]
    return [np.stack([matrix[lane // 4, lane % 4 * 2 :][:2] for lane in range(32)]) for matrix in matrices]


def mma(a, b, c) -> np.ndarray:
    """mma.m16n8k16 by the fragment layouts of the PTX ISA."""
    left, right, result = np.empty((16, 16)), np.empty((16, 8)), np.empty((32, 4))
    for lane in range(32):
        group, place = lane // 4, lane % 4 * 2
        for register in range(4):
            left[group + register % 2 * 8, place + register // 2 * 8 :][:2] = a[register][lane]
        for register in range(2):
            right[place + register * 8 :, group][:2] = b[register][lane]
    product = left @ right
    for lane in range(32):
        for value in range(4):
            result[lane, value] = product[lane // 4 + value // 2 * 8, lane % 4 * 2 + value % 2] + c[lane, value]
    return result


def multiply(tactic, ring, slot, warp, sums) -> None:
    """A warp's part of the k tile at ``slot``."""
    warp_m, warp_k = stream.warp_place(tactic, warp)
    x_slot = slot + tactic.vocab_tile * tactic.row_bytes
    for start in range(0, tactic.k_steps, stream.CHAIN):
        steps = range(start, min(start + stream.CHAIN, tactic.k_steps))
        for m in range(tactic.m_iters):
            a = []
            for step in steps:
                down = m * 16 * tactic.row_bytes + stream.step_bytes(step)
                a.append(
                    ldmatrix(
                        ring,
                        [
                            slot + stream.weight_read(tactic, lane, warp_m, warp_k, step % 4) + down
                            for lane in range(32)
                        ],
                    )
                )
            for n in range(tactic.n_iters):
                b = []
                for step in steps[::2]:
                    down = n * 8 * tactic.row_bytes + stream.step_bytes(step)
                    found = ldmatrix(
                        ring, [x_slot + stream.x_read(tactic, lane, warp_k, step % 4 // 2) + down for lane in range(32)]
                    )
                    b += [found[:2], found[2:]]
                chain = np.zeros((32, 4))
                for left, right in zip(a, b):
                    chain = mma(left, right, chain)
                at = (m * tactic.n_iters + n) * 4
                sums[:, at : at + 4] += chain


def compute(tactic, weight, x, vocab_start, token_start, out) -> None:
    """One CTA."""
    hidden, size = weight.shape[1], tactic.stages * tactic.stage_bytes
    k_tiles = math.ceil(hidden / tactic.k_tile)
    ring, held = Ring(size), {}
    warps = tactic.warps_m * tactic.warps_k
    sums = np.zeros((warps, 32, 4 * tactic.m_iters * tactic.n_iters))

    def fill(k_tile: int) -> None:
        slot = k_tile % tactic.stages * tactic.stage_bytes
        if k_tile < k_tiles:
            load(tactic, ring, weight, x, vocab_start, token_start, k_tile, slot)
            held[slot] = k_tile

    for ahead in range(tactic.stages - 1):
        fill(ahead)
    for k_tile in range(k_tiles):
        fill(k_tile + tactic.stages - 1)
        slot = k_tile % tactic.stages * tactic.stage_bytes
        assert held[slot] == k_tile
        for warp in range(warps):
            multiply(tactic, ring, slot, warp, sums[warp])

    mailbox = np.full(tactic.warps_k * stream.mailbox_words(tactic), np.nan)
    assert max(size, mailbox.size * 4) <= stream.smem_bytes(tactic)
    for warp in range(warps):
        warp_m, warp_k = stream.warp_place(tactic, warp)
        for index in range(sums.shape[2]):
            m, n, value = index // 4 // tactic.n_iters, index // 4 % tactic.n_iters, index % 4
            words = []
            for lane in range(32):
                row, token = stream.fragment_place(lane, value)
                row += (warp_m * tactic.m_iters + m) * 16
                words.append(stream.mailbox_word(tactic, warp_k, row, token + n * 8))
            assert np.isnan(mailbox[words]).all(), "two values in one place of the mailbox"
            assert len({word % 32 for word in words}) == 32, "bank conflict"
            mailbox[words] = sums[warp, :, index]
    for token in range(min(tactic.token_tile, len(x) - token_start)):
        for row in range(min(tactic.vocab_tile, len(weight) - vocab_start)):
            parts = [mailbox[stream.mailbox_word(tactic, warp_k, row, token)] for warp_k in range(tactic.warps_k)]
            out[token_start + token, vocab_start + row] = sum(parts)


EMULATED = [
    # tactic, vocab, hidden, rows
    (Tactic(32, 8, 128, 5, 1, 4), 81, 640, 5),
    (Tactic(16, 8, 64, 4, 1, 2), 17, 584, 1),
    (Tactic(32, 16, 64, 2, 2, 2), 50, 328, 11),
    (Tactic(64, 16, 128, 4, 2, 4), 99, 520, 16),
    (Tactic(64, 32, 64, 6, 2, 2), 65, 200, 33),
    (Tactic(64, 24, 128, 3, 4, 2), 64, 264, 20),
    (Tactic(128, 64, 64, 4, 4, 2), 131, 328, 64),
    (Tactic(64, 48, 128, 2, 4, 1), 33, 264, 41),
    (Tactic(32, 8, 256, 3, 1, 8), 40, 776, 3),
    (Tactic(32, 8, 128, 5, 1, 4), 1, 8, 1),
    (Tactic(128, 16, 128, 2, 8, 2), 130, 72, 9),
]


@pytest.mark.parametrize(("tactic", "vocab", "hidden", "rows"), EMULATED, ids=str)
def test_every_logit_is_the_product(tactic, vocab, hidden, rows):
    assert stream.invalid(tactic) is None
    rng = np.random.default_rng(0)
    weight, x = (rng.integers(-8, 9, shape).astype(float) for shape in ((vocab, hidden), (rows, hidden)))
    out = np.full((rows, vocab), np.nan)
    for vocab_start in range(0, vocab, tactic.vocab_tile):
        for token_start in range(0, rows, tactic.token_tile):
            compute(tactic, weight, x, vocab_start, token_start, out)
    assert np.array_equal(out, x @ weight.T)


# --- Tactics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_tactics_fit(arch, head):
    limits = devices.limits(arch)
    for rows in (1, 8, 9, 16, 17, 32, 33, 64):
        problem = usual(vocab=head[0], hidden=head[1], rows=rows, arch=arch)
        found = [*stream.autotune_tactics(problem), stream.invariant_tactic(problem)]
        assert found[0] == stream.default_tactic(problem)
        for tactic in [*found, *stream.sweep_tactics(problem)]:
            assert stream.invalid(tactic) is None
            assert stream.smem_bytes(tactic) <= limits.smem_per_block
            assert tactic.token_tile >= rows


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_one_order_of_additions_for_every_row_count(arch):
    for hidden in (8, 576, 4096):
        tactics = {stream.invariant_tactic(usual(hidden=hidden, rows=rows, arch=arch)) for rows in range(1, 65)}
        assert len(tactics) > 1
        assert len({(tactic.k_tile, tactic.warps_k) for tactic in tactics}) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": FP32, "out_dtype": FP32}, "x is float32; it takes bfloat16 or float16"),
        ({"out_dtype": FP16}, "the output is float16; it writes bfloat16 or float32"),
        ({"rows": 65}, "it takes up to 64 rows"),
        ({"hidden": 2884}, "hidden 2884 is not a multiple of 8"),
        ({"hidden": 2**21}, "hidden 2097152 is more than 1048576"),
    ],
)
def test_refusals(changes, reason):
    if flashinfer.unusable() is None:
        assert stream.Stream().supports(usual(**changes)) == reason
        assert stream.Stream().supports(usual()) is None


@pytest.mark.parametrize(
    ("tactic", "reason"),
    [
        (Tactic(32, 8, 128, 5, 3, 4), "powers of two"),
        (Tactic(48, 8, 128, 5, 2, 4), "vocab tile 48: a multiple of 16 for each of 2 warps"),
        (Tactic(32, 12, 128, 5, 1, 4), "token tile 12: a multiple of 8 up to 64"),
        (Tactic(32, 8, 96, 5, 1, 4), "k tile 96: 64, 128 or 256"),
        (Tactic(32, 8, 64, 5, 1, 4), "4 warps along a k tile of 64: each takes 32 elements at least"),
        (Tactic(32, 64, 128, 5, 1, 4), None),
        (Tactic(64, 64, 128, 5, 1, 4), "a warp has 32 MMA tiles: at most 16"),
        (Tactic(32, 8, 128, 1, 1, 4), "1 stages: 2 to 16"),
    ],
)
def test_invalid_tactics(tactic, reason):
    found = stream.invalid(tactic)
    assert found is None if reason is None else reason in found
    if reason is not None:
        with pytest.raises(ValueError, match="tactic"):
            stream.Stream().kernel(usual(), tactic)


# --- Compilation -----------------------------------------------------------------------------------------------------


def built(backend, problem, tactic) -> elf.Kernel:
    assert backend.supports(problem) is None
    key, library = backend.build(problem, tactic)
    assert elf.architectures(library) == {problem.arch}
    assert key["tactic"] == str(tactic)
    (kernel,) = elf.kernels(library)
    assert kernel.arch == problem.arch
    return kernel


@compiles
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("rows", "dtype", "out_dtype", "bias"),
    [(1, BF16, FP32, True), (16, FP16, FP16, False), (32, BF16, BF16, False), (64, BF16, FP32, False)],
)
def test_it_compiles_for(arch, rows, dtype, out_dtype, bias):
    problem = usual(rows=rows, dtype=dtype, out_dtype=out_dtype, has_bias=bias, arch=arch)
    tactic = stream.default_tactic(problem)
    kernel = built(stream.Stream(), problem, tactic)
    limits = devices.limits(arch)
    residents = limits.smem_per_sm // (stream.smem_bytes(tactic) + devices.RESERVED_SMEM)
    if arch == "sm_90a":  # elsewhere nothing has been measured
        registers = -(-kernel.registers // 8) * 8 * tactic.threads
        assert stream.REGISTERS // registers >= min(residents, 4), (
            "registers keep CTAs out that shared memory has room for"
        )


@compiles
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("module", [stream, hopper_stream], ids=["stream", "hopper stream"])
def test_every_shape_compiles(head, module):
    problem = usual(vocab=head[0], hidden=head[1], rows=9, out_dtype=FP32)
    backend = stream.Stream() if module is stream else hopper_stream.HopperStream()
    built(backend, problem, module.default_tactic(problem))


@compiles
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("module", [stream, hopper_stream], ids=["stream", "hopper stream"])
def test_what_autotune_measures_compiles(rows, module):
    problem = usual(rows=rows)
    backend = stream.Stream() if module is stream else hopper_stream.HopperStream()
    for tactic in module.autotune_tactics(problem)[1:]:
        built(backend, problem, tactic)


@compiles
@pytest.mark.parametrize("module", [stream, hopper_stream], ids=["stream", "hopper stream"])
def test_an_early_launch_is_another_object_and_waits_in_the_kernel(module, monkeypatch):
    from cutlass import cute

    waits, wait = [], cute.arch.griddepcontrol_wait
    monkeypatch.setattr(cute.arch, "griddepcontrol_wait", lambda: waits.append(wait()))
    backend = stream.Stream() if module is stream else hopper_stream.HopperStream()
    problem = usual(hidden=576)
    tactic = module.default_tactic(problem)
    usual_key, _ = backend.build(problem, tactic)
    assert not waits
    monkeypatch.setenv("LOWBATCH_LMHEAD_PDL", "1")
    key, _ = backend.build(problem, tactic)
    assert len(waits) == 1
    assert key == usual_key | {"pdl": True}
    if module is stream:  # which GPUs before SM90 run, too: they launch in order
        older = dataclasses.replace(problem, arch="sm_89")
        assert "pdl" not in backend.build(older, stream.default_tactic(older))[0]
        assert len(waits) == 1


@compiles
@pytest.mark.parametrize("rows", [65, 96, 128])
def test_what_autotune_measures_beyond_64_rows_compiles(rows):
    for out_dtype in (BF16, FP32):
        problem = usual(rows=rows, out_dtype=out_dtype)
        tactics = hopper_stream.autotune_tactics(problem)
        assert len(tactics) >= 3
        assert all(rows <= tactic.token_tile for tactic in tactics)
        built(hopper_stream.HopperStream(), problem, tactics[0])
        built(hopper_stream.HopperStream(), problem, tactics[-1])
