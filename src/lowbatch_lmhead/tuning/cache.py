"""What ``autotune`` measured, on disk.

Rules:
- one head on one GPU, with the versions that it was measured with, is one small JSON file with its key and its content;
  another key is another file, never an overwritten one;
- a file is written beside its place and renamed into it, so a reader sees all of it or nothing, and two processes that
  measure the same head, or one that is killed, do no harm;
- a missing, damaged, foreign, oversized or too deeply nested file is a miss, never an error: the head is measured again;
- what a file holds is data. Nothing in it is executed, so no trust in its folder is asked for: a forged entry can cost
  speed, never logits, because each launch is checked before it serves, at the fewest and the most rows that it serves;
- a folder that cannot be read or written costs the next process the measurement, and one warning.

Where: the folder ``tuned`` in that of the compiled kernels (objects.py), or a folder that the caller names.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from .. import __version__, objects
from ..backends import flashinfer
from ..log import logger, warn_once

N = TypeVar("N", int, float)
Key = dict[str, Any]

FOLDER = "tuned"
MOST_BYTES = 1 << 20  # of a file; 128 row counts take about 20 kB
MOST_DEPTH = 32  # of lists and objects in each other; an entry has five

# Unlike that of a compiled kernel's entry (objects.py), which may lie in the same folder.
_NAME = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.tuned\.json")


@dataclass(frozen=True)
class Kept:
    """One file: its size in bytes, when it was written (seconds since 1970), and its key and content.

    Both are None where ``load`` would not take the file under any key.
    """

    path: Path
    bytes: int
    key: Key | None
    content: dict[str, Any] | None
    modified: float


def versions() -> Key:
    """The installed versions that a measured choice depends on."""
    return {
        "lowbatch-lmhead": __version__,
        "torch": str(torch.__version__),  # brings cuBLAS
        **{name: flashinfer.version(name) or "" for name in (flashinfer.FLASHINFER[0], flashinfer.CUTE_DSL[0])},
        "cuda": objects.cuda_flavour() or 0,
    }


def folder(cache: bool | str | os.PathLike[str]) -> Path | None:
    """The folder that ``cache`` stands for: True the default one, a path itself, False none.

    None, with one warning, also where there is no home folder to find it in. ValueError for anything else.
    """
    if isinstance(cache, bool):
        base = objects.cache_folder() if cache else None
        if cache and base is None:
            warn_once("tuned choices are not kept: there is no home folder; set LOWBATCH_LMHEAD_CACHE to a folder")
        return base / FOLDER if base else None
    try:
        named = os.fsencode(Path(cache))  # TypeError, or UnicodeEncodeError: what no file can be called
        if not cache or b"\0" in named:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"cache must be True, False or the path of a folder, got {cache!r}") from None
    try:
        return Path(cache).expanduser()
    except RuntimeError:  # pathlib's, where there is no home folder to find
        warn_once(f"tuned choices are not kept: there is no home folder for {os.fspath(cache)}")
        return None


def load(where: Path | None, key: Key) -> dict[str, Any] | None:
    """The content that was saved in ``where`` under exactly this key, as JSON gives it back; None where there is none.

    What does not serve is a miss with one log line; a file that is not there is a miss without one.
    """
    if where is None:
        return None
    path = where / _name(key)
    try:
        found, content = _read(path)
        if _text(found) == _text(key):  # the text tells 1 from True, and knows no tuples
            return content
        reason = "it is for another key"
    except FileNotFoundError:
        return None
    except OSError as error:
        if not _is_there(path):
            _warn(where, error)
            return None
        reason = f"it cannot be read ({error.strerror or error})"
    except (ValueError, RecursionError) as error:
        reason = f"it cannot be read ({error})"
    logger.warning("%s is not used, the head is measured again: %s", path, reason)
    return None


def save(where: Path | None, key: Key, content: dict[str, Any]) -> Path | None:
    """Write ``content`` for ``load`` and return its file; None, with one warning, where that cannot be done.

    ValueError or TypeError for a key or content that ``load`` would not take, such as a number that is not finite: a bug.
    """
    if where is None:
        return None
    text = json.dumps({"key": key, "content": content}, indent=1, allow_nan=False)
    if len(text) > MOST_BYTES or _depth(text) > MOST_DEPTH:
        raise ValueError(f"an entry of {len(text)} bytes, nested {_depth(text)} deep, would not be read")
    path = where / _name(key)
    try:
        objects.make_folder(where)
        objects.replace_file(path, text.encode())
    except OSError as error:
        _warn(where, error)
        return None
    return path


def entries(where: Path | None) -> list[Kept]:
    """The files in ``where`` that ``save`` could have written, by their names. Never raises, and logs nothing."""
    try:
        paths = objects.named_files(where, _NAME) if where else []
    except OSError:
        return []
    found = [_kept(path) for path in paths]
    return [one for one in found if one is not None]


def clear(where: Path | None) -> tuple[int, list[str]]:
    """Remove the files that ``entries`` gives, and temporary files that a killed process left.

    Returns how many entries are gone by it, and ``path: reason`` for each file that could not be removed.
    """
    if where is None:
        return 0, []
    try:
        paths, others = objects.named_files(where, _NAME), objects.left_over(where)
    except OSError as error:
        return 0, [f"{where}: {error.strerror or error}"]
    removed, stuck = objects.remove_files(paths)
    return len(removed), stuck + objects.remove_files(others)[1]


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True, allow_nan=False)


def _name(key: Key) -> str:
    """The file's name: readable first, then a digest of the whole key."""
    digest = hashlib.sha256(_text(key).encode()).hexdigest()[:16]
    size = f"{key.get('vocab')}x{key.get('hidden')}"
    words = [key.get("gpu"), key.get("arch"), size, key.get("dtype"), key.get("out_dtype")]
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(map(str, words)))
    return f"{readable[:120].strip('-.')}-{digest}.tuned.json"


def _read(path: Path) -> tuple[Key, dict[str, Any]]:
    """The key and the content of a file. OSError, ValueError or RecursionError."""
    text = _bytes(path).decode()
    # Asked before it is parsed: where a program has raised the limit of recursion, the parser overruns its stack.
    if _depth(text) > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    entry = json.loads(
        text, parse_int=_finite(int), parse_float=_finite(float), parse_constant=_refuse
    )  # json takes NaN and Infinity, which JSON has not
    if not isinstance(entry, dict):
        raise ValueError("it is no JSON object")
    key, content = entry.get("key"), entry.get("content")
    if not isinstance(key, dict) or not isinstance(content, dict):
        raise ValueError("it has no key or no content")
    return key, content


def _bytes(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe is not waited for
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MOST_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return data


def _depth(text: str) -> int:
    """How deep a parser of ``text`` gets into lists and objects."""
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _finite(number: Callable[[str], N]) -> Callable[[str], N]:
    def parse(text: str) -> N:
        if not math.isfinite(float(text)):  # an int of 400 digits as well, which no reader could make a float
            raise ValueError(f"{text[:20]} is beyond a double's range")
        return number(text)

    return parse


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _kept(path: Path) -> Kept | None:
    """The file as it is now; None where it went away, or its folder may not be searched."""
    try:
        info = path.lstat()
    except OSError:
        return None
    key = content = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found, inside = _read(path)
        if _name(found) == path.name:
            key, content = found, inside
    return Kept(path, info.st_size, key, content, info.st_mtime)


def _is_there(path: Path) -> bool:
    """Whether it is the file that cannot be read, and not its folder."""
    try:
        path.lstat()
    except OSError:
        return False
    return True


def _warn(where: Path, error: OSError) -> None:
    """Say once that ``where`` does not serve, in the same words for reading and writing."""
    # Making a folder in the place of a file tells the same as reading in it, by another name.
    reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror or str(error)
    warn_once(f"tuned choices are not kept in {where}, the next process measures again: {reason}")
