"""What `make dist` has built, as someone gets it who installs it: the files, the entry points, and that it runs.

    python tests/check_wheel.py dist [--with-dependencies [--torch torch==2.13.0]]

The wheel goes into a new virtual environment outside of the repository. The packages that it needs are by default those of
the environment that runs this script, which takes seconds; with --with-dependencies pip installs them as the wheel
names them, which takes minutes and shows that it names all.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
DATA = {"lowbatch_lmhead/py.typed"}  # all that is no Python; the package reads no file of its own
ENTRY_POINTS = {
    ("console_scripts", "lowbatch-lmhead", "lowbatch_lmhead.cli:main"),
    ("vllm.general_plugins", "lowbatch_lmhead", "lowbatch_lmhead.adapters.vllm:register"),
    ("sglang.srt.plugins", "lowbatch_lmhead", "lowbatch_lmhead.adapters.sglang:register"),
}

# Runs in the new environment, with the folder into which the wheel went as its argument.
INSTALLED = """
import pathlib, sys
from importlib.metadata import distribution
found = distribution("lowbatch-lmhead")
where = pathlib.Path(sys.argv[1]).resolve()
assert pathlib.Path(found.locate_file("")).resolve() == where, found.locate_file("")
for entry in found.entry_points:
    assert callable(entry.load()), entry
    print(entry.group, entry.name, entry.value, sep="\\t")
import lowbatch_lmhead
assert pathlib.Path(lowbatch_lmhead.__file__).resolve().parent.parent == where, lowbatch_lmhead.__file__
assert lowbatch_lmhead.__version__ == found.version, (lowbatch_lmhead.__version__, found.version)
"""


def expected(version: str) -> set[str]:
    """The files of the wheel."""
    modules = {path.relative_to(SOURCES).as_posix() for path in (SOURCES / "lowbatch_lmhead").rglob("*.py")}
    names = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    return modules | DATA | {f"lowbatch_lmhead-{version}.dist-info/{name}" for name in names}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def check_files(wheel: Path, version: str) -> None:
    files = contents(wheel)
    print("\n".join(f"{len(data):>8}  {name}" for name, data in sorted(files.items())))
    extra, missing = files.keys() - expected(version), expected(version) - files.keys()
    assert not extra, f"does not belong in the wheel: {sorted(extra)}"
    assert not missing, f"missing in the wheel: {sorted(missing)}"
    for name in sorted(files):
        if name.startswith("lowbatch_lmhead/"):
            assert files[name] == (SOURCES / name).read_bytes(), (
                f"{name} differs from src: built before it was changed?"
            )
    metadata = Parser().parsestr(files[f"lowbatch_lmhead-{version}.dist-info/METADATA"].decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"


def check_sdist(sdist: Path, wheel: Path, folder: Path) -> None:
    """It builds the same wheel, byte for byte."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "again", source)
    (again,) = (folder / "again").iterdir()
    assert again.name == wheel.name
    first, second = contents(wheel), contents(again)
    assert first.keys() == second.keys(), sorted(first.keys() ^ second.keys())
    differ = sorted(name for name in first if first[name] != second[name])
    assert not differ, f"the wheel of the source distribution differs: {differ}"


def environment(folder: Path, wheel: Path, requirements: list[str]) -> Path:
    """A virtual environment with the wheel; its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    options = [] if requirements else ["--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *options, *requirements, wheel)
    if not requirements:
        borrow(site_packages(python))
    return python


def site_packages(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def borrow(site: Path) -> None:
    """Let the new environment see the packages of this one, but not the editable install of the repository.

    Python reads no .pth file in a folder that a .pth file names. So the one that leads to src stays unread, and folders
    that others add (the CuTe DSL's) are named here. The wheel's own folder comes first in the path.
    """
    found = [entry for entry in sys.path if {"site-packages", "dist-packages"} & set(Path(entry).parts)]
    (site / "borrowed.pth").write_text("".join(f"{entry}\n" for entry in dict.fromkeys(found)))


def check_installed(python: Path, folder: Path) -> None:
    """From a folder outside of the repository and with caches of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOWBATCH_LMHEAD_"))}
    kept = {"cwd": folder, "env": {**clean, "LOWBATCH_LMHEAD_CACHE": str(folder / "cache")}}
    lines = run(python, "-I", "-c", INSTALLED, site_packages(python), **kept).splitlines()
    assert {tuple(line.split("\t")) for line in lines} == ENTRY_POINTS, lines
    print("\n".join(lines))
    example = folder / "readme.py"
    example.write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    print(run(python, "-I", example, **kept))
    print(run(python.with_name("lowbatch-lmhead"), "doctor", **kept))


def run(*command: object, **options: object) -> str:
    """What the command prints; where it fails, all that it said and a stop."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\nexit status {done.returncode}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with one wheel and one source distribution")
    parser.add_argument("--with-dependencies", action="store_true", help="install what the wheel needs")
    parser.add_argument("--torch", default="torch", help="the PyTorch that pip installs then")
    args = parser.parse_args()
    (wheel,), (sdist,) = args.dist.resolve().glob("*.whl"), args.dist.resolve().glob("*.tar.gz")
    version = re.search(r'"(.+)"', (SOURCES / "lowbatch_lmhead" / "_version.py").read_text())[1]
    assert wheel.name == f"lowbatch_lmhead-{version}-py3-none-any.whl", wheel.name
    assert sdist.name == f"lowbatch_lmhead-{version}.tar.gz", sdist.name
    check_files(wheel, version)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        check_sdist(sdist, wheel, folder)
        python = environment(folder / "venv", wheel, [args.torch] if args.with_dependencies else [])
        check_installed(python, folder)
    print(f"{wheel.name}, {sdist.name}: as they should be")


if __name__ == "__main__":
    main()
