"""autotune on the CPU: reference backends, and a clock that follows a script."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from conftest import HIDDEN, VOCAB, assert_logits, inputs, linear
from scripted import AGAIN, DEFAULT, Script, Tactics, steady
from torch import nn

from lowbatch_lmhead import autotune, backends, bind, devices, explain, project, testing, warmup
from lowbatch_lmhead.plan import Entry, Plan, plan_for
from lowbatch_lmhead.tuning import timing, tune
from lowbatch_lmhead.tuning.search import Search, buckets
from lowbatch_lmhead.tuning.timing import compare, warm_us


@pytest.fixture
def tuning(monkeypatch):
    """tuning(script, *backends): autotune times by ``script`` and chooses among ``backends``; returns the Script."""

    def start(us, *kernels):
        script = us if isinstance(us, Script) else Script(us)
        monkeypatch.setattr(timing, "timer_for", script)
        monkeypatch.setattr(backends, "_KERNELS", list(kernels) or [Tactics("a")])
        testing.forget()
        return script

    with torch.no_grad():
        yield start


def chosen(report):
    """Row count -> tactic, None for the default GEMM."""
    (head,) = report.heads
    return {row.rows: row.tactic for row in head.rows}


# --- the choice ---


def test_the_fastest_tactic_serves_and_is_right(tuning):
    kernel = Tactics("a", "b", "c")
    tuning(steady(default=100, a=97, b=90, c=95), kernel)
    head = linear()
    report = autotune(head)
    assert chosen(report) == dict.fromkeys(range(1, 33), "b")
    kernel.calls.clear()
    x = inputs(20)
    assert_logits(project(head, x), head, x)
    assert kernel.calls == [("b", 20)]
    assert explain(head, x).tactic == "b"


def test_the_default_gemm_serves_where_nothing_is_quicker(tuning):
    kernel = Tactics("a")
    tuning(steady(default=100, a=103), kernel)
    head = linear()
    assert chosen(autotune(head)) == dict.fromkeys(range(1, 33), None)
    kernel.calls.clear()
    x = inputs(3)
    assert torch.equal(project(head, x), nn.functional.linear(x, head.weight))
    assert not kernel.calls
    decision = explain(head, x)
    assert not decision.taken
    assert decision.prepared
    assert any("measured 103.0 us, the default GEMM 100.0 us" in reason for reason in decision.reasons)


@pytest.mark.parametrize("gain", [0.0, 0.4, 0.9])
def test_a_gain_within_the_resolution_is_none(tuning, gain):
    tuning(steady(default=100, a=100 - gain))
    assert set(chosen(autotune(linear())).values()) == {None}


@pytest.mark.parametrize(("us", "serves"), [(99.0, None), (98.0, "a")])
def test_a_gain_has_to_be_more_than_the_default_gemm_differs_from_itself(tuning, us, serves):
    tuning(steady(default=100, again=101.5, a=us))
    assert chosen(autotune(linear(), max_rows=1)) == {1: serves}


def test_what_is_alike_goes_to_the_first(tuning):
    """So that the choice is the same the next time."""
    tuning(steady(default=100, a=90.3, b=90.0, c=90.1), Tactics("a", "b", "c"))
    assert set(chosen(autotune(linear())).values()) == {"a"}


@pytest.mark.parametrize(("us", "serves"), [(89.0, "a"), (87.5, "b")])
def test_a_handicap_has_to_be_made_up_for(tuning, us, serves):
    class Sensitive(Tactics):
        def handicap(self, tactic):
            return 0.02 if tactic == "b" else 0.0

    tuning(steady(default=100, a=90, b=us), Sensitive("a", "b"))
    report = autotune(linear())
    assert set(chosen(report).values()) == {serves}
    assert report.heads[0].rows[0].us == (us if serves == "b" else 90)  # as measured


def test_a_handicap_does_not_count_against_the_default_gemm(tuning):
    class Sensitive(Tactics):
        def handicap(self, tactic):
            return 0.02

    tuning(steady(default=100, a=98.5), Sensitive("a"))
    assert set(chosen(autotune(linear())).values()) == {"a"}


def test_each_row_count_has_its_own_backend(tuning):
    first, second = Tactics("a", name="first", most_rows=8), Tactics("b", name="second")
    tuning(steady(default=lambda rows: 100, a=lambda rows: 80 + rows, b=lambda rows: 88 - rows / 4), first, second)
    (head,) = autotune(linear()).heads
    by_rows = {row.rows: row.backend for row in head.rows}
    assert by_rows[1] == by_rows[4] == "first"
    assert by_rows[8] == by_rows[9] == by_rows[32] == "second"


@pytest.mark.parametrize("crossover", [1, 2, 9, 17, 21, 24, 31, 32])
def test_the_crossover_to_the_default_gemm_is_exact(tuning, crossover):
    tuning(steady(default=100, a=lambda rows: 90 if rows <= crossover else 110))
    expected = {rows: "a" if rows <= crossover else None for rows in range(1, 33)}
    assert chosen(autotune(linear())) == expected


def test_a_single_quick_row_count_of_the_default_gemm_is_found(tuning):
    """cuBLAS has a kernel for 5 rows that beats ours, say."""
    tuning(steady(default=lambda rows: 80 if rows == 5 else 100, a=90))
    assert [rows for rows, tactic in chosen(autotune(linear())).items() if tactic is None] == [5]


@pytest.mark.parametrize("lasting", [False, True])
def test_a_row_count_that_the_default_gemm_wins_alone_is_timed_once_more(tuning, lasting):
    """At 22 rows the kernel seems to be slow, once or whenever it is timed."""
    met = []  # contests at 22 rows

    def script(label, rows, round_):
        if rows == 22 and label == "a" and round_ == 1:
            met.append(True)
        return 99.5 if rows == 22 and label == "a" and (lasting or len(met) < 2) else 100 if label != "a" else 95

    timed = tuning(script).timed
    expected = {rows: None if lasting and rows == 22 else "a" for rows in range(1, 33)}
    assert chosen(autotune(linear())) == expected
    counts = Counter(rows for rows, _ in timed)
    assert counts[22] == 2
    assert set(counts.values()) == {1, 2}
    assert [rows for rows, count in counts.items() if count == 2] == [22]


def test_nothing_is_timed_once_more_when_the_budget_has_ended(tuning):
    us = steady(default=100, a=lambda rows: 99.5 if rows == 5 else 90)
    script = tuning(us)
    found = search(linear(), script, Clock(1.0), budget_s=8.5).run(8)
    assert found.out_of_time
    assert [rows for rows, _ in script.timed].count(5) == 1


def test_what_loses_at_both_ends_of_a_bucket_is_not_timed_inside(tuning):
    script = tuning(steady(default=100, a=lambda rows: 90 if rows <= 16 else 120))
    autotune(linear())
    assert script.rows_timed() == [*range(1, 18), 24, 25, 32]


def test_what_wins_at_the_fewest_rows_of_a_large_bucket_serves_inside_it(tuning):
    us = {"a": lambda rows: 80 if rows > 28 else 90, "b": lambda rows: 90 if rows > 16 else 95}
    us |= {"c": lambda rows: 60 + rows, "d": 99}
    script = tuning(steady(default=100, **us), Tactics("a", "b", "c", "d"))
    served = chosen(autotune(linear()))
    assert served == {rows: "c" if rows < 29 else "a" for rows in range(1, 33)}
    timed = {rows: set(labels) - {DEFAULT, AGAIN} for rows, labels in script.timed}
    assert timed[25] == {"a", "b", "c", "d"}
    assert all(timed[rows] == {"a", "c"} for rows in range(26, 32))  # the finalists of both ends


def test_what_wins_at_the_end_below_serves_inside_a_small_bucket(tuning):
    us = {"a": lambda rows: 80 if rows > 6 else 90, "b": lambda rows: 70 + 2 * rows, "c": lambda rows: 50 + 15 * rows}
    script = tuning(steady(default=200, **us), Tactics("a", "b", "c"))
    assert chosen(autotune(linear(), max_rows=8)) == {
        rows: "c" if rows == 1 else "b" if rows < 7 else "a" for rows in range(1, 9)
    }
    timed = {rows: set(labels) - {DEFAULT, AGAIN} for rows, labels in script.timed}
    assert timed[5] == timed[6] == timed[7] == {"a", "b"}
    assert timed[3] == {"b"}


def test_a_wrong_tactic_is_dropped_however_fast_it_is(tuning, caplog):
    kernel = Tactics("a", "b", wrong=["b"])
    tuning(steady(default=100, a=90, b=10), kernel)
    head = linear()
    report = autotune(head)
    assert set(chosen(report).values()) == {"a"}
    assert any("scripted (b)" in note and "differ from the default GEMM" in note for note in report.heads[0].notes)
    assert "scripted (b)" in caplog.text


def test_a_tactic_that_is_wrong_at_one_row_count_serves_nowhere(tuning):
    tuning(steady(default=100, a=95, b=90), Tactics("a", "b", wrong_at={"b": 7}))
    head = linear()
    assert set(chosen(autotune(head)).values()) == {"a"}
    for rows in (6, 7):
        x = inputs(rows)
        assert_logits(project(head, x), head, x)


def test_where_what_was_timed_inside_a_bucket_turns_out_wrong_the_others_are_timed(tuning):
    """b would serve 5 rows by its time at 4 and 8, but is slower there than the default GEMM."""
    us = steady(default=lambda rows: 80 if rows == 5 else 100, a=70, b=90)
    script = tuning(us, Tactics("a", "b", wrong_at={"a": 7}))
    report = autotune(linear(), max_rows=8)
    assert chosen(report) == {rows: None if rows == 5 else "b" for rows in range(1, 9)}
    assert all(row.us and row.default_us for row in report.heads[0].rows)
    assert [labels[1] for rows, labels in script.timed if rows == 5] == ["a", "b"]


@pytest.mark.parametrize("arguments", [{"max_rows": 2}, {"max_rows": 8, "budget_s": 0}])
def test_what_a_later_call_finds_wrong_serves_nowhere(tuning, arguments):
    kernel = Tactics("a", "b")
    tuning(steady(default=100, a=90, b=95), kernel)
    head = linear()
    assert set(chosen(autotune(head, max_rows=8, cache=False)).values()) == {"a"}
    kernel._wrong.add("a")  # as it may be for another weight of this shape
    report = autotune(head, cache=False, refresh=True, **arguments)
    assert "a" not in chosen(report).values()
    for rows in range(1, 9):
        x = inputs(rows)
        assert_logits(project(head, x), head, x)
        assert explain(head, x).tactic != "a"
    again = autotune(head, max_rows=8, cache=False)  # what serves now was not measured at all of these row counts
    assert set(chosen(again).values()) == {"b"}
    assert again.heads[0].source == "measured"


def test_a_tactic_that_does_not_compile_is_dropped(tuning):
    tuning(steady(default=100, a=90, b=80), Tactics("a", "b", failing=["b"]))
    report = autotune(linear())
    assert set(chosen(report).values()) == {"a"}
    assert any("no code for b" in note for note in report.heads[0].notes)


def test_nothing_that_compiles_leaves_the_default_gemm(tuning):
    tuning(steady(default=100), Tactics("a", failing=["a"]))
    assert set(chosen(autotune(linear(), max_rows=4)).values()) == {None}


def test_a_backend_can_tune_itself_first_and_say_what_it_could_not(tuning):
    class Inner(Tactics):
        tuned = 0

        def tune(self, problem, weight, bias):
            assert weight.shape == (VOCAB, HIDDEN)
            self.tuned += 1
            return "its own tuner needs a compiler"

    kernel = Inner("a")
    tuning(steady(default=100, a=90), kernel)
    report = autotune(linear(), max_rows=4)
    assert kernel.tuned
    assert report.heads[0].notes == ("scripted: its own tuner needs a compiler",)


@pytest.mark.parametrize("source", ["measured", "cache"])
def test_what_a_backend_chose_inside_is_what_is_checked_and_timed(tuning, source):
    events = []

    class Inner(Tactics):
        def tune(self, problem, weight, bias):
            events.append(("tuned", problem.rows))

        def compile(self, problem, tactic):
            launch = super().compile(problem, tactic)

            def call(weight, x, bias, out):
                events.append(("called", x.shape[0]))
                launch.call(weight, x, bias, out)

            call.label = tactic
            return type(launch)(call, launch.backend, launch.tactic)

    class Noting(Script):
        def contest(self, rows, calls):
            events.append(("timed", rows))
            return super().contest(rows, calls)

    head = linear()
    if source == "cache":
        tuning(steady(default=100, a=90), Inner("a"))
        autotune(head, max_rows=8)
        events.clear()
    tuning(Noting(steady(default=100, a=90)), Inner("a"))
    assert autotune(head, max_rows=8).heads[0].source == source
    for rows in range(1, 9):
        assert next(what for what, at in events if at == rows) == "tuned"
    assert ("timed", 8) in events or source == "cache"


def test_a_backend_whose_own_tuner_fails_serves_as_it_is(tuning):
    class Inner(Tactics):
        def tune(self, problem, weight, bias):
            raise RuntimeError("no compiler")

    tuning(steady(default=100, a=90, b=80), Tactics("a"), Inner("b", name="inner"))
    report = autotune(linear())
    assert set(chosen(report).values()) == {"b"}
    assert report.heads[0].notes == ("inner: its own tuner failed: RuntimeError: no compiler",)


def test_a_backend_that_cannot_name_its_tactics_costs_the_others_nothing(tuning):
    class Broken(Tactics):
        def autotune_tactics(self, problem):
            raise RuntimeError("no tactics")

    tuning(steady(default=100, a=90), Broken("b", name="broken"), Tactics("a"))
    report = autotune(linear())
    assert set(chosen(report).values()) == {"a"}
    assert "broken: RuntimeError: no tactics" in report.heads[0].rows[0].reasons


def test_a_backend_for_more_rows_than_one_is_tuned(tuning):
    class Batched(Tactics):
        def supports(self, problem):
            return "it takes 2 rows and more" if problem.rows < 2 else super().supports(problem)

    tuning(steady(default=100, a=90), Batched("a"))
    assert chosen(autotune(linear(), max_rows=4)) == {1: None, 2: "a", 3: "a", 4: "a"}


def test_what_is_wrong_is_logged_once(tuning, caplog):
    tuning(steady(default=100, a=95, b=90), Tactics("a", "b", wrong_at={"b": 7}))
    autotune(linear())
    assert [record.getMessage().count("scripted (b)") for record in caplog.records] == [1]


@pytest.mark.parametrize("how", ["in place", "swapped"])
def test_a_weight_that_changes_meanwhile_condemns_nothing(tuning, how, caplog):
    head, changed = linear(), []

    def script(label, rows, round_):
        if rows == 4 and not changed:
            changed.append(True)
            if how == "in place":
                head.weight.normal_()
            else:
                head.weight.data = torch.randn_like(head.weight)
        return 100 if label in (DEFAULT, AGAIN) else 90

    tuning(script, Tactics("a", "b"))
    assert set(chosen(autotune(head)).values()) == {"a"}
    assert not caplog.records
    x = inputs(5)
    assert_logits(project(head, x), head, x)


def test_the_timer_holds_the_memory_of_a_weight_that_is_swapped(tuning):
    """The graphs hold its address."""
    given = []
    script = tuning(steady(default=100, a=90))
    timing.timer_for = lambda weight, *rest: (given.append(weight), script(weight, *rest))[1]
    head = linear()
    address = head.weight.data_ptr()
    autotune(head, cache=False)
    head.weight.data = torch.randn_like(head.weight)
    assert given[0].data_ptr() == address


def test_float32_logits_have_a_choice_of_their_own(tuning):
    tuning(steady(default=100, a=90))
    head = linear()
    autotune(head, out_dtype=torch.float32)
    assert explain(head, inputs(30), out_dtype=torch.float32).taken
    assert not explain(head, inputs(30)).taken  # untuned: up to 16 rows


def test_a_head_with_a_bias_is_tuned_with_it(tuning):
    tuning(steady(default=100, a=90))
    head = linear(bias=True)
    assert set(chosen(autotune(head)).values()) == {"a"}
    x = inputs(32)
    assert_logits(project(head, x), head, x)


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]),
                                               (20, [1, 2, 4, 8, 16, 20]), (32, [1, 2, 4, 8, 16, 24, 32]),
                                               (128, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128])])  # fmt: skip
def test_buckets(most, expected):
    assert buckets(most) == expected


@pytest.mark.parametrize("most", [1, 3, 24, 64])
def test_max_rows(tuning, most):
    script = tuning(steady(default=100, a=90))
    head = linear()
    assert list(chosen(autotune(head, max_rows=most))) == list(range(1, most + 1))
    assert script.rows_timed() == list(range(1, most + 1))
    assert explain(head, inputs(most)).taken
    assert explain(head, inputs(most + 1)).taken == (most + 1 <= 16)  # as without tuning


# --- comparing ---


class Rounds:
    def __init__(self, *columns):
        self._columns, self.done = columns, []

    def round(self, which):
        self.done.append(sorted(which))
        return [self._columns[index][len(self.done) - 1] for index in which]


def test_the_median_of_the_rounds_counts_not_an_outlier():
    contest = Rounds([100, 100, 500, 100, 100, 100, 100, 100, 100], [99.9, 100.1, 100, 900, 100, 100, 100, 100, 100])
    assert [timing.us for timing in compare(contest, 2)] == [100, 100]


def test_what_is_clearly_behind_is_not_timed_on():
    contest = Rounds([100] * 9, [99.8] * 9, [110] * 9)
    assert compare(contest, 3)[2].rounds == 3
    assert contest.done[0] == [0, 1, 2]
    assert contest.done[3] == [0, 1]
    assert len(contest.done) == 9  # the other two are close


def test_a_clear_result_ends_early():
    contest = Rounds([100] * 9, [90] * 9)
    compare(contest, 2)
    assert len(contest.done) == 3


def test_noise_is_looked_at_longer():
    contest = Rounds([100] * 9, [90, 99, 95, 104, 96, 97, 93, 99, 95])
    compare(contest, 2)
    assert len(contest.done) == 9


def test_the_yardstick_is_timed_as_long_as_anything():
    contest = Rounds([100] * 9, [90] * 9, [90.1] * 9)
    timings = compare(contest, 3)
    assert timings[0].rounds == timings[1].rounds


def test_a_clock_that_slows_down_does_not_favour_what_was_left_out():
    slower = [1.0] * 3 + [1.06] * 6
    contest = Rounds([100 * by for by in slower], [99.5 * by for by in slower], [104] * 9)
    yardstick, close, behind = compare(contest, 3)
    assert behind.rounds == 3
    assert (yardstick.us, close.us) == pytest.approx((106, 105.47))
    assert behind.us == pytest.approx(1.04 * 106)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_slower_in_every_round_does_not_serve_when_the_clock_slows_down(tuning, at_once):
    us = {DEFAULT: 100, AGAIN: 100, "near": 99.5, "slow": 104}

    def script(label, rows, round_):
        return us[label] * ((1.0 if round_ <= 3 else 1.06) if at_once else 1.02**round_)

    tuning(script, Tactics("near", "slow"))
    assert chosen(autotune(linear(), max_rows=1)) == {1: None}


def test_what_loads_slowly_does_not_count_as_the_time_of_a_launch():
    """Loading cuBLAS may take longer than the whole warm-up: the graphs would hold too few launches."""
    calls = []

    def measure():
        calls.append(time.perf_counter())
        time.sleep(1.5e-6 * timing.WARM_UP_US if len(calls) == 1 else 1e-3)
        return [1e5, 25.0, 20.0, 21.0][min(len(calls), 4) - 1]

    assert warm_us(measure) == 20.0
    assert calls[-1] - calls[1] > 0.9e-6 * timing.WARM_UP_US  # the GPU got work for as long as it should


# --- the budget, interruptions, second calls ---


class Clock:
    def __init__(self, step):
        self.now, self._step = 0.0, step

    def __call__(self):
        self.now += self._step
        return self.now


def search(head, script, clock, budget_s, exchange=lambda value: [value]):
    found = plan_for(head.weight, head.bias, head.weight.dtype)
    references = [found.reference(head.weight, head.bias, 32)]
    return Search(
        found, head.weight, head.bias, references, script, lambda b, problem, tactic: b.compile(problem, tactic),
        exchange, budget_s, lambda done, of: None, clock,
    )  # fmt: skip


def test_the_best_so_far_serves_when_the_budget_ends(tuning):
    """After four of the seven buckets: the winner of 1 and 2 rows serves, 8 rows and what lies between the timed ones."""
    script = tuning(steady(default=100, a=97, b=90), Tactics("a", "b"))
    found = search(linear(), script, Clock(1.0), budget_s=4.5).run(32)
    assert found.out_of_time
    assert script.rows_timed() == [1, 2, 4, 8]
    names = {rows: option and option.tactic for rows, option in found.chosen.items()}
    assert all(names[rows] == "b" for rows in range(1, 9))
    assert all(names[rows] == "a" for rows in range(9, 17))  # the untuned choice
    assert all(names[rows] is None for rows in range(17, 33))


def test_what_lost_at_the_lower_end_of_a_bucket_does_not_serve_inside_untimed(tuning):
    us = steady(default=100, a=lambda rows: 90 if rows <= 8 else 120, b=lambda rows: 150 if rows < 16 else 80)
    script = tuning(us, Tactics("a", "b"))
    found = search(linear(), script, Clock(1.0), budget_s=7.5).run(32)
    assert script.rows_timed() == [1, 2, 4, 8, 16, 24, 32]
    names = {rows: option and option.tactic for rows, option in found.chosen.items()}
    assert [rows for rows, name in names.items() if name is None] == list(range(9, 16))


@pytest.mark.parametrize("arguments", [{"refresh": True}, {"max_rows": 64}])
def test_a_budget_that_ended_takes_nothing_back(tuning, arguments):
    tuning(steady(default=100, a=97, b=90), Tactics("a", "b"))
    head = linear()
    first = autotune(head)
    (again,) = autotune(head, budget_s=0, **arguments).heads
    assert [row.tactic for row in again.rows] == ["b"] * 32 + [None] * (len(again.rows) - 32)
    assert again.rows[:32] == first.heads[0].rows
    assert {explain(head, inputs(rows)).tactic for rows in (1, 16, 32)} == {"b"}


def test_a_larger_budget_measures_what_a_smaller_one_did_not(tuning, monkeypatch):
    script = tuning(steady(default=100, a=97, b=90), Tactics("a", "b"))
    head = linear()
    autotune(head, budget_s=0)
    made = script.made
    assert autotune(head, budget_s=0).heads[0].source == "earlier call"
    assert script.made == made
    assert set(chosen(autotune(head)).values()) == {"b"}
    assert autotune(head, budget_s=0).heads[0].source == "earlier call"


def test_without_any_time_the_limit_is_not_measured_either(tuning, monkeypatch):
    tuning(steady(default=100, a=90))
    monkeypatch.setattr(tune.limit, "read_us", lambda timer, weight: pytest.fail("measured"))
    autotune(linear(), budget_s=0)


def test_without_any_time_everything_is_as_warmup_leaves_it(tuning):
    script = tuning(steady(default=100, a=110))
    head = linear()
    report = autotune(head, budget_s=0)
    assert not script.timed
    assert [rows for rows, tactic in chosen(report).items() if tactic == "a"] == list(range(1, 17))
    assert any("budget of 0 s" in note for note in report.heads[0].notes)
    x = inputs(5)
    assert_logits(project(head, x), head, x)


def test_a_budget_that_ended_is_not_kept_for_the_next_process(tuning):
    tuning(steady(default=100, a=90))
    head = linear()
    autotune(head, budget_s=0)
    script = tuning(steady(default=100, a=90))
    assert autotune(head).heads[0].source == "measured"
    assert script.timed


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_the_old_plan_working(tuning, error):
    def interrupted(label, rows, round_):
        if rows == 4:
            raise error
        return 100

    head = linear()
    tuning(interrupted, Tactics("a", "b"))
    warmup(head)
    before = list(plan_for(head.weight, None, torch.bfloat16).table)
    with pytest.raises(error):
        autotune(head)
    assert plan_for(head.weight, None, torch.bfloat16).table == before
    x = inputs(4)
    assert_logits(project(head, x), head, x)
    script = tuning(steady(default=100, a=97, b=90), Tactics("a", "b"))
    assert set(chosen(autotune(head)).values()) == {"b"}
    assert script.closed == script.made == 1


def test_the_timer_is_closed_whatever_happens(tuning):
    def broken(label, rows, round_):
        raise RuntimeError("a clock that broke")

    script = tuning(broken)
    autotune(linear())
    assert script.closed == script.made == 1


def test_an_error_while_measuring_leaves_the_head_as_warmup_does(tuning, caplog):
    def broken(label, rows, round_):
        raise RuntimeError("a clock that broke")

    tuning(broken)
    head = linear()
    with caplog.at_level(logging.WARNING):
        report = autotune(head)
    (found,) = report.heads
    assert found.source == "not tuned"
    assert "RuntimeError: a clock that broke" in found.notes
    assert [record.getMessage().count("a clock that broke") for record in caplog.records] == [1]
    assert explain(head, inputs(16)).prepared
    assert not explain(head, inputs(17)).taken


@pytest.mark.parametrize("us", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("label", [DEFAULT, AGAIN, "a"])
def test_a_timer_that_is_broken_decides_nothing(tuning, label, us):
    times = {DEFAULT: 100.0, AGAIN: 100.0, "a": 120.0, label: us}
    tuning(lambda name, rows, round_: times[name])
    head = linear()
    report = autotune(head)
    assert report.heads[0].source == "not tuned"
    assert explain(head, inputs(16)).taken
    assert len(plan_for(head.weight, None, torch.bfloat16).table) == 17
    json.loads(report.to_json(), parse_constant=pytest.fail)


def test_heads_tuned_before_one_that_fails_stay_tuned(tuning, caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([linear(), linear(vocab=VOCAB + 2), linear(vocab=VOCAB + 4)])

        def get_output_embeddings(self):
            return self.heads

    class Broken(Tactics):
        def handicap(self, tactic):
            if len(script.timed) > 32:
                raise RuntimeError("a handicap that broke")
            return 0.0

    script, model = tuning(steady(default=100, a=90), Broken("a")), Model()
    report = autotune(model)
    assert [head.source for head in report.heads] == ["measured", "not tuned", "not tuned"]
    assert explain(model.heads[0], inputs(32)).taken
    assert [record.getMessage() for record in caplog.records] == [
        "heads.1, heads.2 not tuned but prepared as warmup does: RuntimeError: a handicap that broke"
    ]


def test_the_report_after_an_error_names_no_more_rows_than_asked_for(tuning):
    tuning(lambda label, rows, round_: [][0])
    assert list(chosen(autotune(linear(), max_rows=8))) == list(range(1, 9))


@pytest.mark.parametrize("adopting", [True, False])
def test_an_interruption_while_a_choice_is_entered_comes_before_or_after(tuning, adopting):
    """At whichever line it comes: what is explained is what serves."""
    tuning(steady(default=100, a=90))
    head = linear()
    plan = plan_for(head.weight, None, torch.bfloat16)
    launch = Tactics("b").compile(plan.problem(1), "b")
    code = (Plan.adopt if adopting else Plan.prepare).__code__
    interrupted, line = True, 0
    while interrupted:
        interrupted, line, met = False, line + 1, 0

        def trace(frame, event, argument, line=line):
            nonlocal met, interrupted
            met += event == "line" and frame.f_code is code
            if met == line and event == "line" and not interrupted:
                interrupted = True
                raise KeyboardInterrupt
            return trace if frame.f_code is code else None

        plan.entries[1:], plan.table[1:] = [None] * 16, [None] * 16
        tracer = sys.gettrace()
        sys.settrace(trace)
        try:
            if adopting:
                plan.adopt({rows: Entry(launch, ()) for rows in range(1, 17)})
            else:
                plan.prepare(3, head.weight, None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        assert [entry and entry.launch.call for entry in plan.entries] == plan.table
        assert len(set(plan.table[1:])) == 1 or not adopting
    assert line > 4


def test_want_of_memory_leaves_the_head_as_warmup_does(tuning, monkeypatch):
    tuning(steady(default=100, a=90))

    def no_memory(*arguments):
        raise torch.OutOfMemoryError("no memory for copies of the weight")

    monkeypatch.setattr(timing, "timer_for", no_memory)
    (found,) = autotune(linear()).heads
    assert found.source == "not tuned"
    assert any("no memory for copies" in note for note in found.notes)


def test_a_weight_that_is_not_loaded_cannot_be_tuned_yet(tuning):
    script = tuning(steady(default=100, a=90))
    head = linear()
    head.weight.zero_()
    (found,) = autotune(head).heads
    assert found.source == "not tuned"
    assert any("zero or not finite" in note for note in found.notes)
    assert not script.timed
    head.weight.normal_()
    assert set(chosen(autotune(head)).values()) == {"a"}


def test_a_second_call_measures_nothing(tuning):
    script = tuning(steady(default=100, a=90))
    head = linear()
    first = autotune(head)
    script.timed.clear()
    second = autotune(head)
    assert not script.timed
    assert second.heads[0].source == "earlier call"
    assert second.heads[0].rows == first.heads[0].rows
    autotune(head, max_rows=8)
    assert not script.timed
    autotune(head, refresh=True)
    assert script.timed


def test_more_rows_than_the_earlier_call_are_measured(tuning):
    script = tuning(steady(default=100, a=90))
    head = linear()
    autotune(head, max_rows=8)
    script.timed.clear()
    assert len(chosen(autotune(head, max_rows=32))) == 32
    assert 32 in script.rows_timed()


def test_an_earlier_call_is_reported_for_the_rows_asked_for(tuning):
    tuning(steady(default=100, a=90))
    head = linear()
    autotune(head)
    assert list(chosen(autotune(head, max_rows=8))) == list(range(1, 9))


@pytest.mark.parametrize("between", [{"max_rows": 16, "budget_s": 0}, {"max_rows": 4, "refresh": True}])
def test_row_counts_that_were_measured_are_not_measured_again(tuning, between):
    script = tuning(steady(default=100, a=90))
    head = linear()
    first = autotune(head, max_rows=8, cache=False)
    autotune(head, cache=False, **between)
    timed = len(script.timed)
    again = autotune(head, max_rows=8, cache=False)
    assert len(script.timed) == timed
    assert again.heads[0].source == "earlier call"
    assert chosen(again) == chosen(first)
    assert not again.heads[0].notes


def test_two_threads_do_not_measure_at_once(tuning):
    running, most = [], []

    def us(label, rows, round_):
        running.append(label)
        time.sleep(0.0005)
        most.append(len(running))
        running.pop()
        return 100 if label in (DEFAULT, AGAIN) else 90

    tuning(us)
    heads = [linear(vocab=VOCAB + 2 * index) for index in range(3)]
    threads = [threading.Thread(target=autotune, args=(head,)) for head in heads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert all(explain(head, inputs(32)).taken for head in heads)


def test_heads_of_one_shape_are_tuned_once(tuning):
    script = tuning(steady(default=100, a=90))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([linear(), linear()])

        def get_output_embeddings(self):
            return self.heads

    report = autotune(Model())
    assert [head.source for head in report.heads] == ["measured", "earlier call"]
    assert [head.name for head in report.heads] == ["heads.0", "heads.1"]
    assert script.made == 1


# --- serving afterwards ---


def test_what_was_bound_before_serves_the_new_choice(tuning):
    kernel = Tactics("a", "b")
    tuning(steady(default=100, a=97, b=90), kernel)
    head = linear()
    step = bind(head)
    step(inputs(20)), step(inputs(2))  # prepared as without tuning
    autotune(head)
    kernel.calls.clear()
    for rows in (2, 20, 32):
        x = inputs(rows)
        assert_logits(step(x), head, x)
    assert kernel.calls == [("b", 2), ("b", 20), ("b", 32)]


def test_warmup_after_autotune_changes_nothing(tuning):
    kernel = Tactics("a", "b")
    tuning(steady(default=100, a=97, b=90), kernel)
    head = linear()
    autotune(head)
    kernel.compiled.clear()
    report = warmup(head)
    assert not kernel.compiled
    assert {decision.tactic for decision in report.heads[0].decisions if decision.taken} == {"b"}


def test_the_weight_may_change_afterwards(tuning):
    tuning(steady(default=100, a=90))
    head = linear()
    autotune(head)
    head.weight.normal_()
    x = inputs(9)
    assert_logits(project(head, x), head, x)


def test_autotune_touches_neither_random_state_nor_the_head(tuning):
    tuning(steady(default=100, a=90))
    head = linear()
    before, state = head.weight.clone(), torch.get_rng_state()
    autotune(head)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(head.weight, before)


def test_gradients_stay_on_outside(tuning):
    tuning(steady(default=100, a=90))
    head = linear().requires_grad_()
    with torch.enable_grad():
        autotune(head)
        assert torch.is_grad_enabled()
        project(head, inputs(2)).sum().backward()
    assert head.weight.grad is not None


# --- heads that are not taken, and bad arguments ---


def test_a_head_without_a_kernel_is_left_to_itself(tuning):
    script = tuning(steady(default=100, a=90))
    head = linear()
    head.register_forward_hook(lambda *arguments: None)
    report = autotune(head)
    (found,) = report.heads
    assert found.source == "not tuned"
    assert found.rows == ()
    assert "it has hooks" in found.notes
    assert not script.made


def test_without_a_gpu_nothing_is_measured():
    (found,) = autotune(linear()).heads
    assert found.source == "not tuned"
    assert found.notes == ("the head is on cpu, not on a CUDA GPU",)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_rows": 0}, "from 1 to 128, got 0"),
        ({"max_rows": 129}, "from 1 to 128, got 129"),
        ({"max_rows": True}, "got True"),
        ({"max_rows": None}, "got None"),
        ({"max_rows": 2.0}, "got 2.0"),
        ({"budget_s": -1}, "got -1"),
        ({"budget_s": float("nan")}, "got nan"),
        ({"budget_s": "5"}, "got '5'"),
        ({"cache": 3}, "3"),
        ({"out_dtype": torch.float16}, "float16"),
        ({"out_dtype": "float32"}, "'float32'"),
        ({"process_group": 7}, "7"),
    ],
)
def test_bad_arguments(tuning, arguments, said):
    kernel = Tactics("a")
    script = tuning(steady(default=100, a=90), kernel)
    with pytest.raises(ValueError, match=re.escape(said)):
        autotune(linear(), **arguments)
    assert not script.made
    assert not kernel.compiled


@pytest.mark.parametrize("model", [nn.Sequential(), 3, None, "lm_head"])
def test_no_head(model):
    with pytest.raises(ValueError, match="no head"):
        autotune(model)


# --- the cache (``tuning`` forgets what is in memory, as another process would not know it; the folder stays) ---


def test_the_next_process_takes_the_choice_from_the_cache(tuning):
    kernel = Tactics("a", "b")
    tuning(steady(default=100, a=97, b=lambda rows: 90 if rows < 20 else 120), kernel)
    head = linear()
    first = autotune(head)
    kernel = Tactics("a", "b")
    script = tuning(steady(default=100, a=1, b=1), kernel)
    second = autotune(head)
    assert not script.made
    assert kernel.compiled == ["b", "a"] or kernel.compiled == ["b"]
    assert second.heads[0].source == "cache"
    assert chosen(second) == chosen(first)
    assert [(row.us, row.default_us) for row in second.heads[0].rows] == [
        (row.us, row.default_us) for row in first.heads[0].rows
    ]
    x = inputs(13)
    assert_logits(project(head, x), head, x)
    assert explain(head, inputs(30)).taken == (chosen(first)[30] is not None)


def test_what_was_measured_for_a_bucket_is_taken_from_the_cache_inside_it(tuning):
    """A backend may list another tactic for fewer rows of the bucket, as one with a smaller tile does."""

    class Tiles(Tactics):
        def tactics(self, problem):
            return [f"{next(tile for tile in (8, 16, 20, 24, 32, 64) if tile >= problem.rows)} tokens"]

        autotune_tactics = tactics

    tuning(lambda label, rows, round_: 100 if label in (DEFAULT, AGAIN) else 90, Tiles())
    head = linear()
    first = autotune(head)
    assert {chosen(first)[rows] for rows in range(17, 25)} == {"24 tokens"}
    script = tuning(steady(default=100), Tiles())
    second = autotune(head)
    assert (second.heads[0].source, script.made) == ("cache", 0)
    assert chosen(second) == chosen(first)
    x = inputs(20)
    assert_logits(project(head, x), head, x)


def twice(checks):
    """The launches of ``checks``: two each."""
    return [check for check in checks for _ in range(2)]


def test_from_the_cache_a_launch_is_checked_at_the_fewest_and_the_most_rows_that_it_serves(tuning):
    us = steady(default=100, a=lambda rows: 90 if rows <= 4 else 120, b=lambda rows: 90 if 4 < rows <= 16 else 120)
    kernel = Tactics("a", "b")
    tuning(us, kernel)
    head = linear()
    autotune(head)
    assert {("a", rows) for rows in range(1, 5)} | {("b", rows) for rows in range(5, 17)} <= set(kernel.calls)
    kernel = Tactics("a", "b")
    tuning(us, kernel)
    assert autotune(head).heads[0].source == "cache"
    assert kernel.calls == twice([("a", 1), ("a", 4), ("b", 5), ("b", 16)])


@pytest.mark.parametrize("wrong_at", [3, 8])
def test_what_is_wrong_at_one_end_of_what_it_serves_is_a_miss(tuning, wrong_at):
    us = steady(default=100, a=97, b=lambda rows: 90 if 3 <= rows <= 8 else 120)
    head = linear()
    tuning(us, Tactics("a", "b"))
    autotune(head, max_rows=16)
    tuning(us, Tactics("a", "b", wrong_at={"b": wrong_at}))
    report = autotune(head, max_rows=16)
    assert report.heads[0].source == "measured"
    assert set(chosen(report).values()) == {"a"}


def test_a_backend_that_chooses_for_each_row_count_is_checked_at_each(tuning):
    class Choosing(Tactics):
        def tune(self, problem, weight, bias):
            return None

    head = linear()
    tuning(steady(default=100, a=90), Choosing("a"))
    autotune(head, max_rows=8)
    kernel = Choosing("a")
    tuning(steady(default=100, a=90), kernel)
    assert autotune(head, max_rows=8).heads[0].source == "cache"
    assert {("a", rows) for rows in range(1, 9)} <= set(kernel.calls)


def test_row_counts_beyond_those_measured_are_kept_as_checked(tuning, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "untuned_rows", lambda arch: 12)
    us, head = steady(default=100, a=97, b=90), linear()
    kernel = Tactics("a", "b")
    tuning(us, kernel)
    autotune(head, max_rows=8)
    assert {("a", rows) for rows in range(9, 13)} <= set(kernel.calls)
    kernel = Tactics("a", "b")
    tuning(us, kernel)
    report = autotune(head, max_rows=8)
    assert report.heads[0].source == "cache"
    assert len(report.heads[0].rows) == 8
    assert kernel.calls == twice([("b", 1), ("b", 8), ("a", 9), ("a", 12)])
    assert [explain(head, inputs(rows)).tactic for rows in (8, 9, 12)] == ["b", "a", "a"]

    # Beyond fewer rows than were measured, what is not measured serves more, where nothing has checked it.
    kernel = Tactics("a", "b")
    tuning(us, kernel)
    assert autotune(head, max_rows=4).heads[0].source == "cache"
    assert kernel.calls == twice([("b", 1), ("b", 4), *(("a", rows) for rows in range(5, 13))])

    whole = entry(tmp_path).read_text()
    # What is not first in line, or is not told of as it should be, is prepared as ``warmup`` does.
    for change in (
        lambda kept: [row.update(tactic="b") for row in kept],
        lambda kept: kept.clear(),
        lambda kept: kept.insert(0, 7),
        lambda kept: kept[0].pop("rows"),
        lambda kept: kept[0].update(rows=[9]),
    ):
        entry(tmp_path).write_text(whole)
        edit(entry(tmp_path), lambda c, change=change: change(c["content"]["unmeasured"]))
        kernel = Tactics("a", "b")
        tuning(us, kernel)
        assert autotune(head, max_rows=8).heads[0].source == "cache"
        assert kernel.calls == twice([("b", 1), ("b", 8), *(("a", rows) for rows in range(9, 13))])
        assert explain(head, inputs(10)).tactic == "a"


def test_what_is_wrong_beyond_the_rows_that_were_measured_does_not_serve_there(tuning, monkeypatch):
    monkeypatch.setattr(devices, "untuned_rows", lambda arch: 12)
    us, head = steady(default=100, a=97, b=90), linear()
    tuning(us, Tactics("a", "b"))
    autotune(head, max_rows=8)
    tuning(us, Tactics("a", "b", wrong_at={"a": 12}))
    report = autotune(head, max_rows=8)
    assert report.heads[0].source == "cache"
    assert set(chosen(report).values()) == {"b"}
    assert [explain(head, inputs(rows)).taken for rows in (8, 9, 12)] == [True, False, False]


def test_a_folder_of_ones_own(tuning, tmp_path):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head, cache=tmp_path / "mine")
    assert list((tmp_path / "mine").glob("*.json"))
    script = tuning(steady(default=100, a=90))
    assert autotune(head, cache=str(tmp_path / "mine")).heads[0].source == "cache"
    script = tuning(steady(default=100, a=90))
    assert autotune(head).heads[0].source == "measured"
    assert script.made


def test_what_this_process_has_found_is_kept_in_a_cache_named_later(tuning, tmp_path):
    head = linear()
    tuning(steady(default=100, a=90))
    first = autotune(head, max_rows=4, cache=False)
    later, other = tmp_path / "later", tmp_path / "other"
    for folder in (later, later, other):
        assert autotune(head, max_rows=4, cache=folder).heads[0].source == "earlier call"
        assert len(list(folder.glob("*.json"))) == 1
    next(other.glob("*.json")).unlink()
    autotune(head, max_rows=4, cache=other)  # written already: a second call costs no look at the disk
    assert not list(other.glob("*.json"))
    script = tuning(steady(default=100, a=90))
    found = autotune(head, max_rows=4, cache=later)
    assert not script.made
    assert found.heads[0].source == "cache"
    assert chosen(found) == chosen(first)


def test_a_choice_for_fewer_rows_does_not_replace_one_for_more(tuning, tmp_path):
    tuning(steady(default=100, a=90))
    head = linear()
    autotune(head, max_rows=8, cache=tmp_path)
    testing.forget()  # the next process
    autotune(head, max_rows=4, cache=False)
    assert autotune(head, max_rows=4, cache=tmp_path).heads[0].source == "earlier call"
    testing.forget()
    assert autotune(head, max_rows=8, cache=tmp_path, budget_s=0).heads[0].source == "cache"


def test_what_a_budget_cut_short_is_kept_nowhere(tuning, tmp_path):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head, max_rows=4, cache=False, budget_s=0)
    autotune(head, max_rows=4, cache=tmp_path / "later", budget_s=0)
    assert not list(tmp_path.rglob("*.json"))


def test_no_cache_neither_reads_nor_writes(tuning, tmp_path):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head, cache=False)
    assert not list(tmp_path.rglob("*.json"))
    autotune(head, refresh=True)
    script = tuning(steady(default=100, a=90))
    assert autotune(head, cache=False).heads[0].source == "measured"
    assert script.made


def entry(tmp_path):
    (path,) = (tmp_path / "cache" / "tuned").glob("*.json")
    return path


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rows_of(content):
    """The list of rows, wherever the entry keeps it."""
    return next(value for value in _walk(content) if isinstance(value, list) and value and "rows" in value[0])


def _walk(value):
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _walk(part)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: rows_of(c).pop(3),
        lambda c: rows_of(c).clear(),
        lambda c: rows_of(c)[2].pop("backend"),
        lambda c: rows_of(c)[2].update(backend="a backend of tomorrow"),
        lambda c: rows_of(c)[2].update(tactic="a tactic of yesterday"),
        lambda c: rows_of(c)[2].update(rows="3"),
        lambda c: rows_of(c)[2].update(tactic=["a"]),
        lambda c: rows_of(c).append(7),
    ],
)
def test_an_entry_that_does_not_say_what_serves_is_a_miss(tuning, tmp_path, change):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head)
    edit(entry(tmp_path), change)
    script = tuning(steady(default=100, a=90))
    report = autotune(head)
    assert report.heads[0].source == "measured"
    assert script.made
    assert set(chosen(report).values()) == {"a"}


def test_a_forged_entry_costs_speed_never_logits(tuning, tmp_path):
    head = linear()
    kernel = Tactics("a", "b", wrong=["b"])
    tuning(steady(default=100, a=90, b=80), kernel)
    autotune(head)
    edit(entry(tmp_path), lambda c: [row.update(tactic="b") for row in rows_of(c)])
    script = tuning(steady(default=100, a=90, b=80), Tactics("a", "b", wrong=["b"]))
    report = autotune(head)
    assert script.made  # the launch failed its check, so the entry is a miss
    assert set(chosen(report).values()) == {"a"}
    x = inputs(3)
    assert_logits(project(head, x), head, x)


@pytest.mark.parametrize("us", [None, "fast", -1, True, [1]])
def test_times_in_an_entry_are_only_shown(tuning, tmp_path, us):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head)
    edit(entry(tmp_path), lambda c: rows_of(c)[0].update(us=us))
    tuning(steady(default=100, a=90))
    report = autotune(head)
    assert report.heads[0].source in ("cache", "measured")
    assert str(report)


def test_no_number_in_an_entry_makes_the_report_no_json(tuning, tmp_path):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head)
    edit(entry(tmp_path), lambda c: c["content"].update(read_us=1e308) or rows_of(c)[0].update(us=1e-320))
    tuning(steady(default=100, a=90))
    report = autotune(head)
    assert report.heads[0].source == "cache"
    json.loads(report.to_json(), parse_constant=pytest.fail)
    assert str(report)


def test_an_entry_for_fewer_rows_is_a_miss(tuning):
    head = linear()
    tuning(steady(default=100, a=90))
    autotune(head, max_rows=8)
    tuning(steady(default=100, a=90))
    assert autotune(head, max_rows=4).heads[0].source == "cache"
    tuning(steady(default=100, a=90))
    assert autotune(head, max_rows=32).heads[0].source == "measured"


@pytest.mark.parametrize("what", ["dtype", "shape", "bias", "out_dtype", "version"])
def test_another_head_or_version_is_another_entry(tuning, monkeypatch, what):
    tuning(steady(default=100, a=90))
    autotune(linear())
    tuning(steady(default=100, a=90))
    other = {
        "dtype": lambda: linear(dtype=torch.float16),
        "shape": lambda: linear(vocab=VOCAB + 1),
        "bias": lambda: linear(bias=True),
    }.get(what, linear)()
    if what == "version":
        monkeypatch.setattr(tune.kept, "__version__", "9.9")
    out_dtype = torch.float32 if what == "out_dtype" else None
    assert autotune(other, out_dtype=out_dtype).heads[0].source == "measured"


def test_a_folder_that_cannot_be_written_does_no_harm(tuning, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tuning(steady(default=100, a=90))
    head = linear()
    report = autotune(head, cache=tmp_path / "file" / "tuned")
    assert set(chosen(report).values()) == {"a"}
    assert explain(head, inputs(32)).taken


# --- the report ---


def test_the_report_prints_and_is_json(tuning):
    tuning(steady(default=100, a=lambda rows: 90 if rows < 9 else 120))
    report = autotune(linear())
    text = str(report)
    assert f"head {VOCAB}x{HIDDEN}, bfloat16 to bfloat16: measured" in text
    assert "1-8" in text
    assert "9-32" in text
    assert "scripted (a)" in text
    assert "90.0" in text
    data = json.loads(report.to_json())
    (head,) = data["heads"]
    assert [row["rows"] for row in head["rows"]] == list(range(1, 33))
    assert head["rows"][0] == {
        "rows": 1, "backend": "scripted", "tactic": "a", "us": 90, "default_us": 100,
        "limit_us": None, "limit_fraction": None, "reasons": [],
    }  # fmt: skip
    assert head["rows"][31]["backend"] == backends.DEFAULT_GEMM
    assert head["rows"][31]["us"] == 100


def test_the_fraction_of_the_limit(tuning, monkeypatch):
    tuning(steady(default=100, a=90))
    monkeypatch.setattr(tune.limit, "read_us", lambda timer, weight: 80.0)
    (head,) = autotune(linear(vocab=128, hidden=64)).heads
    row = head.rows[31]
    moved = 128 * 64 * 2 + 32 * 64 * 2 + 32 * 128 * 2
    assert row.limit_us == pytest.approx(80.0 * moved / (128 * 64 * 2))
    assert row.limit_fraction == pytest.approx(row.limit_us / 90)


def test_progress(tuning, capsys):
    tuning(steady(default=100, a=90))
    autotune(linear(), progress=True)
    assert "tuning head" in capsys.readouterr().err
    testing.forget()
    tuning(steady(default=100, a=90))
    autotune(linear(), progress=False, refresh=True)
    assert not capsys.readouterr().err


def test_the_wall_clock_serves_where_no_script_does(monkeypatch):
    """The whole of it on the CPU, timed for real: whatever it chooses is right."""
    monkeypatch.setattr(backends, "_KERNELS", [testing.Reference()])
    testing.forget()
    head = linear()
    with torch.no_grad():
        report = autotune(head, max_rows=4)
        assert report.heads[0].source == "measured"
        assert all(row.us > 0 for row in report.heads[0].rows)
        for rows in range(1, 6):
            x = inputs(rows)
            assert_logits(project(head, x), head, x)


# --- what is left for others to notice ---


def test_rows_beyond_those_tuned_are_prepared_as_warmup_does(tuning):
    kernel = Tactics("a", "b")
    tuning(steady(default=100, a=97, b=90), kernel)
    head = linear()
    assert len(chosen(autotune(head, max_rows=8))) == 8
    assert [explain(head, inputs(rows)).prepared for rows in (8, 9, 16)] == [True] * 3
    kernel.compiled.clear()
    project(head, inputs(12))
    assert not kernel.compiled


def test_a_disturbed_bucket_is_measured_once_more(tuning):
    """The default GEMM differs from itself by 10 % the first time: something else was running."""
    met = []  # contests at 4 rows, by their first rounds

    def script(label, rows, round_):
        if rows == 4 and label == "default" and round_ == 1:
            met.append(True)
        if rows == 4 and label == "again" and len(met) < 2:
            return 110
        return 97 if label == "a" else 100

    tuning(script)
    assert set(chosen(autotune(linear())).values()) == {"a"}
    assert len(met) == 2


def test_a_lasting_disturbance_leaves_the_default_gemm(tuning):
    tuning(steady(default=100, again=110, a=97))
    report = autotune(linear())
    assert set(chosen(report).values()) == {None}
    assert report.heads[0].noise == pytest.approx(0.1)


def test_a_weight_that_an_engine_loads_unseen_is_looked_at_again(tuning):
    """Through .data, which changes neither its address nor its version."""
    tuning(steady(default=100, a=90))
    head = linear()
    head.weight.data.zero_()
    assert autotune(head).heads[0].source == "not tuned"
    head.weight.data.copy_(torch.randn(head.weight.shape))
    assert autotune(head).heads[0].source == "measured"


@pytest.mark.parametrize("progress", [None, True])
@pytest.mark.parametrize("stderr", [None, "closed", "a broken pipe"])
def test_a_daemon_without_a_terminal(tuning, monkeypatch, tmp_path, stderr, progress):
    tuning(steady(default=100, a=90))
    if stderr == "closed":
        stderr = (tmp_path / "log").open("w")
        stderr.close()
    elif stderr:
        read, write = os.pipe()
        os.close(read)
        stderr = open(write, "w", buffering=1)  # noqa: SIM115
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", stderr)
        assert autotune(linear(), progress=progress).heads[0].source == "measured"
        assert warmup(linear(), progress=progress).heads[0].decisions[0].prepared
    if stderr and not stderr.closed:
        with contextlib.suppress(BrokenPipeError):
            stderr.close()


def test_without_a_budget_and_a_cache_nothing_counts_as_measured(kernel):
    (found,) = autotune(linear(), max_rows=4, budget_s=0, cache=False).heads
    assert found.source == "not tuned"
    assert [row.us for row in found.rows] == [None] * 4
    assert "the budget of 0 s ended first" in " ".join(found.notes)
