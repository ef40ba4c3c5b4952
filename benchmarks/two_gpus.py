"""Two GPUs of one machine: one process on both, and a vocabulary that is split over two ranks.

    python benchmarks/two_gpus.py all --out benchmarks/results/h200/two_gpus.json      (what follows, each with a time limit)
    python benchmarks/two_gpus.py one-process --out PART
    torchrun --standalone --nproc-per-node 2 benchmarks/two_gpus.py ranks --out PART
    torchrun --standalone --nproc-per-node 2 benchmarks/two_gpus.py tail --out PART
    python benchmarks/two_gpus.py vllm --out PART       (needs vLLM)

one-process: heads on each GPU, with the tensors' device current and not, on side streams, in graphs, in threads, moved from
one to the other: right logits against float64, in outputs full of NaN before, and plans apart. The host time of a call is
that of processes that see both GPUs over that of processes that see the first alone.

ranks: heads split by vocabulary, padded to a multiple of 64 first as engines do. The gathered logits are those of the whole
head on one GPU: the same bits where a kernel serves both with one tactic, otherwise within tolerance. Then ``autotune`` with
the process group, and what becomes of it when rank 1 fails or is late.

tail: rms_norm, the shard, all_gather or gather, argmax: ours, F.linear, and F.linear again, which shows the noise, in turn;
eager and in CUDA graphs. A time is the slower rank's.

vllm: the small model of engines.py over two GPUs, with the plugin and without it.

``--device cpu --small`` runs all but vLLM on tiny heads without a GPU, with gloo, the reference backend, and a clock for
``autotune`` that favours it: no time means anything then. NCCL runs without NVLink multicast.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # before NCCL is loaded

import engines
import machine
import timing
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compile_all import HEADS, shard
from torch import Tensor, nn

import lowbatch_lmhead
from lowbatch_lmhead import backends, devices, testing
from lowbatch_lmhead.backends import Launch
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.plan import Entry, plan_for
from lowbatch_lmhead.tuning import ranks as ranks_module
from lowbatch_lmhead.tuning import timing as tuning_timing
from lowbatch_lmhead.tuning.search import options

BF16, F32 = torch.bfloat16, torch.float32
LIMIT = {BF16: 2.5e-3, F32: 1e-5}  # of norm(y - exact) / norm(exact)
MODELS = ("llama-3.1-8b", "deepseek-v3", "granite-3.1-2b")
SMALL = {"llama-3.1-8b": (512, 128), "deepseek-v3": (640, 256), "granite-3.1-2b": (499, 128)}
MOST_ROWS = 16
ROWS = (1, 2, 4, 8, 16)
TAIL_ROWS = (1, 4, 16)
HOST_RATIO, TAIL_WORST, TAIL_MEAN, FALL_BACK_S = 1.05, 1.01, 0.96, 30.0  # the targets
LIMITS_S = {"one-process": 110, "ranks": 180, "tail": 110, "vllm": 200}  # of the parts of ``all``
RANKED = ("ranks", "tail")


def head_sizes(model: str, small: bool) -> dict[str, Any]:
    """The entry of heads.json, or one as small as a test."""
    head = next(head for head in HEADS if head["model"] == model)
    return head | dict(zip(("vocab_size", "hidden_size"), SMALL[model])) if small else head


def make(vocab: int, hidden: int, device: torch.device, seed: int = 0) -> Tensor:
    """A random weight: the same on every GPU of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(vocab, hidden, device=device, dtype=BF16, generator=generator)
    return weight.mul_(hidden**-0.5)


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def wrong(logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """The larger of the errors over all logits and over the end of the vocabulary, in units of what is allowed."""
    with current(x.device):
        everywhere, last = timing.relative_error(logits.flatten(0, -2), x.flatten(0, -2), weight, bias)
    limit = LIMIT[logits.dtype]
    found = max(everywhere / limit, last / (4 * limit))
    return math.inf if math.isnan(found) else round(found, 3)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronize(*on: torch.device) -> None:
    for device in on:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def serving(device: torch.device) -> Iterator[None]:
    """On a CPU the reference backend stands for the kernels, and wins."""
    if device.type != "cpu":
        yield
        return
    real, tuning_timing.timer_for = tuning_timing.timer_for, Favouring
    try:
        with testing.reference_backend():
            yield
    finally:
        tuning_timing.timer_for = real


class Favouring:
    """A timer by whose clock the reference backend takes nine tenths of the default GEMM's time."""

    def __init__(self, *_: Any) -> None:
        pass

    @contextlib.contextmanager
    def contest(self, rows: int, calls: Sequence[Callable[..., Any]]) -> Iterator[Favouring]:
        self._us = [90.0 if call.__qualname__.startswith("Reference.") else 100.0 for call in calls]
        yield self

    def round(self, which: Sequence[int]) -> list[float]:
        return [self._us[index] for index in which]

    def close(self) -> None:
        pass


def describe(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": "cpu", "torch": torch.__version__, "lowbatch-lmhead": lowbatch_lmhead.__version__}
    return {**machine.describe(), "gpus": torch.cuda.device_count()}


def write(path: Path, result: Any) -> None:
    """At once or not at all: what is there already counts when a part runs out of time."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(result, indent=1) + "\n")
    fresh.replace(path)


def attempt(check: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """What ``check`` found, with ``ok`` False where it raised."""
    begin = time.perf_counter()
    try:
        found = {"ok": True, **(check() or {})}
    except Exception as error:
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:1000]}
    return found | {"seconds": round(time.perf_counter() - begin, 2)}


# --- one process on both ---


class Both:
    """The checks of one process. ``a`` and ``b`` are two GPUs, or twice the only device that there is."""

    def __init__(self, a: torch.device, b: torch.device, small: bool) -> None:
        self.a, self.b, self.two = a, b, a != b
        self.shape = (512, 128) if small else (32000, 4096)
        self.other = (499, 128) if small else (49155, 2048)
        self.worst = 0.0

    def head(self, device: torch.device, shape: tuple[int, int] | None = None, seed: int = 0) -> nn.Linear:
        vocab, hidden = shape or self.shape
        head = nn.Linear(hidden, vocab, bias=False, device="meta").requires_grad_(False)
        head.weight = nn.Parameter(make(vocab, hidden, device, seed), requires_grad=False)
        return head

    def x(self, head: nn.Linear, rows: int = 4, seed: int = 1) -> Tensor:
        return make(rows, head.in_features, head.weight.device, seed).mul_(head.in_features**0.5)

    def right(self, logits: Tensor, head: nn.Linear, x: Tensor) -> None:
        """AssertionError unless these are the logits."""
        synchronize(x.device)
        assert logits.device == x.device, f"logits on {logits.device}, x on {x.device}"
        error = wrong(logits, x, head.weight, head.bias)
        self.worst = max(self.worst, error)
        assert error <= 1, f"the error is {error} times what is allowed, on {x.device}"

    def project(self, head: nn.Linear, x: Tensor, call: Callable[..., Tensor] | None = None) -> None:
        """Project into an output full of NaN, and check the logits."""
        out = poisoned(*x.shape[:-1], head.out_features, device=x.device)
        got = (call or functools.partial(lowbatch_lmhead.project, head))(x, out=out)
        assert got is out
        self.right(out, head, x)

    def served(self, head: nn.Linear, x: Tensor) -> None:
        decision = lowbatch_lmhead.explain(head, x)
        assert decision.taken, str(decision)
        assert decision.prepared, str(decision)

    def same_heads(self) -> dict[str, Any]:
        """One shape and other values on each, by turns."""
        heads = [self.head(self.a, seed=1), self.head(self.b, seed=2)]
        for rows in (1, 4, MOST_ROWS, MOST_ROWS + 1) * 2:
            for head in heads:
                self.project(head, self.x(head, rows))
        self.served(heads[0], self.x(heads[0]))
        self.served(heads[1], self.x(heads[1]))
        return {"plans_apart": self.plans_apart(*heads)}

    def plans_apart(self, first: nn.Linear, second: nn.Linear) -> bool | None:
        """Whether each device has a plan of its own; None on one device."""
        plans = [plan_for(head.weight, None, BF16) for head in (first, second)]
        if not self.two:
            return None
        assert plans[0] is not plans[1]
        assert plans[0].table is not plans[1].table
        assert [one.key.device for one in plans] == [self.a, self.b]
        return True

    def different_heads(self) -> None:
        heads = [self.head(self.a), self.head(self.b, self.other)]
        report = [lowbatch_lmhead.warmup(head) for head in heads]
        assert all(one.heads for one in report)
        for rows in (*range(1, MOST_ROWS + 1), 33):
            for head in heads:
                self.project(head, self.x(head, rows))

    def warmup_on_one(self) -> dict[str, Any]:
        """Preparing a head on one GPU prepares nothing on the other, which serves all the same."""
        heads = [self.head(self.a, seed=1), self.head(self.b, seed=2)]
        lowbatch_lmhead.warmup(heads[0])
        self.served(heads[0], self.x(heads[0]))
        prepared = lowbatch_lmhead.explain(heads[1], self.x(heads[1])).prepared
        assert prepared != self.two, f"prepared on the second device: {prepared}"
        for head in reversed(heads):
            self.project(head, self.x(head))
            self.served(head, self.x(head))
        return {"plans_apart": self.plans_apart(*heads)}

    def another_device_is_current(self) -> None:
        """Every way to the logits while the other device is current, the first call among them; it stays current."""
        for here, there in ((self.a, self.b), (self.b, self.a)):
            testing.forget()
            head, bound = self.head(here), None
            with current(there):
                for rows in (1, 4, MOST_ROWS, 33):
                    for _ in range(2):
                        self.project(head, self.x(head, rows))
                bound = lowbatch_lmhead.bind(head)
                x = self.x(head, 4)
                for _ in range(2):
                    self.project(head, x, bound)
                    self.right(bound(x), head, x)
                    self.right(bound(x[:, None]), head, x[:, None])
                    self.right(lowbatch_lmhead.project(head, x, out_dtype=F32), head, x)
                lowbatch_lmhead.warmup(head)
                lowbatch_lmhead.autotune(head, max_rows=2, cache=False, budget_s=10)
                self.project(head, self.x(head, 2))
                if there.type == "cuda":
                    assert torch.cuda.current_device() == there.index
            self.project(head, self.x(head))

    def side_streams(self) -> dict[str, Any] | None:
        """Work that is still queued on a side stream of each; entered in turn and one within the other."""
        if self.a.type != "cuda":
            return {"skipped": "streams are a GPU's"}
        heads = [self.head(self.a, seed=1), self.head(self.b, seed=2)]
        streams = [torch.cuda.Stream(device) for device in (self.a, self.b)]
        for head in heads:
            self.project(head, self.x(head))
        for nested in (False, True, True):
            xs = [self.x(head, seed=5) for head in heads]
            late = [torch.zeros_like(x) for x in xs]
            outs = [poisoned(4, self.shape[0], device=x.device) for x in xs]
            synchronize(self.a, self.b)
            for stream, x, behind in zip(streams, xs, late):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
                    behind.copy_(x)  # a launch on another stream would read zeros
            with contextlib.ExitStack() as stack:
                for stream in streams if nested else ():
                    stack.enter_context(torch.cuda.stream(stream))  # the second one's device is current then
                for head, stream, behind, out in zip(heads, streams, late, outs):
                    with contextlib.nullcontext() if nested else torch.cuda.stream(stream):
                        lowbatch_lmhead.project(head, behind, out=out)
            synchronize(self.a, self.b)
            for head, x, out in zip(heads, xs, outs):
                self.right(out, head, x)
            heads.reverse(), streams.reverse()
        return None

    def graphs(self) -> dict[str, Any] | None:
        """A graph on each device, captured after preparing, replayed with other inputs by turns."""
        if self.a.type != "cuda":
            return {"skipped": "graphs are a GPU's"}
        captured = []
        for device, seed in ((self.a, 1), (self.b, 2)):
            head = self.head(device, seed=seed)
            lowbatch_lmhead.warmup(head)
            x, out = self.x(head), poisoned(4, self.shape[0], device=device)
            graph = torch.cuda.CUDAGraph()
            with current(device), torch.cuda.graph(graph):
                lowbatch_lmhead.project(head, x, out=out)
            captured.append((graph, head, x, out))
        for seed in range(3):
            for graph, head, x, out in captured:
                x.copy_(self.x(head, seed=10 + seed))
                out.fill_(float("nan"))
                with current(x.device):
                    graph.replay()
            for _, head, x, out in captured:
                self.right(out, head, x)
        return None

    def moved(self) -> None:
        """``module.to`` and back, under ``project`` and under what was bound before."""
        head = self.head(self.a)
        bound = lowbatch_lmhead.bind(head)
        for device, left in ((self.a, self.b), (self.b, self.a), (self.a, self.b), (self.b, self.a)):
            before = self.x(head)
            head.to(device)
            for _ in range(2):
                self.project(head, self.x(head))
                self.project(head, self.x(head), bound)
            self.served(head, self.x(head))
            if before.device != device:
                self.refused(head, before.to(left), bound)

    def refused(self, head: nn.Linear, x: Tensor, bound: Callable[..., Tensor]) -> None:
        """x on a device that the head has left raises, and nothing is written."""
        for call in (bound, functools.partial(lowbatch_lmhead.project, head)):
            out = poisoned(4, self.shape[0], device=x.device)
            raised = None
            try:
                call(x, out=out)
            except ValueError as error:
                raised = str(error)
            assert raised, f"x on {x.device} was taken by a head on {head.weight.device}"
            assert str(head.weight.device) in raised, raised
            assert out.isnan().all()

    def threads(self) -> None:
        """A thread for each device, at once, from the first call on."""
        heads = [self.head(self.a, seed=1), self.head(self.b, seed=2)]
        xs = [self.x(head, seed=3) for head in heads]
        outs: dict[int, list[Tensor]] = {}
        failed: list[Exception] = []
        start = threading.Barrier(2)

        def work(index: int) -> None:
            try:
                start.wait()
                with torch.inference_mode():
                    outs[index] = [lowbatch_lmhead.project(heads[index], xs[index]) for _ in range(20)]
            except Exception as error:
                failed.append(error)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed:
            raise failed[0]
        for index, head in enumerate(heads):
            self.right(outs[index][-1], head, xs[index])
            assert all(torch.equal(one, outs[index][0]) for one in outs[index])


CHECKS = (
    *("same_heads", "different_heads", "warmup_on_one", "another_device_is_current"),
    *("side_streams", "graphs", "moved", "threads"),
)


def both_devices(device: str) -> list[torch.device]:
    """The first two GPUs; twice the only one."""
    if device == "cpu":
        return [torch.device("cpu")] * 2
    return [torch.device("cuda", min(index, torch.cuda.device_count() - 1)) for index in range(2)]


def one_process(arguments: argparse.Namespace) -> None:
    a, b = both_devices(arguments.device)
    both = Both(a, b, arguments.small)
    result: dict[str, Any] = {"devices": [str(a), str(b)], "checks": {}}
    with serving(a), torch.inference_mode():
        for name in CHECKS:
            testing.forget()
            result["checks"][name] = attempt(getattr(both, name))
            write(arguments.out, result)
    result["largest error over what is allowed"] = both.worst
    result["host_us"] = attempt(lambda: host_beside(arguments))
    result["ok"] = all(one["ok"] for one in [*result["checks"].values(), result["host_us"]])
    write(arguments.out, result)


def host(arguments: argparse.Namespace) -> None:
    """Microseconds of a call in this process, on the first device; with the other one current too where there is one."""
    a, b = both_devices(arguments.device)
    with serving(a), torch.inference_mode():
        both = Both(a, b, arguments.small)
        head = both.head(a)
        bound, x = lowbatch_lmhead.bind(head), both.x(head)
        out = torch.empty(4, head.out_features, device=a, dtype=BF16)
        lowbatch_lmhead.warmup(head)
        ways: dict[str, Callable[[], object]] = {
            "F.linear": lambda: F.linear(x, head.weight),
            "project": lambda: lowbatch_lmhead.project(head, x),
            "bind": lambda: bound(x),
            "bind, out=": lambda: bound(x, out=out),
        }
        found = {}
        for name, device in (("current", a), ("not current", b)):
            with current(device):
                for way in ways.values():
                    way()
                found[name] = host_us(ways, a, 20 if arguments.small else 200, 3 if arguments.small else 25)
        found["devices"] = 1 + both.two
    write(arguments.out, found)


def host_us(ways: dict[str, Callable[[], object]], device: torch.device, calls: int, rounds: int) -> dict[str, float]:
    """timing.host_us where another device than the tensors' may be current, and on a CPU."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for _ in range(calls // 10):
                way()
            begin = time.perf_counter()
            for _ in range(calls):
                way()
            times[name].append((time.perf_counter() - begin) * 1e6 / calls)
            synchronize(device)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def host_beside(arguments: argparse.Namespace) -> dict[str, Any]:
    """The same in processes that see one GPU and that see both, in turn."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    seen: dict[str, list[dict[str, Any]]] = {"one": [], "both": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 if arguments.small else 2):
            for name in ("one", "both"):
                out = Path(folder, f"{name}{turn}.json")
                only = {"CUDA_VISIBLE_DEVICES": visible} if name == "one" else {}
                command = [sys.executable, __file__, "host", "--out", str(out), *passed_on(arguments)]
                subprocess.run(command, env={**os.environ, **only}, check=True, stdout=sys.stderr)
                seen[name].append(json.loads(out.read_text()))
    ways = seen["one"][0]["current"]

    def median(name: str, where: str, way: str) -> float:
        return round(statistics.median(one[where][way] for one in seen[name]), 2)

    us = {"one GPU": {way: median("one", "current", way) for way in ways}}
    us |= {where: {way: median("both", where, way) for way in ways} for where in ("current", "not current")}
    ratios = {
        where: {way: round(us[where][way] / us["one GPU"][way], 3) for way in ways}
        for where in ("current", "not current")
    }
    ours = [ratio for where in ratios.values() for way, ratio in where.items() if way != "F.linear"]
    met = max(ours) <= HOST_RATIO
    return {"us": us, "ratio": ratios, "target": HOST_RATIO, "target_met": met, "devices": seen["both"][0]["devices"]}


# --- two ranks ---

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # newer PyTorch has renamed it


@dataclass
class Team:
    """This rank among the others. ``group`` is the one that is tested; ``talk`` carries what the ranks tell each other."""

    rank: int
    size: int
    device: torch.device
    group: Any
    talk: Any

    def exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def all_gather(self, logits: Tensor) -> Tensor:
        """(rows, vocabulary of this shard) of all ranks -> (rows, vocabulary)."""
        pieces = logits.new_empty((self.size * logits.shape[0], logits.shape[1]))
        _all_gather(pieces, logits, group=self.group)
        return pieces.view(self.size, *logits.shape).movedim(0, 1).reshape(logits.shape[0], -1)

    def gather(self, logits: Tensor) -> Tensor | None:
        """The same, on rank 0 alone."""
        pieces = [torch.empty_like(logits) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(logits, pieces, dst=0, group=self.group)
        return torch.cat(pieces, -1) if pieces else None


@contextlib.contextmanager
def joined(arguments: argparse.Namespace) -> Iterator[Team]:
    """The team that torchrun has started."""
    if "RANK" not in os.environ:
        raise SystemExit("ranks and tail are started by torchrun --standalone --nproc-per-node 2")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            raise SystemExit(f"{size} ranks need {size} GPUs, here are {torch.cuda.device_count()}")
        torch.cuda.set_device(device)
    backend = "gloo" if arguments.device == "cpu" else "nccl"
    dist.init_process_group(backend)
    try:
        with serving(device), torch.inference_mode():
            yield Team(rank, size, device, dist.group.WORLD, dist.new_group(backend="gloo"))
    finally:
        synchronize(device)
        dist.destroy_process_group()


def split(head: dict[str, Any], team: Team) -> tuple[Tensor, Tensor]:
    """The whole weight and this rank's part of it, of its own memory and padded with zeros as engines do."""
    whole = make(head["vocab_size"], head["hidden_size"], team.device, seed=1)
    size = shard(head, team.size)["vocab_size"]
    rows = whole[team.rank * size : (team.rank + 1) * size]
    part = whole.new_zeros((size, whole.shape[1]))
    part[: rows.shape[0]] = rows
    return whole, part


def served_by(weight: Tensor, x: Tensor, out_dtype: torch.dtype | None) -> list[str | None]:
    """[backend, tactic]."""
    decision = lowbatch_lmhead.explain(weight, x, out_dtype=out_dtype)
    return [decision.backend, decision.tactic]


def beside_whole(
    team: Team, whole: Tensor, part: Tensor, rows: int, out_dtype: torch.dtype | None, stage: str
) -> dict[str, Any]:
    """The gathered logits of the shards beside those of the whole head, at one row count."""
    x = make(rows, whole.shape[1], team.device, seed=100 + rows).mul_(whole.shape[1] ** 0.5)
    dtype = out_dtype or BF16
    outs = [poisoned(rows, weight.shape[0], device=team.device, dtype=dtype) for weight in (part, whole)]
    for weight, out in zip((part, whole), outs):
        lowbatch_lmhead.project(weight, x, out=out, out_dtype=out_dtype)
    gathered, single = team.all_gather(outs[0])[:, : whole.shape[0]], outs[1]
    here, there = served_by(part, x, out_dtype), served_by(whole, x, out_dtype)
    said = team.exchange({
        "here": [here, there],
        "equal": torch.equal(gathered, single),
        "error": wrong(gathered, x, whole),
        "apart": ((gathered.double() - single.double()).norm() / single.double().norm()).item(),
    })  # fmt: skip
    agree = all(one["here"] == [there] * 2 for one in said) and there[0] != backends.DEFAULT_GEMM
    equal = all(one["equal"] for one in said)
    error = max(one["error"] for one in said)
    return {
        "stage": stage,
        "rows": rows,
        "out_dtype": dtype_name(dtype),
        "shard": [one["here"][0] for one in said] if len({str(one["here"]) for one in said}) > 1 else here,
        "whole": there,
        "plans_agree": agree,
        "equal": equal,
        "apart": max(one["apart"] for one in said),
        "error over what is allowed": error,
        "ok": error <= 1 and (equal or not agree),
    }


def follow(whole: Tensor, part: Tensor) -> None:
    """Let the launches that serve the shard serve the whole head, too, where they are right for it."""
    plans = plan_for(whole, None, BF16), plan_for(part, None, BF16)
    entries, references = {}, []
    for rows in range(1, MOST_ROWS + 1):
        entry = plans[1].entries[rows]
        if entry is None or entry.launch is None:
            continue
        wanted = entry.launch.backend, entry.launch.tactic
        known = {(one.backend.name, str(one.tactic)): one for one in options(plans[0].problem(rows))[0]}
        if wanted not in known:
            continue
        option = known[wanted]
        launch = plans[0].checked(rows, option.backend, option.tactic, whole, None, references)
        if isinstance(launch, Launch):
            entries[rows] = Entry(launch, ())
    if entries:
        plans[0].adopt(entries)


def choices(report: Any) -> list[list[Any]]:
    return [[row.rows, row.backend, row.tactic] for head in report.heads for row in head.rows]


def tuned_alike(team: Team, part: Tensor, **how: Any) -> dict[str, Any]:
    """``autotune`` on all ranks: whether they chose alike."""
    begin = time.perf_counter()
    report = lowbatch_lmhead.autotune(
        part, max_rows=MOST_ROWS, process_group=team.group, progress=False, **{"refresh": True, "budget_s": 25, **how}
    )
    (head,) = report.heads
    own = {"source": head.source, "choice": choices(report), "notes": list(head.notes)}
    said = team.exchange(own | {"seconds": round(time.perf_counter() - begin, 2)})
    alike = all(one["choice"] == said[0]["choice"] and one["source"] == said[0]["source"] for one in said)
    return {
        "alike": alike,
        "sources": [one["source"] for one in said],
        "seconds": [one["seconds"] for one in said],
        "notes": [one["notes"] for one in said],
        "choice": said[0]["choice"] if alike else [one["choice"] for one in said],
    }


def split_head(team: Team, head: dict[str, Any]) -> dict[str, Any]:
    """One head: untuned, tuned by the ranks together, and taken from the cache."""
    whole, part = split(head, team)
    fingerprints = team.exchange(whole.view(torch.int16).sum(dtype=torch.int64).item())
    assert len(set(fingerprints)) == 1, "the ranks made different weights"
    rows = []
    for out_dtype in (None, F32) if head["vocab_size"] % 16 else (None,):
        for weight in (whole, part):
            lowbatch_lmhead.warmup(weight, max_rows=MOST_ROWS, out_dtype=out_dtype, progress=False)
        rows += [beside_whole(team, whole, part, count, out_dtype, "untuned") for count in ROWS]
    tuned = tuned_alike(team, part)
    follow(whole, part)
    rows += [beside_whole(team, whole, part, count, None, "tuned") for count in ROWS]
    testing.forget()
    again = tuned_alike(team, part, refresh=False)
    kept = again["choice"] == tuned["choice"] and again["sources"] == ["cache"] * team.size
    testing.forget()
    return {
        **{key: head[key] for key in ("model", "vocab_size", "hidden_size")},
        "shard_vocab": part.shape[0],
        "autotune": tuned,
        "from the cache": {key: again[key] for key in ("alike", "sources", "seconds")},
        "rows": rows,
        "ok": tuned["alike"] and tuned["sources"] == ["measured"] * team.size and kept and all(one["ok"] for one in rows),
    }  # fmt: skip


# --- a rank that fails ---


class Odd:
    """A head type of an engine, whose reader may fail."""


@contextlib.contextmanager
def a_round_does(happen: Callable[[], None]) -> Iterator[None]:
    """At the fifth time that ``autotune`` takes, something happens once."""
    original, taken = tuning_timing.timer_for, []

    def timer_for(*given: Any) -> Any:
        timer = original(*given)
        contest = timer.contest

        @contextlib.contextmanager
        def disturbed(*arguments: Any) -> Iterator[Any]:
            with contest(*arguments) as inner:
                taken.append(True)
                if len(taken) == 5:
                    happen()
                yield inner

        timer.contest = disturbed
        return timer

    tuning_timing.timer_for = timer_for
    try:
        yield
    finally:
        tuning_timing.timer_for = original


def fail() -> None:
    raise RuntimeError("a clock that broke")


def clock_breaks(team: Team, part: Tensor) -> dict[str, Any]:
    with a_round_does(fail) if team.rank == 1 else contextlib.nullcontext():
        tuned = tuned_alike(team, part, cache=False)
    fell = tuned["sources"] == ["not tuned"] * team.size
    said = all(any("a clock that broke" in note for note in notes) for notes in tuned["notes"])
    return tuned | {"ok": fell and said and tuned["alike"]}


def reader_fails(team: Team, part: Tensor) -> dict[str, Any]:
    """Raises on both, at once: nothing is known of the head."""

    rank = team.rank  # the reader stays registered, and what it holds stays: not the process group

    def read(odd: Odd) -> tuple[Tensor, None]:
        if rank == 1:
            raise RuntimeError("a reader that broke")
        return part, None

    lowbatch_lmhead.register_head(Odd, read)
    begin, raised = time.perf_counter(), None
    try:
        lowbatch_lmhead.autotune(Odd(), process_group=team.group, cache=False, progress=False)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    said = team.exchange([raised, round(time.perf_counter() - begin, 2)])
    lowbatch_lmhead.warmup(part, max_rows=MOST_ROWS, progress=False)
    named = [bool(one) and "a reader that broke" in one for one, _ in said]
    return {"raised": [one for one, _ in said], "seconds": [seconds for _, seconds in said], "ok": all(named)}


class NoCode(testing.Reference):
    """A backend of this device that rank 1 cannot compile."""

    name = "no code on rank 1"

    def __init__(self, device: torch.device, rank: int) -> None:
        self.architectures = frozenset({devices.architecture(device)})
        self._rank = rank

    def compile(self, problem: Any, tactic: Any) -> Launch:
        if self._rank == 1:
            raise RuntimeError("no code for it")
        return super().compile(problem, tactic)


def backend_fails(team: Team, part: Tensor) -> dict[str, Any]:
    """What one rank cannot compile serves on none; the others are measured."""
    backends._KERNELS.append(NoCode(team.device, team.rank))
    try:
        tuned = tuned_alike(team, part, cache=False)
    finally:
        backends._KERNELS.pop()
    served = {backend for _, backend, _ in tuned["choice"]} if tuned["alike"] else {NoCode.name}
    return tuned | {"ok": NoCode.name not in served and tuned["sources"] == ["measured"] * team.size}


def late_beyond_the_time(team: Team, part: Tensor) -> dict[str, Any]:
    """Rank 1 sleeps longer than the others wait; the time is shortened from a minute."""
    before, ranks_module.TIMEOUT_S = ranks_module.TIMEOUT_S, 3.0
    try:
        with a_round_does(lambda: time.sleep(8)) if team.rank == 1 else contextlib.nullcontext():
            tuned = tuned_alike(team, part, cache=False)
    finally:
        ranks_module.TIMEOUT_S = before
    fell = tuned["sources"] == ["not tuned"] * team.size
    return tuned | {"ok": fell and tuned["alike"] and tuned["seconds"][0] < tuned["seconds"][1]}


def late_within_the_time(team: Team, part: Tensor) -> dict[str, Any]:
    """Rank 1 comes three seconds after the others, who wait."""
    if team.rank == 1:
        time.sleep(3)
    tuned = tuned_alike(team, part, cache=False)
    return tuned | {"ok": tuned["alike"] and tuned["sources"] == ["measured"] * team.size}


FAILURES = (clock_breaks, reader_fails, backend_fails, late_beyond_the_time, late_within_the_time)


def with_failure(team: Team, part: Tensor, what: Callable[[Team, Tensor], dict[str, Any]]) -> dict[str, Any]:
    """What came of it, whether the head serves right logits after it, and whether the group still works."""
    testing.forget()
    dist.barrier(group=team.talk)
    found = what(team, part)
    x = make(4, part.shape[1], team.device, seed=7).mul_(part.shape[1] ** 0.5)
    out = poisoned(4, part.shape[0], device=team.device)
    prepared = lowbatch_lmhead.explain(part, x).prepared
    lowbatch_lmhead.project(part, x, out=out)
    total = torch.ones(1, device=team.device)
    dist.all_reduce(total, group=team.group)
    said = team.exchange({"prepared": prepared, "error": wrong(out, x, part), "total": total.item()})
    fine = all(one["prepared"] and one["error"] <= 1 and one["total"] == team.size for one in said)
    found.pop("choice", None)
    in_time = max(found["seconds"]) <= FALL_BACK_S
    return found | {"after": said, "in_time": in_time, "ok": bool(found["ok"] and fine and in_time)}


def ranks(arguments: argparse.Namespace) -> None:
    with joined(arguments) as team:
        result: dict[str, Any] = {
            "backend": dist.get_backend(team.group),
            "ranks": team.size,
            "heads": [],
            "failures": {},
        }
        for model in MODELS:
            result["heads"].append(split_head(team, head_sizes(model, arguments.small)))
            keep(team, arguments.out, result)
        _, part = split(head_sizes(MODELS[-1], arguments.small), team)
        for what in FAILURES:
            result["failures"][what.__name__] = with_failure(team, part, what)
            keep(team, arguments.out, result)
        compared = [row for head in result["heads"] for row in head["rows"]]
        result["summary"] = {
            "row counts with a plan that agrees": sum(row["plans_agree"] for row in compared),
            "of these bit for bit": sum(row["plans_agree"] and row["equal"] for row in compared),
            "of": len(compared),
        }
        result["ok"] = all(one["ok"] for one in [*result["heads"], *result["failures"].values()])
        keep(team, arguments.out, result)


def keep(team: Team, path: Path, result: dict[str, Any]) -> None:
    if team.rank == 0:
        write(path, result)


# --- the tail of a decode step ---


def copies_of(part: Tensor) -> list[Tensor]:
    """The weight, and copies of it until they are larger than four L2 caches."""
    if not part.is_cuda:
        return [part]
    l2 = torch.cuda.get_device_properties(part.device).L2_cache_size
    return [part] + [part.clone() for _ in range(max(1, -(-4 * l2 // part.nbytes)) - 1)]


def steps_of(
    projections: Sequence[Callable[[Tensor], Tensor]],
    x: Tensor,
    norm: Tensor,
    collect: Callable[[Tensor], Tensor | None],
) -> Callable[[int], Tensor | None]:
    """A function of a step's number that gives the next tokens; None on a rank that does not choose them."""

    def step(index: int) -> Tensor | None:
        hidden = F.rms_norm(x, (x.shape[1],), norm, 1e-5)
        logits = collect(projections[index % len(projections)](hidden))
        return None if logits is None else logits.argmax(-1)

    return step


def captured(step: Callable[[int], Any], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog works meanwhile
        for index in range(count):
            step(index)
    return graph


def timed(run: Callable[[], None], device: torch.device, count: int) -> float:
    """Microseconds of one of ``count`` steps."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6 / count
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def in_turn(team: Team, runs: dict[str, Callable[[], None]], count: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a step of each, of the slower rank. All ranks take the same turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name in runs if index % 2 else reversed(runs):
            times[name].append(timed(runs[name], team.device, count))
    said = team.exchange({name: statistics.median(values[1:]) for name, values in times.items()})
    return {name: round(max(one[name] for one in said), 2) for name in runs}


def tail_us(team: Team, steps: dict[str, Callable[[int], Any]], mode: str, count: int, rounds: int) -> dict[str, Any]:
    """The times of one mode, or why there are none on any rank."""

    def eagerly(step: Callable[[int], Any]) -> None:
        for index in range(count):
            step(index)

    if mode == "eager":
        return in_turn(team, {name: functools.partial(eagerly, step) for name, step in steps.items()}, count, rounds)
    graphs, failed = {}, None
    try:
        graphs = {name: captured(step, count) for name, step in steps.items()}
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"[:300]
    why = [one for one in team.exchange(failed) if one]
    if why:
        return {"error": why[0]}
    found = in_turn(team, {name: graph.replay for name, graph in graphs.items()}, count, rounds)
    synchronize(team.device)
    graphs.clear()  # before the communicator that they hold goes
    return found


def tail_rows(team: Team, head: dict[str, Any], small: bool) -> Iterator[dict[str, Any]]:
    _, part = split(head, team)
    report = lowbatch_lmhead.autotune(part, max_rows=MOST_ROWS, process_group=team.group, progress=False, budget_s=25)
    served = {row.rows: [row.backend, row.tactic] for row in report.heads[0].rows}
    weights = copies_of(part)
    ours = [lowbatch_lmhead.bind(weight) for weight in weights]
    linear = [functools.partial(lambda weight, x: F.linear(x, weight), weight) for weight in weights]
    count = max(len(weights), 4, round(timing.GRAPH_US / (part.nbytes / 4e6))) if part.is_cuda else 4
    norm = torch.ones(part.shape[1], device=team.device, dtype=BF16)
    for rows in TAIL_ROWS:
        x = make(rows, part.shape[1], team.device, seed=rows).mul_(part.shape[1] ** 0.5)
        for projection in ours:
            projection(x)  # the first call of each is outside of the graphs
        for name, collect in (("all_gather", team.all_gather), ("gather", team.gather)):
            ways = {"ours": ours, "linear": linear, "linear_again": linear}
            steps = {way: steps_of(projections, x, norm, collect) for way, projections in ways.items()}
            tokens = {way: step(0) for way, step in steps.items()}
            same = None if tokens["ours"] is None else (tokens["ours"] == tokens["linear"]).float().mean().item()
            for mode in ("eager", "graph") if part.is_cuda else ("eager",):
                us = tail_us(team, steps, mode, count, 3 if small else timing.ROUNDS)
                row = {
                    "model": head["model"],
                    "shard": list(part.shape),
                    "rows": rows,
                    "collective": name,
                    "mode": mode,
                }
                row |= {"served_by": served.get(rows), "same_tokens": same, "us": us}
                if "error" not in us:
                    row["ratio"] = round(us["ours"] / us["linear"], 4)
                    row["noise"] = round(us["linear_again"] / us["linear"], 4)
                yield row


def tail_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Largest ratio and geometric mean, of each mode and of all."""
    found = {}
    for mode in ("eager", "graph", "all"):
        ratios = [row["ratio"] for row in rows if "ratio" in row and mode in (row["mode"], "all")]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            met = max(ratios) <= TAIL_WORST and mean <= TAIL_MEAN
            found[mode] = {"largest": max(ratios), "geometric mean": round(mean, 4), "targets_met": met}
    return found | {"not timed": sum("ratio" not in row for row in rows), "targets": [TAIL_WORST, TAIL_MEAN]}


def tail(arguments: argparse.Namespace) -> None:
    with joined(arguments) as team:
        result: dict[str, Any] = {"backend": dist.get_backend(team.group), "ranks": team.size, "rows": []}
        for model in MODELS:
            for row in tail_rows(team, head_sizes(model, arguments.small), arguments.small):
                result["rows"].append(row)
                result["summary"] = tail_summary(result["rows"])
                keep(team, arguments.out, result)
            testing.forget()


# --- vLLM ---

_rows: dict[Any, frozenset[int]] = {}  # of a worker's heads, as the plugin has prepared them


def widen(model: Any) -> None:
    """Random weights, others on each rank, wide enough to keep ties of bfloat16 apart. Runs in vLLM's workers."""
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def serve(model: Any, on: bool) -> list[int]:
    """Let the plugin's heads serve what they have prepared, or nothing; what they serve. Runs in vLLM's workers."""
    from lowbatch_lmhead.adapters import vllm as adapter

    for key, head in adapter._heads.items():
        _rows.setdefault(key, head.rows)
        head.rows = _rows[key] if on else frozenset()
    return sorted({rows for head in adapter._heads.values() for rows in head.rows})


def vllm_engine(arguments: argparse.Namespace) -> None:
    """One engine over both GPUs; the plugin is there or not by the environment."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_ALLREDUCE_USE_SYMM_MEM="0",
    )  # fmt: skip
    import two_gpus as this  # what workers are told to call comes from a module that they can import
    from vllm import LLM, SamplingParams

    tokens = engines.TOKENS
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
                  "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
                  "bos_token_id": 1, "eos_token_id": 2, **engines.LLAMA}  # fmt: skip
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = LLM(folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=bool(arguments.eager), seed=0,
                     gpu_memory_utilization=0.5, max_model_len=1024, max_num_seqs=max(engines.BATCHES),
                     tensor_parallel_size=2, distributed_executor_backend="mp", disable_custom_all_reduce=True,
                     compilation_config={"pass_config": {"fuse_allreduce_rms": False}})  # fmt: skip
        engine.apply_model(this.widen)
        results = []
        for batch in engines.BATCHES:
            generator = torch.Generator().manual_seed(batch)
            vocab = engines.LLAMA["vocab_size"]
            prompts = [
                {"prompt_token_ids": torch.randint(3, vocab, (16,), generator=generator).tolist()} for _ in range(batch)
            ]

            def run(prompts: list[Any] = prompts) -> list[list[int]]:
                greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, greedy, use_tqdm=False)]

            def with_plugin(on: bool, run: Callable[[], Any] = run) -> Any:
                engine.apply_model(functools.partial(this.serve, on=on))
                return run()

            result: dict[str, Any] = {"batch": batch, "tokens": run()}
            ways: dict[str, Callable[[], Any]] = {"no plugin": run}
            if arguments.plugin:
                result["rows served on each rank"] = engine.apply_model(functools.partial(this.serve, on=True))
                assert all(result["rows served on each rank"]), "the plugin serves nothing"
                ways = {"without": functools.partial(with_plugin, False), "with": functools.partial(with_plugin, True)}
            result["ms_per_step"] = {name: round(ms / tokens, 4) for name, ms in engines.in_turn(ways).items()}
            results.append(result)
            write(arguments.out, results)


def run_vllm(arguments: argparse.Namespace) -> None:
    """The engine without the plugin and with it, and how far their tokens agree."""
    if arguments.device == "cpu":
        write(arguments.out, {"skipped": "vLLM's ranks here are GPUs"})
        return
    import vllm

    found: dict[str, Any] = {"vllm": vllm.__version__, "tensor_parallel_size": 2, "eager": bool(arguments.eager)}
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = engines.with_entry_point(folder / "site")
        environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).resolve().parent)
        for plugin in (0, 1):
            out = folder / f"{plugin}.json"
            command = [
                sys.executable,
                __file__,
                "vllm-engine",
                "--plugin",
                str(plugin),
                "--eager",
                str(arguments.eager),
            ]
            disable = {"LOWBATCH_LMHEAD_DISABLE": str(1 - plugin)}
            subprocess.run([*command, "--out", str(out)], env={**environment, **disable}, check=True)
            runs.append(json.loads(out.read_text()))
    found["batches"] = []
    for without, with_ in zip(*runs):
        agreed = engines.agreement(without["tokens"], with_["tokens"])
        times = without["ms_per_step"] | with_["ms_per_step"]
        found["batches"].append({**with_, "ms_per_step": times, "tokens": agreed})
    same = [one["tokens"]["identical"] == one["tokens"]["sequences"] for one in found["batches"]]
    write(arguments.out, found | {"ok": all(same)})


# --- all ---


def passed_on(arguments: argparse.Namespace) -> list[str]:
    return ["--device", arguments.device, *(["--small"] if arguments.small else [])]


def run_part(name: str, arguments: argparse.Namespace, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """What a part of its own processes has written; with ``error`` where it failed or ran out of time."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name in RANKED else []
    command = [sys.executable, *launcher, __file__, name, "--out", str(out), *passed_on(arguments)]
    begin, error = time.monotonic(), None
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if process.wait(LIMITS_S[name]):
                error = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done within {LIMITS_S[name]} s"
        finally:
            end(process)
    print(log.read_text(errors="replace"), f"{name}: {error or 'done'}", sep="\n", flush=True)
    found = json.loads(out.read_text()) if out.exists() else {}
    if error:
        found |= {"ok": False, "error": error, "end of its output": log.read_text(errors="replace")[-3000:]}
    return found | {"wall_s": round(time.monotonic() - begin, 1)}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part that is still there: its processes are a session of their own, torchrun's workers others."""
    for number, grace in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):  # torchrun ends its workers
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is not None and number == signal.SIGTERM:
                return
            os.killpg(process.pid, number)
            process.wait(grace)


def run_all(arguments: argparse.Namespace) -> None:
    result: dict[str, Any] = {"machine": describe(arguments.device)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {"LOWBATCH_LMHEAD_CACHE": str(folder / "cache"), **os.environ}
        for part in arguments.parts or LIMITS_S:
            result[part] = run_part(part, arguments, folder / f"{part}.json", environment)
            write(arguments.out, result)
    print(json.dumps({part: one.get("ok") for part, one in result.items() if part in LIMITS_S}))


COMMANDS = {
    "all": run_all, "one-process": one_process, "ranks": ranks, "tail": tail, "vllm": run_vllm, "host": host,
    "vllm-engine": vllm_engine,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny heads")
    parser.add_argument("--parts", nargs="*", choices=LIMITS_S, help="of all")
    parser.add_argument("--plugin", type=int, default=1)
    parser.add_argument("--eager", type=int, default=0)
    arguments = parser.parse_args()
    COMMANDS[arguments.command](arguments)
    if arguments.command in RANKED:
        # A thread of gloo may still be dropping tensors, which aborts a process whose interpreter is being finalized.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
