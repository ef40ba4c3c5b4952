"""The README's tables, from the results that they cite.

python benchmarks/table.py benchmarks/results/h200
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHOWN = ("qwen3-0.6b", "llama-3.1-8b", "deepseek-v3", "command-r-plus", "gpt2", "granite-3.1-8b", "gpt-oss-20b")


def heads(core: dict) -> list[str]:
    rows = {(row["model"], row["rows"], row["out_dtype"]): row for row in core["rows"]}
    lines = [
        "| head | vocab x hidden | rows | F.linear | project | ratio | plain read | float32 logits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in SHOWN:
        for count in (1, 8):
            row, wide = rows[model, count, "bfloat16"], rows[model, count, "float32"]
            served = "" if row["backend"] != "default GEMM" else " (default GEMM)"
            lines.append(
                f"| {model} | {row['vocab']}x{row['hidden']} | {count} | {row['linear_us']:.1f} | {row['us']:.1f}{served} | "
                f"{row['us'] / row['linear_us']:.2f} | {row['read_us']:.1f} | {wide['us']:.1f} |"
            )
    return lines


def calls(host: dict) -> list[str]:
    shown = ("F.linear(x, weight)", "project(head, x)", "bind(head)(x)", "bind(head)(x, out=out)", "TVM-FFI launch")
    lines = ["| host time of a call, us | |", "| --- | --- |"]
    return lines + [f"| `{name}` | {host['host_us'][name]:.1f} |" for name in shown]


def main() -> None:
    folder = Path(sys.argv[1])
    core, host = (json.loads((folder / name).read_text()) for name in ("core.json", "host.json"))
    print("\n".join([*heads(core), "", *calls(host)]))
    print(json.dumps(core["summary"], indent=1))


if __name__ == "__main__":
    main()
