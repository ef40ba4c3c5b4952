"""Host time, preparation time and memory: what a call and a start cost beside the GPU's work.

    python benchmarks/host.py --out benchmarks/results/h200/host.json [--objects DIR]

``--objects`` is a folder that ``lowbatch-lmhead compile --arch sm_90a --out DIR`` wrote on a machine without a GPU for
the head of ``start`` below; the process that is timed with it may compile nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import machine
import timing
import torch
import torch.nn.functional as F

import lowbatch_lmhead
from lowbatch_lmhead import plan

VOCAB, HIDDEN = 32000, 4096


def calls() -> dict[str, float]:
    """Microseconds of host time a call, of each way to the logits, on one head."""
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(4, VOCAB, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        lowbatch_lmhead.warmup(head)
        lowbatch_lmhead.warmup(head, out_dtype=torch.float32)
        launch = plan.plan_for(head.weight, None, torch.bfloat16).table[4]
        assert launch is not None
        weight, bound, bound_f32 = (
            head.weight,
            lowbatch_lmhead.bind(head),
            lowbatch_lmhead.bind(head, out_dtype=torch.float32),
        )
        x3, odd = x[:, None], torch.randn(32001, HIDDEN, device="cuda", dtype=torch.bfloat16)
        lowbatch_lmhead.warmup(odd)
        ways = {
            "F.linear(x, weight)": lambda: F.linear(x, weight),
            "head(x)": lambda: head(x),
            "TVM-FFI launch": lambda: launch(weight, x, None, out),
            "x.new_empty": lambda: x.new_empty((4, VOCAB)),
            "bind(head)(x, out=out)": lambda: bound(x, out=out),
            "bind(head)(x)": lambda: bound(x),
            "project(head, x)": lambda: lowbatch_lmhead.project(head, x),
            "project(head, x, out=out)": lambda: lowbatch_lmhead.project(head, x, out=out),
            "project(head, x[:, None])": lambda: lowbatch_lmhead.project(head, x3),
            "project(weight, x)": lambda: lowbatch_lmhead.project(weight, x),
            "project(odd vocabulary, x)": lambda: lowbatch_lmhead.project(odd, x),
            "F.linear(x, odd vocabulary)": lambda: F.linear(x, odd),
            "bind(head, out_dtype=float32)(x)": lambda: bound_f32(x),
            "torch.mm(x, weight.t(), out_dtype=float32)": lambda: torch.mm(x, weight.t(), out_dtype=torch.float32),
        }
        results = timing.host_us(ways)
    large, larger = (torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16) for rows in (32, 200))
    with torch.no_grad():
        results |= timing.host_us(
            {
                "no_grad: F.linear(x, weight)": lambda: F.linear(x, weight),
                "no_grad: project(head, x)": lambda: lowbatch_lmhead.project(head, x),
                "32 rows: F.linear(x, weight)": lambda: F.linear(large, weight),
                "32 rows: project(head, x)": lambda: lowbatch_lmhead.project(head, large),
                "200 rows, which no kernel takes: F.linear(x, weight)": lambda: F.linear(larger, weight),
                "200 rows, which no kernel takes: project(head, x)": lambda: lowbatch_lmhead.project(head, larger),
            }
        )
    return results


START = textwrap.dedent("""
    import json, sys, time
    begin = time.perf_counter()
    import torch, lowbatch_lmhead
    from lowbatch_lmhead.backends import compiling
    imported = time.perf_counter()
    loads, load = [], compiling._load
    def timed_load(path):
        function = load(path)
        loads.append(time.perf_counter())
        return function
    compiling._load = timed_load
    head = torch.nn.Linear(4096, 128256, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = head(x)
        torch.cuda.synchronize()
        allocated, reserved, free = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        start = time.perf_counter()
        if sys.argv[1] == "warmup":
            report = lowbatch_lmhead.warmup(head)
            compiled, loaded = report.compiled, report.loaded
            served = report.heads[0].decisions[3].backend
        else:
            lowbatch_lmhead.project(head, x)
            from lowbatch_lmhead import objects
            compiled, loaded = objects.counts.compiled, objects.counts.loaded
            served = lowbatch_lmhead.explain(head, x).backend
        torch.cuda.synchronize()
        end = time.perf_counter()
        memory = {
            "allocated_bytes": torch.cuda.memory_allocated() - allocated,
            "reserved_bytes": torch.cuda.memory_reserved() - reserved,
            "device_bytes": free - torch.cuda.mem_get_info()[0],
        }
        got = lowbatch_lmhead.project(head, x)
        error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    print(json.dumps({
        "import_seconds": round(imported - begin, 3), "seconds": round(end - start, 4),
        "seconds_from_first_load": round(end - loads[0], 4), "compiled": compiled,
        "loaded": loaded, "backend": served, "memory": memory, "difference_to_linear": error,
        "imported": sorted({name.split(".")[0] for name in sys.modules} & {"flashinfer", "cutlass", "tvm_ffi", "triton"}),
    }))
""")


def start(what: str, cache: str, objects: str | None = None) -> dict:
    """A process of its own that prepares (``warmup``) or first uses (``project``) a llama-3.1-8b head."""
    environment = os.environ | {"LOWBATCH_LMHEAD_CACHE": cache, "LOWBATCH_LMHEAD_OBJECTS": objects or ""}
    done = subprocess.run(
        [sys.executable, "-c", START, what], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--objects")
    arguments = parser.parse_args()
    machine.require_kernels()
    result: dict = {
        "machine": machine.describe(),
        "head": f"{VOCAB}x{HIDDEN}, 4 rows",
        "head of the starts": "128256x4096",
        "host_us": calls(),
    }
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o700)
        # The first process of a fresh install also compiles Python's bytecode; the second is a cold cache alone.
        result["warmup, first process after the install"] = start("warmup", f"{scratch}/a")
        result["warmup, cold"] = start("warmup", f"{scratch}/b")
        result["warmup, second process"] = start("warmup", f"{scratch}/b")
        result["project, second process"] = start("project", f"{scratch}/b")
        if arguments.objects:
            result["warmup, objects built without a GPU"] = start("warmup", f"{scratch}/c", arguments.objects)
            result["project, objects built without a GPU"] = start("project", f"{scratch}/d", arguments.objects)
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
