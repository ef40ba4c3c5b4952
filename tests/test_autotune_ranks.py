"""autotune in two real gloo processes: one choice on both, and what happens when one of them fails.

A scenario is a few lines that run in both processes, with ``rank`` known; what it gives to ``say`` is its result. Those that
leave both processes alive run one after the other in the same two processes, which take seconds to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT

PREAMBLE = """
import json, os, pathlib, shutil, sys, time
sys.path[:0] = [{tests!r}]
import torch
import torch.distributed as dist
import lowbatch_lmhead
from lowbatch_lmhead import autotune, backends, explain, project, testing
from lowbatch_lmhead.tuning import ranks as ranks_module, timing
from scripted import Script, Tactics, steady
from conftest import inputs, linear

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
group = dist.group.WORLD
torch.set_grad_enabled(False)
cache = pathlib.Path(os.environ["LOWBATCH_LMHEAD_CACHE"])

def tuning(us, *kernels):
    script = Script(us)
    timing.timer_for = script
    backends._KERNELS[:] = kernels or [Tactics("a", "b")]
    testing.forget()
    return script

def once(happen):
    "Times of 90 for kernels; at the first time of 4 rows on rank 1 something happens."
    met = []
    def script(label, rows, round_):
        if rank == 1 and rows == 4 and not met:
            met.append(True)
            happen()
        return 100 if label in ("default", "again") else 90
    return script

def fail(error):
    raise error

def say(report=None, **more):
    if report is not None:
        (head,) = report.heads
        more |= dict(source=head.source, choice=[row.tactic for row in head.rows], notes=head.notes)
    print(json.dumps([scenario, more | dict(seconds=time.monotonic() - begin)]), flush=True)
"""
START = """
scenario, begin = {name!r}, time.monotonic()
shutil.rmtree(cache, ignore_errors=True)
torch.manual_seed(rank)  # shards differ in their weights
"""

LIVE = {
    # a is the best on the one rank, b on the other; by the slower of the two times, b is.
    "slowest": """
        head = linear()
        tuning(steady(default=100, a=80 + 18 * rank, b=92 - 2 * rank))
        report = autotune(head, process_group=group)
        x = inputs(25)
        right = torch.allclose(project(head, x).float(), x.float() @ head.weight.float().T, rtol=0.02, atol=0.1)
        say(report, us=report.heads[0].rows[0].us, right=right, kept=len(list(cache.rglob("*.json"))))
    """,
    "no gain on one": """
        tuning(steady(default=100, a=lambda rows: 80 if rank == 0 or rows <= 11 else 105, b=120))
        say(autotune(linear(), process_group=group))
    """,
    "no code on one": """
        tuning(steady(default=100, a=95, b=80), Tactics("a", "b", failing=["b"] if rank else []))
        say(autotune(linear(), process_group=group))
    """,
    "wrong on one": """
        tuning(steady(default=100, a=95, b=90), Tactics("a", "b", wrong_at={"b": 7} if rank else {}))
        say(autotune(linear(), process_group=group))
    """,
    "cache": """
        head, sources = linear(), []
        for lose in (False, False, True):
            if lose and rank:
                shutil.rmtree(cache)
            tuning(steady(default=100, a=95, b=80))
            report = autotune(head, process_group=group)
            sources.append(report.heads[0].source)
        say(report, sources=sources)
    """,
    "earlier call on one": """
        head, sources = linear(), []
        tuning(steady(default=100, a=95, b=80))
        if rank == 0:
            autotune(head, cache=False)
        for _ in range(2):
            report = autotune(head, process_group=group, cache=False)
            sources.append(report.heads[0].source)
        say(report, sources=sources)
    """,
    # Each was tuned by itself before, and found another choice.
    "earlier calls that differ": """
        head, sources = linear(), []
        tuning(steady(default=100, a=80 + 15 * rank, b=95 - 15 * rank))
        autotune(head, cache=False)
        for _ in range(2):
            report = autotune(head, process_group=group, cache=False)
            sources.append(report.heads[0].source)
        say(report, sources=sources)
    """,
    "a reader that fails on one": """
        class Odd:
            pass
        def reader(odd):
            if rank:
                raise RuntimeError("a reader that broke")
            return head.weight, None
        head = linear()
        lowbatch_lmhead.register_head(Odd, reader)
        tuning(steady(default=100, a=95, b=80))
        try:
            autotune(Odd(), process_group=group)
        except Exception as error:
            say(autotune(head, process_group=group), error=f"{type(error).__name__}: {error}")
    """,
    "budget": """
        tuning(steady(default=100, a=95, b=80))
        say(autotune(linear(), process_group=group, budget_s=1000 * (1 - rank)))
    """,
    "one raises": """
        tuning(once(lambda: fail(RuntimeError("a clock that broke"))))
        head = linear()
        report = autotune(head, process_group=group)
        total = torch.ones(1)
        dist.all_reduce(total)  # the group works on
        say(report, prepared=explain(head, inputs(16)).prepared, more=explain(head, inputs(17)).taken, total=total.item())
    """,
    "interrupted": """
        tuning(once(lambda: fail(KeyboardInterrupt())))
        head = linear()
        try:
            say(autotune(head, process_group=group))
        except KeyboardInterrupt:
            say(interrupted=True, taken=explain(head, inputs(17)).taken)
    """,
    "hooks on one": """
        tuning(steady(default=100, a=95, b=80))
        head = linear()
        if rank:
            head.register_forward_hook(lambda *arguments: None)
        say(autotune(head, process_group=group))
    """,
    "bad argument on one": """
        tuning(steady(default=100, a=95, b=80))
        try:
            autotune(linear(), max_rows=32 if rank else 0, process_group=group)
        except ValueError as error:
            say(error=str(error))
    """,
    "late": """
        ranks_module.TIMEOUT_S = 1.5
        tuning(once(lambda: time.sleep(4)))
        say(autotune(linear(), process_group=group))
        ranks_module.TIMEOUT_S = 60.0
        dist.barrier()
    """,
    "missed by one": """
        head, sources = linear(), []
        tuning(steady(default=100, a=95, b=80))
        ranks_module.TIMEOUT_S = 1.5
        if rank:
            autotune(head, process_group=group, cache=False)
        for _ in range(4):
            dist.barrier()
            report = autotune(head, process_group=group, cache=False)
            sources.append(report.heads[0].source)
        ranks_module.TIMEOUT_S = 60.0
        say(report, sources=sources)
    """,
    "wrong on one later": """
        kernel, head = Tactics("a", "b"), linear()
        tuning(steady(default=100, a=80, b=90), kernel)
        report = autotune(head, max_rows=8, process_group=group, cache=False)
        before = explain(head, inputs(5)).tactic
        if rank:
            kernel._wrong.add("a")
        report = autotune(head, max_rows=2, refresh=True, process_group=group, cache=False)
        after = explain(head, inputs(5))
        say(report, before=before, after=after.tactic, reasons=len(after.reasons))
    """,
}
DIFFERING = {
    "vocab": "autotune(linear(vocab=100 + rank), process_group=group)",
    "hidden": "autotune(linear(hidden=64 + 16 * rank), process_group=group)",
    "bias": "autotune(linear(bias=bool(rank)), process_group=group)",
    "dtype": "autotune(linear(dtype=torch.float16 if rank else torch.bfloat16), process_group=group)",
    "max_rows": "autotune(linear(), max_rows=8 + rank, process_group=group)",
    "out_dtype": "autotune(linear(), out_dtype=torch.float32 if rank else None, process_group=group)",
    "refresh": "autotune(linear(), refresh=bool(rank), process_group=group)",
}
DIFFERING_BODY = """
    script = tuning(steady(default=100, a=95, b=80))
    try:
        {call}
    except ValueError as error:
        say(error=str(error), made=script.made)
"""
# A process that does not live on.
LAST = {
    "never comes": """
        ranks_module.TIMEOUT_S = 1.5
        tuning(steady(default=100, a=95, b=80))
        if rank == 0:
            say(autotune(linear(), process_group=group))
        else:
            time.sleep(4)
    """,
    "killed": """
        tuning(once(lambda: os._exit(9)))
        say(autotune(linear(), process_group=group))
    """,
}


def run(folder, scenarios):
    """What both processes said: by scenario, the results of rank 0 and 1 (None for one that said nothing)."""
    code = PREAMBLE.format(tests=str(ROOT / "tests"))
    for name, body in scenarios.items():
        code += START.format(name=name) + textwrap.dedent(body)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(folder / "init")],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "src"),
                "OMP_NUM_THREADS": "1",
                "LOWBATCH_LMHEAD_CACHE": str(folder / f"cache{rank}"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [dict(json.loads(line) for line in out.splitlines()) for out, _ in done]
    for name in scenarios:
        assert any(name in one for one in said), done[0][1] + done[1][1]
    return {name: [one.get(name) for one in said] for name in scenarios}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    differing = {name: DIFFERING_BODY.format(call=call) for name, call in DIFFERING.items()}
    return run(tmp_path_factory.mktemp("ranks"), LIVE | differing)


def alike(results, name):
    """The result of both ranks, which is the same."""
    first, second = ({key: value for key, value in one.items() if key != "seconds"} for one in results[name])
    assert first == second
    return first


def test_the_slowest_rank_decides(results):
    said = alike(results, "slowest")
    assert said["source"] == "measured"
    assert said["choice"] == ["b"] * 32
    assert said["us"] == 92
    assert said["right"]
    assert said["kept"] == 1


def test_where_one_rank_gains_nothing_the_default_gemm_serves_on_both(results):
    assert alike(results, "no gain on one")["choice"] == ["a"] * 11 + [None] * 21


def test_what_does_not_compile_on_one_rank_serves_on_none(results):
    assert [one["choice"] for one in results["no code on one"]] == [["a"] * 32] * 2


def test_what_is_wrong_on_one_rank_serves_on_none(results):
    assert [one["choice"] for one in results["wrong on one"]] == [["a"] * 32] * 2


def test_the_cache_counts_where_both_have_the_same(results):
    """The second time both take it from there; when one has lost its entry both measure."""
    assert alike(results, "cache")["sources"] == ["measured", "cache", "measured"]


def test_an_earlier_call_counts_where_both_made_it(results):
    assert alike(results, "earlier call on one")["sources"] == ["measured", "earlier call"]


def test_earlier_calls_count_where_they_chose_alike(results):
    said = alike(results, "earlier calls that differ")
    assert said["sources"] == ["measured", "earlier call"]


def test_a_reader_that_fails_on_one_rank_raises_on_both(results):
    """At once, and the next call finds the ranks in step."""
    first, second = results["a reader that fails on one"]
    assert first["error"] == "ValueError: rank 1 cannot tune: a reader that broke"
    assert second["error"] == "RuntimeError: a reader that broke"
    for one in (first, second):
        assert one["source"] == "measured"
        assert one["seconds"] < 10


def test_the_budget_of_one_rank_ends_it_on_both(results):
    said = [one["choice"] for one in results["budget"]]
    assert said == [["a"] * 16 + [None] * 16] * 2


def test_a_rank_that_raises_makes_both_fall_back_at_once(results):
    for one in results["one raises"]:
        assert one["source"] == "not tuned"
        assert any("a clock that broke" in note for note in one["notes"])
        assert one["prepared"]
        assert not one["more"]
        assert one["total"] == 2
        assert one["seconds"] < 10
    assert any("rank 1" in note for note in results["one raises"][0]["notes"])


def test_an_interrupted_rank_makes_the_other_fall_back(results):
    first, second = results["interrupted"]
    assert first["source"] == "not tuned"
    assert second["interrupted"]
    assert not second["taken"]


def test_a_head_that_one_rank_cannot_tune_is_tuned_on_none(results):
    for one in results["hooks on one"]:
        assert one["source"] == "not tuned"
        assert "it has hooks" in one["notes"]


def test_a_bad_argument_on_one_rank_raises_on_both(results):
    first, second = results["bad argument on one"]
    assert first["error"] == "max_rows must be a whole number from 1 to 128, got 0"
    assert second["error"] == "rank 0 cannot tune: max_rows must be a whole number from 1 to 128, got 0"


def test_a_late_rank_makes_both_fall_back(results):
    for one in results["late"]:
        assert one["source"] == "not tuned"
        assert one["choice"][:16] == ["a"] * 16
    assert results["late"][0]["seconds"] < 4  # it did not wait for the other


def test_a_call_that_one_rank_missed_does_not_set_the_ranks_apart_for_good(results):
    assert alike(results, "missed by one")["sources"] == ["not tuned", "measured", "earlier call", "earlier call"]


def test_what_turns_out_wrong_on_one_rank_no_longer_serves_on_any(results):
    said = [
        {key: one[key] for key in ("choice", "before", "after", "reasons")} for one in results["wrong on one later"]
    ]
    assert said[0] == said[1] == {"choice": ["b", "b"], "before": "a", "after": None, "reasons": 1}


@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_that_differ_raise_on_both(results, what):
    for one in results[what]:
        assert "all ranks must tune heads of the same shape with the same arguments" in one["error"]
        assert not one["made"]


def test_a_rank_that_never_comes(tmp_path):
    first, _ = run(tmp_path, {"never comes": LAST["never comes"]})["never comes"]
    assert first["source"] == "not tuned"
    assert first["seconds"] < 4


def test_a_rank_that_is_killed(tmp_path):
    first, _ = run(tmp_path, {"killed": LAST["killed"]})["killed"]
    assert first["source"] == "not tuned"
    assert first["choice"][:16] == ["a"] * 16
    assert first["seconds"] < 30
