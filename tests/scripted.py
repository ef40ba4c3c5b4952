"""A backend with several tactics, and a timer whose clock is a script: what autotune does without a GPU."""

from __future__ import annotations

import contextlib

from lowbatch_lmhead import testing
from lowbatch_lmhead.backends import Launch

DEFAULT, AGAIN = "default", "again"  # the default GEMM, and its second graph in the same contest


class Tactics(testing.Reference):
    """The reference backend in several tactics, all right unless told otherwise."""

    name = "scripted"

    def __init__(self, *tactics, name="scripted", wrong=(), wrong_at=(), failing=(), most_rows=64):
        self.name = name
        self._tactics = list(tactics) or ["a"]
        self._wrong, self._wrong_at, self._failing, self._most = set(wrong), dict(wrong_at), set(failing), most_rows
        self.compiled, self.calls = [], []

    def supports(self, problem):
        return f"it takes up to {self._most} rows" if problem.rows > self._most else super().supports(problem)

    def tactics(self, problem):
        return self._tactics[:1]

    def autotune_tactics(self, problem):
        return self._tactics

    def compile(self, problem, tactic):
        if tactic in self._failing:
            raise RuntimeError(f"no code for {tactic}")
        self.compiled.append(tactic)
        right = super().compile(problem, tactic)

        def call(weight, x, bias, out):
            self.calls.append((tactic, x.shape[0]))
            right.call(weight, x, bias, out)
            if tactic in self._wrong or self._wrong_at.get(tactic) == x.shape[0]:
                out[0, 0] += 1e3

        call.label = tactic
        return Launch(call, self.name, tactic)


class Script:
    """Stands for timing.timer_for: the times are ``us(label, rows, round)``; what was timed is kept in ``timed``."""

    def __init__(self, us):
        self._us = us
        self.timed = []  # (rows, labels)
        self.made = self.closed = 0

    def __call__(self, weight, bias, max_rows, out_dtype):
        self.made += 1
        return self

    def close(self):
        self.closed += 1

    @contextlib.contextmanager
    def contest(self, rows, calls):
        labels = [getattr(call, "label", AGAIN if index else DEFAULT) for index, call in enumerate(calls)]
        self.timed.append((rows, labels))
        yield _Rounds(self._us, rows, labels)

    def rows_timed(self):
        return sorted({rows for rows, _ in self.timed})


class _Rounds:
    def __init__(self, us, rows, labels):
        self._us, self._rows, self._labels, self._round = us, rows, labels, 0

    def round(self, which):
        self._round += 1
        return [self._us(self._labels[index], self._rows, self._round) for index in which]


def steady(default, again=None, **us):
    """Times that do not change from round to round, by tactic: microseconds, or a function of the row count."""
    us |= {DEFAULT: default, AGAIN: default if again is None else again}

    def script(label, rows, round_):
        return us[label](rows) if callable(us[label]) else us[label]

    return script
