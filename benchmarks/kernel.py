"""The library's own kernels (stream, hopper stream) on every head of heads.json: 1 to 64 rows, bfloat16 and float32 logits,
beside F.linear, FlashInfer's kernels, a Triton GEMM and a plain read of the weight.

    python benchmarks/kernel.py compile --out DIR [--part 0 --parts 2] [--resume]       (needs no GPU)
    python benchmarks/kernel.py estimate [--part 0 --parts 2]        launches and seconds of a run   (needs no GPU)
    python benchmarks/kernel.py run --objects DIR --out PART [--part 0 --parts 2] [--resume] [--seconds 560]
    python benchmarks/kernel.py join kernel.json PART...            the parts as one file, with the summary
    python benchmarks/kernel.py summary kernel.json                  the figures again

``--models``, ``--rows``, ``--shards`` (the 1/8 shards instead of whole heads) and ``--tactics`` are the same for the first
three.

Times are those of CUDA graphs replayed in turn, medians of rounds; weights come from memory, x lies at 16 addresses. In the
first round everything runs; what is then 5 % behind the best of its kind is left out, also at the head's other row counts of
that output type. After three rounds the best two of each kind stay, after five the best, and the defaults. Where a figure is
close to a target there are more rounds.

Rows as in core.json: us is the quickest of our tactics, default_us the untuned one (of the first of our kernels that takes
the head), stream_us and stream_default_us those of the portable kernel; linear_us F.linear (for float32 logits torch.mm with
out_dtype); flashinfer_us the quickest tactic of warp split-K and direct (up to 32 rows); triton_us the quickest
configuration of triton_gemm.py; read_us a kernel that reads the weight alone, the best of its configurations, in the same
rounds; limit_us the same for as many bytes as weight, x and logits have. Every launch is checked first, with its output full
of NaN, against float64 on the same input: one that is wrong is reported under "wrong" and not timed. rel_err is the quickest
launch's, worst_rel_err the largest of all of ours, linear_rel_err F.linear's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import timing
import torch
import torch.nn.functional as F
from compile_all import HEADS, is_in, shard
from tuned import DTYPES, default, make, mean, write

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem, flashinfer, warp_splitk
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.backends.direct import Direct
from lowbatch_lmhead.backends.hopper_stream import HopperStream
from lowbatch_lmhead.backends.stream import Stream
from lowbatch_lmhead.backends.warp_splitk import WarpSplitK
from lowbatch_lmhead.benching.measure import check, errors
from lowbatch_lmhead.tuning import limit
from lowbatch_lmhead.tuning.timing import GRAPH_US, GraphTimer

ARCH = "sm_90a"
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
OURS = (HopperStream(), Stream())  # the first that takes a head serves it untuned
DIRECT = Direct()
# With warp split-K's whole list: its autotune_tactics leaves out what another backend always beats.
FLASHINFER = ((WarpSplitK(), warp_splitk.autotune_tactics), (DIRECT, DIRECT.autotune_tactics))
FLASHINFER_ROWS = 32
HOST_HEAD = {"model": "host", "vocab_size": 32000, "hidden_size": 4096}
HOST_ROWS = (4, 32, 64)

# A launch with a larger error is wrong. Others' accumulators may be less exact than ours.
BOUND = {
    ("ours", "bfloat16"): 2.5e-3,
    ("ours", "float32"): 1e-5,
    ("others", "bfloat16"): 5e-3,
    ("others", "float32"): 1e-4,
}

ROUNDS, MOST_ROUNDS = 5, 11
BEHIND = 0.05  # the best of its kind, after one round: left out
FINAL, FINALISTS = 0.02, 2  # behind the best of its kind after three rounds, and how many stay

# By row counts up to: of the limit that is to be reached, at hidden sizes from 2048 and below.
TARGETS = {16: (0.97, 0.95), 32: (0.96, 0.94), 64: (0.95, 0.93)}
LARGE = 200e6  # bytes
READING = "graphs of plain reads before each timed one"
WIDE = 2048
SLOWER = 1.02  # than the best of the others: listed


# --- what runs ---


@dataclass(frozen=True)
class Entry:
    """One launch in a contest. ``kind``: linear, read, hopper stream, stream, flashinfer or triton."""

    kind: str
    tactic: str
    call: Callable[..., Any]
    is_default: bool = False  # one of ours that is measured in any case
    rel_err: float = 0.0
    last_rows_err: float = 0.0

    @property
    def is_ours(self) -> bool:
        return self.kind in {backend.name for backend in OURS}

    @property
    def stays(self) -> bool:
        return self.is_default or self.kind == "linear"


def problem(head: dict[str, Any], rows: int, out_dtype: torch.dtype) -> Problem:
    return Problem(head["vocab_size"], head["hidden_size"], rows, torch.bfloat16, out_dtype, False, ARCH)


def our_launches(problem: Problem, which: str) -> Iterator[tuple[Any, Any, bool]]:
    """(backend, tactic, whether it is the default) of our kernels."""
    is_first = True  # of those that take the head: it serves it untuned
    for backend in OURS:
        if problem.arch in backend.architectures and backend.supports(problem) is None:
            default = backend.tactics(problem)[:1] if is_first else []
            tactics = backend.autotune_tactics(problem) if which == "autotune" else []
            for tactic in dict.fromkeys([*default, *tactics]):
                yield backend, tactic, tactic in default
            is_first = False


def flashinfer_launches(problem: Problem) -> Iterator[tuple[Any, Any, bool]]:
    if problem.rows <= FLASHINFER_ROWS:
        for backend, tactics in FLASHINFER:
            if backend.supports(problem) is None:
                for tactic in tactics(problem):
                    yield backend, tactic, False


def launches(problem: Problem, which: str) -> list[tuple[Any, Any, bool]]:
    return [*our_launches(problem, which), *flashinfer_launches(problem)]


def chosen_heads(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.models:
        named = [head for head in HEADS + [shard(head) for head in HEADS] if head["model"] in arguments.models]
        missing = set(arguments.models) - {head["model"] for head in named}
        if missing:
            raise SystemExit(f"not in heads.json: {', '.join(sorted(missing))}")
    else:
        named = [shard(head) for head in HEADS] if arguments.shards else HEADS
    return named[arguments.part :: arguments.parts]


# --- compiling without a GPU ---


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, Any, Problem, Any]]:
    """(model, backend, problem, tactic) of each object, once; those of the host times besides."""
    cases = [(head, rows, arguments.tactics) for head in chosen_heads(arguments) for rows in arguments.rows]
    cases += [(HOST_HEAD, rows, "default") for rows in HOST_ROWS] if arguments.part == 0 else []
    done = set()
    for head, rows, which in cases:
        for out_dtype in DTYPES.values() if head is not HOST_HEAD else (torch.bfloat16,):
            one = problem(head, rows, out_dtype)
            for backend, tactic, _ in launches(one, which):
                known = (one.vocab, one.hidden, out_dtype, backend.name, str(tactic))
                if known not in done:
                    done.add(known)
                    yield head["model"], backend, one, tactic


def compile_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    todo, failed, model, begin = list(jobs(arguments)), [], "", time.time()
    for index, (name, backend, one, tactic) in enumerate(todo):
        if name != model:
            model = name
            print(f"{model:<22} {index} of {len(todo)} [{time.time() - begin:.0f} s]", flush=True)
        if arguments.resume and is_in(arguments.out, backend, one, tactic):
            continue
        try:
            objects.write(arguments.out, *backend.build(one, tactic))
        except Exception as error:
            failed.append(f"{name} {backend.name} {tactic} {one.out_dtype}: {error}")
    print(f"{len(todo)} launches, {len(failed)} failed [{time.time() - begin:.0f} s]", *failed, sep="\n")
    raise SystemExit(1 if failed else 0)


# --- how long a run takes ---


def estimated_seconds(head: dict[str, Any], arguments: argparse.Namespace) -> float:
    """From the bytes of the weight at 4.6 TB/s, the least work of a graph, and what a launch costs the host to prepare."""
    read_us = head["vocab_size"] * head["hidden_size"] * 2 / 4.6e6
    graph_s, seconds, seen = max(GRAPH_US, 4 * read_us) / 1e6, 1.0, set()
    for out_dtype in DTYPES.values():
        for rows in sorted(arguments.rows, reverse=True):
            names = {f"{b.name} {t}" for b, t, _ in launches(problem(head, rows, out_dtype), arguments.tactics)}
            block = next(size for size in (16, 32, 64, 128) if rows <= size)
            names |= {f"triton {block} {index}" for index in range(20)} if arguments.triton else set()
            # About a quarter of what has been measured before is measured again.
            first = len({(name, out_dtype) for name in names} - seen)
            count = first + (len(names) - first) // 4 + 5
            seen |= {(name, out_dtype) for name in names}
            # Every second case is taken to be close to a target.
            rounds = 11 * (ROUNDS - 1) + 8 * (MOST_ROUNDS - ROUNDS) / 2
            timed = count + rounds
            seconds += timed * (1 + arguments.reading) * graph_s + count * (graph_s + 0.004) + first * 0.008
    return seconds


def estimate(arguments: argparse.Namespace) -> None:
    total = 0.0
    for head in chosen_heads(arguments):
        seconds = estimated_seconds(head, arguments)
        total += seconds
        print(f"{head['model']:<22} {head['vocab_size']}x{head['hidden_size']}: {seconds:.1f} s")
    count = sum(1 for _ in jobs(arguments))
    print(f"{count} objects, {total:.0f} s of measuring, and up to a minute for Triton's first compiling")


# --- measuring ---


class Head:
    """One head on the GPU with everything that is measured on it; launches are loaded once."""

    def __init__(self, head: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.head, self.arguments = head, arguments
        self.weight = make(head)
        most = max(arguments.rows)
        self.x = torch.randn(most, self.weight.shape[1], device=self.weight.device, dtype=torch.bfloat16)
        self.exact = torch.cat([self.x.double() @ part.double().t() for part in self.weight.split(32768)], 1)
        self.loaded: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.behind: set[tuple[Any, ...]] = set()  # what is not measured again
        self.wrong: list[dict[str, Any]] = []

    def measure(self) -> list[dict[str, Any]]:
        found = []
        for out_dtype in DTYPES.values():
            timer = GraphTimer(self.weight, None, max(self.arguments.rows), out_dtype)
            # From many rows to few: tactics are screened where their tile of tokens is full.
            for rows in sorted(self.arguments.rows, reverse=True):
                found.append(self.case(timer, rows, out_dtype))
            timer.close()
        return sorted(found, key=lambda row: (row["out_dtype"], row["rows"]))

    def candidates(self, rows: int, out_dtype: torch.dtype) -> Iterator[Entry]:
        """Everything that is not known to be behind, unchecked."""
        for index, call in enumerate(limit.readers(self.weight)):
            yield Entry("read", str(limit.CONFIGURATIONS[index]), call)
        one = problem(self.head, rows, out_dtype)
        for backend, tactic, is_default in launches(one, self.arguments.tactics):
            kind = backend.name if backend in OURS else "flashinfer"
            name = str(tactic) if backend in OURS else f"{backend.name.removeprefix('flashinfer ')}: {tactic}"
            if is_default or (kind, name, out_dtype) not in self.behind:
                yield Entry(kind, name, self.launch(backend, one, tactic), is_default)
        if self.arguments.triton:
            yield from self.triton_candidates(rows, out_dtype)

    def triton_candidates(self, rows: int, out_dtype: torch.dtype) -> Iterator[Entry]:
        import triton_gemm

        multiprocessors = torch.cuda.get_device_properties(self.weight.device).multi_processor_count
        block = triton_gemm.token_block(rows)
        for config in triton_gemm.configs(self.head["vocab_size"], rows, out_dtype):
            if ("triton", f"{config}, {block} tokens", out_dtype) not in self.behind:
                yield Entry("triton", f"{config}, {block} tokens", triton_gemm.launch(config, multiprocessors))

    def launch(self, backend: Any, one: Problem, tactic: Any) -> Callable[..., Any]:
        """The loaded launch; one that cannot be had raises where it is checked."""
        key = (backend.name, str(tactic), one.out_dtype)
        if key not in self.loaded:
            try:
                self.loaded[key] = backend.compile(one, tactic).call
            except Exception as error:
                self.loaded[key] = _raiser(error)
        return self.loaded[key]

    def checked(self, rows: int, out_dtype: torch.dtype) -> Iterator[Entry]:
        """The candidates that compute the product, with their errors; the others go to ``wrong``."""
        x, exact, name = self.x[:rows], self.exact[:rows], dtype_name(out_dtype)
        for entry in self.candidates(rows, out_dtype):
            if entry.kind == "read":
                yield entry
                continue
            reason = None
            try:
                found = check(entry.call, self.weight, x, exact, out_dtype)
                if max(found) > BOUND["ours" if entry.is_ours else "others", name]:
                    reason = f"error {found[0]:.3g}, of the last rows {found[1]:.3g}"
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:300]}"
            if reason is None:
                yield Entry(entry.kind, entry.tactic, entry.call, entry.is_default, *found)
            else:
                self.behind.add((entry.kind, entry.tactic, out_dtype))
                self.wrong.append({"model": self.head["model"], "rows": rows, "out_dtype": name,
                                   "kind": entry.kind, "tactic": entry.tactic, "problem": reason})  # fmt: skip
                print("WRONG", json.dumps(self.wrong[-1]), flush=True)

    def case(self, timer: Any, rows: int, out_dtype: torch.dtype) -> dict[str, Any]:
        """One row of the table."""
        linear = default(out_dtype)
        linear_err, _ = errors(linear(self.weight, self.x[:rows], None, None), self.exact[:rows])
        default_kind = next((b.name for b, _, _ in our_launches(problem(self.head, rows, out_dtype), "default")), None)
        entries = [Entry("linear", "", linear), *self.checked(rows, out_dtype)]
        vocab, hidden = self.weight.shape
        extra = rows * (hidden * 2 + vocab * out_dtype.itemsize) / self.weight.nbytes
        with timer.contest(rows, [entry.call for entry in entries]) as contest:
            contested = Contested(entries, contest, rows, hidden, extra, self.arguments.reading)
        self.behind |= {(e.kind, e.tactic, out_dtype) for e in contested.left_out if e.kind not in ("read", "linear")}
        return {
            "model": self.head["model"],
            "vocab": vocab,
            "hidden": hidden,
            "rows": rows,
            "out_dtype": dtype_name(out_dtype),
            **contested.row(default_kind),
            "worst_rel_err": max((entry.rel_err for entry in entries if entry.is_ours), default=None),
            "linear_rel_err": linear_err,
        }


def _raiser(error: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> None:
        raise error

    return call


class Contested:
    """The rounds of one contest, and what came out of them."""

    def __init__(
        self, entries: list[Entry], contest: Any, rows: int, hidden: int, extra: float, reading: int = 0
    ) -> None:
        self.entries, self.rows, self.hidden, self.extra = entries, rows, hidden, extra
        reader = next(index for index, entry in enumerate(entries) if entry.kind == "read")
        self.before = [reader] * reading
        self.times: list[list[float]] = [[] for _ in entries]
        self.active = list(range(len(entries)))
        self.left_out: list[Entry] = []
        for done in range(1, MOST_ROUNDS + 1):
            turn = self.active if done % 2 else self.active[::-1]
            for index, us in zip(turn, self.timed(contest, turn)):
                self.times[index].append(us)
            if done == 1:
                kept = self.within(BEHIND, len(entries))
                self.left_out = [
                    entries[index] for index in self.active if index not in kept and not entries[index].stays
                ]
                self.active = kept
            elif done == 3:
                self.active = self.within(FINAL, FINALISTS)
            elif done == ROUNDS:
                self.active = self.within(FINAL, 1)
            if done >= ROUNDS and not self.is_close():
                break

    def timed(self, contest: Any, turn: list[int]) -> list[float]:
        """Microseconds of each of ``turn``, after as many graphs of plain reads as are asked for."""
        step = len(self.before) + 1
        times: list[float] = contest.round([one for index in turn for one in (*self.before, index)])
        return times[step - 1 :: step]

    def us(self, index: int) -> float:
        return statistics.median(self.times[index])

    def within(self, margin: float, most: int) -> list[int]:
        """Of each kind the best and what is no more than ``margin`` behind it, and the defaults."""
        kept = set()
        for kind in {entry.kind for entry in self.entries}:
            mine = sorted((i for i in self.active if self.entries[i].kind == kind), key=self.us)
            kept |= {i for i in mine[:most] if self.us(i) <= self.us(mine[0]) * (1 + margin)}
            kept |= {i for i in mine if self.entries[i].stays}
        return sorted(kept)

    def best(self, *kinds: str) -> int | None:
        return min((i for i in self.active if self.entries[i].kind in kinds), key=self.us, default=None)

    def best_us(self, *kinds: str) -> float | None:
        index = self.best(*kinds)
        return None if index is None else round(self.us(index), 2)

    def default_us(self, kind: str | None) -> float | None:
        index = next((i for i, entry in enumerate(self.entries) if entry.is_default and entry.kind == kind), None)
        return None if index is None else round(self.us(index), 2)

    def limit_us(self) -> float:
        read_us = self.best_us("read")
        assert read_us is not None
        return read_us * (1 + self.extra)

    def is_close(self) -> bool:
        """Whether more rounds may change on which side of a target this case is."""
        us, other_us = self.best_us(*(b.name for b in OURS)), self.best_us("linear", "flashinfer", "triton")
        if us is None or other_us is None:
            return False
        return abs(self.limit_us() / us - target(self.rows, self.hidden)) < 0.006 or abs(us / other_us - SLOWER) < 0.012

    def row(self, default_kind: str | None) -> dict[str, Any]:
        ours = [backend.name for backend in OURS]
        names = {key: self.best(*kinds) for key, kinds in (("ours", ours), ("stream", ["stream"]),
                 ("flashinfer", ["flashinfer"]), ("triton", ["triton"]))}  # fmt: skip
        entry = {key: self.entries[index] if index is not None else None for key, index in names.items()}
        best = entry["ours"]
        return {
            "backend": best.kind if best else None,
            "tactic": best.tactic if best else None,
            "us": self.best_us(*ours),
            "linear_us": self.best_us("linear"),
            "flashinfer_us": self.best_us("flashinfer"),
            "flashinfer_tactic": entry["flashinfer"].tactic if entry["flashinfer"] else None,
            "triton_us": self.best_us("triton"),
            "triton_config": entry["triton"].tactic if entry["triton"] else None,
            "default_us": self.default_us(default_kind),
            "stream_us": self.best_us("stream"),
            "stream_tactic": entry["stream"].tactic if entry["stream"] else None,
            "stream_default_us": self.default_us("stream"),
            "read_us": self.best_us("read"),
            "limit_us": round(self.limit_us(), 2),
            "rounds": max(map(len, self.times)),
            "rel_err": best.rel_err if best else None,
            "last_rows_err": best.last_rows_err if best else None,
            "triton_rel_err": entry["triton"].rel_err if entry["triton"] else None,
        }


def host() -> dict[str, Any]:
    """Microseconds of host time of one launch, with the default tactics, beside F.linear."""
    weight = make(HOST_HEAD)
    x = torch.randn(max(HOST_ROWS), weight.shape[1], device=weight.device, dtype=torch.bfloat16)
    out = torch.empty(max(HOST_ROWS), weight.shape[0], device=weight.device, dtype=torch.bfloat16)
    ways: dict[str, Callable[[], object]] = {}
    for rows in HOST_ROWS:
        one, part, logits = problem(HOST_HEAD, rows, torch.bfloat16), x[:rows], out[:rows]
        ways[f"F.linear, {rows} rows"] = lambda x=part: F.linear(x, weight)
        seen = set()
        for backend, tactic, _ in launches(one, "default"):
            if backend.name in seen:
                continue
            seen.add(backend.name)
            try:
                call = backend.compile(one, tactic).call
                call(weight, part, None, logits)
            except Exception as error:
                print(f"no host time of {backend.name}, {rows} rows: {error}", flush=True)
                continue
            ways[f"{backend.name}, {rows} rows"] = lambda c=call, x=part, o=logits: c(weight, x, None, o)
    return {"head": f"{HOST_HEAD['vocab_size']}x{HOST_HEAD['hidden_size']}", "launch_us": timing.host_us(ways)}


def prepare_triton(arguments: argparse.Namespace) -> None:
    import triton_gemm

    begin = time.time()
    shapes = [(head["vocab_size"], head["hidden_size"]) for head in chosen_heads(arguments)]
    todo = triton_gemm.jobs(shapes, arguments.rows, list(DTYPES.values()))
    try:
        failed = triton_gemm.prepare(todo)
    except Exception as error:  # then each is compiled where it is first launched
        failed = [f"{type(error).__name__}: {error}"]
    print(
        f"{len(todo)} Triton kernels, {len(failed)} failed [{time.time() - begin:.0f} s]", *failed, sep="\n", flush=True
    )


def run(arguments: argparse.Namespace) -> None:
    machine.require_kernels()
    begin = time.time()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
        reason = objects.distrust(arguments.objects)
        if reason:  # everything would be compiled again, on the GPU's time
            raise SystemExit(f"no kernel is loaded from {arguments.objects}: {reason}")
    found: dict[str, Any] = {"rows": [], "wrong": [], "host": None, "compiled in the run": 0}
    if arguments.resume and arguments.out.exists():
        found |= json.loads(arguments.out.read_text())
    found["reading"] = arguments.reading
    measured = {row["model"] for row in found["rows"]}
    todo = [head for head in chosen_heads(arguments) if head["model"] not in measured]
    print(f"{len(todo)} heads, about {sum(estimated_seconds(head, arguments) for head in todo):.0f} s", flush=True)
    if arguments.triton and todo:
        prepare_triton(arguments)
    if arguments.part == 0 and not found["host"]:
        found["host"] = host()
        print(json.dumps(found["host"]), flush=True)
    spent, expected = 0.0, 0.0
    for index, head in enumerate(todo):
        start = time.time()
        needed = estimated_seconds(head, arguments) * (max(1.0, spent / expected) if expected else 1.0)
        if arguments.seconds and start - begin + needed > arguments.seconds:
            print(f"out of time: {len(todo) - index} heads are left, --resume goes on", flush=True)
            break
        on_gpu = Head(head, arguments)
        new = on_gpu.measure()
        found["rows"] += new
        found["wrong"] += on_gpu.wrong
        del on_gpu
        torch.cuda.empty_cache()
        save(arguments.out, found)
        spent, expected = spent + time.time() - start, expected + estimated_seconds(head, arguments)
        tell(head, new, time.time() - start, time.time() - begin)
    if found["rows"]:
        save(arguments.out, found)
        show(found)


def save(path: Path, found: dict[str, Any]) -> None:
    top = {
        "machine": found.get("machine") or machine.describe() | {"triton": flashinfer.version("triton")},
        "summary": summary(found["rows"]),
        READING: found["reading"],
        "host": found["host"],
        # More than none: these times include no compiling, but the run took longer for it.
        "compiled in the run": found["compiled in the run"] + objects.counts.compiled,
        "wrong": found["wrong"],
    }
    beside = path.with_name(path.name + ".new")
    write(beside, top, found["rows"])
    beside.replace(path)


def tell(head: dict[str, Any], rows: list[dict[str, Any]], seconds: float, total: float) -> None:
    """One line for each output type: of the limit, and over the best of the others, at each row count."""
    for name in DTYPES:
        mine = [row for row in rows if row["out_dtype"] == name and row["us"]]
        of_limit = " ".join(f"{row['limit_us'] / row['us']:.3f}" for row in mine)
        ratios = " ".join(f"{row['us'] / best_other(row):.3f}" for row in mine)
        print(f"{head['model']:<22} {name:<8} of the limit {of_limit} | over the others {ratios}", flush=True)
    compiled = f", {objects.counts.compiled} compiled so far" if objects.counts.compiled else ""
    print(f"   {seconds:.0f} s [{total:.0f} s]{compiled}", flush=True)


# --- figures ---


def target(rows: int, hidden: int) -> float:
    last = next((last for last in TARGETS if rows <= last), max(TARGETS))
    return TARGETS[last][0 if hidden >= WIDE else 1]


def best_other(row: dict[str, Any]) -> float:
    return min(us for us in (row["linear_us"], row["flashinfer_us"], row["triton_us"]) if us)


def named(row: dict[str, Any], value: float) -> str:
    return f"{row['model']} {row['rows']} {row['out_dtype']}: {value:.3f}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are asked of this table: of whole heads, and apart from them of shards."""
    shards = [row for row in rows if "1/8" in row["model"]]
    whole = [row for row in rows if "1/8" not in row["model"]]
    result = figures(whole) if whole or not shards else {}
    return result | ({"1/8 shards": figures(shards)} if shards else {})


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    served = [row for row in rows if row["us"]]
    result = taken(rows)
    for first, (last, targets) in zip((1, 17, 33), TARGETS.items()):
        for name, is_wide, bound in ((f"hidden >= {WIDE}", True, targets[0]), (f"hidden < {WIDE}", False, targets[1])):
            mine = [row for row in served if first <= row["rows"] <= last and (row["hidden"] >= WIDE) == is_wide]
            result[f"of the limit, above 200 MB, {name}, rows {first}-{last}"] = of_limit(mine, bound)
    return result | {
        "over the best of F.linear, FlashInfer and Triton": against(served, best_other),
        "over F.linear": against(served, lambda row: row["linear_us"]),
        "over F.linear, vocab % 16 != 0": odd(served),
        "errors": error_figures(served),
    }


def taken(rows: list[dict[str, Any]]) -> dict[str, Any]:
    models = dict.fromkeys(row["model"] for row in rows)
    missing = [f"{row['model']} {row['rows']} {row['out_dtype']}" for row in rows if not row["us"]]
    both = [
        model
        for model in models
        if {row["out_dtype"] for row in rows if row["model"] == model} == set(DTYPES)
        and all(row["us"] for row in rows if row["model"] == model)
    ]
    return {
        "heads": len(models),
        f"heads taken, of {len(HEADS)}, at every row count and with both types of logits": len(both),
        "cases": len(rows),
        "cases not taken": missing,
    }


def of_limit(rows: list[dict[str, Any]], bound: float) -> dict[str, Any]:
    reached = [(row["limit_us"] / row["us"], row) for row in rows if row["vocab"] * row["hidden"] * 2 > LARGE]
    parts = [part for part, _ in reached]
    return {
        "cases": len(parts),
        "least": min(parts, default=None),
        "geometric mean": mean(parts) if parts else None,
        f"below {bound}": [named(row, part) for part, row in sorted(reached, key=lambda one: one[0]) if part < bound],
    }


def against(rows: list[dict[str, Any]], other: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    ratios = [(row["us"] / other(row), row) for row in rows]
    many = [(ratio, row) for ratio, row in ratios if row["rows"] > 16]
    return {
        "largest": max((ratio for ratio, _ in ratios), default=None),
        f"above {SLOWER}": [
            named(row, ratio) for ratio, row in sorted(ratios, key=lambda one: -one[0]) if ratio > SLOWER
        ],
        "rows 17-64, geometric mean": mean([ratio for ratio, _ in many]) if many else None,
        "rows 17-64, vocab % 16 == 0, geometric mean": mean([r for r, row in many if row["vocab"] % 16 == 0])
        if any(row["vocab"] % 16 == 0 for _, row in many)
        else None,
        "rows 17-64, largest": max((ratio for ratio, _ in many), default=None),
    }


def odd(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["us"] / row["linear_us"] for row in rows if row["vocab"] % 16]
    return {
        "cases": len(ratios),
        "geometric mean": mean(ratios) if ratios else None,
        "largest": max(ratios, default=None),
    }


def error_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every launch that was timed, not of the quickest alone."""
    narrow, wide = ([row for row in rows if row["out_dtype"] == name] for name in DTYPES)
    return {
        "bfloat16, over F.linear's own on the same input, largest": max(
            (row["worst_rel_err"] / row["linear_rel_err"] for row in narrow), default=None
        ),
        "bfloat16, largest": max((row["worst_rel_err"] for row in narrow), default=None),
        "float32, largest": max((row["worst_rel_err"] for row in wide), default=None),
        "last rows of the quickest, bfloat16, largest": max((row["last_rows_err"] for row in narrow), default=None),
        "last rows of the quickest, float32, largest": max((row["last_rows_err"] for row in wide), default=None),
    }


def show(found: dict[str, Any]) -> None:
    print(json.dumps(summary(found["rows"]), indent=1))
    ours = [one for one in found["wrong"] if one["kind"] in {backend.name for backend in OURS}]
    print(f"{len(found['wrong'])} wrong launches, {len(ours)} of them ours", *map(json.dumps, ours), sep="\n")


def show_summary(arguments: argparse.Namespace) -> None:
    show(json.loads(arguments.file.read_text()))


def join(arguments: argparse.Namespace) -> None:
    """A case that was measured again counts as it was measured last."""
    parts = [json.loads(part.read_text()) for part in arguments.parts]
    cases = {(row["model"], row["rows"], row["out_dtype"]): row for part in parts for row in part["rows"]}
    order = {head["model"]: index for index, head in enumerate(HEADS + [shard(head) for head in HEADS])}
    rows = sorted(cases.values(), key=lambda row: (order[row["model"]], row["out_dtype"], row["rows"]))
    top = {
        "machine": parts[0]["machine"],
        "summary": summary(rows),
        READING: parts[0].get(READING, 0),
        "host": next((part["host"] for part in parts if part["host"]), None),
        "compiled in the run": sum(part["compiled in the run"] for part in parts),
        "wrong": [one for part in parts for one in part["wrong"]],
    }
    write(arguments.out, top, rows)
    show(top | {"rows": rows})


# --- arguments ---


def choices(command: argparse.ArgumentParser) -> None:
    command.add_argument("--models", nargs="*", help="names as in heads.json, or 'NAME 1/8'")
    command.add_argument("--shards", action="store_true", help="the 1/8 shards instead of whole heads")
    command.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    command.add_argument("--tactics", choices=("default", "autotune"), default="autotune", help="of our kernels")
    command.add_argument("--no-triton", dest="triton", action="store_false")
    command.add_argument(
        "--reading", type=int, default=0, metavar="GRAPHS", help="of plain reads before each timed one (1.5 ms each)"
    )
    command.add_argument("--part", type=int, default=0, help="of --parts that share the heads")
    command.add_argument("--parts", type=int, default=1)
    command.add_argument("--resume", action="store_true", help="leave out what is in --out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("compile", compile_all), ("estimate", estimate), ("run", run)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        choices(command)
        if name != "estimate":
            command.add_argument("--out", type=Path, required=True)
        if name == "run":
            command.add_argument("--objects", type=Path, help="what compile wrote")
            command.add_argument("--seconds", type=float, help="no head is begun that would not be done by then")
    showing = commands.add_parser("summary")
    showing.set_defaults(function=show_summary)
    showing.add_argument("file", type=Path)
    joining = commands.add_parser("join")
    joining.set_defaults(function=join)
    joining.add_argument("out", type=Path)
    joining.add_argument("parts", nargs="+", type=Path)
    arguments = parser.parse_args()
    with torch.inference_mode():
        arguments.function(arguments)


if __name__ == "__main__":
    main()
