"""The command line, run in this process without a GPU: what it prints, writes and returns."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from lowbatch_lmhead import TunedHead, TuningReport, backends, cli, cli_cache, devices, objects, testing
from lowbatch_lmhead.backends import flashinfer
from lowbatch_lmhead.backends.compiling import object_key
from lowbatch_lmhead.backends.hopper_stream import HopperStream
from lowbatch_lmhead.backends.warp_splitk import WarpSplitK
from lowbatch_lmhead.plan import Plan, PlanKey
from lowbatch_lmhead.tuning import cache, search, tune

HEAD = ["--vocab", "4096", "--hidden", "1024"]
needs_compiler = pytest.mark.skipif(
    flashinfer.unusable() is not None or objects.linker() is None, reason="no FlashInfer, CuTe DSL or linker"
)


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    installed = flashinfer.version

    def version(name: str) -> str | None:
        return None if name == "flashinfer-python" else installed(name)

    monkeypatch.setattr(flashinfer, "version", version)
    flashinfer.unusable.cache_clear()
    yield
    flashinfer.unusable.cache_clear()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> SimpleNamespace:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return SimpleNamespace(status=status, out=captured.out, err=captured.err)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What is said of wrong arguments, which end with status 2."""
    with pytest.raises(SystemExit) as exited:
        cli.main(argv)
    assert exited.value.code == 2
    return capsys.readouterr().err


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_prints_every_section(capsys):
    done = run(capsys, "doctor")
    assert done.status == 0
    for words in ("Versions", "CUDA", "Compiled kernels", "GPUs", "Backends", "linker", torch.__version__):
        assert words in done.out
    for backend in backends.kernels():
        assert backend.name in done.out
    assert "because there is no CUDA GPU" in done.out
    assert "not there yet, can be made" in done.out


def test_doctor_json(capsys, tmp_path):
    done = run(capsys, "doctor", "--json")
    report = json.loads(done.out)
    assert done.status == 0
    assert report["versions"]["torch"] == torch.__version__
    assert report["gpus"] == []
    assert report["problems"] == []
    assert [b["name"] for b in report["backends"]] == [b.name for b in backends.kernels()]
    assert all(not b["runs_here"] and "there is no CUDA GPU" in b["reasons"] for b in report["backends"])
    assert report["cache"] == {
        "folder": str(tmp_path / "cache"),
        "exists": False,
        "kernels": 0,
        "distrusted": objects.distrust(tmp_path),
        "writable": True,
    }
    assert not (tmp_path / "cache").exists()


def test_doctor_looks_into_folders(capsys, monkeypatch, tmp_path):
    given, cache = tmp_path / "given", tmp_path / "cache"
    given.mkdir(mode=0o700)
    cache.mkdir()
    cache.chmod(0o777)
    (given / "one.so").touch()
    (given / "one.json").touch()
    monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", f"{given}:{tmp_path / 'missing'}")
    out = run(capsys, "doctor").out
    assert f"{given}: 1 kernel\n" in out
    assert f"{tmp_path / 'missing'}: there is no such folder" in out
    assert f"{cache}: not used, {cache} can be written by other users (mode 777)" in out


@pytest.mark.usefixtures("without_flashinfer")
def test_doctor_without_flashinfer(capsys):
    done = run(capsys, "doctor")
    assert done.status == 0
    assert "flashinfer-python   not installed" in done.out
    assert "because {0} is not installed (it takes {0}>={1},<{2})".format(*flashinfer.FLASHINFER) in done.out


def test_doctor_survives_whatever_is_broken(capsys, monkeypatch):
    def broken(*args: object) -> None:
        raise RuntimeError("broken\nbadly")

    for module, name in (
        (flashinfer, "version"),
        (flashinfer, "unusable"),
        (objects, "linker"),
        (objects, "cache_folder"),
        (objects, "cuda_flavour"),
        (objects, "open_runtime"),
        (objects, "driver_version"),
        (torch.cuda, "is_available"),
    ):
        monkeypatch.setattr(module, name, broken)
    done = run(capsys, "doctor")
    assert done.status == 0
    assert "  GPUs: RuntimeError: broken badly" in done.out
    assert "fails: RuntimeError: broken badly" in done.out
    report = json.loads(run(capsys, "doctor", "--json").out)
    assert report["cache"] is None
    assert "linker: RuntimeError: broken badly" in report["problems"]
    assert not any(backend["runs_here"] for backend in report["backends"])


def test_doctor_with_gpus(capsys, monkeypatch):
    """Two GPUs, of which the kernels know one."""
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {capabilities[device]}")
    monkeypatch.setattr(objects, "open_runtime", lambda: None)
    monkeypatch.setattr(flashinfer, "unusable", lambda: None)
    devices._cuda_architecture.cache_clear()
    try:
        out = run(capsys, "doctor").out
        report = json.loads(run(capsys, "doctor", "--json").out)
    finally:
        devices._cuda_architecture.cache_clear()
    assert "compute capability 9.0: sm_90a, kernels serve up to 64 rows" in out
    assert "compute capability 7.5: no architecture that a kernel is made for" in out
    runs = {backend["name"]: backend for backend in report["backends"]}
    assert runs["flashinfer warp split-K"]["runs_here"]
    assert runs["flashinfer cluster split-K"]["reasons"] == ["no GPU here has such an architecture"]


# --- explain --------------------------------------------------------------------------------------------------------


def test_explain_for_an_architecture(capsys):
    done = run(capsys, "explain", *HEAD, "--rows", "4", "--arch", "sm_90a")
    assert done.status == 0
    assert done.out.startswith(
        "4096x1024 head, bfloat16 to bfloat16, 4 rows\nsm_90a: flashinfer warp split-K (32x8x128"
    )


def test_explain_without_a_gpu_tells_of_every_architecture(capsys):
    done = run(capsys, "explain", *HEAD, "--rows", "20", "--out-dtype", "float32")
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[:3] == [
        "4096x1024 head, bfloat16 to float32, 20 rows",
        "here, without a CUDA GPU: default GEMM",
        "  because the head is on cpu, not on a CUDA GPU",
    ]
    known = {line.split()[0]: line for line in lines if line.startswith("  sm_")}
    assert list(known) == list(devices.ARCHITECTURES)
    assert "hopper stream (64x24x128" in known["sm_90a"]
    assert known["sm_120a"].split(maxsplit=1)[1] == "default GEMM"
    assert "because kernels serve up to 16 rows on sm_120a" in lines[lines.index(known["sm_120a"]) + 1]
    assert "flashinfer warp split-K (32x32x256" in known["sm_100a"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hidden", "580", "--rows", "4"], "flashinfer warp split-K: hidden 580 is not a multiple of 128"),
        (["--hidden", "1024", "--rows", "33"], "kernels serve up to 32 rows on sm_100a"),
        (["--hidden", "1024", "--rows", "4", "--dtype", "float32"], "x is float32; it takes bfloat16 or float16"),
    ],
)
def test_explain_says_why_not(capsys, arguments, reason):
    done = run(capsys, "explain", "--vocab", "49152", *arguments, "--arch", "sm_100a")
    assert done.status == 0
    assert "sm_100a: default GEMM\n  because " in done.out
    assert reason in done.out


def test_explain_of_models_and_of_one_ranks_part(capsys):
    models = ["--model", "llama-3.1-8b", "--model", "qwen3-0.6b"]
    done = run(capsys, "explain", *models, "--tp", "8", "--rows", "4", "--arch", "sm_90a")
    assert done.status == 0
    heads = [line for line in done.out.splitlines() if " head, " in line]
    assert heads == [
        "llama-3.1-8b 16032x4096 head, bfloat16 to bfloat16, 4 rows",
        "qwen3-0.6b 18992x1024 head, bfloat16 to bfloat16, 4 rows",
    ]
    assert done.out.count("\nsm_90a: ") == 2
    assert "which head? Give --vocab and --hidden, or --model" in refused(capsys, "explain", "--rows", "4")


def test_explain_says_what_was_passed_over(capsys):
    done = run(capsys, "explain", *HEAD, "--rows", "1", "--bias", "--arch", "sm_100a")
    assert "with a bias, 1 row\nsm_100a: flashinfer warp split-K" in done.out
    assert "  not flashinfer direct: the head has a bias; it adds none" in done.out


def test_explain_here_asks_the_gate(capsys):
    """A backend for the CPU stands for a GPU that is served."""
    with testing.reference_backend():
        done = run(capsys, "explain", *HEAD, "--rows", "3")
    assert "here, without a CUDA GPU: reference (4 splits)" in done.out


# --- compile --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_compile_writes_what_serving_finds(capsys, monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    tmp_path.chmod(0o700)
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD, "--out", str(folder))
    assert done.status == 0
    lines = [line for line in done.out.splitlines() if " sm_90a " in line]
    names = ["flashinfer warp split-K", *["hopper stream"] * 4]
    assert [line.split()[0] for line in lines] == ["1-8", "9-16", "17-24", "25-32", "33-48"]
    assert all(name in line for name, line in zip(names, lines))
    left = done.out.partition("  49-64 rows: default GEMM\n")[2]
    assert (
        "    because hopper stream: it serves this row count only where autotune with such a max_rows finds it quicker\n"
        in left
    )
    assert "65+ rows: default GEMM\n    because kernels serve up to 64 rows on sm_90a" in left
    assert "5 kernels written" in done.out
    assert f"export LOWBATCH_LMHEAD_OBJECTS={folder}\n" in done.out
    assert folder.stat().st_mode & 0o777 == 0o755

    monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", str(folder))
    keys = [json.loads(path.read_bytes())["key"] for path in folder.glob("*.json")]
    assert len(keys) == 5
    if objects.distrust(folder) is None:
        assert all(objects.find(key).parent == folder for key in keys)
    else:  # the temporary folder lies where others can write
        assert "warning: as it is, nothing is loaded from it" in done.err


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_compile_reads_the_architecture_back(capsys, arch):
    done = run(capsys, "compile", "--arch", arch, *HEAD, "--rows", "1", "--all-backends", "--bias")
    assert done.status == 0
    (line,) = [line for line in done.out.splitlines() if "warp split-K" in line]
    tail = line.split(f" {arch} ")[1].split()
    registers, smem, smem_unit, size, size_unit, seconds = tail
    assert 16 <= int(registers) <= 255
    assert 0 < float(smem) * devices.KB <= devices.ARCHITECTURES[arch].smem_per_block
    assert float(size) > 10
    assert (smem_unit, size_unit) == ("KB", "KB")
    assert float(seconds) > 0


@needs_compiler
def test_compile_all_backends(capsys):
    done = run(capsys, "compile", "--arch", "sm_100a", *HEAD, "--rows", "1", "--all-backends")
    assert done.status == 0
    names = [line for line in done.out.splitlines() if " sm_100a " in line]
    assert [name.split("  ")[1] for name in names] == ["1", "(1)", "(1)", "(1)"]
    assert all(backend in done.out for backend in ("warp split-K", "cluster split-K", "stream", "direct"))
    assert "in brackets" in done.out


@needs_compiler
def test_compile_what_autotune_measures(capsys, tmp_path):
    """Every launch that the search of autotune may ask for is there afterwards."""
    folder = tmp_path / "kernels"
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD, "--rows", "16", "--tuning", "--out", str(folder))
    assert done.status == 0
    assert "or where autotune finds it quicker" in done.out
    plan = Plan(PlanKey(torch.device("meta"), 4096, 1024, torch.bfloat16, torch.bfloat16, False), "sm_90a")
    wanted = search.wanted(plan, 16)
    assert len(wanted) > 6
    for backend, problem, tactic in wanted:
        assert (folder / f"{objects.stem(object_key(backend.name, problem, tactic))}.json").exists()
    assert len(list(folder.glob("*.so"))) == len(wanted)


@pytest.mark.usefixtures("fake_builds")
def test_no_more_rows_are_compiled_for_tuning_than_it_measures(capsys):
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD, "--rows", "5000", "--tuning")
    assert "(97-128)" in done.out
    assert "(97-5000)" not in done.out


def test_compile_of_a_head_that_is_not_served(capsys):
    done = run(capsys, "compile", "--arch", "sm_90a", "--vocab", "49152", "--hidden", "580")
    assert done.status == 1
    assert (
        "  1-3 rows: default GEMM\n    because flashinfer warp split-K: hidden 580 is not a multiple of 128" in done.out
    )
    assert "  4-32 rows: default GEMM" in done.out
    assert "  33-64 rows: default GEMM" in done.out
    assert "65+" not in done.out
    assert "    because flashinfer direct: it takes up to 3 rows" in done.out
    assert "1 of 1 heads are not served on sm_90a" in done.err


@pytest.mark.usefixtures("without_flashinfer")
def test_compile_without_flashinfer(capsys):
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD)
    assert done.status == 1
    assert "flashinfer-python is not installed" in done.out


@pytest.fixture
def fake_builds(monkeypatch):
    """Builds that give what a compiler would have given, but for the tactics for 9 and more rows."""

    def build(self, problem, tactic):
        if tactic.token_tile > 8:
            raise RuntimeError("ptxas\n  fell over")
        return {"cuda": 13, "backend": self.name, "tactic": str(tactic), **vars(problem)}, b"library"

    kernel = SimpleNamespace(name="k", arch="sm_90a", registers=None)
    monkeypatch.setattr(WarpSplitK, "build", build)
    monkeypatch.setattr(HopperStream, "build", build)
    monkeypatch.setattr(cli.elf, "kernels", lambda library: [kernel])
    monkeypatch.setattr(flashinfer, "unusable", lambda: None)
    return kernel


@pytest.mark.usefixtures("fake_builds")
def test_a_failing_kernel_leaves_the_others_their_turn(capsys):
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD, "--model", "qwen3-0.6b")
    assert done.status == 1
    assert done.out.count("FAILED: RuntimeError: ptxas fell over") == 9
    assert done.out.count("  sm_90a      unknown") == 2
    assert "9 of 11 kernels failed" in done.err


@pytest.mark.usefixtures("fake_builds")
def test_compile_takes_a_models_config(capsys, tmp_path):
    sizes = {"vocab_size": 262208, "hidden_size": 5376}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": sizes}))
    done = run(capsys, "compile", "--arch", "sm_90a", "--model", str(tmp_path), "--rows", "1")
    assert done.status == 0
    assert f"{tmp_path}, 262208x5376 head" in done.out
    (tmp_path / "config.json").write_text("{}")
    assert "no vocab_size and hidden_size" in refused(capsys, "compile", "--arch", "sm_90a", "--model", str(tmp_path))


def test_rows_that_a_backend_serves_without_compiling(capsys, monkeypatch):
    monkeypatch.setattr(flashinfer, "unusable", lambda: None)
    monkeypatch.setattr(backends, "_KERNELS", [backends.MmBf16()])
    done = run(capsys, "compile", "--arch", "sm_100a", *HEAD)
    assert done.status == 0
    assert "1-32 rows: flashinfer mm_bf16 (its own choice), which compiles nothing beforehand" in done.out


def test_known_models_are_those_of_the_benchmarks():
    path = Path(__file__).parents[1] / "benchmarks" / "heads.json"
    if not path.is_file():
        pytest.skip("the benchmarks are not part of this distribution")
    heads = {head["model"]: (head["vocab_size"], head["hidden_size"]) for head in json.loads(path.read_text())}
    assert heads == cli.MODELS


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "command"),
        (["compile", *HEAD, "--arch", "sm_80"], "sm_120a"),
        (["compile", *HEAD], "--arch"),
        (["compile", "--arch", "sm_90a"], "Give --vocab and --hidden, or --model"),
        (["compile", "--arch", "sm_90a", "--vocab", "16"], "--vocab and --hidden go together"),
        (["compile", "--arch", "sm_90a", "--model", "gpt-9"], "--model gpt-9 is neither one of gpt2, "),
        (["compile", "--arch", "sm_90a", *HEAD, "--rows", "0"], "'0' is not a whole number from 1 to 2147483647"),
        (["explain", *HEAD, "--rows", "-3"], "--rows"),
        (["explain", "--vocab", "0", "--hidden", "1", "--rows", "1"], "argument --vocab: '0' is not a whole number"),
        (["explain", "--vocab", "1", "--hidden", "x", "--rows", "1"], "argument --hidden: 'x' is not a whole number"),
        (["explain", "--vocab", "1", "--hidden", "9" * 5000, "--rows", "1"], "is not a whole number"),
        (["explain", *HEAD, "--rows", "1", "--arch", "hopper"], "'hopper'"),
        (
            ["explain", *HEAD, "--rows", "1", "--out-dtype", "float16"],
            "out_dtype must be None, torch.float32 or torch.bfloat16, got float16",
        ),
        (["explain", "--model", "m" * 5000, "--rows", "1"], "File name too long"),
        (
            ["explain", "--vocab", str(2**31 - 1), "--hidden", "64", "--pad", "64", "--rows", "1"],
            "--vocab 2147483647 is padded to 2147483648; a GPU's part can have 2147483647 rows",
        ),
        (["compile", "--arch", "sm_90a", *HEAD, "--out", ""], "it is empty"),
        (["bench", *HEAD, "--out", ""], "it is empty"),
    ],
)
def test_wrong_arguments(capsys, argv, said):
    assert said in refused(capsys, *argv)


def test_a_config_that_nests_without_end(capsys, tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "no vocab_size and hidden_size" in refused(capsys, "explain", "--model", str(tmp_path), "--rows", "1")


def test_a_path_that_the_terminal_cannot_show(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    with open(folder + b"/config.json", "w") as config:
        json.dump({"vocab_size": 4096, "hidden_size": 1024}, config)
    done = subprocess.run(
        [sys.executable, "-m", "lowbatch_lmhead", "explain", "--rows", "1", "--arch", "sm_90a", "--model", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "/\\udcff" in done.stdout


def test_out_must_be_a_folder_that_can_be_named_and_written(capsys, tmp_path):
    (tmp_path / "file").touch()
    argv = ["compile", "--arch", "sm_90a", *HEAD, "--out"]
    assert "cannot be made: File exists" in refused(capsys, *argv, str(tmp_path / "file"))
    assert "cannot name a folder with ':'" in refused(capsys, *argv, str(tmp_path / "a:b"))
    assert not (tmp_path / "a:b").exists()


def test_as_a_module():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "lowbatch_lmhead", "explain", *HEAD, "--rows", "1", "--arch", "sm_80"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "sm_80" in done.stderr
    assert "Traceback" not in done.stderr


# --- cache ----------------------------------------------------------------------------------------------------------

KERNEL = {"backend": "b", "tactic": "t", "arch": "sm_90a", "vocab": 4096, "hidden": 1024, "out_dtype": "bfloat16"}
LIBRARY = b"library" * 100_000  # 0.7 MB


def tuned_key(**changes):
    head = {"gpu": "NVIDIA H200", "arch": "sm_90a", "vocab": 128256, "hidden": 4096}
    types = {"dtype": "bfloat16", "out_dtype": "float32", "bias": False}
    return {**head, **types, **cache.versions(), **changes}


def rows(*counts):
    return {"rows": [{"rows": count, "backend": "b", "tactic": None, "us": 1.0} for count in counts]}


@pytest.fixture
def kept(tmp_path: Path) -> SimpleNamespace:
    """A cache folder with two compiled kernels and two tuned heads."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for tactic in ("t", "u"):
        objects.write(folder, {**KERNEL, "tactic": tactic}, LIBRARY)
    tuned = folder / "tuned"
    cache.save(tuned, tuned_key(), rows(*range(1, 33)))
    cache.save(tuned, tuned_key(gpu="NVIDIA B200", vocab=50257, bias=True, torch="1.2.3"), rows(1))
    return SimpleNamespace(folder=folder, tuned=tuned)


def kernels_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".so", ".json"))


def cells(line):
    return [cell for cell in line.split("  ") if cell]


def answer(monkeypatch, text, terminal=True):
    """``text`` on stdin, which is a terminal."""
    stdin = io.StringIO(text)
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def test_cache_list(capsys, kept):
    for path in kept.tuned.iterdir():
        os.utime(path, (time.time() - 3 * 3600,) * 2)
    done = run(capsys, "cache", "list")
    assert done.status == 0
    lines = [line.strip() for line in done.out.splitlines()]
    assert lines[0] == f"Cache folder: {kept.folder}"
    assert lines[1] == "Compiled kernels: 2, 1.4 MB"
    assert lines[2] == "Tuned heads: 2"
    assert cells(lines[3]) == ["GPU", "vocab x hidden", "types", "bias", "rows", "age", "versions"]
    assert [[cell.strip() for cell in cells(line)] for line in lines[4:6]] == [
        ["NVIDIA B200", "50257x4096", "bfloat16 -> float32", "yes", "1", "3 h", "other: torch 1.2.3"],
        ["NVIDIA H200", "128256x4096", "bfloat16 -> float32", "no", "1-32", "3 h", "as installed"],
    ]
    assert lines[6].startswith(f"installed: lowbatch-lmhead {cli.__version__}, torch {torch.__version__}, ")
    assert lines[7:] == ["An entry for other versions than the installed is not used."]


def test_cache_list_json(capsys, kept):
    done = run(capsys, "cache", "list", "--json")
    report = json.loads(done.out)
    assert done.status == 0
    assert report["folder"] == str(kept.folder)
    assert report["exists"] is True
    assert report["problems"] == []
    assert report["kernels"]["count"] == 2
    assert report["kernels"]["bytes"] == sum((kept.folder / name).stat().st_size for name in kernels_in(kept.folder))
    assert report["installed"]["torch"] == torch.__version__
    other, installed = report["tuned"]
    assert installed["key"] == tuned_key()
    assert installed["content"] == rows(*range(1, 33))
    assert installed["other_versions"] == {}
    assert other["other_versions"] == {"torch": "1.2.3"}
    for one in report["tuned"]:
        info = Path(one["file"]).stat()
        assert (one["bytes"], one["modified"]) == (info.st_size, info.st_mtime)


def test_cache_list_compares_what_autotune_writes():
    size = (4096, 1024, torch.bfloat16, torch.float32, False)
    key = tune.cache_key(Plan(PlanKey(torch.device("cpu"), *size), "sm_90a"))
    installed = cache.versions()
    assert installed == {name: key[name] for name in installed}
    assert set(key) - set(installed) >= {"gpu", "arch", "vocab", "hidden", "dtype", "out_dtype", "bias"}


@pytest.mark.parametrize("exists", [False, True])
def test_cache_list_of_nothing(capsys, tmp_path, exists):
    if exists:
        (tmp_path / "cache").mkdir()
    out = run(capsys, "cache", "list").out
    there = "" if exists else " (not there yet)"
    assert out == f"Cache folder: {tmp_path / 'cache'}{there}\nCompiled kernels: 0, 0.0 MB\nTuned heads: 0\n"
    assert (tmp_path / "cache").exists() == exists
    assert json.loads(run(capsys, "cache", "list", "--json").out)["exists"] == exists


def test_cache_list_of_another_folder(capsys, tmp_path, monkeypatch, kept):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "none"))
    assert "Tuned heads: 0" in run(capsys, "cache", "list").out
    for named in (str(kept.folder), "~/cache"):
        assert "Tuned heads: 2" in run(capsys, "cache", "list", "--dir", named).out


@pytest.mark.parametrize("command", [["list"], ["list", "--json"], ["clear", "--yes"]])
def test_cache_without_a_home_folder(capsys, monkeypatch, command):
    monkeypatch.setattr(objects, "cache_folder", lambda: None)
    done = run(capsys, "cache", *command)
    assert done.status == 0
    assert "there is no home folder" in done.out


CONTENTS = [
    {},
    {"rows": None},
    {"rows": 5},
    {"rows": []},
    {"rows": [None, 1, "x", [], {}]},
    {"rows": [{"rows": None}, {"rows": "1"}, {"rows": True}, {"rows": [1]}, {"rows": 1.5}]},
    {"rows": {"rows": 1}},
    {"rows": [{"rows": 10**300}, {"rows": -(10**300)}]},
    {"rows": rows(1, 2)["rows"], "more": "\ud800"},
]
KEYS = [
    {},
    {"gpu": None, "vocab": [], "bias": "yes", "torch": {"a": 1}, "cuda": True},
    {"gpu": "\x1b[2J\x07\r\n\ud800\u202e", "dtype": "x" * 100_000},
    {"gpu": {"deep": [[[["x"]]]]}, "hidden": 1e300, "out_dtype": ["a"], "lowbatch-lmhead": ["\n"]},
]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("key", KEYS)
def test_cache_list_copes_with_any_content(capsys, tmp_path, key, content):
    cache.save(tmp_path / "cache" / "tuned", key, content)
    done = run(capsys, "cache", "list")
    lines = done.out.splitlines()
    assert done.status == 0
    assert len(lines) == 7
    assert all(line.isprintable() and len(line) < 1500 for line in lines)
    assert "other: no " in lines[4] or "other: lowbatch-lmhead [" in lines[4]
    report = json.loads(run(capsys, "cache", "list", "--json").out)
    assert [(one["key"], one["content"]) for one in report["tuned"]] == [(key, content)]


def test_cache_list_says_which_file_cannot_be_read(capsys, kept):
    for path in kept.tuned.glob("*H200*"):
        path.write_text("{")
    out = run(capsys, "cache", "list").out
    assert "Tuned heads: 1\n" in out
    assert f"  {path.name} cannot be read, and is not used" in out
    broken = json.loads(run(capsys, "cache", "list", "--json").out)["tuned"][1]
    assert (broken["key"], broken["content"], broken["other_versions"]) == (None, None, None)


@pytest.mark.parametrize("part", ["folder", "tuned"])
def test_cache_list_says_which_folder_cannot_be_read(capsys, monkeypatch, kept, part):
    refused = getattr(kept, part)

    def refuse(real):
        def call(path):
            if Path(path) == refused:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path)

        return call

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    done = run(capsys, "cache", "list")
    assert done.status == 0
    assert f"  {refused} cannot be read: Permission denied\n" in done.out
    assert f"Tuned heads: {2 if part == 'folder' else 0}" in done.out


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-50, "0 s"), (59.9, "59 s"), (60, "1 min"), (3600, "1 h"), (47 * 3600, "47 h"), (48 * 3600, "2 days")],
)
def test_ages(seconds, said):
    assert cli_cache._age(seconds) == said


@pytest.mark.parametrize(
    ("flags", "gone"),
    [([], "both"), (["--tuned", "--kernels"], "both"), (["--tuned"], "tuned"), (["--kernels"], "kernels")],
)
def test_cache_clear(capsys, kept, flags, gone):
    kernels, tuned = kernels_in(kept.folder), sorted(kept.tuned.iterdir())
    assert (len(kernels), len(tuned)) == (4, 2)
    done = run(capsys, "cache", "clear", *flags, "--yes")
    assert done.status == 0
    assert done.err == ""
    said = {"kernels": "2 compiled kernels (1.4 MB)", "tuned": "the tuned choices of 2 heads"}
    assert done.out == f"Removed {', '.join(said.values()) if gone == 'both' else said[gone]} from {kept.folder}.\n"
    assert kernels_in(kept.folder) == (kernels if gone == "tuned" else [])
    assert sorted(kept.tuned.iterdir()) == (tuned if gone == "kernels" else [])
    done = run(capsys, "cache", "clear", *flags, "--yes")
    assert (done.status, done.out) == (0, f"Nothing was removed from {kept.folder}.\n")


def test_cache_clear_of_another_folder(capsys, tmp_path, monkeypatch, kept):
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "none"))
    assert "Nothing was removed" in run(capsys, "cache", "clear", "--yes").out
    assert len(kernels_in(kept.folder)) == 4
    assert "Removed 2 compiled" in run(capsys, "cache", "clear", "--yes", "--dir", str(kept.folder)).out
    assert kernels_in(kept.folder) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("text", ["y\n", "YES\n", " yes \n"])
def test_cache_clear_asks_and_is_told_yes(capsys, monkeypatch, kept, text):
    answer(monkeypatch, text)
    done = run(capsys, "cache", "clear")
    assert done.status == 0
    what = f"2 compiled kernels (1.4 MB), the tuned choices of 2 heads from {kept.folder}"
    assert done.err == f"Remove {what}? [y/N] "
    assert done.out == f"Removed {what}.\n"
    assert kernels_in(kept.folder) == []


@pytest.mark.parametrize("text", ["n\n", "\n", "", "yesterday\n", "no\ny\n"])
def test_cache_clear_asks_and_is_not_told_yes(capsys, monkeypatch, kept, text):
    answer(monkeypatch, text)
    before = sorted(kept.folder.rglob("*"))
    done = run(capsys, "cache", "clear")
    assert (done.status, done.out) == (1, "Nothing was removed.\n")
    assert sorted(kept.folder.rglob("*")) == before


def test_cache_clear_of_nothing_does_not_ask(capsys, monkeypatch, tmp_path):
    answer(monkeypatch, "")
    done = run(capsys, "cache", "clear")
    assert (done.status, done.out, done.err) == (0, f"Nothing was removed from {tmp_path / 'cache'}.\n", "")


@pytest.mark.parametrize("closed", [False, True])
def test_cache_clear_without_a_terminal_takes_yes(capsys, monkeypatch, kept, closed):
    answer(monkeypatch, "y\n", terminal=False)
    if closed:
        monkeypatch.setattr(sys, "stdin", None)
    before = sorted(kept.folder.rglob("*"))
    assert "stdin is no terminal on which to ask; --yes removes without asking" in refused(capsys, "cache", "clear")
    assert sorted(kept.folder.rglob("*")) == before
    assert run(capsys, "cache", "clear", "--yes").status == 0
    assert kernels_in(kept.folder) == []


def test_cache_clear_leaves_other_files(capsys, tmp_path, kept):
    outside = tmp_path / f"outside-{'0' * 16}.tuned.json"
    outside.write_text("{}")
    digest, library = "0" * 16, f"{'0' * 16}-{'0' * 8}.so"
    for folder in (kept.folder, kept.tuned):
        for name in ("model.json", "libfoo.so", f"foo-{digest}.so", f"foo-{digest}.json", "weights.tmp", ".a.tmp"):
            (folder / name).write_text('{"key": 1, "file": 2}')
        (folder / f"link-{digest}.tuned.json").symlink_to(outside)
        (folder / f"link-{library}").symlink_to(outside)
        (folder / f"folder-{library}").mkdir()
        (folder / "more").mkdir()
        objects.write(folder / "more", KERNEL, LIBRARY)
        cache.save(folder / "more", tuned_key(), {})
    ours = [path for path in kept.folder.iterdir() if path.name.startswith("b-sm_90a-")]
    ours += [path for path in kept.tuned.iterdir() if path.name.startswith("NVIDIA-")]
    assert len(ours) == 6
    before = set(kept.folder.rglob("*"))
    done = run(capsys, "cache", "clear", "--yes")
    assert done.status == 0
    assert set(kept.folder.rglob("*")) == before - set(ours)
    assert outside.exists()


def test_cache_clear_removes_damaged_ones(capsys, kept):
    for path in [*kept.folder.glob("*.json"), *kept.tuned.iterdir()]:
        path.write_text("{")
    assert run(capsys, "cache", "clear", "--yes").status == 0
    assert kernels_in(kept.folder) == []
    assert list(kept.tuned.iterdir()) == []


def test_cache_clear_removes_an_entry_without_its_library(capsys, kept):
    for path in kept.folder.glob("*.so"):
        path.unlink()
    run(capsys, "cache", "clear", "--yes")
    assert kernels_in(kept.folder) == []


def test_cache_clear_removes_left_over_files(capsys, monkeypatch, kept):
    run(capsys, "cache", "clear", "--yes")
    old = time.time() - 2 * objects.LEFT_OVER_S
    for folder in (kept.folder, kept.tuned):
        for name in ("old", "new"):
            (folder / f".lowbatch-lmhead-{name}.tmp").touch()
        os.utime(folder / ".lowbatch-lmhead-old.tmp", (old, old))
    answer(monkeypatch, "n\n")
    assert run(capsys, "cache", "clear").status == 1, "also these are asked for"
    assert run(capsys, "cache", "clear", "--yes").out.startswith("Removed 2 left-over temporary files from ")
    for folder in (kept.folder, kept.tuned):
        assert [path.name for path in folder.glob(".*")] == [".lowbatch-lmhead-new.tmp"]


def test_cache_clear_does_not_follow_a_link_out_of_the_folder(capsys, tmp_path, kept):
    elsewhere = tmp_path / "elsewhere"
    kept.tuned.rename(elsewhere)
    kept.tuned.symlink_to(elsewhere)
    assert "Tuned heads: 2" in run(capsys, "cache", "list").out
    done = run(capsys, "cache", "clear", "--yes")
    assert done.status == 1
    assert done.err == f"{kept.tuned} is a link to another folder, which is left as it is\n"
    assert done.out == f"Removed 2 compiled kernels (1.4 MB) from {kept.folder}.\n"
    assert kept.tuned.is_symlink()
    assert len(list(elsewhere.iterdir())) == 2
    assert run(capsys, "cache", "clear", "--kernels", "--yes").status == 0


def test_cache_clear_of_a_folder_that_a_link_names(capsys, monkeypatch, tmp_path, kept):
    (tmp_path / "link").symlink_to(kept.folder)
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "link"))
    assert run(capsys, "cache", "clear", "--yes").status == 0
    assert kernels_in(kept.folder) == []


@pytest.mark.parametrize("flags", [[], ["--tuned"], ["--kernels"]])
@pytest.mark.parametrize("part", ["folder", "tuned", "link", "--dir"])
def test_cache_clear_leaves_given_folders(capsys, monkeypatch, tmp_path, kept, part, flags):
    given = kept.tuned if part == "tuned" else kept.folder
    if part == "link":
        given = tmp_path / "link"
        given.symlink_to(kept.folder)
    monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", f"{tmp_path / 'missing'}:{given}")
    if part == "--dir":
        monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "mine"))
        flags = [*flags, "--dir", str(kept.folder)]
    before = sorted(kept.folder.rglob("*"))
    said = refused(capsys, "cache", "clear", "--yes", *flags)
    assert f"nothing is removed from {kept.tuned if part == 'tuned' else kept.folder}: it is one of" in said
    assert sorted(kept.folder.rglob("*")) == before


def test_cache_clear_says_what_could_not_be_removed(capsys, monkeypatch, kept):
    (library, _), (head, _) = sorted(kept.folder.glob("*.so")), sorted(kept.tuned.iterdir())

    def unlink(path, *arguments, real=os.unlink, **named):
        if Path(path) in (library, head):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, *arguments, **named)

    monkeypatch.setattr(os, "unlink", unlink)
    done = run(capsys, "cache", "clear", "--yes")
    assert done.status == 1
    assert done.out == f"Removed 1 compiled kernel (0.7 MB), the tuned choices of 1 head from {kept.folder}.\n"
    assert done.err.splitlines() == [f"{path}: Operation not permitted" for path in (library, head)]
    assert [path.name for path in (library, head)] == kernels_in(kept.folder) + kernels_in(kept.tuned)


def test_a_kernel_loses_its_entry_first(kept):
    """Another process never finds an entry without its library."""
    assert [path.suffix for path in objects.kept_files(kept.folder)] == [".json", ".json", ".so", ".so"]


@pytest.mark.parametrize("command", ["list", "clear"])
def test_cache_folder_that_is_none(capsys, monkeypatch, tmp_path, command):
    (tmp_path / "file").touch()
    assert "is no folder" in refused(capsys, "cache", command, "--dir", str(tmp_path / "file"))
    assert "--dir '' names no folder" in refused(capsys, "cache", command, "--dir", "")
    assert "no such home folder" in refused(capsys, "cache", command, "--dir", "~nobody-of-this-name/cache")
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "file"))
    assert "is no folder" in refused(capsys, "cache", command)


def test_cache_takes_an_action(capsys):
    assert "action" in refused(capsys, "cache")


@pytest.mark.parametrize(("counts", "said"), [([1], "1"), ([3, 1, 2], "1-3"), ([True, "2", None, 1.5], "?"), ([], "?")])
def test_row_ranges_of_tuned_heads(counts, said):
    assert cli_cache._rows(rows(*counts)) == said


# --- tune (measuring takes a GPU: tests/gpu/test_gpu_autotune.py runs it there) ---


@pytest.fixture
def tuned(monkeypatch):
    """What ``tune`` hands to autotune, on a machine that passes for one with a GPU."""
    calls = []

    def autotune(head, **arguments):
        calls.append((tuple(head[0].shape), head[0].dtype, head[1] is not None, arguments))
        found = TunedHead("head", *head[0].shape, "bfloat16", "bfloat16", "measured", (), None, 0.001, (), 1.0)
        return TuningReport((found,), 1.0, 0, 0)

    monkeypatch.setattr(cli, "autotune", autotune)
    monkeypatch.setattr(cli, "_here", lambda: (torch.device("cpu"), "a GPU, sm_90a"))
    monkeypatch.setattr(cli.devices, "architecture", lambda device: "sm_90a")
    return calls


def test_tune_without_a_gpu(capsys):
    assert cli.main(["tune", "--vocab", "1000", "--hidden", "64"]) == 1
    assert "tune measures on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "shapes"),
    [
        (["--vocab", "1000", "--hidden", "64"], [(1000, 64)]),
        (["--vocab", "1000", "--hidden", "64", "--tp", "4"], [(256, 64)]),  # padded to 1024
        (["--vocab", "1000", "--hidden", "64", "--tp", "4", "--pad", "8"], [(250, 64)]),
        (["--vocab", "1000", "--hidden", "64", "--pad", "64"], [(1024, 64)]),
        (["--model", "gpt2", "--tp", "8"], [(6288, 768)]),
        (["--model", "gpt2", "--vocab", "1000", "--hidden", "64"], [(50257, 768), (1000, 64)]),
    ],
)
def test_tune_takes_one_ranks_part(capsys, tuned, argv, shapes):
    assert cli.main(["tune", *argv]) == 0
    assert [call[0] for call in tuned] == shapes
    assert "measured in 1.00 s" in capsys.readouterr().out


def test_tune_hands_its_arguments_on(tuned, tmp_path):
    argv = ["--rows", "16", "--out-dtype", "float32", "--bias", "--budget", "5", "--again", "--dir", str(tmp_path)]
    assert cli.main(["tune", "--vocab", "1000", "--hidden", "64", *argv]) == 0
    ((_, dtype, bias, arguments),) = tuned
    assert dtype is torch.bfloat16
    assert bias
    assert arguments == {
        "max_rows": 16, "out_dtype": torch.float32, "cache": tmp_path, "refresh": True, "budget_s": 5.0, "progress": None,
    }  # fmt: skip


def test_tune_json(capsys, tuned):
    assert cli.main(["tune", "--model", "gpt2", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["model"] == "gpt2"
    assert report["heads"][0]["vocab"] == 50257


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "which head?"),
        (["--vocab", "1000"], "--vocab and --hidden go together"),
        (
            ["--vocab", "1000", "--hidden", "64", "--tp", "7"],
            "does not divide a vocabulary of 1024; --pad 448 would make it",
        ),
        (["--vocab", "1000", "--hidden", "64", "--tp", "0"], "'0' is not a whole number"),
        (["--vocab", "1000", "--hidden", "64", "--dtype", "float32", "--out-dtype", "float16"], "out_dtype must be"),
        (["--model", "no such model"], "neither one of"),
        (["--model", "gpt2", "--rows", "129"], "'129' is not a whole number from 1 to 128"),
        (["--model", "gpt2", "--budget", "nan"], "'nan' is not a number of seconds"),
        (["--model", "gpt2", "--budget", "-1"], "'-1' is not a number of seconds"),
        (["--model", "gpt2", "--dir", ""], "it is empty"),
    ],
)
def test_wrong_arguments_of_tune(capsys, tuned, argv, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *argv])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not tuned


def test_what_autotune_refuses_is_a_wrong_argument(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "--vocab", "1000", "--hidden", "64", "--budget", "often"])
    assert ended.value.code == 2
