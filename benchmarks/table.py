"""The tables of README.md and docs/results.md, from the results that they cite.

python benchmarks/table.py benchmarks/results/h200
"""

from __future__ import annotations

import json
import statistics
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


def tuned(results: dict) -> list[str]:
    """Geometric means of ``us / linear_us`` with bfloat16 logits, and the share of cases that a kernel serves."""
    rows = [row for row in results["rows"] if row["out_dtype"] == "bfloat16"]
    kinds = {
        "whole heads, vocab % 16 == 0": [row for row in rows if not is_shard(row) and row["vocab"] % 16 == 0],
        "whole heads, other vocabularies": [row for row in rows if not is_shard(row) and row["vocab"] % 16],
        "1/8 shards": [row for row in rows if is_shard(row)],
    }
    lines = ["| bfloat16 logits | 1-8 rows | 9-16 rows | 17-32 rows |", "| --- | --- | --- | --- |"]
    for kind, of_kind in kinds.items():
        cells = []
        for first, last in ((1, 8), (9, 16), (17, 32)):
            chosen = [row for row in of_kind if first <= row["rows"] <= last]
            ratio = statistics.geometric_mean([row["us"] / row["linear_us"] for row in chosen])
            served = sum(row["backend"] != "default GEMM" for row in chosen) / len(chosen)
            cells.append(f"{ratio:.2f} ({100 * served:.0f} %)")
        lines.append(f"| {kind} ({len({row['model'] for row in of_kind})}) | {' | '.join(cells)} |")
    return lines


def is_shard(row: dict) -> bool:
    return "1/8" in row["model"]


def calls(host: dict) -> list[str]:
    shown = ("F.linear(x, weight)", "project(head, x)", "bind(head)(x)", "bind(head)(x, out=out)", "TVM-FFI launch")
    lines = ["| host time of a call, us | |", "| --- | --- |"]
    return lines + [f"| `{name}` | {host['host_us'][name]:.1f} |" for name in shown]


def main() -> None:
    folder = Path(sys.argv[1])
    results = [json.loads((folder / name).read_text()) for name in ("tuned.json", "core.json", "host.json")]
    tables = [make(result) for make, result in zip((tuned, heads, calls), results)]
    print("\n\n".join("\n".join(table) for table in tables))
    print(*(json.dumps(result["summary"], indent=1) for result in results[:2]), sep="\n")


if __name__ == "__main__":
    main()
