"""Compiled kernels on disk.

Rules:
- one kernel is one shared library and one small JSON file that names it, its digest and everything that it depends on;
  another version, architecture or tactic is another file, never an overwritten one;
- a file is written beside its place and renamed into it, so a reader sees all of it or nothing, and two processes that
  compile the same kernel do no harm;
- a missing, damaged or foreign file is a miss, never an error: the kernel is compiled again;
- nothing is loaded from a folder that another user can write, because loading runs code;
- a folder that cannot be written costs the next process a compile, nothing else.

Where: ``LOWBATCH_LMHEAD_CACHE``, else ``$XDG_CACHE_HOME/lowbatch-lmhead``, else ``~/.cache/lowbatch-lmhead``. Folders in
``LOWBATCH_LMHEAD_OBJECTS`` (separated by ``:``) are read before it and never written: what ``lowbatch-lmhead compile
--out`` made on another machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .log import logger, warn_once

Key = dict[str, Any]

TEMPORARY = (".lowbatch-lmhead-", ".tmp")  # the beginning and the end of a temporary file's name
LEFT_OVER_S = 60.0  # a temporary file of this age is nobody's any more: writing one takes milliseconds
MOST_ENTRY_BYTES = 1 << 20  # of a JSON file that can be an entry; they have about 600

# What ``stem`` makes and ``write`` adds to it.
_ENTRY = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.json")
_LIBRARY = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}-[0-9a-f]{8}\.so")
_TEMPORARY = re.compile(re.escape(TEMPORARY[0]) + ".+" + re.escape(TEMPORARY[1]))


@dataclass
class Counts:
    """What this process did so far; ``warmup`` reports the difference."""

    compiled: int = 0
    loaded: int = 0


counts = Counts()


def cache_folder() -> Path | None:
    """Where this process keeps what it compiles; it may not exist yet. None for a user without a home folder."""
    chosen = os.environ.get("LOWBATCH_LMHEAD_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(chosen).expanduser() if chosen else Path(base).expanduser() / "lowbatch-lmhead"
    except RuntimeError:  # pathlib's, where there is no home folder to find
        return None


def given_folders() -> list[Path]:
    """The folders of LOWBATCH_LMHEAD_OBJECTS."""
    given = [Path(part) for part in os.environ.get("LOWBATCH_LMHEAD_OBJECTS", "").split(os.pathsep) if part]
    with contextlib.suppress(RuntimeError):  # no home folder
        given = [part.expanduser() for part in given]
    return given


def folders() -> list[Path]:
    """Where objects are looked for, first to last."""
    cache = cache_folder()
    return given_folders() + ([cache] if cache else [])


def distrust(folder: Path) -> str | None:
    """Why code in ``folder`` could have been put there by another user, or None."""
    own = (0, os.geteuid())
    try:
        path = folder.resolve(strict=True)
        for place in (path, *path.parents):
            info = place.stat()
            if info.st_uid not in own:
                return f"{place} belongs to user {info.st_uid}"
            # In a sticky folder (/tmp) others can add files but not replace ours.
            others_write = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if others_write and (place == path or not info.st_mode & stat.S_ISVTX):
                return f"{place} can be written by other users (mode {stat.S_IMODE(info.st_mode):o})"
    except OSError as error:
        return f"{folder} cannot be examined: {error.strerror or error}"
    return None


def _missing(folder: Path) -> bool:
    try:
        return not folder.exists()
    except OSError:  # it is there, in a folder that may not be searched
        return False


def stem(key: Key) -> str:
    """The file name, without its ending, for ``key``: readable first, then a digest of all of it."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    words = [key["backend"], key["arch"], f"{key['vocab']}x{key['hidden']}", key["out_dtype"], key["tactic"]]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(map(str, words))) + f"-{digest}"


def find(key: Key) -> Path | None:
    """The shared library for ``key`` from the first folder that has a whole one of it."""
    for folder in folders():
        if _missing(folder):
            continue
        with contextlib.suppress(OSError):  # distrust says why
            folder = folder.resolve(strict=True)  # from here on that folder, should a link be turned meanwhile
        reason = distrust(folder)
        if reason:
            warn_once(f"no compiled kernel is loaded from {folder}: {reason}")
            continue
        path = _read(folder, key)
        if path is not None:
            return path
    return None


def _read(folder: Path, key: Key) -> Path | None:
    entry = folder / f"{stem(key)}.json"
    try:
        content = json.loads(entry.read_bytes())
        path = folder / Path(content["file"]).name
        info = path.stat()
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} can be written by another user")
        data = path.read_bytes()
        if content["key"] == key and hashlib.sha256(data).hexdigest() == content["sha256"]:
            return path
        reason = "it does not hold what it says"
    except FileNotFoundError as error:
        if error.filename == str(entry):
            return None
        reason = f"{error.filename} is missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it cannot be read ({type(error).__name__}: {error})"
    logger.warning("%s is compiled again: %s", entry, reason)
    return None


def keep(key: Key, data: bytes) -> Path | None:
    """Write a compiled kernel to the cache folder; None, with one warning, where that cannot be done or trusted."""
    folder = cache_folder()
    if folder is None:
        warn_once("compiled kernels are not kept: there is no home folder; set LOWBATCH_LMHEAD_CACHE to a folder")
        return None
    try:
        make_folder(folder)
        folder = folder.resolve(strict=True)
        reason = distrust(folder)
        if reason is None:
            return write(folder, key, data)
    except OSError as error:
        reason = f"{error.strerror or error}"
    warn_once(f"compiled kernels are not kept in {folder}, the next process compiles again: {reason}")
    return None


def write(folder: Path, key: Key, data: bytes) -> Path:
    """Write a compiled kernel and its entry into ``folder`` and return the library's path. OSError when it cannot."""
    digest = hashlib.sha256(data).hexdigest()
    path = folder / f"{stem(key)}-{digest[:8]}.so"
    replace_file(path, data)
    entry = {"key": key, "file": path.name, "sha256": digest}
    replace_file(folder / f"{stem(key)}.json", json.dumps(entry, indent=1, sort_keys=True).encode())
    return path


def make_folder(folder: Path) -> None:
    """Make ``folder`` and what is missing above it, each for its user alone. OSError.

    What ``mkdir(parents=True)`` makes on the way has the mode of the umask, with which others may be able to write.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it, so that a reader sees all of it or nothing. OSError."""
    handle, temporary = tempfile.mkstemp(prefix=TEMPORARY[0], suffix=TEMPORARY[1], dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)  # what root built into an image is loaded by the user who serves
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # gone, or as stuck as what raised, which is what counts
            os.unlink(temporary)
        raise


def kept_files(folder: Path) -> list[Path]:
    """The files in ``folder`` that ``write`` made: entries, then libraries. OSError where it cannot be read.

    In this order they can be removed: a reader never finds an entry without its library.
    """
    libraries = named_files(folder, _LIBRARY)
    stems = {path.name.rpartition("-")[0] for path in libraries}
    entries = [path for path in named_files(folder, _ENTRY) if path.stem in stems or _is_entry(path)]
    return entries + libraries


def _is_entry(path: Path) -> bool:
    """Whether a file with the name of an entry is one; other programs end names with a digest, too."""
    try:
        content = json.loads(path.read_bytes()) if path.stat().st_size <= MOST_ENTRY_BYTES else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.keys() >= {"key", "file", "sha256"}


def left_over(folder: Path) -> list[Path]:
    """The temporary files in ``folder`` of processes that were killed. OSError where it cannot be read."""
    found = []
    for path in named_files(folder, _TEMPORARY):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            if time.time() - path.lstat().st_mtime >= LEFT_OVER_S:
                found.append(path)
    return found


def named_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files in ``folder`` whose whole name matches, sorted; links are none. OSError where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            names = [
                file.name for file in found if pattern.fullmatch(file.name) and file.is_file(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names)]


def remove_files(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Remove files; returns those removed and, for those that could not be, ``path: reason``."""
    removed, stuck = [], []
    for path in paths:
        try:
            path.unlink()
            removed.append(path)
        except FileNotFoundError:  # another process removed it
            pass
        except OSError as error:
            stuck.append(f"{path}: {error.strerror or error}")
    return removed, stuck


def linker() -> str | None:
    """A program that links a shared library, or None."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang", "ld"):
        found = name and shutil.which(name)
        if found:
            return found
    return None


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver supports, or None without a driver."""
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000, version.value % 1000 // 10
    except (OSError, AttributeError):
        pass
    return None


@functools.cache
def _runtimes() -> dict[int, Path]:
    """The DSL's runtime library for each CUDA major version that is installed."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    found = {}
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(root).glob("cu*/lib/libcute_dsl_runtime.so"):
            major = path.parts[-3].removeprefix("cu")
            if major.isdigit():
                found[int(major)] = path
    return found


@functools.cache
def cuda_flavour() -> int | None:
    """The CUDA major version of the DSL that is used here: the newest installed that the driver supports.

    This is the DSL's own rule (without a driver: the newest), so that what is loaded is what it would compile.
    """
    driver = driver_version()
    return max((major for major in _runtimes() if driver is None or major <= driver[0]), default=None)


@functools.cache
def open_runtime() -> None:
    """Make the symbols that compiled kernels need visible: the DSL's runtime and TVM-FFI's. OSError when missing."""
    import tvm_ffi

    flavour = cuda_flavour()
    if flavour is None:
        raise OSError(
            f"no libcute_dsl_runtime.so for this driver (CUDA {driver_version()}): "
            f"nvidia-cutlass-dsl has {sorted(_runtimes()) or 'none'}"
        )
    ctypes.CDLL(str(_runtimes()[flavour]), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(tvm_ffi.libinfo.find_libtvm_ffi()), mode=ctypes.RTLD_GLOBAL)
