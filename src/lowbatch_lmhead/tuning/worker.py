"""A process that compiles kernels for another (workers.py): ``python -m lowbatch_lmhead.tuning.worker DESCRIPTOR``.

Jobs come as JSON lines on stdin: ``{"backend", "class", "problem", "tactic"}``. To each there is one JSON line on the pipe
with that descriptor: ``{"key", "library"}`` (the library in base64), ``{"failed": why}`` for a kernel that does not
compile, or ``{"unable": why}`` for a job that another process may fare better with. Before all, when it is ready, comes
``{"package": folder}``. The process ends when stdin does, in the middle of a kernel too.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import queue
import sys
import threading
from typing import Any

from .. import backends
from ..backends.base import Problem
from ..backends.compiling import CompiledBackend
from .workers import PACKAGE, class_name, problem_of


def main() -> None:
    """Answer jobs until the process ends."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # the linker, which is a child of this process, has no part in it
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    with contextlib.suppress(Exception):  # the first job says what is wrong; here it is only that it takes a while
        importlib.import_module("cutlass.cute")
    with open(descriptor, "w") as answers:
        _say(answers, {"package": PACKAGE})
        while True:
            _say(answers, answer(json.loads(jobs.get())))


def _say(answers: Any, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _read(jobs: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        jobs.put(line)
    os._exit(0)  # there is nobody left to answer


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What to say to ``job``."""
    try:
        backend, problem, tactic = _found(job)
    except Exception as error:
        return {"unable": f"{type(error).__name__}: {error}"}
    try:
        key, library = backend.build(problem, tactic)
    except (ImportError, MemoryError, OSError) as error:  # of this process or the machine, not of the kernel
        return {"unable": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"key": key, "library": base64.b64encode(library).decode()}


def _found(job: dict[str, Any]) -> tuple[CompiledBackend, Problem, Any]:
    """The backend, problem and tactic that ``job`` names. LookupError where this process has no such backend or tactic."""
    problem = problem_of(job["problem"])
    for backend in backends.kernels():
        if (backend.name, class_name(backend)) == (job["backend"], job["class"]):
            assert isinstance(backend, CompiledBackend)
            return backend, problem, _tactic(backend, problem, job["tactic"])
    raise LookupError(f"no backend {job['backend']!r} ({job['class']})")


def _tactic(backend: Any, problem: Problem, name: str) -> Any:
    for tactic in (*backend.tactics(problem), *backend.autotune_tactics(problem)):
        if str(tactic) == name:
            return tactic
    raise LookupError(f"{backend.name} has no tactic {name!r} for {problem}")


if __name__ == "__main__":
    main()
