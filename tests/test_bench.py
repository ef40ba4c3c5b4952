"""``lowbatch-lmhead bench`` and the benchmarks beside it, without a GPU: what is measured, kept, shown and returned."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, Counting, load_script, python
from scripted import Script, steady

from lowbatch_lmhead import cli, cli_bench, plan, testing
from lowbatch_lmhead.benching import competitors, measure, results
from lowbatch_lmhead.benching.competitors import Case, Competitor, Prepared
from lowbatch_lmhead.tuning import timing

CPU = torch.device("cpu")
HEAD = ["--vocab", "200", "--hidden", "64", "--device", "cpu"]
BENCHMARKS = ROOT / "benchmarks"
needs_benchmarks = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the benchmarks are not part of this distribution"
)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(competitors, "added", [])


def bench(capsys, *argv):
    status = cli.main(["bench", *map(str, argv)])
    captured = capsys.readouterr()
    return SimpleNamespace(status=status, out=captured.out, err=captured.err)


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as exited:
        cli.main(["bench", *map(str, argv)])
    assert exited.value.code == 2
    return capsys.readouterr().err


def kept(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def by_name(content):
    return {one["name"]: one for one in content["results"]}


def add(name, call=None, available=None, make=None):
    """A competitor that the command measures besides; ``call(weight, x, bias, out)``."""
    made = make or (lambda case, weight, x: Prepared(call))
    competitors.added.append(Competitor(name, lambda case: available, made))


@pytest.fixture
def measured(monkeypatch):
    """The cases that are measured."""
    cases, original = [], measure.measure

    def counted(case, *arguments):
        cases.append(case)
        return original(case, *arguments)

    monkeypatch.setattr(measure, "measure", counted)
    return cases


# --- arguments ---


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--device", "cpu"], "Give --vocab and --hidden, or --model"),
        ([*HEAD, "--rows", "0"], "'0' is not one or more whole numbers from 1 to 128"),
        ([*HEAD, "--rows", "1,,4"], "'1,,4' is not"),
        ([*HEAD, "--rows", "129"], "'129' is not"),
        ([*HEAD, "--rows", "9" * 5000], "is not one or more"),
        ([*HEAD, "--out-dtype", "float16"], "'float16'"),
        ([*HEAD, "--resume"], "--resume needs --out DIR"),
        ([*HEAD, "--tp", "7"], "--tp 7 does not divide a vocabulary of 256"),
        (["--model", "gpt-9"], "is neither one of"),
    ],
)
def test_wrong_arguments(capsys, argv, said):
    assert said in refused(capsys, *argv)


def test_out_must_be_a_folder(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be made: File exists" in refused(capsys, *HEAD, "--out", tmp_path / "file")


def test_row_counts_are_taken_once_and_in_order():
    assert cli_bench._rows("16,1,16,4") == [16, 1, 4]


# --- a run ---


def test_a_run_without_a_kernel(capsys, tmp_path):
    done = bench(capsys, *HEAD, "--rows", "1,3", "--out", tmp_path)
    assert done.status == 0
    assert "head 200x64, 1 row, bfloat16 logits, on the CPU, wall-clock time" in done.out
    assert "head 200x64, 3 rows" in done.out
    one, three = kept(tmp_path)
    assert (one["rows"], three["rows"]) == (1, 3)
    assert one["environment"]["torch"] == torch.__version__
    assert one["environment"]["gpu"] is None
    assert set(one["clocks_mhz"].values()) == {None}
    found = by_name(one)
    for name in ("project, tuned", "project, untuned", "F.linear", "F.linear, again"):
        assert found[name]["us"] > 0
        assert found[name]["host_us"] > 0
        assert 0 < found[name]["rel_err"] < 3e-3
        assert found[name]["reason"] is None
    assert found["F.linear"]["ratio"] == 1
    assert found["project, untuned"]["note"] == "default GEMM"
    assert one["noise"] == pytest.approx(abs(found["F.linear, again"]["ratio"] - 1))


def test_every_competitor_is_measured_or_has_a_reason(capsys, tmp_path):
    out = bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path).out
    (content,) = kept(tmp_path)
    found = by_name(content)
    names = [one.name for one in competitors.table(CPU, False)]
    assert len(set(names)) == len(names)
    assert set(found) == {*names, "F.linear, again"}
    for name, one in found.items():
        assert (one["us"] is None) == bool(one["reason"])
        (line,) = [line for line in out.splitlines() if line.startswith(f"  {name}  ")]
        assert one["us"] is not None or f"not measured: {one['reason']}" in line
    assert "float32 logits" in found["torch.mm(out_dtype=float32)"]["reason"]
    assert "CUDA GPU" in found["flashinfer mm_bf16"]["reason"]
    assert "CUDA GPU" in found["QuACK gemm"]["reason"]
    assert "--compile" in found["torch.compile"]["reason"]
    assert "python -m benchmarks" in found["Triton GEMM"]["reason"]


def test_float32_logits(capsys, tmp_path):
    done = bench(capsys, *HEAD, "--rows", "2", "--out-dtype", "float32", "--out", tmp_path)
    assert done.status == 0
    (content,) = kept(tmp_path)
    found = by_name(content)
    assert content["yardstick"] == "F.linear in float32"
    assert found["F.linear in float32"]["ratio"] == 1
    assert found["F.linear"]["reason"] == "its logits are rounded to bfloat16"
    assert all(one["rel_err"] < 1e-6 for one in found.values() if one["us"])


def test_a_model_and_a_shard_of_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(cli.MODELS, "tiny", cli.Size(190, 64))
    bench(capsys, "--model", "tiny", "--tp", "2", "--device", "cpu", "--rows", "1", "--out", tmp_path)
    (content,) = kept(tmp_path)
    assert (content["model"], content["vocab"]) == ("tiny 1/2", 96)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny_1_2-96x64-1-bfloat16.json"]


class Slow(Counting):
    """A backend that no measurement chooses."""

    def compile(self, problem, tactic):
        launch = super().compile(problem, tactic)

        def call(*tensors):
            time.sleep(0.002)
            launch.call(*tensors)

        call.label = "slow"
        return type(launch)(call, launch.backend, launch.tactic)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_no(capsys):
    assert cli.main(["bench", "--model", "llama-3.1-8b"]) == 1
    assert "bench measures on a CUDA GPU, and there is none here; --device cpu" in capsys.readouterr().err


def test_tuned_and_untuned_are_two_plans(capsys, monkeypatch, tmp_path):
    """Each is served by its own all the time, though a process has one plan for a head."""
    case = Case("head", 200, 64, 2, torch.bfloat16, CPU, 2)
    weight, x = torch.randn(200, 64).bfloat16(), torch.randn(2, 64).bfloat16()
    # What autotune measures: a busy machine may be slower than Slow.
    monkeypatch.setattr(timing, "timer_for", Script(steady(default=1.0, slow=2000.0)))
    with testing.reference_backend(Slow()) as backend, torch.inference_mode():
        tuned, untuned = (make(case, weight, x) for make in (competitors._tuned, competitors._untuned))
        mine = plan.plan_for(weight, None, torch.bfloat16)
        assert (tuned.note, untuned.note) == ("default GEMM", "reference (4 splits)")
        for _ in range(3):
            for prepared, launches in ((tuned, 0), (untuned, 1)):
                before = backend.calls
                out = torch.empty(2, 200, dtype=torch.bfloat16)
                prepared.call(weight, x, None, out)
                prepared.call(weight.clone(), x, None, out)
                with prepared.around():
                    prepared.host()
                assert backend.calls - before == 3 * launches
        assert plan.plan_for(weight, None, torch.bfloat16) is mine
        assert bench(capsys, *HEAD, "--rows", "2", "--out", tmp_path).status == 0
    found = by_name(kept(tmp_path)[0])
    assert found["project, untuned"]["note"].startswith("reference")
    assert found["project, untuned"]["us"] > 2000  # which Slow waits in each call
    assert found["project, tuned"]["note"] == "default GEMM"


def test_torch_compile_is_measured_where_it_is_asked_for(capsys, monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    assert bench(capsys, *HEAD, "--rows", "1", "--compile", "--out", tmp_path).status == 0
    assert by_name(kept(tmp_path)[0])["torch.compile"]["us"] > 0
    assert compiled[0]["mode"] == "max-autotune-no-cudagraphs"


# --- what cannot run, or is wrong ---


def writes_beside(weight, x, bias, out):
    out.copy_(F.linear(x, weight))
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1)
    return out


WRONG = {
    "off": (lambda weight, x, bias, out: F.linear(x, weight) * 1.05, "wrong: relative error 0.05 against float64"),
    "silent": (lambda weight, x, bias, out: None, "wrong: relative error inf against float64, over 0.005"),
    "beside": (writes_beside, "wrong: relative error inf"),
    "wide": (lambda weight, x, bias, out: F.linear(x.float(), weight.float()), "TypeError: it gave (1, 200) float32"),
    "part": (lambda weight, x, bias, out: F.linear(x, weight)[:, 1:], "TypeError: it gave (1, 199) bfloat16"),
    "raises": (lambda weight, x, bias, out: 1 / 0, "ZeroDivisionError: division by zero"),
}


def test_what_is_wrong_or_raises_is_in_the_table_with_its_reason(capsys, tmp_path):
    def no_make(case, weight, x):
        raise RuntimeError("no such\nGPU")

    for name, (call, _) in WRONG.items():
        add(name, call)
    add("absent", available="it is not installed")
    add("unmade", make=no_make)
    done = bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path)
    assert done.status == 0
    found = by_name(kept(tmp_path)[0])
    reasons = {name: said for name, (_, said) in WRONG.items()}
    reasons |= {"absent": "it is not installed", "unmade": "RuntimeError: no such GPU"}
    for name, said in reasons.items():
        assert found[name]["us"] is None
        assert found[name]["host_us"] is None
        assert said in found[name]["reason"]
        assert f"not measured: {found[name]['reason']}" in done.out
    assert found["off"]["rel_err"] == pytest.approx(0.05, rel=0.1)
    assert found["silent"]["rel_err"] is None


def test_what_cannot_be_timed_stops_nobody(capsys, tmp_path):
    def once(case, weight, x):
        calls = []

        def call(weight, x, bias, out):
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("capture")
            return F.linear(x, weight)

        return Prepared(call)

    class Strict(cli_bench.timer_for(torch.ones(2, 2), None, 1, torch.float32).__class__):
        def contest(self, rows, calls):
            for call in calls:
                call(self._weight, self._x[:rows], None, self._out[:rows])
            return super().contest(rows, calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_bench, "timer_for", Strict)
        add("once", make=once)
        assert bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path).status == 0
    found = by_name(kept(tmp_path)[0])
    assert found["once"]["reason"] == "it cannot be timed: RuntimeError: capture"
    assert found["F.linear"]["us"] > 0


def test_status_1_where_project_is_wrong(capsys):
    add("project, tuned", lambda weight, x, bias, out: F.linear(x, weight) * 2)
    done = bench(capsys, *HEAD, "--rows", "1")
    assert done.status == 1
    assert "project, tuned               not measured: wrong" in done.out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("the GPU fell over"), "head, 1 rows, could not be measured: RuntimeError: the GPU fell over"),
        (torch.OutOfMemoryError("64 GiB"), "no memory for a 200x64 weight on cpu"),
    ],
)
def test_status_1_where_a_case_fails(capsys, monkeypatch, tmp_path, error, said):
    original = measure.measure

    def fails_at_1(case, *arguments):
        if case.rows == 1:
            raise error
        return original(case, *arguments)

    monkeypatch.setattr(measure, "measure", fails_at_1)
    done = bench(capsys, *HEAD, "--rows", "1,2", "--out", tmp_path)
    assert done.status == 1
    assert said in done.err
    assert [content["rows"] for content in kept(tmp_path)] == [2]


def test_a_failure_at_the_end_names_what_raised_before(capsys, monkeypatch):
    def gone(*arguments):
        raise RuntimeError("CUDA error")

    add("culprit", lambda weight, x, bias, out: 1 / 0)
    monkeypatch.setattr(measure, "_time_all", gone)
    done = bench(capsys, *HEAD, "--rows", "1")
    assert done.status == 1
    assert "RuntimeError: CUDA error; before that, culprit: ZeroDivisionError" in done.err


def test_status_1_where_the_weight_has_no_room(capsys, monkeypatch):
    def no_room(*arguments):
        raise torch.OutOfMemoryError("64 GiB")

    monkeypatch.setattr(cli_bench, "timer_for", no_room)
    done = bench(capsys, *HEAD)
    assert (done.status, done.out) == (1, "")
    assert "no memory for a 200x64 weight on cpu" in done.err


# --- going on ---


def test_resume_measures_what_is_missing(capsys, tmp_path, measured):
    first = bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path, "--resume").out
    done = bench(capsys, *HEAD, "--rows", "1,2", "--out", tmp_path, "--resume")
    assert [case.rows for case in measured] == [1, 2]
    assert done.status == 0
    assert done.err == ""
    assert done.out.startswith(first)
    bench(capsys, *HEAD, "--rows", "2", "--out", tmp_path)  # without --resume
    bench(capsys, *HEAD, "--rows", "2", "--out-dtype", "float32", "--out", tmp_path, "--resume")
    assert len(measured) == 4
    add("another", lambda weight, x, bias, out: F.linear(x, weight))
    done = bench(capsys, *HEAD, "--rows", "2", "--out", tmp_path, "--resume")
    assert len(measured) == 5
    assert "is measured again: it is of other competitors or another head" in done.err


def test_resume_with_torch_compile_is_another_set(capsys, monkeypatch, tmp_path, measured):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path)
    bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path, "--resume", "--compile")
    assert len(measured) == 2


def test_another_environment_is_measured_again(capsys, monkeypatch, tmp_path, measured):
    bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path)
    around = results.environment(CPU) | {"driver": "1.2", "torch": "9"}
    monkeypatch.setattr(results, "environment", lambda device: around)
    done = bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path, "--resume")
    assert len(measured) == 2
    assert "is measured again: it was measured with another driver, torch" in done.err


def damaged(content, **changes):
    return json.dumps(content | changes)


BROKEN = {
    "empty": lambda content: "",
    "cut": lambda content: json.dumps(content)[:-30],
    "a list": lambda content: "[]",
    "deep": lambda content: "[" * 100_000,
    "another form": lambda content: damaged(content, form=0),
    "no results": lambda content: damaged(content, results=None),
    "other results": lambda content: damaged(content, results=[1]),
    "text for a number": lambda content: damaged(content, limit_us="1"),
    "text for a time": lambda content: damaged(content, results=[content["results"][0] | {"us": "1"}]),
    "no environment": lambda content: damaged(content, environment=[]),
}


@pytest.mark.parametrize("how", list(BROKEN))
def test_a_broken_file_is_measured_again(capsys, tmp_path, measured, how):
    bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    path.write_text(BROKEN[how](content))
    done = bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path, "--resume")
    assert done.status == 0
    assert f"{path} is measured again: it " in done.err
    assert len(measured) == 2
    assert set(json.loads(path.read_text())) == set(content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_loses_no_table(capsys, monkeypatch, tmp_path):
    def full(file, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "save", full)
    done = bench(capsys, *HEAD, "--rows", "1", "--out", tmp_path)
    assert done.status == 0
    assert f"not kept in {tmp_path}: No space left on device" in done.err
    assert "F.linear" in done.out


# --- the environment ---


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("1980, 3201, [N/A], 3201\n", [1980, 3201, None, 3201]),
        ("No devices were found\n", [None] * 4),
        (FileNotFoundError("nvidia-smi"), [None] * 4),
        (subprocess.TimeoutExpired("nvidia-smi", 30), [None] * 4),
    ],
)
def test_clocks_are_what_nvidia_smi_says(monkeypatch, answer, found):
    def run(command, **options):
        assert command[-1] == "GPU-12ab"
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12ab"))
    monkeypatch.setattr(subprocess, "run", run)
    assert list(results.clocks(torch.device("cuda", 0)).values()) == found


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer")
def test_flashinfers_backends_are_competitors():
    """In a process of its own: importing FlashInfer brings much with it."""
    code = """
import torch
from lowbatch_lmhead.benching import competitors
print([one.name for one in competitors.table(torch.device("cuda", 0), False)])
"""
    names = python(code)
    for backend in ("cudnn", "cutlass", "cute-dsl"):
        assert f"'flashinfer mm_bf16 ({backend})'" in names


def test_the_table_of_a_gpu():
    one = measure._result("one", us=200.0, ratio=0.95, limit_fraction=0.9, host_us=10.0, rel_err=1e-3, memory_bytes=5e5)
    size = {"model": "m", "vocab": 4, "hidden": 2, "rows": 2, "out_dtype": "bfloat16"}
    measured = {"results": [one], "noise": 0.004, "yardstick": "F.linear", "read_us": 170.0, "limit_us": 180.0}
    content = {**size, **measured, "environment": {"gpu": "NVIDIA H200"}}
    head, headings, line, last = results.lines(content)
    assert head == "m 4x2, 2 rows, bfloat16 logits, on NVIDIA H200"
    assert headings.split() == ["us", "ratio", "of", "the", "limit", "host", "us", "error", "memory", "MB"]
    assert line.split() == ["one", "200.0", "0.950", "90.0%", "10.0", "1.0e-03", "0.5"]
    assert "differs from itself by 0.4%; the limit of 180.0 us: 170.0 us" in last


def test_flashinfer_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    device = torch.device("cuda", 0)
    (one,) = [one for one in competitors.table(device, False) if one.name.startswith("flashinfer")]
    assert "it cannot be imported: " in one.available(Case("head", 200, 64, 1, torch.bfloat16, device, 1))


# --- from the repository ---


def script(*argv):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@needs_benchmarks
def test_benchmarks_as_a_module(tmp_path):
    done = script("-m", "benchmarks", *HEAD, "--rows", "1", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert by_name(kept(tmp_path)[0])["Triton GEMM"]["reason"] == "it takes a CUDA GPU"
    assert script("-m", "benchmarks", "--model", "llama-3.1-8b").returncode == 1


@needs_benchmarks
def test_decode_tail(tmp_path):
    out = tmp_path / "decode_tail.json"
    tail = BENCHMARKS / "decode_tail.py"
    done = script(tail, "--device", "cpu", "--steps", "2", "--rounds", "2", "--out", out)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert [(row["batch"], row["mode"]) for row in content["rows"]] == [(1, "eager"), (4, "eager"), (16, "eager")]
    for row in content["rows"]:
        assert row["ratio"] == pytest.approx(row["us"]["ours"] / row["us"]["F.linear"], rel=1e-2)
        assert row["not_measured"] == {"mm_bf16": "it takes a CUDA GPU"}
    assert "a CUDA GPU" in script(tail).stderr


@pytest.fixture
def decode_tail(monkeypatch):
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not part of this distribution")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = set(sys.modules)
    yield load_script(BENCHMARKS / "decode_tail.py")
    for name in set(sys.modules) - names:  # its neighbours have common names
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_decode_tail_compares_tokens_up_to_ties(decode_tail):
    weight = torch.randn(50, 64).bfloat16()
    weight[20] = weight[7]  # a tie wherever 7 is the best
    with torch.inference_mode():
        tail = decode_tail.Tail([weight], 3)
        tokens = tail.linear(0)
        assert tail.differing(tail.linear) is None
        assert tail.differing(tail.ours) is None
        tail.hidden.copy_(weight[7])
        for tie in (7, 20):
            assert tail.differing(lambda index, tie=tie: torch.full_like(tokens, tie)) is None
        said = tail.differing(lambda index: torch.tensor([7, 20, 8]))
        assert said == "token 8 of row 2 is not the best"


def test_decode_tail_targets(decode_tail):
    def row(model, mode, ratio, batch=4):
        return {"model": model, "mode": mode, "ratio": ratio, "batch": batch}

    rows = [
        row("deepseek-v3 1/8", "eager", 0.9),
        row("deepseek-v3 1/8", "graph", 0.99),
        row("granite-3.1-2b", "eager", 0.55),
        row("llama-3.1-8b", "eager", 1.02, 16),
        row("llama-3.1-8b", "graph", None),
    ]
    found = decode_tail.summary(rows)
    assert found["largest ratio"] == "llama-3.1-8b, batch 16, eager: 1.020"
    assert found["rows without a ratio"] == 1
    assert [one["met"] for one in found["targets"].values()] == [True, False, False]
    assert [one["above"] for one in found["targets"].values()][1] == ["granite-3.1-2b, batch 4, eager: 0.550"]
