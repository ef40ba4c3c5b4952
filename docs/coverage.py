"""Writes docs/coverage.md: what would serve the heads of benchmarks/heads.json on each architecture, asked of the library.

    python docs/coverage.py             writes the page
    python docs/coverage.py --check     exit status 1 where it is not as it would be written

It needs no GPU. It needs the packages that the kernels need (``lowbatch-lmhead doctor``): without them nothing serves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    # In the place of this folder: the name of this file is that of a well-known package, too.
    sys.path[0] = str(ROOT / "src")

import torch  # noqa: E402

from lowbatch_lmhead import backends, devices, gate  # noqa: E402
from lowbatch_lmhead.backends import Problem  # noqa: E402
from lowbatch_lmhead.plan import Plan, PlanKey  # noqa: E402
from lowbatch_lmhead.tuning import search  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"
HEADS = json.loads((ROOT / "benchmarks" / "heads.json").read_text())
ROWS = (1, 16, 32)
NONE = "-"

INTRODUCTION = """\
# Coverage

What would serve the heads of [heads.json](../benchmarks/heads.json) on each architecture. `docs/coverage.py` asks the
library and writes this page; a test compares the two. Nothing is run for it, so it says what is taken, not what is quicker.
What was measured is in [Measuring](measuring.md).

A cell is *untuned* / *autotune*: the backend that `warmup` or the first call takes, and those that `autotune` times beside
the default GEMM, with the number of their tactics. `-` is the default GEMM alone. Heads are bfloat16 without a bias, with
bfloat16 logits. For a head of your own:

```
lowbatch-lmhead explain --vocab 128256 --hidden 4096 --rows 8 --arch sm_90a
```
"""


def short(name: str) -> str:
    """The capital letter that stands for a backend in the table: that of its first word that no backend before has."""
    taken: set[str] = set()
    for backend in backends.kernels():
        words = backend.name.removeprefix("flashinfer ").replace("_", " ").split()
        letters = [word[0].upper() for word in words] + list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        letter = next(one for one in letters if one not in taken)
        if backend.name == name:
            return letter
        taken.add(letter)
    raise LookupError(name)


def problem(head: dict, rows: int, arch: str, out_dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> Problem:
    return Problem(head["vocab_size"], head["hidden_size"], rows, torch.bfloat16, out_dtype, bias, arch)


def untuned(asked: Problem) -> str:
    """The backend of an unmeasured launch."""
    key = PlanKey(torch.device("meta"), asked.vocab, asked.hidden, asked.dtype, asked.out_dtype, asked.has_bias)
    decision = gate.decide_rows(Plan(key, asked.arch), asked.rows)
    return short(decision.backend) if decision.taken else NONE


def measured(asked: Problem) -> str:
    """The backends that autotune times, each with the number of its tactics."""
    names = [short(option.backend.name) for option in search.options(asked)[0]]
    return " ".join(f"{name}{names.count(name)}" for name in dict.fromkeys(names)) or NONE


def cell(asked: Problem) -> str:
    first, others = untuned(asked), measured(asked)
    return NONE if first == others == NONE else f"{first} / {others}"


def table() -> list[str]:
    columns = [f"{arch} {rows}" for arch in devices.ARCHITECTURES for rows in ROWS]
    lines = [f"| head | vocab x hidden | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for head in HEADS:
        cells = [cell(problem(head, rows, arch)) for arch in devices.ARCHITECTURES for rows in ROWS]
        lines.append(f"| {head['model']} | {head['vocab_size']}x{head['hidden_size']} | {' | '.join(cells)} |")
    return lines


def reasons() -> list[str]:
    """For each head that the default GEMM alone serves somewhere, why."""
    lines = []
    for head in HEADS:
        why: dict[str, list[str]] = {}  # reason: where
        for arch in devices.ARCHITECTURES:
            able = {rows: backends.candidates(problem(head, rows, arch)) for rows in ROWS}
            for reason in {reason: None for rows in ROWS if not able[rows][0] for reason in able[rows][1]}:
                why.setdefault(reason, []).append(arch)
        if why:
            lines.append(f"- **{head['model']}**, {head['vocab_size']}x{head['hidden_size']}")
            everywhere = list(devices.ARCHITECTURES)
            for reason, at in why.items():
                lines.append(f"    - {reason}" + ("" if at == everywhere else f" ({', '.join(at)})"))
    return lines


def able(out_dtype: torch.dtype, bias: bool) -> set[str]:
    """The backends that take some head of the table."""
    return {
        backend.name
        for head in HEADS
        for arch in devices.ARCHITECTURES
        for rows in ROWS
        for backend in backends.candidates(problem(head, rows, arch, out_dtype, bias))[0]
    }


def other_types() -> list[str]:
    plain = able(torch.bfloat16, False)
    lines = []
    for what, found in (
        ("float32 logits", able(torch.float32, False)),
        ("a bias", able(torch.bfloat16, True)),
    ):
        left_out = " and ".join(backend.name for backend in backends.kernels() if backend.name in plain - found)
        lines.append(f"- With {what}: " + (f"all but {left_out}." if left_out else "the same."))
    return lines


def page() -> str:
    lines = [INTRODUCTION]
    lines += ["| letter | backend | architectures |", "| --- | --- | --- |"]
    for backend in backends.kernels():
        architectures = [arch for arch in devices.ARCHITECTURES if arch in backend.architectures]
        lines.append(f"| {short(backend.name)} | {backend.name} | {', '.join(architectures)} |")
    lines.append("")
    lines += [f"- {arch.name}: untuned up to {arch.untuned_rows} rows." for arch in devices.ARCHITECTURES.values()]
    lines += other_types()
    lines += ["", "## Heads", "", *table(), "", "## Why not", ""]
    lines += reasons() or ["Every head is taken."]
    return "\n".join(lines) + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
