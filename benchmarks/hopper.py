"""What the scripts about hopper stream's default tactic share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from tuned import write

from lowbatch_lmhead.backends import Problem, hopper_stream

HEADS = {"llama-3.1-8b": (128256, 4096), "qwen3-0.6b": (151936, 1024)}


def launch(vocab: int, hidden: int, rows: int, out_dtype: torch.dtype) -> tuple[str, Any]:
    """The default tactic in words, and its launch."""
    problem = Problem(vocab, hidden, rows, torch.bfloat16, out_dtype, False, "sm_90a")
    backend = hopper_stream.HopperStream()
    (tactic,) = backend.tactics(problem)
    return str(tactic), backend.compile(problem, tactic).call


def main(doc: str | None, measure: Callable[[str, int, int], list[dict[str, Any]]]) -> None:
    """A script that writes what ``measure`` finds for each of the heads."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--objects", type=Path)
    arguments = parser.parse_args()
    machine.require_kernels()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    with torch.inference_mode():
        rows = [row for model, shape in HEADS.items() for row in measure(model, *shape)]
    write(arguments.out, {"machine": machine.describe()}, rows)
