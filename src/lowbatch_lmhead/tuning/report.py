"""What ``autotune`` found, for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..report import Report

Source = Literal["measured", "cache", "earlier call", "not tuned"]


@dataclass(frozen=True)
class TunedRow:
    """One row count. Times are GPU microseconds of one projection; None where they were not measured.

    ``backend`` is "default GEMM" or a kernel's, with its ``tactic``; ``us`` is its time and ``default_us`` the default
    GEMM's; ``limit_us`` is how long reading the weight and x and writing the logits takes at the read bandwidth.
    """

    rows: int
    backend: str
    tactic: str | None
    us: float | None
    default_us: float | None
    limit_us: float | None
    reasons: tuple[str, ...] = ()

    @property
    def limit_fraction(self) -> float | None:
        """How much of the read limit this reaches: 1 is as fast as memory."""
        return self.limit_us / self.us if self.limit_us and self.us else None


@dataclass(frozen=True)
class TunedHead:
    """One head. ``rows`` is empty where it is left to its own computation; ``notes`` say why, and what went wrong.

    ``source``: the choice was "measured" now, came from the "cache" on disk or an "earlier call" in this process, or the
    head is "not tuned". ``read_us`` is the time of reading the weight once, ``noise`` how far the default GEMM differed
    from itself (0.01 is 1 %).
    """

    name: str
    vocab: int | None
    hidden: int | None
    dtype: str | None
    out_dtype: str | None
    source: Source
    rows: tuple[TunedRow, ...]
    read_us: float | None
    noise: float | None
    notes: tuple[str, ...]
    seconds: float

    def lines(self) -> Iterator[str]:
        size = f" {self.vocab}x{self.hidden}" if self.vocab else ""
        types = f", {self.dtype} to {self.out_dtype}" if self.dtype else ""
        yield f"{self.name}{size}{types}: {_SAID[self.source]} in {self.seconds:.2f} s"
        if self.rows:
            names = [_name(run[0]) for run in self._runs()]
            width = max(map(len, names))
            yield f"  {'rows':<7}{'served by':<{width}}  {'us':>13}  {'default GEMM':>13}  {'of the limit':>12}"
            for name, run in zip(names, self._runs()):
                rows = f"{run[0].rows}" if len(run) == 1 else f"{run[0].rows}-{run[-1].rows}"
                us = _range([row.us for row in run], ".1f")
                default = _range([row.default_us for row in run], ".1f")
                fraction = _range([row.limit_fraction for row in run], ".0%")
                yield f"  {rows:<7}{name:<{width}}  {us:>13}  {default:>13}  {fraction:>12}"
        for note in self.notes:
            yield f"  {note}"

    def _runs(self) -> list[list[TunedRow]]:
        runs: list[list[TunedRow]] = []
        for row in self.rows:
            if runs and (runs[-1][0].backend, runs[-1][0].tactic) == (row.backend, row.tactic):
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "rows": row.rows,
                "backend": row.backend,
                "tactic": row.tactic,
                "us": _finite(row.us),
                "default_us": _finite(row.default_us),
                "limit_us": _finite(row.limit_us),
                "limit_fraction": _finite(row.limit_fraction),
                "reasons": list(row.reasons),
            }
            for row in self.rows
        ]
        numbers = {"read_us": _finite(self.read_us), "noise": _finite(self.noise)}
        return {**vars(self), "rows": rows, **numbers, "notes": list(self.notes)}


_SAID = {
    "measured": "measured",
    "cache": "from the cache",
    "earlier call": "tuned already",
    "not tuned": "not tuned",
}


def _name(row: TunedRow) -> str:
    return f"{row.backend} ({row.tactic})" if row.tactic else row.backend


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers; times from a cache may be any."""
    return value if value is not None and math.isfinite(value) else None


def _range(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, most = format(min(known), form), format(max(known), form)
    return least if least == most else f"{least}-{most}"


class TuningReport(Report[TunedHead]):
    """What ``autotune`` did."""

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)
