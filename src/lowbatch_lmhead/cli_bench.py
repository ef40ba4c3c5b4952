"""The command ``lowbatch-lmhead bench``: ``project`` beside everything else that computes the logits, on this GPU.

    lowbatch-lmhead bench --model llama-3.1-8b --tp 8 --rows 1,4,16 --out DIR --resume

Rules:
- what is compared is measured in one run and in turn;
- what cannot run, or computes something else, is in the table with its reason;
- a case that is done is on disk before the next one begins.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .benching import competitors, measure, results
from .benching.competitors import TUNED, UNTUNED, Case, Competitor
from .log import said
from .tuning.timing import Timer, timer_for
from .tuning.tune import MOST_ROWS

OUT_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NO_GPU = (
    "bench measures on a CUDA GPU, and there is none here; --device cpu --vocab 1000 --hidden 128 tries the command out, "
    "with wall-clock times that say nothing of a GPU"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``bench`` besides those of the head."""
    parser.add_argument(
        "--rows", type=_rows, default=[1, 4, 16], metavar="M,M", help="row counts, with commas between (1,4,16)"
    )
    parser.add_argument("--out-dtype", choices=list(OUT_DTYPES), default="bfloat16", help="of the logits (bfloat16)")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, too, which takes minutes")
    parser.add_argument("--out", type=folder_name, metavar="DIR", help="keep what is measured in DIR, as JSON")
    parser.add_argument("--resume", action="store_true", help="do not measure again what is in DIR")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the command out")


def folder_name(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return Path(text)


def _rows(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part[:20]) <= MOST_ROWS for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one or more whole numbers from 1 to {MOST_ROWS}, as in 1,4,16"
        )
    return list(dict.fromkeys(map(int, parts)))


def run(args: argparse.Namespace, heads: Sequence[tuple[str, tuple[int, int]]]) -> int:
    """Measure ``heads``, each (name or "", (vocab, hidden)). 0 where ``project`` was measured and right in every case."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"lowbatch-lmhead bench: {NO_GPU}", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    folder = _folder(args)
    table = competitors.table(device, args.compile)
    around = results.environment(device)
    done = [_head(args, _title(name, args.tp), size, device, table, around, folder) for name, size in heads]
    return 0 if all(done) else 1


def _folder(args: argparse.Namespace) -> Path | None:
    folder: Path | None = args.out
    if args.resume and folder is None:
        args.parser.error("--resume needs --out DIR: what was measured is looked up there")
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        args.parser.error(f"--out {folder} cannot be made: {error.strerror or error}")
    return folder


def _title(name: str, ranks: int) -> str:
    return f"{name or 'head'} 1/{ranks}" if ranks > 1 else name or "head"


def _head(
    args: argparse.Namespace,
    model: str,
    size: tuple[int, int],
    device: torch.device,
    table: list[Competitor],
    around: dict[str, Any],
    folder: Path | None,
) -> bool:
    """One head at every row count; whether all went well."""
    out_dtype = OUT_DTYPES[args.out_dtype]
    cases = [Case(model, *size, rows, out_dtype, device, max(args.rows)) for rows in args.rows]
    known = {case: _known(results.path(folder, case), case, table, around) for case in cases if folder and args.resume}
    todo = [case for case in cases if not known.get(case)]
    fresh: dict[Case, dict[str, Any] | str] = {}
    if todo:
        try:
            _measure_head(todo, table, around, folder, fresh)
        except Exception as error:  # no memory for the weight, say; the other heads get their turn
            fresh.setdefault(todo[0], _failed(todo[0], error))
    fine = True
    for case in cases:
        content = known.get(case) or fresh.get(case)
        if isinstance(content, dict):
            print("\n".join(results.lines(content)), end="\n\n", flush=True)
        elif content:
            print(content, file=sys.stderr)
        fine = fine and isinstance(content, dict) and _is_fine(content)
    return fine


def _known(file: Path, case: Case, table: list[Competitor], around: dict[str, Any]) -> dict[str, Any] | None:
    found = results.load(file, case, table, around)
    if isinstance(found, str):
        print(f"{file} is measured again: {found}", file=sys.stderr)
        return None
    return found


def _measure_head(
    cases: list[Case],
    table: list[Competitor],
    around: dict[str, Any],
    folder: Path | None,
    found: dict[Case, dict[str, Any] | str],
) -> None:
    """Enter into ``found`` what was measured of each case, or what went wrong."""
    from tqdm import tqdm

    first = cases[0]
    bar = tqdm(total=len(cases) * (len(table) + 1), desc=first.model, unit="step", leave=False, disable=None)
    with bar, torch.inference_mode():
        generator = torch.Generator(first.device).manual_seed(1)
        weight = torch.randn(
            first.vocab, first.hidden, generator=generator, dtype=torch.bfloat16, device=first.device
        ).mul_(first.hidden**-0.5)
        timer = timer_for(weight, None, max(case.rows for case in cases), first.out_dtype)
        try:
            for case in cases:
                found[case] = _measure(case, table, weight, timer, bar, around, folder)
        finally:
            timer.close()
            del weight, timer
            if first.device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # the allocator does not, after a capture that failed
                    torch.cuda.empty_cache()


def _measure(
    case: Case,
    table: list[Competitor],
    weight: torch.Tensor,
    timer: Timer,
    bar: Any,
    around: dict[str, Any],
    folder: Path | None,
) -> dict[str, Any] | str:
    def step(name: str) -> None:
        bar.set_postfix_str(f"{case.rows} rows: {name}")
        bar.update()

    try:
        measured = measure.measure(case, table, weight, timer, step)
    except Exception as error:  # the other cases get their turn
        return _failed(case, error)
    content = results.whole(case, table, around, measured)
    if folder is not None:
        try:
            results.save(results.path(folder, case), content)
        except OSError as error:
            print(f"not kept in {folder}: {error.strerror or error}", file=sys.stderr)
    return content


def _failed(case: Case, error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return f"no memory for a {case.vocab}x{case.hidden} weight on {case.device}"
    return f"{case.model}, {case.rows} rows, could not be measured: {said(error)}"


def _is_fine(content: dict[str, Any]) -> bool:
    """Whether ``project`` was measured, which it is only where it is right."""
    times = {one["name"]: one["us"] for one in content["results"]}
    return all(times.get(name) is not None for name in (TUNED, UNTUNED) if name in times)
