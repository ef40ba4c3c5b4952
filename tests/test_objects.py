"""Compiled kernels on disk: what is found, what is a miss, what is not trusted, and what compiles again."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_logits, inputs, linear, python

from lowbatch_lmhead import devices, explain, objects, project, testing, warmup
from lowbatch_lmhead.backends import Problem, compiling, flashinfer
from lowbatch_lmhead.backends.compiling import CompiledBackend

PROBLEM = Problem(1000, 256, 3, torch.bfloat16, torch.bfloat16, False, "sm_90a")
DATA = b"\x7fELF the code of a kernel" * 100


def key(**changes):
    return {**compiling.object_key("test backend", PROBLEM, "a tactic"), **changes}


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def entry_of(path):
    """The JSON file beside the only kept library."""
    (entry,) = path.parent.glob("*.json")
    return entry


class Compiled(CompiledBackend):
    """A compiled backend for the CPU: its library is a few bytes, and loading it gives the reference launch."""

    name = "test backend"
    architectures = frozenset({devices.CPU})

    def __init__(self):
        self.built = []
        self.problem = None

    def supports(self, problem):
        self.problem = problem
        return None

    def tactics(self, problem):
        return ["a tactic"]

    def smem_bytes(self, tactic):
        return None

    def kernel(self, problem, tactic):
        raise AssertionError("build is replaced")

    def build(self, problem, tactic):
        self.built.append(problem)
        return compiling.object_key(self.name, problem, tactic), DATA


@pytest.fixture
def backend(monkeypatch):
    """Compiled serves CPU heads, and what it loads must be whole."""
    backend = Compiled()
    backend.loaded = []

    def load(path):
        if path.read_bytes() != DATA:
            raise OSError(f"{path}: invalid ELF header")
        backend.loaded.append(path)
        return testing.Reference().compile(backend.problem, None).call

    monkeypatch.setattr(compiling, "_load", load)
    with testing.reference_backend(backend), torch.no_grad():
        yield backend


def serve(backend, head, rows=3):
    """Project as a new process would: nothing is prepared."""
    testing.forget()
    x = inputs(rows)
    assert_logits(project(head, x), head, x)
    return explain(head, x)


class TestRoundTrip:
    def test_keep_and_find(self, cache):
        assert objects.find(key()) is None
        path = objects.keep(key(), DATA)
        assert path.parent == cache
        assert path.read_bytes() == DATA
        assert objects.find(key()) == path

    def test_no_temporary_files_stay(self, cache):
        objects.keep(key(), DATA)
        assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".so"]

    def test_names_can_be_read(self):
        name = objects.stem(key())
        assert name.startswith("test-backend-sm_90a-1000x256-bfloat16-a-tactic-")
        assert name == objects.stem(dict(reversed(key().items())))

    @pytest.mark.parametrize("part", sorted(compiling.object_key("b", PROBLEM, "t")))
    def test_every_part_of_the_key_counts(self, part):
        objects.keep(key(), DATA)
        assert objects.find(key(**{part: "another"})) is None
        other = objects.keep(key(**{part: "another"}), DATA + b"!")
        assert objects.find(key(**{part: "another"})) == other
        assert objects.find(key()).read_bytes() == DATA

    def test_key_depends_on_what_is_compiled_and_by_what(self, monkeypatch):
        changes = {
            "vocab": 1001,
            "hidden": 512,
            "dtype": torch.float16,
            "out_dtype": torch.float32,
            "has_bias": True,
            "arch": "sm_100a",
        }
        stems = {objects.stem(key())}
        for name, value in changes.items():
            problem = dataclasses.replace(PROBLEM, **{name: value})
            stems.add(objects.stem(compiling.object_key("test backend", problem, "a tactic")))
        assert len(stems) == 1 + len(changes)
        rows = dataclasses.replace(PROBLEM, rows=9)
        assert compiling.object_key("test backend", rows, "a tactic") == key(), "one object for all row counts"
        for name, value in (("__version__", "9"), ("CALL_VERSION", 99)):
            with monkeypatch.context() as patch:
                patch.setattr(compiling, name, value)
                stems.add(objects.stem(key()))
        for package in (flashinfer.FLASHINFER[0], flashinfer.CUTE_DSL[0]):
            with monkeypatch.context() as patch:
                patch.setattr(flashinfer, "version", lambda name, changed=package: "9" if name == changed else "1")
                stems.add(objects.stem(key()))
        assert len(stems) == 5 + len(changes)


def _damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _rewrite(path, **changes):
    entry = entry_of(path)
    entry.write_text(json.dumps({**json.loads(entry.read_text()), **changes}))


DAMAGES = {
    "a flipped bit": _damage,
    "a truncated library": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "an empty library": lambda path: path.write_bytes(b""),
    "no library": lambda path: path.unlink(),
    "a folder for a library": lambda path: (path.unlink(), path.mkdir()),
    "truncated JSON": lambda path: entry_of(path).write_text(entry_of(path).read_text()[:40]),
    "empty JSON": lambda path: entry_of(path).write_text(""),
    "no JSON": lambda path: entry_of(path).write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: entry_of(path).write_text("[]"),
    "null": lambda path: entry_of(path).write_text("null"),
    "nested lists": lambda path: entry_of(path).write_text("[" * 100000),
    "missing fields": lambda path: entry_of(path).write_text("{}"),
    "a file name that is a number": lambda path: _rewrite(path, file=5),
    "an empty file name": lambda path: _rewrite(path, file=""),
    "a file name with a zero": lambda path: _rewrite(path, file="a\0b"),
    "another digest": lambda path: _rewrite(path, sha256="0" * 64),
    "another key": lambda path: _rewrite(path, key=key(tactic="another tactic")),
    "another version": lambda path: _rewrite(path, key=key(**{"lowbatch-lmhead": "0.0.1"})),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_is_a_miss_and_one_line(self, damage, caplog):
        path = objects.keep(key(), DATA)
        entry = entry_of(path)
        damage(path)
        assert objects.find(key()) is None
        (said,) = warnings(caplog)
        assert said.startswith(f"{entry} is compiled again: ")

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_is_compiled_again(self, damage, backend, cache):
        head = linear()
        serve(backend, head)
        (path,) = cache.glob("*.so")
        damage(path)
        assert serve(backend, head).taken
        assert len(backend.built) == 2
        assert serve(backend, head).taken
        # What was compiled again is found, unless something stays in its way.
        assert len(backend.built) == (3 if path.is_dir() else 2)

    def test_an_entry_cannot_name_a_file_elsewhere(self, tmp_path, caplog):
        path = objects.keep(key(), DATA)
        outside = tmp_path / "outside.so"
        shutil.copy(path, outside)
        for name in (str(outside), "../outside.so"):
            _rewrite(path, file=name)
            assert objects.find(key()) is None
        assert len(warnings(caplog)) == 2

    def test_a_whole_library_that_does_not_load_is_compiled_again(self, backend, cache, caplog):
        """Of another machine's kind, say: a damaged or foreign file is a miss."""
        head = linear()
        serve(backend, head)
        (entry,) = cache.glob("*.json")
        objects.keep(json.loads(entry.read_text())["key"], b"of another machine")
        decision = serve(backend, head)
        assert decision.taken
        assert len(backend.built) == 2

    def test_missing_entry_is_silent(self, cache, caplog):
        cache.mkdir()
        assert objects.find(key()) is None
        assert not warnings(caplog)


class TestCompile:
    def test_compiled_once_and_loaded_afterwards(self, backend, cache):
        head = linear()
        report = warmup(head)
        assert (report.compiled, report.loaded) == (1, 0)
        testing.forget()
        report = warmup(head)
        assert (report.compiled, report.loaded) == (0, 1)
        assert backend.loaded[0] == backend.loaded[1]
        assert backend.loaded[0].parent == cache
        x = inputs(3)
        assert_logits(project(head, x), head, x)

    def test_no_linker(self, backend, monkeypatch, caplog):
        def build(problem, tactic):
            return compiling.object_key(backend.name, problem, tactic), compiling.link(b"an object")

        monkeypatch.setattr(backend, "build", build)
        monkeypatch.setattr(objects.shutil, "which", lambda name, *_: None)
        head, x = linear(bias=True), inputs(3)
        for _ in range(3):
            assert torch.equal(project(head, x), F.linear(x, head.weight, head.bias))
        (said,) = warnings(caplog)
        assert "dropped test backend (a tactic): RuntimeError: no linker" in said
        assert "no linker: compiling a kernel takes one of cc, gcc, clang or ld on the PATH" in str(explain(head, x))

    @pytest.mark.parametrize("compiler", ["cc", "gcc", "clang", "ld"])
    def test_linkers(self, compiler, monkeypatch):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(objects.shutil, "which", lambda name: f"/bin/{name}" if name == compiler else None)
        assert objects.linker() == f"/bin/{compiler}"
        monkeypatch.setenv("CC", "mycc")
        assert objects.linker() == f"/bin/{compiler}"
        monkeypatch.setattr(objects.shutil, "which", lambda name: f"/bin/{name}")
        assert objects.linker() == "/bin/mycc"


def _no_space(monkeypatch, cache):
    def replace(source, target, real=os.replace):
        if target.parent == cache:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(objects.os, "replace", replace)
    return "No space left on device"


def _read_only(monkeypatch, cache):
    """As an unprivileged user sees it; root may write into a folder of mode 0500."""

    def mkstemp(*arguments, dir=None, real=tempfile.mkstemp, **named):
        if dir == cache:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(*arguments, dir=dir, **named)

    monkeypatch.setattr(objects.tempfile, "mkstemp", mkstemp)
    return "Read-only file system"


def _a_file(monkeypatch, cache):
    cache.write_text("")
    return "File exists"


def _below_a_file(monkeypatch, cache):
    cache.write_text("")
    monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(cache / "below"))
    return "Not a directory"


class TestUnwritable:
    @pytest.mark.parametrize("prevent", [_no_space, _read_only, _a_file, _below_a_file])
    def test_compiles_and_keeps_nothing(self, prevent, backend, cache, monkeypatch, caplog):
        reason, head = prevent(monkeypatch, cache), linear()
        assert objects.keep(key(), DATA) is None
        for _ in range(2):
            assert serve(backend, head).taken
        assert len(backend.built) == 2
        kept = [message for message in warnings(caplog) if "are not kept" in message]
        assert kept == [
            f"compiled kernels are not kept in {objects.cache_folder()}, the next process compiles again: {reason}"
        ]
        assert not [message for message in warnings(caplog) if "dropped" in message]
        assert not cache.is_dir() or not list(cache.iterdir()), "a temporary file was left"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_read_only_folder(self, backend, cache):
        cache.mkdir(mode=0o500)
        assert objects.keep(key(), DATA) is None
        assert serve(backend, linear()).taken

    def test_no_home_folder(self, backend, monkeypatch, caplog):
        monkeypatch.delenv("LOWBATCH_LMHEAD_CACHE")
        monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
        assert objects.folders() == []
        for _ in range(2):
            assert serve(backend, linear()).taken
        assert len(warnings(caplog)) == 1
        assert "set LOWBATCH_LMHEAD_CACHE to a folder" in warnings(caplog)[0]


class TestTrust:
    def test_folder_is_made_for_its_user_alone(self, cache):
        objects.keep(key(), DATA)
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert objects.distrust(cache) is None

    @pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o702, 0o720])
    def test_folder_that_others_can_write(self, mode, backend, cache, caplog):
        head = linear()
        serve(backend, head)
        cache.chmod(mode)
        before = {path: path.read_bytes() for path in cache.iterdir()}
        backend.loaded.clear()
        for _ in range(2):
            assert serve(backend, head).taken
        assert len(backend.built) == 3, "compiled again, each time"
        assert all(path.parent != cache for path in backend.loaded), "nothing is loaded from it"
        assert {path: path.read_bytes() for path in cache.iterdir()} == before, "nothing is written to it"
        said = [message for message in warnings(caplog) if "can be written by other users" in message]
        assert len(said) == 2
        assert all(f"(mode {mode:o})" in message for message in said)
        assert {message.split(" ")[0] for message in said} == {"no", "compiled"}

    def test_parent_that_others_can_write(self, tmp_path, monkeypatch, caplog):
        parent = tmp_path / "open"
        parent.mkdir()
        monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(parent / "cache"))
        objects.keep(key(), DATA)
        parent.chmod(0o777)
        assert objects.find(key()) is None
        assert f"{parent} can be written by other users" in warnings(caplog)[0]
        parent.chmod(0o1777)
        assert objects.find(key()) is not None, "in a sticky folder others cannot replace ours"

    def test_link_to_a_folder_that_others_can_write(self, tmp_path, monkeypatch):
        target = tmp_path / "target"
        target.mkdir()
        objects.write(target, key(), DATA)
        (tmp_path / "link").symlink_to(target)
        monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", str(tmp_path / "link"))
        assert objects.find(key()) is not None
        target.chmod(0o777)
        assert objects.find(key()) is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give a folder away")
    def test_folder_of_another_user(self, cache, caplog):
        objects.keep(key(), DATA)
        os.chown(cache, 12345, 12345)
        assert objects.find(key()) is None
        assert objects.keep(key(), DATA) is None
        assert f"{cache} belongs to user 12345" in warnings(caplog)[0]

    def test_file_that_others_can_write(self, cache):
        path = objects.keep(key(), DATA)
        for file in (path, entry_of(path)):
            assert not file.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class TestFolders:
    def test_given_folders_come_first(self, tmp_path, cache, monkeypatch):
        first, second = tmp_path / "first", tmp_path / "second"
        for folder in (first, second):
            folder.mkdir()
        monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", f"{first}:{tmp_path / 'missing'}::{second}")
        assert objects.folders() == [first, tmp_path / "missing", second, cache]
        kept = objects.keep(key(), DATA)
        assert kept.parent == cache, "given folders are not written"
        assert objects.find(key()) == kept
        later = objects.write(second, key(), DATA + b"2")
        assert objects.find(key()) == later
        earlier = objects.write(first, key(), DATA + b"1")
        assert objects.find(key()) == earlier
        _damage(earlier)
        assert objects.find(key()) == later, "a damaged one is passed over for the next folder's"

    def test_served_from_a_given_folder(self, backend, tmp_path, monkeypatch):
        head = linear()
        serve(backend, head)
        shutil.move(tmp_path / "cache", tmp_path / "given")
        monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", str(tmp_path / "given"))
        serve(backend, head)
        assert len(backend.built) == 1
        assert backend.loaded[-1].parent == tmp_path / "given"
        assert not (tmp_path / "cache").exists()

    def test_given_folder_that_others_can_write(self, tmp_path, monkeypatch, caplog):
        given = tmp_path / "given"
        given.mkdir()
        objects.write(given, key(), DATA)
        given.chmod(0o777)
        monkeypatch.setenv("LOWBATCH_LMHEAD_OBJECTS", str(given))
        assert objects.find(key()) is None
        assert f"no compiled kernel is loaded from {given}" in warnings(caplog)[0]

    def test_where_the_cache_is(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", "~/kernels")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert objects.cache_folder() == tmp_path / "kernels"
        for unset in (lambda name: monkeypatch.delenv(name), lambda name: monkeypatch.setenv(name, "")):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
            unset("LOWBATCH_LMHEAD_CACHE")
            assert objects.cache_folder() == tmp_path / "xdg" / "lowbatch-lmhead"
            unset("XDG_CACHE_HOME")
            assert objects.cache_folder() == tmp_path / ".cache" / "lowbatch-lmhead"
            monkeypatch.setenv("LOWBATCH_LMHEAD_CACHE", "")


def check_whole(path):
    """A library that was found is one of those that the writers keep, whole."""
    data = path.read_bytes()
    assert len(data) == 200_000
    assert set(data) == {data[0]}


class TestConcurrentWriters:
    def test_threads(self):
        done = threading.Event()

        def write(byte):
            try:
                for _ in range(60):
                    check_whole(objects.keep(key(), bytes([byte]) * 200_000))
            finally:
                done.set()

        def read():
            found = 0
            while not done.is_set() or not found:
                path = objects.find(key())
                if path is not None:
                    check_whole(path)
                    found += 1
            return found

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(write, 1), pool.submit(write, 2), pool.submit(read), pool.submit(read)]
            assert [future.result() for future in futures][2] > 0
        check_whole(objects.find(key()))

    def test_processes(self, cache):
        code = """
import json, os, sys
from lowbatch_lmhead import objects
key, byte = json.loads(sys.argv[1]), int(sys.argv[2])
for _ in range(50):
    objects.keep(key, bytes([byte]) * 200_000)
"""
        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(python, code, json.dumps(key()), byte) for byte in (1, 2)]
            found = 0
            while not all(writer.done() for writer in writers):
                path = objects.find(key())
                if path is not None:
                    check_whole(path)
                    found += 1
            for writer in writers:
                writer.result()
        assert found
        check_whole(objects.find(key()))
        assert not [path for path in cache.iterdir() if path.suffix not in (".so", ".json")]
