"""What writing logits costs a kernel that computes nothing: the read limit with writing, beside hopper stream.

    python benchmarks/read_write.py --out benchmarks/results/h200/read_write.json [--objects DIR]

Each program of a Triton kernel reads the rows of the weight that a CTA would take, as the read limit does, and writes
logits of no meaning for them: ``segments`` where a kernel has to, a piece of each row of logits; ``contiguous`` the same
bytes in one piece for each program; ``evict_last`` and ``evict_first`` are segments with that L2 policy. A program takes 64
rows of the weight, or as many as its name says. All of a row count are replayed in turn. ``read_us`` is the read limit and
``limit_us`` what ``of the limit`` means elsewhere: the bytes of x and the logits at the speed of reading, too.
"""

from __future__ import annotations

import json
from typing import Any

import hopper
import timing
import torch
import triton
import triton.language as tl

from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.tuning import limit

CASES = ((8, torch.bfloat16), (16, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32))
BLOCK = 4096  # int32 words of one load
# name: rows of the weight in a program, one piece, policy
WAYS = {
    "segments": (64, False, ""),
    "contiguous": (64, True, ""),
    "evict_last": (64, False, "evict_last"),
    "evict_first": (64, False, "evict_first"),
    "segments of 32": (32, False, ""),
    "segments of 128": (128, False, ""),
}


@triton.jit
def read_write(
    source, sink, out, count, vocab, BLOCK: tl.constexpr, LOOPS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    ONE_PIECE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.int32)
    program = tl.program_id(0).to(tl.int64)
    for loop in range(LOOPS):
        at = program * BLOCK * LOOPS + loop * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(source + at, mask=at < count, other=0, eviction_policy="evict_first")
    found = tl.sum(total ^ 0x5A5A5A5A)
    if ROWS == 0:
        if found == 0x7FFFFFFF:
            tl.store(sink, 1)
    else:
        row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, TILE)[None, :]
        logits = (row + column + found).to(out.dtype.element_ty)
        if ONE_PIECE:
            place = program * ROWS * TILE + row * TILE + column
        else:
            place = row.to(tl.int64) * vocab + program * TILE + column
        mask = (program * TILE + column < vocab) & (row < ROWS)
        tl.store(out + place, logits, mask=mask, eviction_policy=POLICY)


def call(vocab: int, hidden: int, rows: int, way: tuple[int, bool, str], sink: torch.Tensor, out: torch.Tensor) -> Any:
    tile, one_piece, policy = way
    loops = tile * hidden // 2 // BLOCK
    assert loops * BLOCK * 2 == tile * hidden

    def launch(weight: torch.Tensor) -> None:
        words = weight.view(-1).view(torch.int32)
        read_write[(triton.cdiv(vocab, tile),)](
            words, sink, out, words.numel(), vocab, BLOCK=BLOCK, LOOPS=loops, ROWS=rows, TILE=tile,
            ONE_PIECE=one_piece, POLICY=policy, num_warps=8,
        )  # fmt: skip

    return launch


def measure(model: str, vocab: int, hidden: int) -> list[dict[str, Any]]:
    weights = timing.weight_copies(vocab, hidden)
    sink, found = torch.zeros(1, device="cuda", dtype=torch.int32), []
    readers = limit.readers(weights[0])
    for rows, out_dtype in CASES:
        # As long as the last program's piece reaches.
        whole = torch.empty(rows * (vocab + 128), device="cuda", dtype=out_dtype)
        out = whole[: rows * vocab].view(rows, vocab)
        tactic, launch = hopper.launch(vocab, hidden, rows, out_dtype)
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        ways = {name: call(vocab, hidden, rows, way, sink, whole) for name, way in WAYS.items()}
        nothing = {f"{name}, writing nothing": call(vocab, hidden, 0, way, sink, whole) for name, way in WAYS.items()}
        nothing = {name: one for name, one in nothing.items() if name.startswith("segments")}
        ours = lambda w, launch=launch, x=x, out=out: launch(w, x, None, out)  # noqa: E731
        calls = [*readers, *nothing.values(), *ways.values(), ours]
        times = timing.gpu_us(calls, weights)
        read_us = min(times[: len(readers)])
        written = dict(zip([*nothing, *ways, "hopper stream"], times[len(readers) :]))
        extra = (x.nbytes + out.nbytes) / weights[0].nbytes
        found.append(
            {
                "model": model,
                "vocab": vocab,
                "hidden": hidden,
                "rows": rows,
                "out_dtype": dtype_name(out_dtype),
                "tactic": tactic,
                "read_us": round(read_us, 2),
                "limit_us": round(read_us * (1 + extra), 2),
                "us": {name: round(us, 2) for name, us in written.items()},
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    hopper.main(__doc__, measure)
