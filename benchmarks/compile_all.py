"""Compile what ``warmup`` prepares for every head of heads.json, without a GPU: the check for all architectures, or
the objects that a benchmark run loads instead of compiling.

    python benchmarks/compile_all.py --arch sm_90a --out DIR        (bfloat16 and float32 logits)
    python benchmarks/compile_all.py --arch sm_100a sm_103a sm_120a --json compiled.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from lowbatch_lmhead import __version__, backends, devices, elf, objects
from lowbatch_lmhead.backends import Problem
from lowbatch_lmhead.backends.compiling import CompiledBackend
from lowbatch_lmhead.backends.flashinfer import version

HEADS = json.loads(Path(__file__).with_name("heads.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=sorted(devices.ARCHITECTURES), required=True)
    parser.add_argument("--models", nargs="*")
    parser.add_argument(
        "--all-backends", action="store_true", help="every backend that can, not the first choice alone"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    compiled, failed, begin = [], [], time.time()
    if arguments.out:
        arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for arch in arguments.arch:
        for head in HEADS:
            if arguments.models and head["model"] not in arguments.models:
                continue
            done: set[tuple] = set()
            for out_dtype in (torch.bfloat16, torch.float32):
                for rows in range(1, devices.untuned_rows(arch) + 1):
                    problem = Problem(
                        head["vocab_size"], head["hidden_size"], rows, torch.bfloat16, out_dtype, False, arch
                    )
                    able = [b for b in backends.candidates(problem)[0] if isinstance(b, CompiledBackend)]
                    for backend in able if arguments.all_backends else able[:1]:
                        tactic = backend.tactics(problem)[0]
                        which = (backend.name, str(tactic), out_dtype)
                        if which in done:
                            continue
                        done.add(which)
                        try:
                            key, library = backend.build(problem, tactic)
                        except Exception as error:
                            failed.append(f"{arch} {head['model']} {which}: {error}")
                            continue
                        if arguments.out:
                            objects.write(arguments.out, key, library)
                        compiled.append(
                            {
                                "model": head["model"],
                                "vocab": head["vocab_size"],
                                "hidden": head["hidden_size"],
                                "out_dtype": str(out_dtype).removeprefix("torch."),
                                "backend": backend.name,
                                "tactic": str(tactic),
                                "arch": arch,
                                "code_for": sorted(elf.architectures(library)),
                                "registers": max(kernel.registers or 0 for kernel in elf.kernels(library)),
                            }
                        )
            print(f"{arch} {head['model']:<20} {len(done)} launches [{time.time() - begin:.0f} s]", flush=True)
    print(f"{len(compiled)} compiled, {len(failed)} failed", *failed, sep="\n")
    if arguments.json:
        versions = {name: version(name) for name in ("flashinfer-python", "nvidia-cutlass-dsl")}
        head = json.dumps({"lowbatch-lmhead": __version__, **versions})
        rows = ",\n  ".join(json.dumps(row) for row in compiled)
        arguments.json.write_text(f'{{"versions": {head},\n "launches": [\n  {rows}\n ]}}\n')
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
