"""The command line, run in this process without a GPU: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowbatch_lmhead import backends, cli, devices, objects, testing
from lowbatch_lmhead.backends import flashinfer
from lowbatch_lmhead.backends.warp_splitk import WarpSplitK

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
    assert "compute capability 9.0: sm_90a, kernels serve up to 16 rows" in out
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
        "  because x is on cpu, not on a CUDA GPU",
    ]
    known = {line.split()[0]: line for line in lines if line.startswith("  sm_")}
    assert list(known) == list(devices.ARCHITECTURES)
    assert known["sm_90a"].split(maxsplit=1)[1] == "default GEMM"
    assert "because kernels serve up to 16 rows on sm_90a" in lines[lines.index(known["sm_90a"]) + 1]
    assert "flashinfer warp split-K (32x32x256" in known["sm_100a"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--hidden", "576", "--rows", "4"], "flashinfer warp split-K: hidden 576 is not a multiple of 128"),
        (["--hidden", "1024", "--rows", "33"], "kernels serve up to 32 rows on sm_100a"),
        (["--hidden", "1024", "--rows", "4", "--dtype", "float16"], "x is float16; it takes bfloat16"),
    ],
)
def test_explain_says_why_not(capsys, arguments, reason):
    done = run(capsys, "explain", "--vocab", "49152", *arguments, "--arch", "sm_100a")
    assert done.status == 0
    assert "sm_100a: default GEMM\n  because " in done.out
    assert reason in done.out


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
    rows = [line.split() for line in done.out.splitlines() if "flashinfer warp split-K" in line]
    assert [(row[0], row[row.index("sm_90a")]) for row in rows] == [("1-8", "sm_90a"), ("9-16", "sm_90a")]
    assert "17+ rows: default GEMM\n    because kernels serve up to 16 rows on sm_90a" in done.out
    assert "2 kernels written" in done.out
    assert f"export LOWBATCH_LMHEAD_OBJECTS={folder}\n" in done.out
    assert folder.stat().st_mode & 0o777 == 0o755

    monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", str(folder))
    keys = [json.loads(path.read_bytes())["key"] for path in folder.glob("*.json")]
    assert len(keys) == 2
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
    assert [name.split("  ")[1] for name in names] == ["1", "(1)", "(1)"]
    assert all(backend in done.out for backend in ("warp split-K", "cluster split-K", "direct"))
    assert "in brackets" in done.out


def test_compile_of_a_head_that_is_not_served(capsys):
    done = run(capsys, "compile", "--arch", "sm_90a", "--vocab", "49152", "--hidden", "576")
    assert done.status == 1
    assert (
        "  1-3 rows: default GEMM\n    because flashinfer warp split-K: hidden 576 is not a multiple of 128" in done.out
    )
    assert "  4-16 rows: default GEMM" in done.out
    assert "17+" not in done.out
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
    monkeypatch.setattr(cli.elf, "kernels", lambda library: [kernel])
    monkeypatch.setattr(flashinfer, "unusable", lambda: None)
    return kernel


@pytest.mark.usefixtures("fake_builds")
def test_a_failing_kernel_leaves_the_others_their_turn(capsys):
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD, "--model", "qwen3-0.6b")
    assert done.status == 1
    assert done.out.count("FAILED: RuntimeError: ptxas fell over") == 2
    assert done.out.count("  sm_90a      unknown") == 2
    assert "2 of 4 kernels failed" in done.err


def test_a_kernel_for_another_architecture_fails(capsys, fake_builds):
    fake_builds.arch = "sm_100a"
    done = run(capsys, "compile", "--arch", "sm_90a", *HEAD, "--rows", "1")
    assert done.status == 1
    assert "FAILED: RuntimeError: asked for sm_90a, the object holds code for sm_100a" in done.out


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
    assert cli.MODELS.items() <= heads.items()


# --- wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "command"),
        (["compile", *HEAD, "--arch", "sm_80"], "sm_120a"),
        (["compile", *HEAD], "--arch"),
        (["compile", "--arch", "sm_90a"], "Give --vocab and --hidden, or --model"),
        (["compile", "--arch", "sm_90a", "--vocab", "16"], "--vocab and --hidden go together"),
        (["compile", "--arch", "sm_90a", "--model", "gpt-9"], "--model gpt-9 is neither one of deepseek-v3, "),
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
    ],
)
def test_wrong_arguments(capsys, argv, said):
    assert said in refused(capsys, *argv)


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
