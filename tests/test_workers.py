"""Kernels compiled in worker processes: what comes back, and that whatever happens to a worker costs only time."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, python

from lowbatch_lmhead import backends, devices, elf, objects, testing
from lowbatch_lmhead.backends import Problem, compiling, flashinfer
from lowbatch_lmhead.backends.compiling import CompiledBackend
from lowbatch_lmhead.tuning import worker, workers
from lowbatch_lmhead.tuning.workers import Compiles

needs_compiler = pytest.mark.skipif(flashinfer.unusable() is not None, reason=flashinfer.unusable() or "")

WARP = backends.kernels()[0]
PROBLEM = Problem(1000, 256, 1, torch.bfloat16, torch.bfloat16, False, "sm_90a")
HERE, THERE = b"\x7fELF compiled here", b"\x7fELF compiled by a worker"


class Compiled(CompiledBackend):
    """A backend that builds a few bytes and counts. What is loaded is the path's content."""

    name = "test backend"
    architectures = frozenset({devices.CPU})

    def __init__(self):
        self.built = []

    def supports(self, problem):
        return None

    def tactics(self, problem):
        return ["a", "b", "c"]

    def autotune_tactics(self, problem):
        return self.tactics(problem)

    def smem_bytes(self, tactic):
        return None

    def kernel(self, problem, tactic):
        raise AssertionError("build is replaced")

    def build(self, problem, tactic):
        self.built.append(tactic)
        return compiling.object_key(self.name, problem, tactic), HERE


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(compiling, "_load", lambda path: path.read_bytes())
    return Compiled()


@pytest.fixture(autouse=True)
def _counts(monkeypatch):
    monkeypatch.setattr(objects, "counts", objects.Counts())


@pytest.fixture(autouse=True)
def _no_child_stays(monkeypatch):
    """No worker outlives its test's ``with`` block, whatever the test did to it."""
    started = []

    class Recorded(workers._Worker):
        def __init__(self):
            super().__init__()
            started.append(self._process.pid)

    monkeypatch.setattr(workers, "_Worker", Recorded)
    yield started
    assert not [pid for pid in started if alive(pid)]


@pytest.fixture
def started(_no_child_stays):
    """The process ids of the workers that were started."""
    return _no_child_stays


def wanted(backend, *tactics):
    return [(backend, PROBLEM, tactic) for tactic in tactics]


def alive(pid):
    """Whether the process runs; one that ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def all_begun(compiles):
    """Wait until no kernel is left to begin, so that ``launch`` has to wait for the workers."""
    until(lambda: not compiles._waiting)


def all_done(compiles):
    until(lambda: all(job.done.is_set() for job in compiles._jobs.values()))


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def script(body, hello=workers.PACKAGE, before=""):
    """A worker that does ``body`` for each ``job``: it has ``say``, and ``right(job)``, the right answer."""
    keys = {tactic: compiling.object_key("test backend", PROBLEM, tactic) for tactic in "abc"}
    return f"""
import base64, json, os, subprocess, sys, time
pipe = open(int(sys.argv[1]), "w")
keys = json.loads({json.dumps(keys)!r})
def say(answer):
    pipe.write((answer if isinstance(answer, str) else json.dumps(answer)) + "\\n")
    pipe.flush()
def right(job):
    return {{"key": keys[job["tactic"]], "library": base64.b64encode({THERE!r}).decode()}}
{before}
say({{"package": {hello!r}}})
for line in sys.stdin:
    job = json.loads(line)
    {body}
"""


@pytest.fixture
def fake(monkeypatch):
    """``fake(body)``: from here on workers are ``script(body)``."""

    def use(body, **options):
        monkeypatch.setattr(workers, "_command", lambda: [sys.executable, "-c", script(body, **options)])

    return use


class TestRealWorkers:
    pytestmark = needs_compiler

    def test_the_objects_are_those_that_this_process_compiles(self, tmp_path, monkeypatch, capfd):
        tactics = WARP.autotune_tactics(PROBLEM)[:2]
        expected = {str(tactic): WARP.build(PROBLEM, tactic) for tactic in tactics}
        monkeypatch.setattr(type(WARP), "build", _never)
        with Compiles(wanted(WARP, *tactics), processes=1) as compiles:
            all_done(compiles)
            for tactic in tactics:
                launch = compiles.launch(WARP, PROBLEM, tactic)
                assert (launch.backend, launch.tactic) == (WARP.name, str(tactic))
                with pytest.raises(ValueError, match="device_type"):  # a kernel that refuses tensors of the CPU
                    launch.call(
                        torch.zeros(1000, 256).bfloat16(), torch.zeros(1, 256).bfloat16(), None, torch.zeros(1, 1000)
                    )
        assert (objects.counts.compiled, objects.counts.loaded) == (2, 0)
        found = {}
        for entry in (tmp_path / "cache").glob("*.json"):
            content = json.loads(entry.read_text())
            found[content["key"]["tactic"]] = content["key"], (entry.parent / content["file"]).read_bytes()
        assert {name: key for name, (key, _) in found.items()} == {name: key for name, (key, _) in expected.items()}
        for name, (_, library) in found.items():
            assert elf.architectures(library) == {"sm_90a"}
            assert elf.kernels(library) == elf.kernels(expected[name][1])
        assert capfd.readouterr() == ("", "")

    def test_a_backend_that_only_this_process_has(self, backend, started, caplog):
        caplog.set_level(logging.DEBUG, "lowbatch_lmhead")
        with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
            all_done(compiles)
            assert compiles.launch(backend, PROBLEM, "a").call == HERE
            assert compiles.launch(backend, PROBLEM, "b").call == HERE
        assert len(started) == 1
        assert backend.built == ["a", "b"]
        assert "no backend 'test backend'" in caplog.text
        assert not said(caplog)

    def test_a_kernel_that_fails(self, monkeypatch):
        """As on a machine without a linker."""
        tactics = WARP.autotune_tactics(PROBLEM)[:2]
        monkeypatch.setattr(type(WARP), "build", _never)
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
        with Compiles(wanted(WARP, *tactics), processes=1) as compiles:
            all_done(compiles)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="RuntimeError: no linker: "):
                    compiles.launch(WARP, PROBLEM, tactics[0])
        assert objects.counts.compiled == 0

    def test_ends_with_its_stdin_in_the_middle_of_a_kernel(self):
        code = f"""
import sys, time
from lowbatch_lmhead.tuning import worker
sys.argv[1:] = ["1"]
worker.answer = lambda job: time.sleep({2 * workers.LIMIT_S})
worker.main()
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, env=environment) as process:
            assert json.loads(process.stdout.readline()) == {"package": workers.PACKAGE}
            process.stdin.write(b"{}\n")
            process.stdin.flush()
            time.sleep(0.2)
            process.stdin.close()
            assert process.wait(2) == 0

    def test_no_orphan_of_a_process_that_does_not_close(self):
        code = """
import os
from lowbatch_lmhead.tuning import workers
worker = workers._Worker()
worker.greet()
print(worker._process.pid, flush=True)
os._exit(0)
"""
        pid = int(python(code))
        until(lambda: not alive(pid), 5)


def _never(*_):
    raise AssertionError("compiled in this process")


def _throw(error):
    raise error


class TestWhatWorkersDo:
    def test_workers_compile_what_is_waited_for(self, backend, fake):
        fake("say(right(job))")
        with Compiles(wanted(backend, "a", "b", "c"), processes=2) as compiles:
            all_begun(compiles)
            assert [compiles.launch(backend, PROBLEM, tactic).call for tactic in "abc"] == [THERE] * 3
        assert backend.built == []
        assert (objects.counts.compiled, objects.counts.loaded) == (3, 0)
        with Compiles(wanted(backend, "a"), processes=2) as compiles:
            assert compiles.launch(backend, PROBLEM, "a").call == THERE
        assert (objects.counts.compiled, objects.counts.loaded) == (3, 1)

    def test_what_no_worker_has_begun_is_compiled_here(self, backend, fake):
        fake("time.sleep(600)")
        with Compiles(wanted(backend, "a", "b", "c"), processes=1) as compiles:
            until(lambda: len(compiles._waiting) == 2)
            assert compiles.launch(backend, PROBLEM, "c").call == HERE
            assert compiles.launch(backend, PROBLEM, "b").call == HERE
        assert backend.built == ["c", "b"], "a is the first that is needed, so the worker began with it"

    def test_launch_waits_for_a_kernel_that_was_begun(self, backend, fake):
        fake("time.sleep(0.5); say(right(job))")
        with Compiles(wanted(backend, "a", "b"), processes=2) as compiles:
            all_begun(compiles)
            assert compiles.launch(backend, PROBLEM, "a").call == THERE
        assert backend.built == []

    def test_while_launch_waits_the_next_kernel_is_compiled_here(self, backend, fake, tmp_path):
        go = tmp_path / "go"
        fake(f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(go)!r}), True)]; say(right(job))")
        with Compiles(wanted(backend, "a", "b", "c"), processes=1) as compiles:
            until(lambda: len(compiles._waiting) == 2)
            assert compiles.launch(backend, PROBLEM, "c").call == HERE
            build = backend.build
            backend.build = lambda *of: (go.touch(), build(*of))[1]  # the worker goes on once this process helps
            assert compiles.launch(backend, PROBLEM, "a").call == THERE
            assert backend.built == ["c", "b"]
            assert compiles.launch(backend, PROBLEM, "b").call == HERE
            assert backend.built == ["c", "b"]

    def test_the_compiler_is_not_loaded_to_help(self, backend, fake):
        fake("time.sleep(0.2); say(right(job))")
        with Compiles(wanted(backend, "a", "b", "c"), processes=1) as compiles:
            until(lambda: len(compiles._waiting) == 2)
            assert compiles.launch(backend, PROBLEM, "a").call == THERE
        assert backend.built == []

    def test_what_fails_while_helping_fails_where_it_is_asked_for(self, backend, fake, monkeypatch):
        fake("time.sleep(0.5); say(right(job))")
        build = backend.build
        monkeypatch.setattr(backend, "build", lambda problem, tactic: build(problem, {"c": "c"}[tactic]))
        with Compiles(wanted(backend, "a", "b", "c"), processes=1) as compiles:
            until(lambda: len(compiles._waiting) == 2)
            assert compiles.launch(backend, PROBLEM, "c").call == HERE
            assert compiles.launch(backend, PROBLEM, "a").call == THERE
            for _ in range(2):
                with pytest.raises(KeyError):
                    compiles.launch(backend, PROBLEM, "b")

    def test_rows_are_no_part_of_a_kernel(self, backend, fake):
        fake("say(right(job))")
        more = PROBLEM.__class__(**{**vars(PROBLEM), "rows": 2})
        with Compiles([*wanted(backend, "a"), (backend, more, "a")], processes=1) as compiles:
            launch = compiles.launch(backend, PROBLEM, "a")
            assert compiles.launch(backend, more, "a") is launch
        assert backend.built == ["a"]

    def test_without_a_place_to_keep_them(self, backend, fake, monkeypatch):
        fake("say(right(job))")
        monkeypatch.setattr(objects, "keep", lambda key, data: None)
        with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
            all_begun(compiles)
            launch = compiles.launch(backend, PROBLEM, "a")
            assert compiles.launch(backend, PROBLEM, "a") is launch
            assert launch.call == THERE
            assert objects.find(compiling.object_key(backend.name, PROBLEM, "a")) is None
        assert objects.counts.compiled == 1

    def test_another_kind_of_backend_is_compiled_here_once(self, started):
        reference, count = testing.Reference(), []
        reference.compile = lambda problem, tactic: count.append(tactic) or backends.Launch(print, "reference", tactic)
        with Compiles(wanted(reference, "4 splits", "5 splits"), processes=2) as compiles:
            assert compiles.launch(reference, PROBLEM, "4 splits") is compiles.launch(reference, PROBLEM, "4 splits")
        assert count == ["4 splits"]
        assert not started

    def test_what_was_not_announced_is_compiled_here(self, backend):
        with Compiles([]) as compiles:
            assert compiles.launch(backend, PROBLEM, "a").call == HERE

    def test_a_failure_is_raised_and_not_tried_here(self, backend, fake):
        fake("say({'failed': 'ValueError: no such tile'})")
        with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
            all_begun(compiles)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"^ValueError: no such tile$"):
                    compiles.launch(backend, PROBLEM, "a")
        assert backend.built == []
        assert objects.counts.compiled == 0

    def test_a_failure_here_is_the_backends_own(self, backend, monkeypatch):
        trouble = [MemoryError("for now")] * 2
        build = backend.build
        monkeypatch.setattr(backend, "build", lambda *of: _throw(trouble.pop()) if trouble else build(*of))
        with Compiles(wanted(backend, "a", "b"), processes=0) as compiles:
            for _ in range(2):
                with pytest.raises(MemoryError):
                    compiles.launch(backend, PROBLEM, "a")
            assert compiles.launch(backend, PROBLEM, "a").call == HERE, "a passing error passes"


class TestHowManyWorkers:
    @pytest.mark.parametrize(
        ("on_disk", "processes", "count"),
        [("", 2, 2), ("", 9, 3), ("a", 9, 2), ("ab", 9, 0), ("abc", 9, 0), ("", 0, 0), ("", 1, 1)],
    )
    def test_started(self, on_disk, processes, count, backend, fake, started):
        fake("say(right(job))")
        for tactic in on_disk:
            objects.keep(compiling.object_key(backend.name, PROBLEM, tactic), b"on disk")
        with Compiles(wanted(backend, "a", "b", "c"), processes=processes) as compiles:
            for tactic in on_disk:
                assert compiles.launch(backend, PROBLEM, tactic).call == b"on disk"
            for tactic in "abc":
                compiles.launch(backend, PROBLEM, tactic)
        assert len(started) == count
        assert objects.counts.loaded == len(on_disk)
        assert objects.counts.compiled == 3 - len(on_disk)
        if not count:
            assert "".join(backend.built) == "abc"[len(on_disk) :]

    @pytest.mark.parametrize(
        ("cores", "ranks", "count"),
        [
            (1, "", 1),
            (2, "", 1),
            (3, "", 1),
            (4, "", 2),
            (64, "", 2),
            (64, "16", 2),
            (64, "32", 1),
            (8, "8", 1),
            (8, "x", 2),
        ],
    )
    def test_by_default(self, cores, ranks, count, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert workers.default_workers() == count


TROUBLE = {  # what a worker does with a job, and what is said of it
    "ends": ("os._exit(3)", r"ended \(exit status 3\)"),
    "takes no job": ("", r"ended \(exit status 1\)"),
    "is killed": ("os.kill(os.getpid(), 9)", r"ended \(exit status -9\)"),
    "ends in the middle of an answer": ("pipe.write('{\"key'); pipe.flush(); os._exit(0)", r"ended \(exit status 0\)"),
    "garbage": ("say('warning: something')", "answered b'warning: something'"),
    "bytes": ("os.write(pipe.fileno(), bytes(range(256)) + b'\\n')", "answered b'"),
    "a list": ("say([1])", r"answered b'\[1\]'"),
    "nested lists": ("say('[' * 100000)", r"answered b'\[\["),
    "nothing of use": ("say({})", "answered '{}'"),
    "no library": ("say({**right(job), 'library': None})", "answered "),
    "no base64": ("say({**right(job), 'library': '!'})", "answered "),
    "another key": (
        "say({**right(job), 'key': {**right(job)['key'], 'cuda': 99}})",
        r"compiles something else than this process would \(it differs in cuda\)",
    ),
    "another code": ("say(right(job))", "runs the code in /elsewhere, not that in "),
    "a long answer": ("say('x' * 10_000)", "answered more than 5000 bytes"),
    "no answer": ("time.sleep(600)", "took more than 0.5 s"),
    "a slow line": ("pipe.write('{'); pipe.flush(); time.sleep(600)", "took more than 0.5 s"),
}


OPTIONS = {"another code": {"hello": "/elsewhere"}, "takes no job": {"before": "os.close(0)"}}


class TestTrouble:
    @pytest.mark.parametrize("trouble", TROUBLE)
    def test_is_one_line_and_compiled_here(self, trouble, backend, fake, caplog, monkeypatch):
        body, reason = TROUBLE[trouble]
        fake(body, **(OPTIONS.get(trouble, {})))
        # Starting a fake takes a tenth of a second; the limit is for its answer.
        monkeypatch.setattr(workers, "MOST_BYTES", 5000 if trouble == "a long answer" else 1 << 20)
        greet = workers._Worker.greet

        def greet_and_hurry(self):
            greet(self)
            monkeypatch.setattr(workers, "LIMIT_S", 0.5 if "0.5 s" in reason else 60)

        monkeypatch.setattr(workers._Worker, "greet", greet_and_hurry)
        with Compiles(wanted(backend, "a", "b", "c"), processes=1) as compiles:
            compiles._threads[0].join(20)
            assert not compiles._threads[0].is_alive()
            assert [compiles.launch(backend, PROBLEM, tactic).call for tactic in "abc"] == [HERE] * 3
        (line,) = said(caplog)
        assert line.startswith("kernels that a worker process was to compile are compiled in this one: it ")
        assert re.search(reason, line), line
        assert objects.counts.compiled == 3

    def test_of_one_worker_leaves_the_work_to_the_other(self, backend, fake, tmp_path):
        first = tmp_path / "first"
        fake(f"os._exit(1) if os.system('mkdir {first} 2>/dev/null') == 0 else say(right(job))")
        with Compiles(wanted(backend, "a", "b", "c"), processes=2) as compiles:
            all_done(compiles)
            got = [compiles.launch(backend, PROBLEM, tactic).call for tactic in "abc"]
        assert sorted(got) == sorted([HERE, THERE, THERE])

    def test_killed_from_outside_while_launch_waits(self, backend, fake, started, caplog):
        fake("os.kill(os.getppid(), 10); time.sleep(600)")  # SIGUSR1, once it is in the middle of a kernel
        previous = signal.signal(signal.SIGUSR1, lambda *_: os.kill(started[0], signal.SIGKILL))
        try:
            with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
                until(lambda: len(compiles._waiting) < 2)
                assert compiles.launch(backend, PROBLEM, "a").call == HERE
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert len(said(caplog)) == 1

    def test_a_worker_may_print(self, backend, fake, capfd):
        fake("print('hello'); print('x' * 200_000, file=sys.stderr); say(right(job))")
        with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
            all_begun(compiles)
            assert compiles.launch(backend, PROBLEM, "a").call == THERE
        assert capfd.readouterr() == ("", "")

    def test_the_end_of_what_it_wrote_is_told_in_debug_logs(self, backend, fake, caplog):
        caplog.set_level(logging.DEBUG, "lowbatch_lmhead")
        fake("print('x' * 20_000, file=sys.stderr); raise ZeroDivisionError('the end')")
        with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
            compiles._threads[0].join(20)
        (record,) = [record for record in caplog.records if "what that worker wrote" in record.getMessage()]
        assert record.levelno == logging.DEBUG
        assert "ZeroDivisionError: the end" in record.getMessage()
        assert len(record.getMessage()) < 5000

    @pytest.mark.parametrize("executable", ["", None, "/no/such/python", "/usr/sbin/uwsgi"])
    def test_cannot_be_started(self, executable, backend, monkeypatch, caplog, started):
        monkeypatch.setattr(sys, "executable", executable)
        with Compiles(wanted(backend, "a", "b"), processes=2) as compiles:
            assert compiles.launch(backend, PROBLEM, "a").call == HERE
        assert not started
        (line,) = said(caplog)
        assert "it could not be started: " in line

    def test_a_frozen_program_is_not_started_again(self, backend, monkeypatch, caplog, started):
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        with Compiles(wanted(backend, "a", "b"), processes=2) as compiles:
            assert compiles.launch(backend, PROBLEM, "a").call == HERE
        assert not started


class TestClose:
    def test_in_the_middle_of_a_kernel(self, backend, fake, started, caplog, tmp_path):
        """Neither the worker nor what it runs (a linker, say) stays."""
        pid = tmp_path / "pid"
        fake(f"child = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(child.pid)); child.wait()")
        with Compiles(wanted(backend, "a", "b"), processes=1):
            until(lambda: pid.exists() and pid.read_text())
            begin = time.monotonic()
        assert time.monotonic() - begin < 2
        assert not alive(started[0])
        until(lambda: not alive(int(pid.read_text())), 2)
        assert not said(caplog)

    @needs_compiler
    def test_while_real_workers_start(self, started):
        with Compiles(wanted(WARP, *WARP.autotune_tactics(PROBLEM)), processes=2):
            time.sleep(0.3)
            begin = time.monotonic()
        assert time.monotonic() - begin < 2
        assert len(started) == 2

    def test_a_worker_that_ignores_signals(self, backend, fake):
        fake("import signal; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); time.sleep(600)")
        with Compiles(wanted(backend, "a", "b"), processes=2) as compiles:
            all_begun(compiles)
            begin = time.monotonic()
        assert time.monotonic() - begin < 2

    def test_under_keyboard_interrupt(self, backend, fake, started):
        """Ctrl-C while ``launch`` waits."""
        fake("time.sleep(0.3); os.kill(os.getppid(), 2); time.sleep(600)")

        def interrupted():
            with Compiles(wanted(backend, "a", "b"), processes=1) as compiles:
                until(lambda: len(compiles._waiting) < 2)
                compiles.launch(backend, PROBLEM, "a")

        begin = time.monotonic()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted()
        finally:
            signal.signal(signal.SIGINT, before)
        assert time.monotonic() - begin < 5
        assert backend.built == []
        assert not alive(started[0])

    def test_an_interrupted_start_leaves_no_worker(self, backend, monkeypatch, started):
        fake_worker, count = workers._Worker, []

        def second_fails():
            count.append(1)
            if len(count) == 2:
                raise KeyboardInterrupt
            return fake_worker()

        monkeypatch.setattr(workers, "_command", lambda: [sys.executable, "-c", script("time.sleep(600)")])
        monkeypatch.setattr(workers, "_Worker", second_fails)
        with pytest.raises(KeyboardInterrupt):
            Compiles(wanted(backend, "a", "b"), processes=2)
        assert len(started) == 1
        assert not alive(started[0])

    def test_launch_afterwards_compiles_here(self, backend, fake):
        fake("time.sleep(600)")
        with Compiles(wanted(backend, "a", "b", "c"), processes=1) as compiles:
            until(lambda: len(compiles._waiting) == 2)
        compiles.close()
        assert [compiles.launch(backend, PROBLEM, tactic).call for tactic in "abc"] == [HERE] * 3

    def test_workers_end_when_nothing_is_left_to_do(self, backend, fake, started):
        fake("say(right(job))")
        with Compiles(wanted(backend, "a", "b"), processes=2):
            until(lambda: len(started) == 2 and not any(map(alive, started)))

    def test_descriptors_are_given_back(self, backend, fake):
        fake("say(right(job))")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with Compiles(wanted(backend, "a", "b"), processes=2):
                pass
        assert len(os.listdir("/proc/self/fd")) == before

    def test_descriptors_are_given_back_where_no_thread_can_be_started(
        self, backend, fake, monkeypatch, started, caplog
    ):
        class Thread(threading.Thread):
            def start(self):
                raise RuntimeError("can't start new thread")

        fake("say(right(job))")
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(workers.threading, "Thread", Thread)
        with Compiles(wanted(backend, "a", "b"), processes=2) as compiles:
            assert compiles.launch(backend, PROBLEM, "a").call == HERE
            assert started
            assert len(os.listdir("/proc/self/fd")) == before
        (line,) = said(caplog)
        assert "it could not be started: can't start new thread" in line


class TestJobs:
    def test_problems_survive_the_way(self):
        for out_dtype in (torch.bfloat16, torch.float32, torch.float16):
            problem = Problem(17, 128, 5, torch.bfloat16, out_dtype, True, "sm_120a")
            assert workers.problem_of(json.loads(json.dumps(workers.problem_fields(problem)))) == problem

    def job(self, **changes):
        job = {"backend": WARP.name, "class": workers.class_name(WARP), "problem": workers.problem_fields(PROBLEM)}
        return {**job, "tactic": str(WARP.tactics(PROBLEM)[0]), **changes}

    @pytest.mark.parametrize("which", ["tactics", "autotune_tactics"])
    def test_tactics_are_found_by_name(self, which):
        for tactic in getattr(WARP, which)(PROBLEM):
            assert worker._found(self.job(tactic=str(tactic))) == (WARP, PROBLEM, tactic)

    @pytest.mark.parametrize(
        "changes", [{"backend": "?"}, {"class": "?"}, {"tactic": "?"}, {"problem": {}}, {"problem": {"dtype": "?"}}]
    )
    def test_what_a_worker_does_not_know_it_leaves(self, changes):
        assert set(worker.answer(self.job(**changes))) == {"unable"}

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (ValueError, "failed"),
            (RuntimeError, "failed"),
            (ImportError, "unable"),
            (MemoryError, "unable"),
            (OSError, "unable"),
        ],
    )
    def test_errors_of_the_kernel_and_of_the_process(self, error, kind, monkeypatch):
        monkeypatch.setattr(type(WARP), "build", lambda *_: _throw(error("why")))
        assert worker.answer(self.job()) == {kind: f"{error.__name__}: why"}

    def test_the_environment(self, monkeypatch):
        monkeypatch.setattr(sys, "path", ["", "/a/b:c", *sys.path])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        environment = workers._environment()
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        paths = environment["PYTHONPATH"].split(os.pathsep)
        assert paths[0] == os.getcwd()
        assert "/a/b" not in paths
        assert str(ROOT / "src") in paths

    def test_modules_in_the_working_directory_are_not_imported(self, tmp_path, monkeypatch):
        (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
        monkeypatch.chdir(tmp_path)
        compiles_worker = workers._Worker()
        try:
            compiles_worker.greet()
        finally:
            compiles_worker.end()
