"""The command line ``lowbatch-lmhead``: what runs here, what would serve a head, what is kept, compiling without a GPU.

    lowbatch-lmhead doctor
    lowbatch-lmhead explain --vocab 128256 --hidden 4096 --rows 8
    lowbatch-lmhead tune --model llama-3.1-8b --tp 8
    lowbatch-lmhead bench --model llama-3.1-8b --rows 1,4,16
    lowbatch-lmhead compile --arch sm_90a --vocab 128256 --hidden 4096 --out kernels
    lowbatch-lmhead cache list

What serves is asked of the gate, the plan and the backends, as serving asks them; nothing is decided here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import io
import json
import math
import os
import platform
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from . import backends, cli_bench, cli_cache, devices, dispatch, elf, gate, objects
from ._version import __version__
from .api import autotune
from .backends import Backend, Problem, flashinfer
from .backends.base import dtype_name
from .backends.compiling import CompiledBackend
from .gate import Decision
from .head import Head
from .log import said
from .plan import Plan, PlanKey
from .report import HeadReport
from .tuning import search
from .tuning.tune import MOST_ROWS

T = TypeVar("T")
Facts = dict[str, Any]

PACKAGES = (flashinfer.FLASHINFER[0], flashinfer.CUTE_DSL[0], flashinfer.TVM_FFI[0])
ENGINES = ("transformers", "vllm", "sglang")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST = 2**31 - 1  # of a size: the kernels count the vocabulary, the hidden dimension and the rows in 32 bits
# What doctor asks each backend about: a head that all of them take, so that a refusal is about the machine.
USUAL = Problem(131072, 4096, 1, torch.bfloat16, torch.bfloat16, False, "sm_90a")


class Size(NamedTuple):
    vocab: int
    hidden: int


# The heads of benchmarks/heads.json, as the models' config.json gives them.
MODELS = {
    "gpt2": Size(50257, 768),
    "gpt2-xl": Size(50257, 1600),
    "smollm2-135m": Size(49152, 576),
    "smollm2-360m": Size(49152, 960),
    "smollm2-1.7b": Size(49152, 2048),
    "qwen2.5-0.5b": Size(151936, 896),
    "qwen3-0.6b": Size(151936, 1024),
    "qwen3-4b": Size(151936, 2560),
    "qwen3-8b": Size(151936, 4096),
    "qwen3-14b": Size(151936, 5120),
    "qwen2.5-7b": Size(152064, 3584),
    "qwen2.5-72b": Size(152064, 8192),
    "llama-3.2-1b": Size(128256, 2048),
    "llama-3.2-3b": Size(128256, 3072),
    "llama-3.1-8b": Size(128256, 4096),
    "llama-3.1-70b": Size(128256, 8192),
    "llama-3.1-405b": Size(128256, 16384),
    "llama-4-scout": Size(202048, 5120),
    "llama-2-7b": Size(32000, 4096),
    "llama-2-7b+pad-token": Size(32001, 4096),
    "gemma-2-2b": Size(256000, 2304),
    "gemma-2-9b": Size(256000, 3584),
    "gemma-3-1b": Size(262144, 1152),
    "gemma-3-4b": Size(262208, 2560),
    "gemma-3-27b": Size(262208, 5376),
    "mistral-7b-v0.3": Size(32768, 4096),
    "mistral-nemo": Size(131072, 5120),
    "mistral-large": Size(32768, 12288),
    "deepseek-v3": Size(129280, 7168),
    "kimi-k2": Size(163840, 7168),
    "gpt-oss-20b": Size(201088, 2880),
    "phi-3-mini": Size(32064, 3072),
    "phi-4": Size(100352, 5120),
    "granite-3.1-2b": Size(49155, 2048),
    "granite-3.1-8b": Size(49155, 4096),
    "command-r": Size(256000, 8192),
    "command-r-plus": Size(256000, 12288),
    "glm-4.5": Size(151552, 5120),
    "minimax-m2": Size(200064, 3072),
    "pythia-1.4b": Size(50304, 2048),
    "opt-1.3b": Size(50272, 2048),
    "whisper-large-v3": Size(51866, 1280),
    "bloom-7b": Size(250880, 4096),
    "olmo-2-7b": Size(100352, 4096),
}


class UsageError(Exception):
    """Arguments that cannot be served; the message names them and says what would be right."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 where it says no, and 2 (SystemExit) for wrong arguments."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path or a file's content may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(argv)
    try:
        status: int = args.command(args)
    except UsageError as error:
        args.parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe went away, as head(1) does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


# --- arguments -------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lowbatch-lmhead", description="Fast LM-head projections for decoding.")
    parser.add_argument("--version", action="version", version=f"lowbatch-lmhead {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    doctor = commands.add_parser("doctor", help="what is installed here, which GPUs there are, which kernels run")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.set_defaults(command=_doctor, parser=doctor)

    explain = commands.add_parser("explain", help="what would serve a projection, and why; nothing is compiled")
    _add_head(explain)
    explain.add_argument("--rows", type=_size, required=True, metavar="M", help="rows of x, the batch of a decode step")
    _add_types(explain)
    explain.add_argument("--arch", choices=list(devices.ARCHITECTURES), help="instead of the GPU's that is here")
    explain.set_defaults(command=_explain, parser=explain)

    tune = commands.add_parser("tune", help="measure what serves a head fastest on this GPU, and keep it for autotune")
    _add_head(tune)
    tune.add_argument("--rows", type=_rows, default=32, metavar="M", help="row counts 1 to M (32)")
    _add_types(tune)
    tune.add_argument("--budget", type=_seconds, default=30.0, metavar="S", help="seconds for each head (30)")
    tune.add_argument("--again", action="store_true", help="measure what is in the cache already, too")
    tune.add_argument(
        "--dir", type=cli_bench.folder_name, metavar="DIR", help="keep it in DIR: what autotune(cache=DIR) reads"
    )
    tune.add_argument("--json", action="store_true", help="print the report as JSON")
    tune.set_defaults(command=_tune, parser=tune)

    bench = commands.add_parser("bench", help="measure project beside F.linear and other libraries on this GPU")
    _add_head(bench)
    cli_bench.add_options(bench)
    bench.set_defaults(command=_bench, parser=bench)

    compile_ = commands.add_parser("compile", help="compile what warmup would prepare; needs no GPU")
    compile_.add_argument("--arch", choices=list(devices.ARCHITECTURES), required=True, help="the serving GPU's")
    _add_head(compile_)
    compile_.add_argument("--rows", type=_size, metavar="M", help="row counts 1 to M; default: all that kernels serve")
    _add_types(compile_)
    compile_.add_argument("--all-backends", action="store_true", help="compile also what would serve if those failed")
    compile_.add_argument("--tuning", action="store_true", help="compile also what autotune measures, up to 32 rows")
    compile_.add_argument(
        "--out", type=cli_bench.folder_name, metavar="DIR", help="write the kernels for LOWBATCH_LMHEAD_OBJECTS=DIR"
    )
    compile_.set_defaults(command=_compile, parser=compile_)

    cli_cache.add_to(commands)
    return parser


def _add_head(parser: argparse.ArgumentParser) -> None:
    """What head: its size or a model's, and one rank's part of it."""
    parser.add_argument("--vocab", type=_size, metavar="N", help="rows of the weight")
    parser.add_argument("--hidden", type=_size, metavar="K", help="columns of the weight")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="the head of a model, instead of --vocab and --hidden: a config.json, a folder with one, or a name such as "
        f"llama-3.1-8b: one of {len(MODELS)}, which a wrong name lists. Can be repeated",
    )

    parser.add_argument(
        "--tp", type=_size, default=1, metavar="N", help="the head is split over N GPUs: one rank's part"
    )
    parser.add_argument(
        "--pad",
        type=_size,
        metavar="M",
        help="the vocabulary is padded to a multiple of M first, as engines do; default: 64 with --tp above 1, else 1",
    )


def _add_types(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bias", action="store_true", help="the head has a bias")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of x and the weight (bfloat16)")
    parser.add_argument("--out-dtype", choices=list(DTYPES), help="of the logits: as --dtype, or float32")


def _size(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= MOST:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST}")


def _rows(text: str) -> int:
    if text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= MOST_ROWS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MOST_ROWS}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


class Types(NamedTuple):
    """The data types of a head, and whether it has a bias."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool

    def __str__(self) -> str:
        bias = ", with a bias" if self.bias else ""
        return f"{dtype_name(self.dtype)} to {dtype_name(self.out_dtype)}{bias}"


def _types(args: argparse.Namespace) -> Types:
    dtype, out_dtype = DTYPES[args.dtype], DTYPES[args.out_dtype or args.dtype]
    try:
        dispatch.check_out_dtype(out_dtype, dtype)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return Types(dtype, out_dtype, args.bias)


# --- a head on an architecture that need not be here -----------------------------------------------------------------


def _paper_plan(arch: str, size: Size, types: Types) -> Plan:
    """The plan of a head on an architecture given by name: it tells what would serve, and prepares nothing."""
    return Plan(PlanKey(torch.device("meta"), *size, types.dtype, types.out_dtype, types.bias), arch)


def _ordered(architectures: Iterable[str]) -> list[str]:
    order = list(devices.ARCHITECTURES)
    return sorted(architectures, key=lambda arch: (order.index(arch) if arch in order else len(order), arch))


# --- doctor ----------------------------------------------------------------------------------------------------------


@dataclass
class Probes:
    """Questions to an environment that may be broken: what one raises is noted, and the report goes on."""

    problems: list[str] = field(default_factory=list)

    def ask(self, what: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception as error:  # whatever is broken, a report must come out
            self.problems.append(f"{what}: {said(error)}")
            return otherwise


def _doctor(args: argparse.Namespace) -> int:
    report = _report()
    print(json.dumps(report, indent=2) if args.json else "\n".join(_report_lines(report)))
    return 0


def _report() -> Facts:
    probes = Probes()
    no_facts: list[Facts] = []
    gpus = probes.ask("GPUs", lambda: _gpus(probes), no_facts)
    loading = _loading()
    return {
        "machine": platform.machine(),
        "versions": _versions(probes),
        "cuda": {
            "torch": torch.version.cuda,
            "driver": probes.ask("driver", _driver, None),
            "dsl": probes.ask("CuTe DSL runtime", objects.cuda_flavour, None),
        },
        "linker": probes.ask("linker", objects.linker, None),
        "cannot_load": loading,
        "cache": probes.ask("cache folder", _cache, None),
        "objects": probes.ask("LOWBATCH_LMHEAD_OBJECTS", _given_folders, no_facts),
        "gpus": gpus,
        "backends": [_backend(backend, gpus, loading, probes) for backend in backends.kernels()],
        "problems": probes.problems,
    }


def _given_folders() -> list[Facts]:
    return [_folder(folder) for folder in objects.given_folders()]


def _cache() -> Facts | None:
    folder = objects.cache_folder()
    return _folder(folder) if folder else None


def _driver() -> str | None:
    version = objects.driver_version()
    return "{}.{}".format(*version) if version else None


def _versions(probes: Probes) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "lowbatch-lmhead": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for name in PACKAGES + ENGINES:
        found[name] = probes.ask(f"version of {name}", functools.partial(flashinfer.version, name), None)
    return found


def _loading() -> str | None:
    """Why compiled kernels cannot be loaded in this process, or None. It opens what loading one opens."""
    try:
        objects.open_runtime()
    except Exception as error:
        return said(error)
    return None


def _folder(folder: Path) -> Facts:
    """What is in ``folder`` and whether it is used. It is not created."""
    exists = folder.is_dir()
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    # A folder yet to be made in a sticky one such as /tmp will be our own: what counts is what that one lies in.
    sticky = nearest != folder and nearest.stat().st_mode & stat.S_ISVTX
    return {
        "folder": str(folder),
        "exists": exists,
        "kernels": len(list(folder.glob("*.so"))) if exists else 0,
        "distrusted": objects.distrust(nearest.parent if sticky else nearest),
        "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    }


def _gpus(probes: Probes) -> list[Facts]:
    if not torch.cuda.is_available():
        return []
    indices = range(torch.cuda.device_count())
    found = [probes.ask(f"GPU {index}", functools.partial(_gpu, index), None) for index in indices]
    return [gpu for gpu in found if gpu is not None]


def _gpu(index: int) -> Facts | None:
    arch = devices.architecture(torch.device("cuda", index))
    return {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability(index)),
        "architecture": arch,
        "untuned_rows": devices.untuned_rows(arch) if arch else 0,
    }


def _backend(backend: Backend, gpus: list[Facts], loading: str | None, probes: Probes) -> Facts:
    # Those that a GPU is taken for: kernels compile for more.
    architectures = _ordered(backend.architectures & devices.ARCHITECTURES.keys())
    here = [arch for arch in architectures if arch in {gpu["architecture"] for gpu in gpus}]
    reasons = []
    if not here:
        reasons.append("no GPU here has such an architecture" if gpus else "there is no CUDA GPU")
    problem = dataclasses.replace(USUAL, arch=(here or architectures)[0])
    silent: str | None = "it could not be asked (see below)"
    refusal = probes.ask(backend.name, lambda: backend.supports(problem), silent)
    if refusal:
        reasons.append(refusal)
    if loading and isinstance(backend, CompiledBackend):
        reasons.append("compiled kernels cannot be loaded")
    return {
        "name": backend.name,
        "architectures": architectures,
        "runs_here": not reasons,
        "reasons": reasons,
    }


def _report_lines(report: Facts) -> Iterator[str]:
    cuda = report["cuda"]
    yield from _section(
        f"Versions ({report['machine']})",
        [
            (name, version or "not installed")
            for name, version in report["versions"].items()
            if version or name in PACKAGES
        ],
    )
    yield from _section(
        "CUDA",
        [
            ("driver", f"CUDA {cuda['driver']}" if cuda["driver"] else "none"),
            ("torch", f"built for CUDA {cuda['torch']}" if cuda["torch"] else "built without CUDA"),
            ("CuTe DSL", f"uses its CUDA {cuda['dsl']} libraries" if cuda["dsl"] else "no libraries for this driver"),
        ],
    )
    given = [("LOWBATCH_LMHEAD_OBJECTS", _folder_line(folder, False)) for folder in report["objects"]]
    yield from _section(
        "Compiled kernels",
        [
            ("linker", report["linker"] or "none: compiling takes one of cc, gcc, clang or ld on the PATH"),
            ("loading them", f"fails: {report['cannot_load']}" if report["cannot_load"] else "works"),
            (
                "cache folder",
                _folder_line(report["cache"], True) if report["cache"] else "none: there is no home folder",
            ),
            *(given or [("LOWBATCH_LMHEAD_OBJECTS", "not set")]),
        ],
    )
    yield from _section("GPUs", [(f"{gpu['index']}", _gpu_line(gpu)) for gpu in report["gpus"]] or [("none", "")])
    yield from _section(
        "Backends",
        [
            line
            for backend in report["backends"]
            for line in [
                (backend["name"], f"{'runs here' if backend['runs_here'] else 'does not run here'}"),
                ("", f"made for {', '.join(backend['architectures'])}"),
                *(("", f"because {reason}") for reason in backend["reasons"]),
            ]
        ],
    )
    if report["problems"]:
        yield "What could not be found out"
        yield from (f"  {problem}" for problem in report["problems"])


def _section(title: str, lines: list[tuple[str, str]]) -> Iterator[str]:
    yield title
    width = max(len(name) for name, _ in lines)
    yield from (f"  {name:<{width}}  {value}".rstrip() for name, value in lines)
    yield ""


def _folder_line(folder: Facts, written: bool) -> str:
    where, kernels = folder["folder"], f"{folder['kernels']} kernel{'' if folder['kernels'] == 1 else 's'}"
    if folder["distrusted"] and (folder["exists"] or written):
        return f"{where}: not used, {folder['distrusted']}"
    if not written:
        return f"{where}: {kernels}" if folder["exists"] else f"{where}: there is no such folder"
    if folder["exists"]:
        return f"{where}: {kernels}, {'writable' if folder['writable'] else 'not writable'}"
    return f"{where}: not there yet, {'can be made' if folder['writable'] else 'and cannot be made'}"


def _gpu_line(gpu: Facts) -> str:
    found = f"{gpu['name']}, compute capability {gpu['compute_capability']}"
    if gpu["architecture"] is None:
        return f"{found}: no architecture that a kernel is made for"
    return f"{found}: {gpu['architecture']}, kernels serve up to {gpu['untuned_rows']} rows"


# --- explain ---------------------------------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    types, sizes = _types(args), _sizes(args)
    for name, size in sizes:
        print(
            f"{name} {size.vocab}x{size.hidden} head, {types}, {args.rows} row{'' if args.rows == 1 else 's'}".lstrip()
        )
        _explain_one(args, size, types)
    return 0


def _explain_one(args: argparse.Namespace, size: Size, types: Types) -> None:
    if args.arch:
        _print_decision(args.arch, gate.decide_rows(_paper_plan(args.arch, size, types), args.rows))
        return
    device, where = _here()
    decision = _decide_here(device, size, types, args.rows)
    _print_decision(where, decision)
    if devices.architecture(device) not in devices.ARCHITECTURES:
        print("elsewhere")
        for arch in devices.ARCHITECTURES:
            decision = gate.decide_rows(_paper_plan(arch, size, types), args.rows)
            print(f"  {arch:<9} {decision.name}")
            for reason in () if decision.taken else decision.reasons:
                print(f"  {'':<9} because {reason}")


def _here() -> tuple[torch.device, str]:
    if not torch.cuda.is_available():
        return torch.device("cpu"), "here, without a CUDA GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    return device, f"{torch.cuda.get_device_name(device)}, {devices.architecture(device) or 'unknown architecture'}"


def _decide_here(device: torch.device, size: Size, types: Types, rows: int) -> Decision:
    with torch.no_grad():
        # One element that stands for all of x: the gate reads its shape, type and device.
        x = torch.empty(1, 1, dtype=types.dtype, device=device).expand(rows, size.hidden)
        reasons = gate.reasons_against(Head(None, None, None, ()), x)
    arch = devices.architecture(device)
    if reasons or arch is None:
        return gate.refused(reasons, rows)
    return gate.decide_rows(_paper_plan(arch, size, types), rows)


def _print_decision(where: str, decision: Decision) -> None:
    print(f"{where}: {decision.name}")
    for reason in decision.reasons:
        print(f"  {'not ' if decision.taken else 'because '}{reason}")


# --- tune ------------------------------------------------------------------------------------------------------------


def _tune(args: argparse.Namespace) -> int:
    types, sizes = _types(args), _sizes(args)
    device, where = _here()
    if devices.architecture(device) not in devices.ARCHITECTURES:
        print(
            f"tune measures on a GPU that kernels are made for ({', '.join(devices.ARCHITECTURES)}), called {where}. "
            "compile --tuning --out DIR makes the kernels without one",
            file=sys.stderr,
        )
        return 1
    reports = []
    for name, size in sizes:
        try:
            with torch.no_grad():
                weight = torch.randn(size, dtype=types.dtype, device=device).mul_(size.hidden**-0.5)
                bias = torch.randn(size.vocab, dtype=types.dtype, device=device) if types.bias else None
            report = autotune(
                (weight, bias),
                max_rows=args.rows,
                out_dtype=types.out_dtype,
                cache=args.dir or True,
                refresh=args.again,
                budget_s=args.budget,
                progress=False if args.json else None,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        except torch.OutOfMemoryError:
            print(f"no memory for a {size.vocab}x{size.hidden} weight on {where}", file=sys.stderr)
            return 1
        reports.append({"model": name or None, **report.to_dict()})
        if not args.json:
            print(f"{name or 'head'} on {where}\n{report}\n", flush=True)
    if args.json:
        print(json.dumps(reports, indent=1))
    return 0 if all(head["source"] != "not tuned" for report in reports for head in report["heads"]) else 1


def _shard(size: Size, args: argparse.Namespace) -> Size:
    """One rank's part of the head."""
    pad = args.pad or (64 if args.tp > 1 else 1)
    padded = -(-size.vocab // pad) * pad
    if padded % args.tp:
        right = math.lcm(64, args.tp)  # engines pad to 64
        raise UsageError(f"--tp {args.tp} does not divide a vocabulary of {padded}; --pad {right} would make it")
    if padded // args.tp > MOST:
        raise UsageError(f"--vocab {size.vocab} is padded to {padded}; a GPU's part can have {MOST} rows")
    return Size(padded // args.tp, size.hidden)


# --- bench -----------------------------------------------------------------------------------------------------------


def _bench(args: argparse.Namespace) -> int:
    return cli_bench.run(args, _sizes(args))


# --- compile ---------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One kernel to compile: the rows that it is the first choice for, and those that it could serve otherwise."""

    backend: Backend
    tactic: Any
    problem: Problem
    first: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)

    def rows(self) -> str:
        return _ranges(self.first) if self.first else f"({_ranges(self.spare)})"


@dataclass(frozen=True)
class Built:
    """What came of a job."""

    key: dict[str, Any]
    library: bytes
    arch: str
    registers: int | None
    seconds: float


def _compile(args: argparse.Namespace) -> int:
    types, sizes = _types(args), _sizes(args)
    folder = _out_folder(args.out) if args.out else None
    served, done, failures = [], [], 0
    for name, size in sizes:
        plan = _paper_plan(args.arch, size, types)
        last = min(args.rows or plan.max_rows, plan.max_rows)
        decisions = [gate.decide_rows(plan, rows) for rows in range(1, last + 1)]
        served.append(any(decisions))
        jobs = _jobs(plan, last, args.all_backends)
        if args.tuning:
            jobs += _tuning_jobs(plan, min(args.rows or gate.MEASURED_ROWS, MOST_ROWS), jobs)
        print(f"{name + ', ' if name else ''}{size.vocab}x{size.hidden} head, {types}, on {args.arch}")
        built = [_run(job, table, folder) for table in [_Table(jobs)] for job in jobs]
        if served[-1] and last == plan.max_rows:
            decisions.append(gate.decide_rows(plan, last + 1))
        for line in _not_compiled(HeadReport(name, *size, tuple(decisions)), jobs, plan.max_rows):
            print(line)
        print()
        done += [one for one in built if one is not None]
        failures += built.count(None)
    if folder is not None and done:
        _print_use(folder, done)
    elif done:
        print("Checked only, nothing was written: --out DIR keeps the kernels for a serving machine.")
    if not all(served):
        print(f"{served.count(False)} of {len(served)} heads are not served on {args.arch}", file=sys.stderr)
    if failures:
        print(f"{failures} of {failures + len(done)} kernels failed", file=sys.stderr)
    return 0 if all(served) and not failures else 1


def _sizes(args: argparse.Namespace) -> list[tuple[str, Size]]:
    """The heads that are asked for, one rank's part of each, with a name or ''."""
    found = [(name, _model_size(name)) for name in args.model]
    if (args.vocab is None) != (args.hidden is None):
        raise UsageError("--vocab and --hidden go together: the weight has the shape (vocab, hidden)")
    if args.vocab is not None:
        found.append(("", Size(args.vocab, args.hidden)))
    if not found:
        raise UsageError("which head? Give --vocab and --hidden, or --model")
    return [(name, _shard(size, args)) for name, size in found]


def _model_size(name: str) -> Size:
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.exists():
                raise UsageError(f"--model {name} is a folder without a config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)  # models that also see or hear keep the language model's apart
        return Size(_size(str(text["vocab_size"])), _size(str(text.get("hidden_size") or text["n_embd"])))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--model {name}: vocab_size or hidden_size in {path}: {error}") from None
    except FileNotFoundError:
        raise UsageError(f"--model {name} is neither one of {', '.join(MODELS)} nor a config.json") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"--model {name}: no vocab_size and hidden_size in {path} ({said(error)})") from None


def _jobs(plan: Plan, last: int, every: bool) -> list[Job]:
    """The kernels for 1 to ``last`` rows, each once: the first choices, and with ``every`` what comes after them."""
    jobs: dict[tuple[str, str], Job] = {}
    for rows in range(1, last + 1):
        problem = plan.problem(rows)
        able = [backend for backend in backends.candidates(problem)[0] if isinstance(backend, CompiledBackend)]
        for place, backend in enumerate(able if every else able[:1]):
            for tactic in backend.tactics(problem)[:1]:
                job = jobs.setdefault((backend.name, str(tactic)), Job(backend, tactic, problem))
                (job.spare if place else job.first).append(rows)
    return sorted(jobs.values(), key=lambda job: not job.first)


def _tuning_jobs(plan: Plan, last: int, others: list[Job]) -> list[Job]:
    """The kernels that autotune measures at 1 to ``last`` rows besides ``others``."""
    jobs = {(job.backend.name, str(job.tactic)): job for job in others}
    for rows in range(1, last + 1):
        problem = plan.problem(rows)
        for option in search.options(problem)[0]:
            if isinstance(option.backend, CompiledBackend):
                job = jobs.setdefault(
                    (option.backend.name, str(option.tactic)), Job(option.backend, option.tactic, problem)
                )
                if rows not in job.first:
                    job.spare.append(rows)
    return [job for job in jobs.values() if job not in others]


def _build(job: Job) -> Built:
    assert isinstance(job.backend, CompiledBackend)
    start = time.perf_counter()
    key, library = job.backend.build(job.problem, job.tactic)
    seconds = time.perf_counter() - start
    registers = max((kernel.registers for kernel in elf.kernels(library) if kernel.registers is not None), default=None)
    return Built(key, library, job.problem.arch, registers, seconds)


def _run(job: Job, table: _Table, folder: Path | None) -> Built | None:
    """Compile, write and print one; None where that failed, so that the others still get their turn."""
    try:
        built = _build(job)
        if folder is not None:
            objects.write(folder, built.key, built.library)
    except Exception as error:  # whatever the compiler and the packages around it raise
        table.failed(job, error)
        return None
    table.built(job, built)
    return built


class _Table:
    """Printed line by line as the kernels come; the columns that are known beforehand set their widths."""

    def __init__(self, jobs: list[Job]) -> None:
        self._rows = max([len("rows"), *(len(job.rows()) for job in jobs)])
        self._backend = max([len("backend"), *(len(job.backend.name) for job in jobs)])
        self._tactic = max([len("tactic"), *(len(str(job.tactic)) for job in jobs)])
        if jobs:
            numbers = f"{'arch':<8}  {'registers':>9}  {'shared memory':>13}  {'size':>8}  {'seconds':>7}"
            self._print("rows", "backend", "tactic", numbers)

    def _print(self, rows: str, backend: str, tactic: str, rest: str) -> None:
        print(f"  {rows:<{self._rows}}  {backend:<{self._backend}}  {tactic:<{self._tactic}}  {rest}", flush=True)

    def built(self, job: Job, built: Built) -> None:
        registers = "unknown" if built.registers is None else f"{built.registers}"
        smem = job.backend.smem_bytes(job.tactic)
        memory = "unknown" if smem is None else f"{smem / 1024:.1f} KB"
        size = f"{len(built.library) / 1024:.1f} KB"
        numbers = f"{built.arch:<8}  {registers:>9}  {memory:>13}  {size:>8}  {built.seconds:>7.2f}"
        self._print(job.rows(), job.backend.name, str(job.tactic), numbers)

    def failed(self, job: Job, error: Exception) -> None:
        self._print(job.rows(), job.backend.name, str(job.tactic), f"FAILED: {said(error)}")


def _not_compiled(report: HeadReport, jobs: list[Job], most: int) -> Iterator[str]:
    """The rows that none of ``jobs`` is the first choice for, and why; and what brackets mean."""
    compiled = {row for job in jobs for row in job.first}
    for first, last, decision in report.ranges():
        if decision.taken and first not in compiled:
            yield f"  {_ranges(range(first, last + 1))} rows: {decision.name}, which compiles nothing beforehand"
        elif not decision.taken:
            yield f"  {f'{first}+' if last > most else _ranges(range(first, last + 1))} rows: {decision.name}"
            yield from (f"    because {reason}" for reason in decision.reasons)
    if any(not job.first for job in jobs):
        yield "  (rows) in brackets: it serves them if what comes before it fails, or where autotune finds it quicker"


def _ranges(rows: Sequence[int]) -> str:
    """``[1, 2, 3, 5]`` -> ``"1-3, 5"``."""
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row for row in rows if row + 1 not in rows]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends))


def _out_folder(folder: Path) -> Path:
    """``folder``, made where it is missing; the user who serves reads it, its owner alone writes."""
    if os.pathsep in str(folder.absolute()):
        raise UsageError(
            f"--out {folder}: LOWBATCH_LMHEAD_OBJECTS cannot name a folder with {os.pathsep!r} in its path"
        )
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror or error}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--out {folder} cannot be written by this user")
    return folder.absolute()


def _print_use(folder: Path, done: list[Built]) -> None:
    key = done[0].key
    versions = ", ".join(f"{name} {key[name]}" for name in ("lowbatch-lmhead", *PACKAGES) if name in key)
    print(f"{len(done)} kernel{'' if len(done) == 1 else 's'} written. Copy the folder to the serving machine and set:")
    print(f"  export LOWBATCH_LMHEAD_OBJECTS={folder}")
    print(f"The serving machine needs the same versions: {versions}, their CUDA {key['cuda']}")
    print(
        f"libraries and {platform.machine()} (lowbatch-lmhead doctor shows them), and a folder that others cannot write."
    )
    reason = objects.distrust(folder)
    if reason:
        print(f"warning: as it is, nothing is loaded from it: {reason}", file=sys.stderr)
