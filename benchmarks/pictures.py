"""Draws docs/pictures from the results that the pages cite, as PNG and SVG. The same results give the same bytes.

python benchmarks/pictures.py            # all of them
python benchmarks/pictures.py host rows  # some

What is drawn comes from one function each, *_data, which needs no matplotlib.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PICTURES = ROOT / "docs" / "pictures"

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
OURS, THEIRS, SECOND, GREY = "#0072B2", "#D55E00", "#E69F00", "#555555"
STYLE = {
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.1,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "svg.fonttype": "path",  # looks alike everywhere
    "svg.hashsalt": "lowbatch-lmhead",
}
WIDTH = 9.0  # inches: 900 pixels at 100 dpi

FOUR = ("llama-3.1-8b", "deepseek-v3 1/8", "qwen3-0.6b", "granite-3.1-2b")
CALLS = {  # key in host.json -> label
    "F.linear(x, weight)": "F.linear(x, weight)",
    "project(head, x)": "project(head, x)",
    "project(head, x, out=out)": "project(head, x, out=out)",
    "bind(head)(x)": "bind(head)(x)",
    "bind(head)(x, out=out)": "bind(head)(x, out=out)",
    "32 rows: project(head, x)": "project(head, x), 32 rows",
    "TVM-FFI launch": "the kernel's launch alone",
}
WAYS = {  # key in decode_tail.json -> label, colour, place in its case
    "F.linear": ("F.linear", THEIRS, -0.26),
    "ours": ("bind(head)", OURS, 0),
    "mm_bf16": ("FlashInfer's mm_bf16", SECOND, 0.26),
}


# --- what is drawn ---


def tuned_rows(tuned: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """(model, rows) -> what was measured with bfloat16 logits."""
    return {(row["model"], row["rows"]): row for row in tuned["rows"] if row["out_dtype"] == "bfloat16"}


def rows_data(tuned: dict[str, Any]) -> list[dict[str, Any]]:
    """For each of the four heads its times over the row counts, and the row counts that a kernel serves."""
    rows = tuned_rows(tuned)
    heads = []
    for model in FOUR:
        counts = sorted(count for name, count in rows if name == model)
        mine = [rows[model, count] for count in counts]
        heads.append(
            {
                "model": model,
                "vocab": mine[0]["vocab"],
                "hidden": mine[0]["hidden"],
                "rows": counts,
                "kernel": [row["backend"] != "default GEMM" for row in mine],
                **{key: [row[key] for row in mine] for key in ("us", "linear_us", "limit_us")},
            }
        )
    return heads


def speedup_data(tuned: dict[str, Any], counts: tuple[int, ...] = (1, 16)) -> list[dict[str, Any]]:
    """Whole heads with F.linear's time over ours at each row count, odd vocabularies and large ones first."""
    rows = tuned_rows(tuned)
    heads = []
    for model in {name: None for name, _ in rows if not name.endswith(" 1/8")}:
        mine = [rows[model, count] for count in counts]
        heads.append(
            {
                "model": model,
                "odd": mine[0]["vocab"] % 16 != 0,
                "kernel": [row["backend"] != "default GEMM" for row in mine],
                "speedup": [row["linear_us"] / row["us"] for row in mine],
            }
        )
    return sorted(heads, key=lambda head: (head["odd"], max(head["speedup"])), reverse=True)


def host_data(host: dict[str, Any]) -> list[tuple[str, float]]:
    """(call, microseconds)."""
    return [(name, host["host_us"][name]) for name in CALLS]


def tail_data(tail: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row of the file: the case, eager or graph, the time of a step by each way that was measured, the ratio."""
    return [
        {
            "case": f"{row['model']}, {row['batch']} row{'s' if row['batch'] > 1 else ''}",
            **{key: row[key] for key in ("mode", "us", "ratio")},
        }
        for row in tail["rows"]
    ]


# --- how ---


def start(height: float, title: str, **grid: Any) -> tuple[Any, Any]:
    """A figure with its message as the title, and its axes."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcdefaults()
    plt.rcParams.update(STYLE)
    subplots = plt.subplot_mosaic if "mosaic" in grid else plt.subplots
    figure, axes = subplots(figsize=(WIDTH, height), **grid)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
    return figure, axes


def save(figure: Any, name: str, drawn: Any) -> None:
    """Both formats, without dates and versions, and with a hash of what was drawn: the tests ask whether it is old."""
    import matplotlib.pyplot as plt

    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", metadata={"Software": None, "Description": digest(drawn)})
    unnamed = {"Creator": None, "Date": None, "Format": None, "Type": None}
    figure.savefig(PICTURES / f"{name}.svg", metadata={**unnamed, "Description": digest(drawn)})
    plt.close(figure)


def digest(drawn: Any) -> str:
    return "drawn from " + hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:16]


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"


# --- the pictures ---


def draw_rows(heads: list[dict[str, Any]]) -> Any:
    served = [
        us / limit for head in heads for n, us, limit in zip(head["rows"], head["us"], head["limit_us"]) if n <= 16
    ]
    title = f"Up to 16 rows these heads take at most {percent(max(served))} longer than reading their weight"
    figure, axes = start(6.0, title, nrows=2, ncols=2, sharex=True)
    for ax, head in zip(axes.flat, heads):
        lines = draw_times(ax, head)
    for ax in axes[1]:
        ax.set_xlabel("rows")
    for ax in axes[:, 0]:
        ax.set_ylabel("GPU time, us")
    figure.legend(handles=lines, loc="outside lower center", ncols=4, frameon=False)
    return figure


def draw_times(ax: Any, head: dict[str, Any]) -> list[Any]:
    """One head; the lines, for the legend."""
    rows = head["rows"]
    (linear,) = ax.plot(rows, head["linear_us"], color=THEIRS, marker="s", markersize=3.5, lw=1.2, label="F.linear")
    (limit,) = ax.plot(rows, head["limit_us"], color=GREY, ls="--", lw=1.3, label="read limit")
    ax.plot(rows, head["us"], color=OURS, lw=1.2)
    found = []
    for kernel, face, label in ((True, OURS, "project, by a kernel"), (False, "white", "project, by the default GEMM")):
        mine = [(n, us) for n, us, one in zip(rows, head["us"], head["kernel"]) if one == kernel]
        style = {"color": OURS, "markerfacecolor": face, "marker": "o", "markersize": 4.5, "label": label}
        found += ax.plot(*zip(*mine) if mine else ([], []), lw=0, **style)
    lowest, largest = min(head["limit_us"]), max(head["linear_us"])
    bottom = 0 if largest > 2 * lowest else lowest - 0.25 * (largest - lowest)
    ax.set_ylim(bottom, largest + 0.12 * (largest - bottom))
    ax.set_xticks([1, 4, 8, 12, 16, 20, 24, 28, 32])
    ax.set_title(f"{head['model']}  ({head['vocab']} x {head['hidden']})" + (",  axis not from 0" if bottom else ""))
    ax.grid(axis="y")
    return [linear, *found, limit]


def draw_speedup(heads: list[dict[str, Any]]) -> Any:
    """The heads of even vocabularies in two columns on one scale, the odd ones below on their own."""
    odd, even = ([head for head in heads if head["odd"] == one] for one in (True, False))
    faster = sum(min(head["speedup"]) > 1.01 for head in heads)
    largest = max(max(head["speedup"]) for head in odd)
    title = f"{faster} of {len(heads)} heads run faster than with F.linear, "
    title += f"odd vocabularies up to {largest:.1f} times as fast"
    half = (len(heads) + 3) // 2  # 3 lines: the axis and the heading between the two panels of the right column
    ratios = {"height_ratios": [len(even) - half, len(odd)]}
    figure, axes = start(6.6, title, mosaic=[["first", "second"], ["first", "odd"]], gridspec_kw=ratios)
    for name, mine in (("first", even[:half]), ("second", even[half:]), ("odd", odd)):
        points = draw_ratios(axes[name], mine)
    right = max(max(head["speedup"]) for head in even)
    for name in ("first", "second"):
        axes[name].set_xlim(0.98, right + 0.01)
    axes["odd"].set_xlim(0.6, 1.1 * largest)
    axes["first"].set_title(f"vocab % 16 == 0 ({len(even)})")
    axes["second"].set_title("vocab % 16 == 0, continued")
    axes["odd"].set_title(f"other vocabularies ({len(odd)}), wider scale")
    for name in axes:
        axes[name].set_xlabel("time of F.linear / time of project")
    figure.legend(handles=points, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_ratios(ax: Any, heads: list[dict[str, Any]]) -> list[Any]:
    """A line for each head, the first on top; the points, for the legend."""
    ax.axvline(1, color=GREY, lw=1.2)
    for line, head in enumerate(heads):
        ax.plot(head["speedup"], [line, line], color="#b0b0b0", lw=1.5)
        for colour, marker, ratio, kernel in zip((OURS, SECOND), "oD", head["speedup"], head["kernel"]):
            ax.plot(ratio, line, marker=marker, color=colour, markerfacecolor=colour if kernel else "none")
    ax.set_yticks(range(len(heads)), [head["model"] for head in heads])
    ax.set_ylim(len(heads) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")
    shown = (
        ("o", OURS, OURS, "1 row"),
        ("D", SECOND, SECOND, "16 rows"),
        ("o", GREY, "none", "hollow: the default GEMM serves"),
    )
    return [
        ax.plot([], [], lw=0, marker=marker, color=colour, markerfacecolor=face, label=label)[0]
        for marker, colour, face, label in shown
    ]


def draw_host(calls: list[tuple[str, float]]) -> Any:
    times = dict(calls)
    less = times["F.linear(x, weight)"] - times["project(head, x)"]
    title = f"Where a kernel serves, a call of project costs the host {less:.1f} us less than F.linear"
    figure, ax = start(3.6, title)
    bars = ax.barh([CALLS[name] for name in times], times.values(), 0.65, color=[colour(name) for name in times])
    ax.bar_label(bars, fmt="%.1f", padding=4)
    ax.set_xlim(0, 1.08 * max(times.values()))
    ax.set_xticks(range(0, int(max(times.values())) + 2, 2))
    ax.invert_yaxis()
    ax.set_xlabel("host time of one call, us (32000 x 4096 head, 4 rows, inference mode)")
    ax.tick_params(axis="y", length=0)
    return figure


def colour(call: str) -> str:
    return THEIRS if call.startswith("F.linear") else GREY if "launch" in call else OURS


def draw_tail(steps: list[dict[str, Any]]) -> Any:
    ratios = [step["ratio"] for step in steps if step["ratio"]]
    cases = list(dict.fromkeys(step["case"] for step in steps))
    title = f"The tail of a decode step takes {min(ratios):.2f} to {max(ratios):.2f} of its time with F.linear"
    figure, axes = start(1.8 + 0.6 * len(cases), title, ncols=2, sharex=True, sharey=True)
    for ax, (mode, heading) in zip(axes, {"eager": "eager", "graph": "in a CUDA graph"}.items()):
        times = {step["case"]: step["us"] for step in steps if step["mode"] == mode}
        for way, (label, shade, shift) in WAYS.items():
            mine = {cases.index(case) + shift: us[way] for case, us in times.items() if way in us}
            bars = ax.barh(list(mine), list(mine.values()), 0.24, color=shade, label=label)
            ax.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
        ax.set_title(heading)
        ax.set_xlabel("time of the tail of one step, us")
        ax.tick_params(axis="y", length=0)
    axes[0].set_xlim(0, 1.2 * max(max(step["us"].values()) for step in steps))
    axes[0].set_yticks(range(len(cases)), cases)
    axes[0].set_ylim(len(cases) - 0.5, -0.5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


ALL: dict[str, tuple[str, Callable[[dict[str, Any]], Any], Callable[[Any], Any]]] = {
    "rows": ("tuned.json", rows_data, draw_rows),
    "speedup": ("tuned.json", speedup_data, draw_speedup),
    "host": ("host.json", host_data, draw_host),
    "decode_tail": ("decode_tail.json", tail_data, draw_tail),
}


def main() -> None:
    for name in sys.argv[1:] or ALL:
        source, data, draw = ALL[name]
        if not (RESULTS / source).exists():
            print(f"{name}: not drawn, there is no {source}")
            continue
        drawn = data(json.loads((RESULTS / source).read_text()))
        save(draw(drawn), name, drawn)
        print(f"{name}: {PICTURES.relative_to(ROOT)}/{name}.png, .svg from {source}")


if __name__ == "__main__":
    main()
