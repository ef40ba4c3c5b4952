"""Kernels that are compiled in other processes while this one measures those that are ready.

Compiling takes a lock in one process (the DSL's compiler is not documented as thread-safe), so a second kernel at a time
takes a second process. Such a worker is a new Python of its own (worker.py), neither forked, which a CUDA context does not
survive, nor started by multiprocessing, which would run the user's script again. It compiles and returns the library's
bytes; files are written and libraries loaded in this process alone.

A worker can only save time: a kernel that no worker has begun when it is needed is compiled here, and so is what a
worker that fails, hangs or knows less than this process leaves behind.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..backends.base import Backend, Launch, Problem, dtype_name
from ..backends.compiling import CompiledBackend, object_key
from ..log import logger, warn_once

LIMIT_S = 120.0  # for a worker to start, and for each kernel; both take about a second
MOST_WORKERS = 2  # on a machine of 16 cores four took longer to start than this process to compile
MOST_BYTES = 1 << 26  # of one answer; a kernel's library is a thousandth of it
END_S = 1.0  # for a killed worker to be gone

PACKAGE = str(Path(__file__).resolve().parents[1])

_Name = tuple[str, str, Problem]


class _Useless(Exception):
    """A worker that is not to be asked again, and why."""


@dataclass(eq=False)
class _Job:
    """One kernel. After ``done``: its library, or why it cannot be compiled, or neither: compile it here."""

    backend: CompiledBackend
    problem: Problem
    tactic: Any
    key: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    library: bytes | None = None
    failure: str | None = None


def class_name(backend: Any) -> str:
    return f"{type(backend).__module__}.{type(backend).__qualname__}"


def problem_fields(problem: Problem) -> dict[str, Any]:
    """``problem`` as JSON can hold it; ``problem_of`` is the inverse."""
    values = {part.name: getattr(problem, part.name) for part in fields(problem)}
    return {name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in values.items()}


def problem_of(values: dict[str, Any]) -> Problem:
    """The problem of ``problem_fields``. TypeError or AttributeError for anything else."""
    dtypes = {name: getattr(torch, values[name]) for name in ("dtype", "out_dtype")}
    return Problem(**{**values, **dtypes})


def default_workers() -> int:
    """Half of the processor cores that are this process's share, 1 to ``MOST_WORKERS``: the other half measures."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's: processes like this one on this machine
    return max(1, min(MOST_WORKERS, cores // max(1, int(ranks) if ranks.isdecimal() else 1) // 2))


class Compiles:
    """Launches, compiled beside the work that needs them. A context manager, for one thread.

    ``wanted`` is what will be asked for, in the order of need; anything else can be asked for too. Of kernels that are
    the same but for ``Problem.rows``, on which no object depends, one is compiled. What is on disk is loaded at once.
    Where two or more kernels are missing, ``processes`` workers (None: ``default_workers()``; 0: none; at most one for
    each kernel) begin to compile them.
    """

    def __init__(self, wanted: Sequence[tuple[Backend, Problem, Any]], processes: int | None = None) -> None:
        self._launches: dict[_Name, Launch] = {}
        self._jobs: dict[_Name, _Job] = {}
        self._waiting: deque[_Job] = deque()  # not begun by a worker, and not compiled here
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._compiles = False  # whether this process has loaded the compiler
        for backend, problem, tactic in wanted:
            if isinstance(backend, CompiledBackend):
                self._look_up(backend, problem, tactic)
        self._waiting.extend(self._jobs.values())
        if len(self._jobs) > 1:
            count = default_workers() if processes is None else processes
            try:
                self._start(min(count, len(self._jobs)))
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Compiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self, backend: Backend, problem: Problem, tactic: Any) -> Launch:
        """The launch: from disk, from a worker that has begun it, or compiled here.

        While a worker has begun it, this process compiles what no worker has begun yet, once it has the compiler loaded.

        Raises what ``backend.compile`` raises, or RuntimeError with a worker's message where the kernel was compiled
        there and failed; each further call raises it again.
        """
        name = _name(backend, problem, tactic)
        if name not in self._launches:
            self._launches[name] = self._make(self._jobs.get(name), backend, problem, tactic)
        return self._launches[name]

    def close(self) -> None:
        """End the workers at once, in the middle of a kernel too; what they have not answered is compiled here."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:
            thread.join(END_S)

    def _look_up(self, backend: CompiledBackend, problem: Problem, tactic: Any) -> None:
        """Load the launch from disk, or make a job of it."""
        name = _name(backend, problem, tactic)
        if name in self._launches or name in self._jobs:
            return
        found = backend.find(problem, tactic)
        if found is not None:
            self._launches[name] = found
        else:
            self._jobs[name] = _Job(backend, problem, tactic, object_key(backend.name, problem, tactic))

    def _make(self, job: _Job | None, backend: Backend, problem: Problem, tactic: Any) -> Launch:
        if job is not None:
            self._take_back(job)
            while not job.done.is_set() and self._help():
                pass
            job.done.wait()
            if job.failure is not None:
                raise RuntimeError(job.failure)
            if job.library is not None:
                return job.backend.adopt(problem, tactic, job.library)
        launch = backend.compile(problem, tactic)
        self._compiles = self._compiles or isinstance(backend, CompiledBackend)
        return launch

    def _help(self) -> bool:
        """Compile what a worker would begin next; False where there is nothing, or the compiler would be loaded for it."""
        job = self._next() if self._compiles else None
        if job is None:
            return False
        try:
            # What goes wrong is raised where the launch is asked for: it is compiled again then.
            with contextlib.suppress(Exception):
                name = _name(job.backend, job.problem, job.tactic)
                self._launches[name] = job.backend.compile(job.problem, job.tactic)
        finally:
            job.done.set()
        return True

    def _take_back(self, job: _Job) -> None:
        """Keep ``job`` from the workers, unless one has begun it."""
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
                job.done.set()

    def _next(self) -> _Job | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _start(self, count: int) -> None:
        for _ in range(count):
            try:
                worker = _Worker()
                self._workers.append(worker)
                thread = threading.Thread(target=self._feed, args=(worker,), name="lowbatch-lmhead worker", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    worker.end()  # which its thread would have done
                    raise
            except (OSError, ValueError, RuntimeError) as error:  # no such program, no more processes, no more threads
                _warn(f"could not be started: {error}")
                return
            self._threads.append(thread)

    def _feed(self, worker: _Worker) -> None:
        """Give ``worker`` one kernel after another until none is left."""
        try:
            worker.greet()
            while (job := self._next()) is not None:
                try:
                    worker.compile(job)
                finally:
                    job.done.set()
        except _Useless as error:
            if not self._closed:
                _warn(str(error))
                logger.debug("the end of what that worker wrote:\n%s", worker.last_words())
        finally:
            worker.end()


class _Worker:
    """A process that compiles one kernel at a time. OSError where it cannot be started.

    ``greet``, ``compile`` and ``end`` are for one thread, and ``kill`` for any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile(prefix="lowbatch-lmhead-")  # noqa: SIM115 (closed by ``end``)
        self._answers, answers = os.pipe()
        self._unread = b""
        try:
            self._process = subprocess.Popen(
                [*_command(), str(answers)],
                stdin=subprocess.PIPE,
                # What packages print is neither for the user's terminal nor an answer.
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(answers,),
                env=_environment(),
                cwd=Path(PACKAGE).parent,
                start_new_session=True,  # Ctrl-C is this process's to handle; and the linker ends with the worker
            )
        except BaseException:
            os.close(self._answers)
            self._errors.close()
            raise
        finally:
            os.close(answers)

    def greet(self) -> None:
        """Wait until the worker has started, and be sure that it runs this code. ``_Useless``."""
        package = self._answer().get("package")
        if package != PACKAGE:
            raise _Useless(f"runs the code in {package}, not that in {PACKAGE}")

    def compile(self, job: _Job) -> None:
        """Have ``job`` compiled and set its library or failure, or neither where the worker cannot. ``_Useless``."""
        self._ask(
            {
                "backend": job.backend.name,
                "class": class_name(job.backend),
                "problem": problem_fields(job.problem),
                "tactic": str(job.tactic),
            }
        )
        answer = self._answer()
        if isinstance(answer.get("failed"), str):
            job.failure = answer["failed"]
        elif isinstance(answer.get("unable"), str):
            logger.debug("%s (%s) is not compiled by a worker: %s", job.backend.name, job.tactic, answer["unable"])
        else:
            job.library = _library(answer, job.key)

    def last_words(self) -> str:
        """The end of what the process wrote to stdout and stderr."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace")

    def kill(self) -> None:
        """End the process and its children at once."""
        with self._lock:  # a process that is not waited for keeps its number, so that no other is killed
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_S)

    def end(self) -> None:
        """``kill``, and close what the process was asked through."""
        self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        os.close(self._answers)
        self._errors.close()

    def _ask(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise _Useless(self._ended()) from None

    def _answer(self) -> dict[str, Any]:
        line = self._line(time.monotonic() + LIMIT_S)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise _Useless(f"answered {line[:80]!r}")
        return answer

    def _line(self, deadline: float) -> bytes:
        """The next line from the process, by ``deadline`` (time.monotonic())."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _Useless(f"took more than {LIMIT_S:g} s")
                data = os.read(self._answers, 1 << 16)
                if not data:
                    raise _Useless(self._ended())
                self._unread += data
                if len(self._unread) > MOST_BYTES:
                    raise _Useless(f"answered more than {MOST_BYTES} bytes")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        return f"ended (exit status {self._process.poll()})"


def _name(backend: Backend | CompiledBackend, problem: Problem, tactic: Any) -> _Name:
    return backend.name, str(tactic), replace(problem, rows=0)


def _warn(reason: str) -> None:
    warn_once(f"kernels that a worker process was to compile are compiled in this one: it {reason}")


def _library(answer: dict[str, Any], key: dict[str, Any]) -> bytes:
    """The library in ``answer``, which must be for ``key``. ``_Useless``."""
    theirs, library = answer.get("key"), answer.get("library")
    if not isinstance(theirs, dict) or not isinstance(library, str):
        raise _Useless(f"answered {str(answer)[:80]!r}")
    if theirs != key:
        differ = sorted(name for name in theirs.keys() | key if theirs.get(name) != key.get(name))
        raise _Useless(f"compiles something else than this process would (it differs in {', '.join(differ)})")
    try:
        return base64.b64decode(library, validate=True)
    except ValueError:
        raise _Useless(f"answered {str(answer)[:80]!r}") from None


def _command() -> list[str]:
    """How a worker is started. OSError where this process is not a Python interpreter that can be started again."""
    # In a frozen or embedding program, sys.executable is that program: it would be started, not Python.
    if getattr(sys, "frozen", False) or "python" not in Path(sys.executable or "").name.lower():
        raise OSError(f"{sys.executable or 'this program'} is not a Python interpreter")
    return [sys.executable, "-m", "lowbatch_lmhead.tuning.worker"]


def _environment() -> dict[str, str]:
    """This process's environment, with its import path, and without a GPU: a context there takes memory and time."""
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    paths += [os.path.dirname(PACKAGE)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if os.pathsep not in path),
        "PYTHONSAFEPATH": "1",  # Python 3.10, which does not know it, has the working directory first: this package's
        "CUDA_VISIBLE_DEVICES": "",
    }
