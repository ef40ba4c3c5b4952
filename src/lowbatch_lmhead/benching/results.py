"""What was measured: a JSON file for each case, with what it was measured on; and the table on the terminal.

Rules, as for the cache of tuned choices:
- a case is one file, written beside its place and renamed into it, so that an interrupted run loses one case at most;
- a file that is missing, damaged, of other competitors or of another environment is measured again, never an error.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__, objects
from ..backends import flashinfer
from ..backends.base import dtype_name
from .competitors import Case, Competitor

Facts = dict[str, Any]

FORM = 1  # of a file
PACKAGES = ("flashinfer-python", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels", "triton")
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
NUMBERS = ("us", "ratio", "limit_fraction", "host_us", "rel_err", "last_rows_err", "memory_bytes", "prepare_s")


# --- the environment ---


def environment(device: torch.device) -> Facts:
    """What a time depends on: the GPU, its driver, the processor count and the versions."""
    return {
        "device": device.type,
        **(_gpu(device) if device.type == "cuda" else dict.fromkeys(_GPU)),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        **{name: flashinfer.version(name) for name in PACKAGES},
        "lowbatch-lmhead": __version__,
    }


_GPU = ("gpu", "compute_capability", "multiprocessors", "l2_bytes", "memory_bytes", "driver")


def _gpu(device: torch.device) -> Facts:
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        "memory_bytes": gpu.total_memory,
        "driver": _nvidia_smi(device, ["driver_version"])[0],
    }


def clocks(device: torch.device) -> dict[str, int | None]:
    """The clocks in MHz, of the multiprocessors and the memory, now and at most, as nvidia-smi says; else None."""
    said = _nvidia_smi(device, CLOCKS) if device.type == "cuda" else [None] * len(CLOCKS)
    return {name: int(value) if value and value.isdigit() else None for name, value in zip(CLOCKS, said)}


def _nvidia_smi(device: torch.device, fields: Sequence[str]) -> Sequence[str | None]:
    try:
        which = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", which]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError, AttributeError, RuntimeError):
        return [None] * len(fields)
    values = [value.strip() for value in answer.strip().split(",")]
    if len(values) != len(fields):
        return [None] * len(fields)
    return [None if value.startswith("[") else value for value in values]


# --- files ---


def key(case: Case, competitors: Sequence[Competitor]) -> Facts:
    """What makes two measurements one and the same, in one environment."""
    return {
        "model": case.model,
        "vocab": case.vocab,
        "hidden": case.hidden,
        "rows": case.rows,
        "out_dtype": dtype_name(case.out_dtype),
        "competitors": [one.name for one in competitors if one.asked],
    }


def path(folder: Path, case: Case) -> Path:
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", case.model).strip("._")[-80:] or "head"
    return folder / f"{name}-{case.vocab}x{case.hidden}-{case.rows}-{dtype_name(case.out_dtype)}.json"


def whole(case: Case, competitors: Sequence[Competitor], around: Facts, measured: Facts) -> Facts:
    """What a file holds."""
    return {
        "form": FORM,
        **key(case, competitors),
        "environment": around,
        "clocks_mhz": clocks(case.device),
        "date": datetime.date.today().isoformat(),
        **measured,
    }


def save(file: Path, content: Facts) -> None:
    """OSError where it cannot be written."""
    objects.replace_file(file, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def load(file: Path, case: Case, competitors: Sequence[Competitor], around: Facts) -> Facts | str | None:
    """What was measured of ``case``; why it has to be measured again; None where it was not measured yet."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return "it cannot be read"
    if not _is_whole(content):
        return "it is damaged, or of another version"
    if any(content[name] != value for name, value in key(case, competitors).items()):
        return "it is of other competitors or another head"
    differing = [name for name, value in around.items() if content["environment"].get(name) != value]
    return f"it was measured with another {', '.join(differing)}" if differing else dict(content)


def _is_whole(content: Any) -> bool:
    if not isinstance(content, dict) or content.get("form") != FORM:
        return False
    results, environment = content.get("results"), content.get("environment")
    known = {
        "model",
        "vocab",
        "hidden",
        "rows",
        "out_dtype",
        "competitors",
        "read_us",
        "limit_us",
        "noise",
        "yardstick",
    }
    return (
        isinstance(results, list)
        and isinstance(environment, dict)
        and known <= set(content)
        and all(_is_number(content[name]) for name in ("read_us", "limit_us", "noise"))
        and all(_is_result(one) for one in results)
    )


def _is_result(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("note"), str)
        and isinstance(one.get("reason", 0), (str, type(None)))
        and all(_is_number(one.get(name, "")) for name in NUMBERS)
    )


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


# --- the table ---

HEADINGS = ("", "us", "ratio", "of the limit", "host us", "error", "memory MB")


def lines(content: Facts) -> Iterator[str]:
    """The table of one case."""
    around = content["environment"]
    rows = f"{content['rows']} row{'' if content['rows'] == 1 else 's'}"
    yield (
        f"{content['model']} {content['vocab']}x{content['hidden']}, {rows}, {content['out_dtype']} logits, "
        f"on {around.get('gpu') or 'the CPU, wall-clock time'}"
    )
    cells = [_cells(one) for one in content["results"]]
    width = max(map(len, (row[0] for row in cells)), default=0)
    yield _line(HEADINGS, width)
    for one, row in zip(content["results"], cells):
        if one["us"] is None:
            yield f"  {row[0]:<{width}}  not measured: {one['reason']}"
        else:
            yield _line(row, width) + (f"  {one['note']}" if one["note"] else "")
    yield _read(content)


def _cells(one: Facts) -> tuple[str, ...]:
    memory = one["memory_bytes"]
    return (
        one["name"],
        _number(one["us"], ".1f"),
        _number(one["ratio"], ".3f"),
        _number(one["limit_fraction"], ".1%"),
        _number(one["host_us"], ".1f"),
        _number(one["rel_err"], ".1e"),
        _number(memory / 1e6 if memory is not None else None, ".1f"),
    )


def _line(cells: Sequence[str], width: int) -> str:
    name, *numbers = cells
    return "  ".join([f"  {name:<{width}}", *(f"{cell:>{max(8, len(h))}}" for cell, h in zip(numbers, HEADINGS[1:]))])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _read(content: Facts) -> str:
    noise = _number(content["noise"], ".1%")
    said = f"  ratio: over {content['yardstick']}, which differs from itself by {noise}"
    if content["limit_us"] is None:
        return f"{said}; the read limit is not known: {content.get('read_reason') or 'it was not measured'}"
    return f"{said}; the limit of {content['limit_us']:.1f} us: {content['read_us']:.1f} us for reading the weight"
