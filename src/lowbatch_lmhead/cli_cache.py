"""The commands ``lowbatch-lmhead cache``: what the library keeps on disk, and removing it.

Rules:
- only files are removed that the library wrote, by their names and, where those could be another program's, by what is
  in them; links are neither followed nor removed;
- nothing is removed from a folder in LOWBATCH_LMHEAD_OBJECTS;
- nothing is removed without a yes, on the terminal or by ``--yes``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import objects
from .tuning import cache
from .tuning.cache import Kept

Facts = dict[str, Any]

MB = 1e6  # bytes
WIDEST = 60  # characters of one value of a file, which can hold anything
PATH = 1000  # characters of a path, with what is said of it
NO_HOME = "there is no home folder, so nothing is kept; LOWBATCH_LMHEAD_CACHE or --dir names a folder"


def add_to(commands: Any) -> None:
    """Add ``cache`` to the subparsers of ``lowbatch-lmhead``."""
    parser = commands.add_parser("cache", help="what is kept on disk: compiled kernels and tuned choices")
    actions = parser.add_subparsers(metavar="action", required=True)

    listing = actions.add_parser("list", help="the compiled kernels and the tuned heads that are kept")
    listing.add_argument("--json", action="store_true", help="print them as JSON")
    _add_folder(listing)
    listing.set_defaults(command=_list, parser=listing)

    clear = actions.add_parser("clear", help="remove them; both kinds, unless one is named")
    clear.add_argument("--tuned", action="store_true", help="remove what autotune measured")
    clear.add_argument("--kernels", action="store_true", help="remove compiled kernels")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    _add_folder(clear)
    clear.set_defaults(command=_clear, parser=clear)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", metavar="DIR", help="a cache folder, instead of the one that serving uses here")


def _folder(args: argparse.Namespace) -> Path | None:
    """The cache folder that is meant; None where there is no home folder. It need not exist."""
    try:
        folder = objects.cache_folder() if args.dir is None else Path(args.dir).expanduser()
    except RuntimeError:
        args.parser.error(f"--dir {args.dir}: there is no such home folder")
    if args.dir == "":
        args.parser.error("--dir '' names no folder")
    if folder and os.path.lexists(folder) and not os.path.isdir(folder):
        args.parser.error(f"{folder} is no folder")
    return folder


# --- list ------------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    report = _report(_folder(args))
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report)))
    return 0


def _report(folder: Path | None) -> Facts:
    installed, problems = cache.versions(), [] if folder else [NO_HOME]
    files: list[Path] = []
    try:
        files = objects.kept_files(folder) if folder else []
        if folder:
            os.listdir(folder / cache.FOLDER)  # cache.entries does not tell why it finds none
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{error.filename} cannot be read: {error.strerror}")
    return {
        "folder": str(folder) if folder else None,
        "exists": folder is not None and os.path.isdir(folder),
        "problems": problems,
        "kernels": _kernels({path: _size(path) for path in files}),
        "installed": installed,
        "tuned": [_tuned(kept, installed) for kept in cache.entries(folder / cache.FOLDER if folder else None)],
    }


def _kernels(sizes: dict[Path, int]) -> Facts:
    """How many kernels, and how many bytes with the entries that name them."""
    return {"count": sum(path.suffix == ".so" for path in sizes), "bytes": sum(sizes.values())}


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:  # removed meanwhile
        return 0


def _tuned(kept: Kept, installed: Facts) -> Facts:
    """``other_versions``: those in the key that differ from the installed ones; None for a file that cannot be read."""
    other = None
    if kept.key is not None:
        other = {name: kept.key.get(name) for name, here in installed.items() if kept.key.get(name) != here}
    return {
        "file": str(kept.path),
        "bytes": kept.bytes,
        "modified": kept.modified,
        "key": kept.key,
        "content": kept.content,
        "other_versions": other,
    }


def _lines(report: Facts) -> Iterator[str]:
    kernels, tuned, installed = report["kernels"], report["tuned"], report["installed"]
    there = "" if report["exists"] or not report["folder"] else " (not there yet)"
    yield f"Cache folder: {_shown(report['folder'] or 'none', PATH)}{there}"
    yield from (f"  {_shown(problem, PATH)}" for problem in report["problems"])
    yield f"Compiled kernels: {kernels['count']}, {kernels['bytes'] / MB:.1f} MB"
    yield f"Tuned heads: {sum(one['key'] is not None for one in tuned)}"
    readable = [one for one in tuned if one["key"] is not None]
    if readable:
        yield from _columns([HEADINGS, *(_cells(one) for one in readable)])
        yield f"  installed: {', '.join(_version(name, value) for name, value in installed.items())}"
    if any(one["other_versions"] for one in readable):
        yield "  An entry for other versions than the installed is not used."
    for one in tuned:
        if one["key"] is None:
            yield f"  {_shown(Path(one['file']).name, PATH)} cannot be read, and is not used"


HEADINGS = ["GPU", "vocab x hidden", "types", "bias", "rows", "age", "versions"]


def _cells(tuned: Facts) -> list[str]:
    key, other = tuned["key"], tuned["other_versions"]
    bias = key.get("bias")
    return [
        _shown(key.get("gpu")),
        f"{_shown(key.get('vocab'))}x{_shown(key.get('hidden'))}",
        f"{_shown(key.get('dtype'))} -> {_shown(key.get('out_dtype'))}",
        ("yes" if bias else "no") if isinstance(bias, bool) else _shown(bias),
        _rows(tuned["content"]),
        _age(time.time() - tuned["modified"]),
        "other: " + ", ".join(_version(name, value) for name, value in other.items()) if other else "as installed",
    ]


def _columns(lines: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip()


def _version(name: str, value: Any) -> str:
    return f"{name} {_shown(value)}" if value else f"no {name}"


def _rows(content: Facts) -> str:
    """The first and the last row count that a choice is kept for."""
    rows = content.get("rows")
    given = [row.get("rows") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    counts = [count for count in given if isinstance(count, int) and not isinstance(count, bool)]
    if not counts:
        return "?"
    first, last = min(counts), max(counts)
    return _shown(first) if first == last else f"{_shown(first)}-{_shown(last)}"


def _shown(value: Any, widest: int = WIDEST) -> str:
    """A value that may be anything, on one line of a terminal: no control characters, and not endless."""
    text = "?" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return text if len(text) <= widest else text[:widest] + "..."


def _age(seconds: float) -> str:
    """``200`` -> ``"3 min"``; a time to come is now."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= (2 * length if unit == "days" else length):
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


# --- clear -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doomed:
    """What is to be removed, or was: files of compiled kernels with their bytes, tuned heads, and left-over files."""

    kernels: dict[Path, int]
    heads: int
    left_over: list[Path]

    def __str__(self) -> str:
        """In words; empty for nothing."""
        parts = []
        if self.kernels:
            found = _kernels(self.kernels)
            parts.append(f"{_count(found['count'], 'compiled kernel')} ({found['bytes'] / MB:.1f} MB)")
        if self.heads:
            parts.append(f"the tuned choices of {_count(self.heads, 'head')}")
        if self.left_over:
            parts.append(_count(len(self.left_over), "left-over temporary file"))
        return ", ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _clear(args: argparse.Namespace) -> int:
    folder, problems = _folder(args), list[str]()
    if not args.yes and not _on_terminal():
        args.parser.error("stdin is no terminal on which to ask; --yes removes without asking")
    if folder is None:
        print(NO_HOME)
        return 0
    given = _given(folder)
    if given:
        args.parser.error(f"nothing is removed from {given}: it is one of LOWBATCH_LMHEAD_OBJECTS")
    kernels = folder if args.kernels or not args.tuned else None
    tuned = folder / cache.FOLDER if args.tuned or not args.kernels else None
    if tuned and os.path.islink(tuned):
        problems.append(f"{tuned} is a link to another folder, which is left as it is")
        tuned = None
    doomed = _doomed(kernels, tuned, problems)
    place = _shown(str(folder), PATH)
    if str(doomed) and not args.yes and not _agreed(f"Remove {doomed} from {place}?"):
        print("Nothing was removed.")
        return 1
    gone = _remove(doomed, tuned, problems)
    print(f"Removed {gone} from {place}." if str(gone) else f"Nothing was removed from {place}.")
    for problem in problems:
        print(_shown(problem, PATH), file=sys.stderr)
    return 1 if problems else 0


def _given(folder: Path) -> Path | None:
    """The part of the cache folder that LOWBATCH_LMHEAD_OBJECTS names, by whatever path, or None."""
    given = objects.given_folders()
    parts = (folder, folder / cache.FOLDER)
    return next((part for part in parts if any(_same(part, one) for one in given)), None)


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


def _doomed(kernels: Path | None, tuned: Path | None, problems: list[str]) -> Doomed:
    """What there is to remove in the folder of the compiled kernels, in that of the tuned choices, or in both."""
    files: list[Path] = []
    left_over: list[Path] = []
    try:
        files += objects.kept_files(kernels) if kernels else []
        left_over += objects.left_over(kernels) if kernels else []
    except OSError as error:
        problems.append(f"{kernels}: {error.strerror or error}")
    with contextlib.suppress(OSError):  # cache.clear tells
        left_over += objects.left_over(tuned) if tuned else []
    return Doomed({path: _size(path) for path in files}, len(cache.entries(tuned)), left_over)


def _remove(doomed: Doomed, tuned: Path | None, problems: list[str]) -> Doomed:
    """Remove what is ``doomed``, and return the part of it that is gone."""
    files, stuck = objects.remove_files(doomed.kernels)
    left_over, stuck_too = objects.remove_files(doomed.left_over)
    heads, failed = cache.clear(tuned)
    problems += [*stuck, *stuck_too, *(one for one in failed if one not in stuck_too)]
    return Doomed({path: doomed.kernels[path] for path in files}, heads, left_over)


def _on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _agreed(question: str) -> bool:
    """The answer on the terminal; the question goes to stderr, so that a pipe gets the result alone."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
