"""What serves untuned: the choices of hopper stream beside each other, on the 1/8 shards of heads.json and whole heads.

    python benchmarks/hopper_default.py compile --out DIR [--part 0 --parts 2]       (needs no GPU)
    python benchmarks/hopper_default.py run [--objects DIR] --out benchmarks/results/h200/hopper_default.json

``rounds`` is how many tiles of 64 vocabulary rows a CTA takes where two live on each of 132 multiprocessors. All of one row
count are replayed in turn, and F.linear with them. bfloat16 logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import beside
import torch
from compile_all import HEADS, shard

from lowbatch_lmhead.backends import Problem, hopper_stream
from lowbatch_lmhead.backends.warp_splitk import WarpSplitK

SHARDS = (
    "llama-2-7b", "llama-2-7b+pad-token", "mistral-large", "smollm2-135m", "gpt2", "smollm2-1.7b", "granite-3.1-8b",
    "phi-4", "llama-3.1-8b", "deepseek-v3", "qwen3-0.6b", "qwen3-8b", "qwen2.5-72b", "kimi-k2", "gpt-oss-20b", "gemma-2-9b",
    "gemma-3-27b",
)  # fmt: skip
WHOLE = (
    "gpt2", "whisper-large-v3", "llama-2-7b", "mistral-large", "llama-3.2-1b", "llama-3.1-8b", "deepseek-v3", "qwen3-0.6b",
    "gpt-oss-20b", "gemma-2-2b", "gemma-3-1b", "phi-4",
)  # fmt: skip
ROWS = (4, 8, 16, 24, 32, 48, 64)
# As deepest_ring takes them: vocab_tile, k_tile, groups, CTAs on one multiprocessor, persistent, CTAs of a cluster.
WAYS = {
    "pairs": (64, 128, 1, 2, True, 2),
    "fours": (64, 128, 1, 2, True, 4),
    "persistent": (64, 128, 1, 2, True, 1),
    "a CTA per tile": (64, 128, 1, 3, False, 1),
    "a CTA per tile, pairs": (64, 128, 1, 3, False, 2),
    "three persistent": (64, 128, 1, 3, True, 1),
    "three persistent, pairs": (64, 128, 1, 3, True, 2),
    "one persistent": (64, 128, 1, 1, True, 1),
    "one persistent, pairs": (64, 128, 1, 1, True, 2),
    "pairs, k 64": (64, 64, 1, 2, True, 2),
    "fours, k 64": (64, 64, 1, 2, True, 4),
    "pairs of 128": (128, 128, 2, 2, True, 2),
    "pairs of 128, k 64": (128, 64, 2, 2, True, 2),
}
FLASHINFER_ROWS = 16
BACKEND, FLASHINFER = hopper_stream.HopperStream(), WarpSplitK()


def shapes() -> list[tuple[int, int]]:
    """The shards, then the whole heads, smallest first."""
    shards = sorted((one["vocab_size"], one["hidden_size"]) for one in map(shard, chosen(SHARDS)))
    whole = sorted((one["vocab_size"], one["hidden_size"]) for one in chosen(WHOLE))
    return list(dict.fromkeys(shards + whole))


def chosen(models: tuple[str, ...]) -> list[dict[str, Any]]:
    return [one for one in HEADS if one["model"] in models]


def tactics(problem: Problem) -> dict[str, tuple[Any, Any]]:
    """(backend, tactic) of each way that there is."""
    found = {name: (BACKEND, hopper_stream.deepest_ring(problem, *choice)) for name, choice in WAYS.items()}
    if problem.rows <= FLASHINFER_ROWS and FLASHINFER.supports(problem) is None:
        found["FlashInfer's warp split-K"] = (FLASHINFER, FLASHINFER.tactics(problem)[0])
    return {name: (backend, tactic) for name, (backend, tactic) in found.items() if tactic is not None}


def jobs(shape: tuple[int, int]) -> Iterator[beside.Job]:
    for count in ROWS:
        problem = beside.sm90(shape, count)
        for backend, tactic in tactics(problem).values():
            yield backend, problem, tactic


def rows(shape: tuple[int, int], weights: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    vocab, hidden = shape
    rounds = round(vocab / 64 / (2 * hopper_stream.MULTIPROCESSORS), 2)
    for count in ROWS:
        problem = beside.sm90(shape, count)
        found = beside.measure(problem, weights, tactics(problem))
        yield {"vocab": vocab, "hidden": hidden, "rows": count, "rounds": rounds, **found}


if __name__ == "__main__":
    beside.main(__doc__, shapes(), jobs, rows, choices=WAYS)
