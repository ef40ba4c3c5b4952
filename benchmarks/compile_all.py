"""Compile what ``warmup`` prepares for every head of heads.json, without a GPU: the check for all architectures, or
the objects that a benchmark run loads instead of compiling.

    python benchmarks/compile_all.py --arch sm_90a --out DIR        (bfloat16 and float32 logits)
    python benchmarks/compile_all.py --arch sm_90a --out DIR --tuning --shards      (what autotune measures, 1/8 shards too)
    python benchmarks/compile_all.py --arch sm_100a sm_103a sm_120a --json compiled.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lowbatch_lmhead import __version__, backends, devices, elf, objects
from lowbatch_lmhead.backends import Problem
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.backends.compiling import CompiledBackend, object_key
from lowbatch_lmhead.backends.flashinfer import version

HEADS = json.loads(Path(__file__).with_name("heads.json").read_text())
TUNED_ROWS = 32


def shard(head: dict[str, Any], ranks: int = 8) -> dict[str, Any]:
    """The head's part on one of ``ranks`` GPUs, the vocabulary padded to a multiple of 64 first, as engines do."""
    padded = -(-head["vocab_size"] // 64) * 64
    assert padded % ranks == 0
    return {**head, "model": f"{head['model']} 1/{ranks}", "vocab_size": padded // ranks}


def is_in(folder: Path, backend: CompiledBackend, problem: Problem, tactic: Any) -> bool:
    """Whether ``folder`` holds what ``backend`` compiles for ``tactic``."""
    return (folder / f"{objects.stem(object_key(backend.name, problem, tactic))}.json").exists()


def launches(head: dict[str, Any], arch: str, which: argparse.Namespace) -> Iterator[tuple[Any, Problem, Any]]:
    """(backend, problem, tactic) of each launch of one head, once."""
    done: set[tuple[Any, ...]] = set()
    last = max(devices.untuned_rows(arch), TUNED_ROWS if which.tuning else 0)
    for out_dtype in (torch.bfloat16, torch.float32):
        for rows in range(1, last + 1):
            problem = Problem(head["vocab_size"], head["hidden_size"], rows, torch.bfloat16, out_dtype, False, arch)
            able = [b for b in backends.candidates(problem)[0] if isinstance(b, CompiledBackend)]
            measured = which.tuning and rows <= TUNED_ROWS  # beyond, a tuned head is served as any other
            for backend in able if which.all_backends or measured else able[:1]:
                for tactic in backend.autotune_tactics(problem) if measured else backend.tactics(problem)[:1]:
                    known = (backend.name, str(tactic), out_dtype)
                    if known not in done:
                        done.add(known)
                        yield backend, problem, tactic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=sorted(devices.ARCHITECTURES), required=True)
    parser.add_argument("--models", nargs="*")
    parser.add_argument(
        "--all-backends", action="store_true", help="every backend that can, not the first choice alone"
    )
    parser.add_argument("--tuning", action="store_true", help="every launch that autotune measures")
    parser.add_argument("--shards", action="store_true", help="the 1/8 shards too")
    parser.add_argument("--resume", action="store_true", help="leave out what is in --out")
    parser.add_argument("--part", type=int, default=0, help="of --parts that share the work")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compiled, failed, begin = [], [], time.time()
    if arguments.out:
        arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    heads = [head for head in HEADS if not arguments.models or head["model"] in arguments.models]
    heads += [shard(head) for head in heads] if arguments.shards else []
    for arch in arguments.arch:
        for head in heads[arguments.part :: arguments.parts]:
            count = 0
            for backend, problem, tactic in launches(head, arch, arguments):
                count += 1
                if arguments.out and arguments.resume and is_in(arguments.out, backend, problem, tactic):
                    continue
                try:
                    key, library = backend.build(problem, tactic)
                except Exception as error:
                    failed.append(f"{arch} {head['model']} {backend.name} {tactic} {problem.out_dtype}: {error}")
                    continue
                if arguments.out:
                    objects.write(arguments.out, key, library)
                compiled.append(
                    {
                        "model": head["model"],
                        "vocab": problem.vocab,
                        "hidden": problem.hidden,
                        "out_dtype": dtype_name(problem.out_dtype),
                        "backend": backend.name,
                        "tactic": str(tactic),
                        "arch": arch,
                        "code_for": sorted(elf.architectures(library)),
                        "registers": max(kernel.registers or 0 for kernel in elf.kernels(library)),
                    }
                )
            print(f"{arch} {head['model']:<20} {count} launches [{time.time() - begin:.0f} s]", flush=True)
    print(f"{len(compiled)} compiled, {len(failed)} failed", *failed, sep="\n")
    if arguments.json:
        versions = {name: version(name) for name in ("flashinfer-python", "nvidia-cutlass-dsl")}
        top = json.dumps({"lowbatch-lmhead": __version__, **versions})
        rows = ",\n  ".join(json.dumps(row) for row in compiled)
        arguments.json.write_text(f'{{"versions": {top},\n "launches": [\n  {rows}\n ]}}\n')
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
