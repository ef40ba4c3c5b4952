"""``lowbatch-lmhead bench`` with the Triton GEMM of this folder in its table.

    python -m benchmarks --model llama-3.1-8b --rows 1,4,16 --out DIR --resume

The Triton GEMM is measured in each of its configurations first, and the quickest one takes part.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor

from lowbatch_lmhead import cli
from lowbatch_lmhead.benching import competitors
from lowbatch_lmhead.benching.competitors import Case, Competitor, Prepared
from lowbatch_lmhead.tuning.timing import timer_for

ROUNDS = 3


def available(case: Case) -> str | None:
    if case.device.type != "cuda":
        return "it takes a CUDA GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(case.device)[0] < 9:
        return "it reads through tensor descriptors, which take compute capability 9.0 and higher"
    if case.hidden * 2 % 16:
        return "its descriptors take a hidden size that is a multiple of 8"
    return None


def make(case: Case, weight: Tensor, x: Tensor) -> Prepared:
    from . import triton_gemm

    multiprocessors = torch.cuda.get_device_properties(case.device).multi_processor_count
    ready: list[tuple[Any, Any]] = []
    problem: Exception | None = None
    out = torch.empty(case.rows, case.vocab, dtype=case.out_dtype, device=case.device)
    for config in triton_gemm.configs(case.vocab, case.rows, case.out_dtype):
        launch = triton_gemm.launch(config, multiprocessors)
        try:
            launch(weight, x, None, out)
            torch.cuda.synchronize(case.device)
            ready.append((config, launch))
        except Exception as error:  # one that does not compile leaves the others
            problem = error
    if not ready:
        raise problem or RuntimeError("no configuration fits")
    config, launch = ready[_quickest(case, weight, [launch for _, launch in ready])]

    def call(weight: Tensor, x: Tensor, bias: None, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=case.out_dtype, device=x.device)
        launch(weight, x, None, out)
        return out

    return Prepared(call, f"{config}: the quickest of {len(ready)}")


def _quickest(case: Case, weight: Tensor, calls: list[Any]) -> int:
    timer = timer_for(weight, None, case.rows, case.out_dtype)
    try:
        with timer.contest(case.rows, calls) as contest:
            rounds = [contest.round(range(len(calls))) for _ in range(ROUNDS)]
    finally:
        timer.close()
    return min(range(len(calls)), key=lambda index: sorted(one[index] for one in rounds)[ROUNDS // 2])


def main() -> int:
    competitors.added.append(Competitor(competitors.TRITON, available, make))
    return cli.main(["bench", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
