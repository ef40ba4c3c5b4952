"""What autotune measured, on disk: what is found, what is a miss, who may write at once, and what is removed."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT, python

from lowbatch_lmhead import objects
from lowbatch_lmhead.tuning import cache

KEY = {
    "gpu": "NVIDIA H200",
    "arch": "sm_90a",
    "vocab": 128256,
    "hidden": 4096,
    "dtype": "bfloat16",
    "out_dtype": "float32",
    "bias": False,
    "lowbatch-lmhead": "0.1.0",
    "torch": "2.13.0",
    "flashinfer-python": "0.7.4",
    "nvidia-cutlass-dsl": "4.8.0",
    "cuda": 13,
}
CONTENT = {
    "rows": [
        {"rows": 1, "backend": "warp split-K", "tactic": "32x8x128", "us": 12.3, "default_us": 13.1},
        {"rows": 2, "backend": "default GEMM", "tactic": None, "us": 13.2, "default_us": 13.2},
    ],
    "read_us": 11.9,
    "seconds": 3.25,
}


def key(**changes):
    return {**KEY, **changes}


@pytest.fixture
def where(tmp_path):
    return tmp_path / "cache" / "tuned"


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestFolder:
    def test_default(self, tmp_path):
        assert cache.folder(True) == tmp_path / "cache" / "tuned"

    def test_none(self):
        assert cache.folder(False) is None

    def test_a_path_is_the_folder_itself(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache.folder(tmp_path / "mine") == tmp_path / "mine"
        assert cache.folder(str(tmp_path / "mine")) == tmp_path / "mine"
        assert cache.folder("~/mine") == tmp_path / "mine"

    def test_asking_makes_nothing(self, tmp_path):
        cache.folder(True)
        cache.folder(tmp_path / "mine")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("given", [None, 0, 1, 3.5, b"folder", ["folder"], "", "a\0b", "\ud800"])
    def test_anything_else_is_refused_by_its_name(self, given):
        with pytest.raises(ValueError, match="cache must be True, False or the path of a folder, got ") as raised:
            cache.folder(given)
        assert str(raised.value).endswith(repr(given))

    @pytest.mark.parametrize("given", [True, "~/mine"])
    def test_no_home_folder(self, given, monkeypatch, caplog):
        monkeypatch.delenv("LOWBATCH_LMHEAD_CACHE")
        monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
        for _ in range(2):
            assert cache.folder(given) is None
        (said,) = warnings(caplog)
        assert "there is no home folder" in said

    def test_no_home_variable_for_a_user_without_an_account(self, monkeypatch):
        """As in a container that runs under a number."""
        code = """
import os, pwd
del os.environ["HOME"]
pwd.getpwuid = lambda number: (_ for _ in ()).throw(KeyError(number))
from lowbatch_lmhead.tuning import cache
where = cache.folder(True)
print(where, cache.load(where, {}), cache.save(where, {}, {}), cache.entries(where), cache.clear(where))
"""
        assert python(code, LOWBATCH_LMHEAD_CACHE="") == "None None None [] (0, [])\n"


class TestRoundTrip:
    def test_save_and_load(self, where):
        assert cache.load(where, KEY) is None
        path = cache.save(where, KEY, CONTENT)
        assert path.parent == where
        assert cache.load(where, KEY) == CONTENT
        assert cache.load(where, dict(reversed(KEY.items()))) == CONTENT

    def test_no_folder(self):
        assert cache.save(None, KEY, CONTENT) is None
        assert cache.load(None, KEY) is None
        assert cache.entries(None) == []
        assert cache.clear(None) == (0, [])

    def test_the_last_one_counts(self, where):
        cache.save(where, KEY, {})
        cache.save(where, KEY, CONTENT)
        assert cache.load(where, KEY) == CONTENT
        assert len(list(where.iterdir())) == 1, "a file of the same key, and no temporary one"

    def test_names_can_be_read(self, where):
        name = cache.save(where, KEY, CONTENT).name
        assert name.startswith("NVIDIA-H200-sm_90a-128256x4096-bfloat16-float32-")
        assert name.endswith(".tuned.json")

    @pytest.mark.parametrize("gpu", ["../../up", "/etc/passwd", ".", "", "G" * 5000, "Größe\n\0\ud800", None, {"a": 1}])
    def test_any_key_has_a_file_name(self, where, gpu):
        path = cache.save(where, key(gpu=gpu), CONTENT)
        assert path.parent == where
        assert path.is_file()
        assert cache.load(where, key(gpu=gpu)) == CONTENT
        assert [kept.key for kept in cache.entries(where)] == [key(gpu=gpu)]

    @pytest.mark.parametrize("part", KEY, ids="the {}".format)  # "gpu" alone would be a marker
    def test_every_part_of_the_key_counts(self, where, part, caplog):
        cache.save(where, KEY, CONTENT)
        assert cache.load(where, key(**{part: "another"})) is None
        cache.save(where, key(**{part: "another"}), {})
        assert cache.load(where, KEY) == CONTENT
        assert not warnings(caplog)

    @pytest.mark.parametrize(("one", "other"), [(1, True), (0, False), (13, 13.0), (13, "13"), (None, "")])
    def test_equal_values_of_other_types_are_other_keys(self, where, one, other, caplog):
        path = cache.save(where, key(cuda=one), CONTENT)
        assert cache.load(where, key(cuda=other)) is None
        path.rename(where / cache._name(key(cuda=other)))
        assert cache.load(where, key(cuda=other)) is None
        assert "it is for another key" in warnings(caplog)[0]

    def test_tuples_and_numbered_names_are_what_json_makes_of_them(self, where):
        cache.save(where, key(sizes=(1, 2), by={1: 2}), {"pair": (3, 4)})
        assert cache.load(where, key(sizes=(1, 2), by={1: 2})) == {"pair": [3, 4]}

    def test_folders_are_made_for_their_user_alone(self, where):
        """Also that of the compiled kernels, which are not loaded from a folder that others can write."""
        before = os.umask(0o002)
        try:
            cache.save(where, KEY, CONTENT)
        finally:
            os.umask(before)
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in (where, where.parent)] == [0o700, 0o700]

    def test_others_cannot_write_the_file(self, where):
        assert stat.S_IMODE(cache.save(where, KEY, CONTENT).stat().st_mode) == 0o644

    def test_a_link_to_a_folder_serves(self, where, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        where.parent.mkdir()
        where.symlink_to(tmp_path / "elsewhere")
        cache.save(where, KEY, CONTENT)
        assert cache.load(where, KEY) == CONTENT
        assert list((tmp_path / "elsewhere").iterdir())

    def test_a_folder_that_others_can_write_serves(self, where):
        where.mkdir(parents=True)
        where.chmod(0o777)
        cache.save(where, KEY, CONTENT)
        assert cache.load(where, KEY) == CONTENT

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
    def test_numbers_that_are_not_finite_are_a_bug(self, where, number):
        with pytest.raises(ValueError, match="JSON compliant"):
            cache.save(where, KEY, {"rows": [{"us": number}]})
        with pytest.raises(ValueError, match="JSON compliant"):
            cache.save(where, key(cuda=number), CONTENT)
        assert not where.exists()

    def test_what_would_not_be_read_is_not_written(self, where):
        deep = {}
        for _ in range(cache.MOST_DEPTH):
            deep = {"in": deep}
        for content in ({"text": "x" * cache.MOST_BYTES}, deep):
            with pytest.raises(ValueError, match="would not be read"):
                cache.save(where, KEY, content)
        assert not where.exists()

    def test_brackets_in_a_text_do_not_nest(self, where):
        content = {"text": "[{" * 100 + '\\"[[[[' + '"' + "[" * 100}
        cache.save(where, KEY, content)
        assert cache.load(where, KEY) == content


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def substitute(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path, target):
    path.unlink()
    path.symlink_to(target)


DAMAGES = {
    "empty": lambda path: path.write_text(""),
    "truncated": lambda path: path.write_text(path.read_text()[:-1]),
    "truncated early": lambda path: path.write_text(path.read_text()[:40]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "another encoding": lambda path: path.write_bytes(path.read_text().encode("utf-16")),
    "something after it": lambda path: path.write_text(path.read_text() + "{}"),
    "a list": lambda path: path.write_text("[]"),
    "null": lambda path: path.write_text("null"),
    "a number": lambda path: path.write_text("5"),
    "no fields": lambda path: path.write_text("{}"),
    "no content": lambda path: path.write_text(json.dumps({"key": KEY})),
    "no key": lambda path: path.write_text(json.dumps({"content": CONTENT})),
    "content that is a list": lambda path: rewrite(path, content=[1]),
    "content that is null": lambda path: rewrite(path, content=None),
    "a key that is a text": lambda path: rewrite(path, key="key"),
    "another key": lambda path: rewrite(path, key=key(gpu="NVIDIA H100")),
    "another version": lambda path: rewrite(path, key=key(torch="2.12.0")),
    "a part of the key": lambda path: rewrite(path, key={"gpu": KEY["gpu"]}),
    "more than the key": lambda path: rewrite(path, key=key(more=1)),
    "NaN": lambda path: substitute(path, "12.3", "NaN"),
    "Infinity": lambda path: substitute(path, "12.3", "-Infinity"),
    "a number beyond a double": lambda path: substitute(path, "12.3", "1e999"),
    "a whole number beyond a double": lambda path: substitute(path, "12.3", "9" * 400),
    "a whole number of many digits": lambda path: substitute(path, "12.3", "9" * 100_000),
    "too large": lambda path: path.write_text(path.read_text() + " " * cache.MOST_BYTES),
    "nested lists": lambda path: path.write_text("[" * 100_000),
    "nested objects": lambda path: path.write_text('{"a":' * 100_000),
    "whole, but nested": lambda path: rewrite(path, more=json.loads("[" * 50 + "]" * 50)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe that nobody writes": replace_by_pipe,
    "a device": lambda path: replace_by_link(path, "/dev/zero"),
    "a link to itself": lambda path: replace_by_link(path, path),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_is_a_miss_and_one_line(self, where, damage, caplog):
        path = cache.save(where, KEY, CONTENT)
        other = cache.save(where, key(cuda=12), CONTENT)
        damage(path)
        assert cache.load(where, KEY) is None
        (said,) = warnings(caplog)
        assert said.startswith(f"{path} is not used, the head is measured again: ")
        assert len(said) < len(str(path)) + 300
        assert cache.load(where, key(cuda=12)) == CONTENT
        assert [kept.key for kept in cache.entries(where) if kept.key] == [key(cuda=12)]
        assert other in [kept.path for kept in cache.entries(where)]
        assert len(warnings(caplog)) == 1, "listing logs nothing"

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_is_replaced(self, where, damage):
        path = cache.save(where, KEY, CONTENT)
        damage(path)
        if path.is_dir():
            assert cache.save(where, KEY, CONTENT) is None
        else:
            assert cache.save(where, KEY, CONTENT) == path
            assert cache.load(where, KEY) == CONTENT
        assert len(list(where.iterdir())) == 1

    def test_a_missing_one_is_silent(self, where, caplog):
        assert cache.load(where, KEY) is None
        where.mkdir(parents=True)
        assert cache.load(where, KEY) is None
        assert not warnings(caplog)

    def test_a_pipe_is_not_read_though_it_has_an_entry_in_it(self, where, caplog):
        path = cache.save(where, KEY, CONTENT)
        text = path.read_bytes()
        replace_by_pipe(path)
        handle = os.open(path, os.O_RDWR)
        try:
            os.write(handle, text)
            assert cache.load(where, KEY) is None
        finally:
            os.close(handle)
        assert warnings(caplog)[0].endswith("it cannot be read (it is no file)")

    def test_nesting_where_a_program_has_raised_the_limit_of_recursion(self, where):
        """The parser would overrun the stack, which ends the process."""
        path = cache.save(where, KEY, CONTENT)
        path.write_text("[" * (cache.MOST_BYTES - 1))
        code = """
import json, sys
from pathlib import Path
from lowbatch_lmhead.tuning import cache
sys.setrecursionlimit(10**9)
print(cache.load(Path(sys.argv[1]), json.loads(sys.argv[2])))
"""
        assert python(code, where, json.dumps(KEY)) == "None\n"

    def test_a_file_that_may_not_be_read(self, where, monkeypatch, caplog):
        path = cache.save(where, KEY, CONTENT)
        monkeypatch.setattr(cache.os, "open", refuse_opening(path))
        assert cache.load(where, KEY) is None
        assert warnings(caplog) == [
            f"{path} is not used, the head is measured again: it cannot be read (Permission denied)"
        ]
        assert [(kept.path, kept.key) for kept in cache.entries(where)] == [(path, None)]


def refuse_opening(refused, real=os.open):
    def open_(path, *arguments, **named):
        if path == refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *arguments, **named)

    return open_


# Each makes the folder useless and returns why.


def no_space(monkeypatch, where):
    def replace(source, target, real=os.replace):
        if target.parent == where:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(objects.os, "replace", replace)
    return "No space left on device"


def read_only(monkeypatch, where):
    """As an unprivileged user sees it; root may write into a folder of mode 0500."""

    def mkstemp(*arguments, dir=None, real=tempfile.mkstemp, **named):
        if dir == where:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(*arguments, dir=dir, **named)

    monkeypatch.setattr(objects.tempfile, "mkstemp", mkstemp)
    return "Read-only file system"


def unsearchable(monkeypatch, where):
    """As an unprivileged user sees a folder of mode 0600, in which files can be listed and nothing else."""
    cache.save(where, KEY, CONTENT)
    denied = PermissionError(errno.EACCES, "Permission denied")

    def refuse(real):
        def call(path, *arguments, **named):
            if isinstance(path, str | Path) and where == Path(path).parent:
                raise denied
            return real(path, *arguments, **named)

        return call

    for name in ("open", "stat", "lstat", "unlink"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    return "Permission denied"


def a_file(monkeypatch, where):
    where.parent.mkdir()
    where.write_text("")
    return "Not a directory"


def below_a_file(monkeypatch, where):
    where.parent.write_text("")
    return "Not a directory"


def a_link_to_itself(monkeypatch, where):
    where.parent.mkdir()
    where.symlink_to(where)
    return None


class TestUselessFolder:
    @pytest.mark.parametrize("spoil", [no_space, read_only, unsearchable, a_file, below_a_file, a_link_to_itself])
    def test_costs_one_warning(self, spoil, where, monkeypatch, caplog):
        reason = spoil(monkeypatch, where)
        for changes in ({}, {"cuda": 12}):
            for _ in range(2):
                assert cache.load(where, key(**changes)) is None
                assert cache.save(where, key(**changes), CONTENT) is None
        said = warnings(caplog)
        if reason is None:  # Linux names it differently for reading and writing
            assert all(one.startswith(f"tuned choices are not kept in {where}, ") for one in said)
        else:
            assert said == [f"tuned choices are not kept in {where}, the next process measures again: {reason}"]
        assert cache.entries(where) == []
        monkeypatch.undo()
        left = list(where.iterdir()) if where.is_dir() else []
        assert left == [where / cache._name(KEY)] * (spoil is unsearchable), "a temporary file was left"

    def test_what_is_there_serves_though_nothing_can_be_written(self, where, monkeypatch):
        cache.save(where, KEY, CONTENT)
        read_only(monkeypatch, where)
        assert cache.save(where, KEY, {}) is None
        assert cache.load(where, KEY) == CONTENT

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    @pytest.mark.parametrize("mode", [0o500, 0o600, 0])
    def test_modes(self, where, mode, caplog):
        where.mkdir(parents=True)
        where.chmod(mode)
        assert cache.load(where, KEY) is None
        assert cache.save(where, KEY, CONTENT) is None
        assert cache.entries(where) == []
        assert len(warnings(caplog)) == 1
        where.chmod(0o700)

    def test_clear_says_what_is_wrong(self, where, monkeypatch):
        a_file(monkeypatch, where)
        assert cache.clear(where) == (0, [f"{where}: Not a directory"])


class TestEntries:
    def test_what_they_tell(self, where):
        before = time.time()
        paths = [cache.save(where, key(gpu=gpu), {"of": gpu}) for gpu in ("B", "A")]
        found = cache.entries(where)
        assert [kept.path for kept in found] == sorted(paths)
        assert [(kept.key, kept.content) for kept in found] == [(key(gpu=gpu), {"of": gpu}) for gpu in "AB"]
        assert [kept.bytes for kept in found] == [kept.path.stat().st_size for kept in found]
        assert all(before - 5 < kept.modified < time.time() + 5 for kept in found)

    def test_a_missing_folder_has_none(self, where):
        assert cache.entries(where) == []
        assert cache.clear(where) == (0, [])
        assert not where.exists()

    def test_one_under_another_name_is_not_readable(self, where):
        path = cache.save(where, KEY, CONTENT)
        renamed = path.rename(where / f"renamed-{'0' * 16}.tuned.json")
        assert [(kept.path, kept.key, kept.content) for kept in cache.entries(where)] == [(renamed, None, None)]

    def test_one_that_goes_away_meanwhile(self, where, monkeypatch):
        path = cache.save(where, KEY, CONTENT)
        monkeypatch.setattr(objects, "named_files", lambda folder, pattern: [path.with_name("gone"), path])
        assert [kept.path for kept in cache.entries(where)] == [path]


def foreign_files(folder):
    """Files and folders in ``folder`` that this library did not write, although some are called as if."""
    outside = folder.parent / f"outside-{'0' * 16}.tuned.json"
    outside.write_text(json.dumps({"key": {}, "content": {}}))
    names = [
        "notes.json",
        "tuned.json",
        ".tuned.json",
        f"{'0' * 16}.tuned.json",  # nothing before the digest
        f"head-{'0' * 15}.tuned.json",
        f"head-{'g' * 16}.tuned.json",
        f"head-{'0' * 16}.tuned.json.bak",
        f"head-{'0' * 16}.tuned.json~",
        f"my head-{'0' * 16}.tuned.json",  # no name of ours has a space
        f"head-{'0' * 16}.json",  # a compiled kernel's, or anyone's
        ".tmpabcdefgh.tmp",
        ".lowbatch-lmhead-notes",
    ]
    for name in names:
        (folder / name).write_text("{}")
    (folder / f"folder-{'0' * 16}.tuned.json").mkdir()
    (folder / f"link-{'0' * 16}.tuned.json").symlink_to(outside)
    (folder / ".lowbatch-lmhead-link.tmp").symlink_to(outside)
    (folder / ".lowbatch-lmhead-folder.tmp").mkdir()
    for path in folder.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    return outside


class TestClear:
    def test_removes_what_was_saved(self, where):
        cache.save(where, KEY, CONTENT)
        cache.save(where, key(cuda=12), CONTENT)
        assert cache.clear(where) == (2, [])
        assert list(where.iterdir()) == []
        assert cache.load(where, KEY) is None
        assert cache.clear(where) == (0, [])

    def test_removes_damaged_ones(self, where):
        cache.save(where, KEY, CONTENT).write_text("{")
        assert cache.clear(where) == (1, [])
        assert list(where.iterdir()) == []

    def test_leaves_other_files(self, where):
        where.mkdir(parents=True)
        outside = foreign_files(where)
        before = sorted(where.iterdir())
        cache.save(where, KEY, CONTENT)
        assert len(cache.entries(where)) == 1
        assert cache.clear(where) == (1, [])
        assert sorted(where.iterdir()) == before
        assert outside.exists()

    def test_compiled_kernels_in_the_same_folder_stay(self, tmp_path):
        """Whoever names the cache folder itself for tuned choices."""
        parts = {"backend": "b", "tactic": "t", "arch": "a", "vocab": 1, "hidden": 2, "out_dtype": "o"}
        objects.write(tmp_path, parts, b"library")
        cache.save(tmp_path, KEY, CONTENT)
        assert len(cache.entries(tmp_path)) == 1
        assert len(objects.kept_files(tmp_path)) == 2
        assert cache.clear(tmp_path) == (1, [])
        assert len(objects.kept_files(tmp_path)) == 2

    def test_says_what_could_not_be_removed(self, where, monkeypatch):
        stuck, loose = cache.save(where, KEY, CONTENT), cache.save(where, key(cuda=12), CONTENT)

        def unlink(path, *arguments, real=os.unlink, **named):
            if Path(path) == stuck:
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
            real(path, *arguments, **named)

        monkeypatch.setattr(os, "unlink", unlink)
        assert cache.clear(where) == (1, [f"{stuck}: Operation not permitted"])
        assert stuck.exists()
        assert not loose.exists()

    def test_one_that_goes_away_meanwhile(self, where, monkeypatch):
        path = cache.save(where, KEY, CONTENT)
        monkeypatch.setattr(objects, "named_files", lambda folder, pattern: [path.with_name("gone"), path])
        assert cache.clear(where) == (1, [])


CONTENTS = [{"rows": [{"rows": rows, "by": by} for rows in range(500)]} for by in range(2)]


class TestConcurrentWriters:
    def test_threads(self, where, caplog):
        done = threading.Event()

        def write(content):
            try:
                for _ in range(100):
                    assert cache.save(where, KEY, content)
            finally:
                done.set()

        def read():
            found = 0
            while not done.is_set() or not found:
                content = cache.load(where, KEY)
                if content is not None:
                    assert content in CONTENTS
                    found += 1
            return found

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(write, content) for content in CONTENTS]
            futures += [pool.submit(read), pool.submit(read)]
            assert min(future.result() for future in futures[2:]) > 0
        assert cache.load(where, KEY) in CONTENTS
        assert len(list(where.iterdir())) == 1
        assert not warnings(caplog), "no reader saw a part of a file"

    def test_processes(self, where, caplog):
        code = """
import json, sys
from pathlib import Path
from lowbatch_lmhead.tuning import cache
where, key, content = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
for _ in range(100):
    assert cache.save(where, key, content)
"""
        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(python, code, where, json.dumps(KEY), json.dumps(content)) for content in CONTENTS]
            found = 0
            while not all(writer.done() for writer in writers):
                content = cache.load(where, KEY)
                if content is not None:
                    assert content in CONTENTS
                    found += 1
            for writer in writers:
                writer.result()
        assert found
        assert cache.load(where, KEY) in CONTENTS
        assert len(list(where.iterdir())) == 1
        assert not warnings(caplog)

    def test_saving_while_another_clears(self, where, caplog):
        """A file that is being written is not taken for a left-over one."""
        done = threading.Event()

        def clear():
            gone = 0
            while not done.is_set():
                count, problems = cache.clear(where)
                assert problems == []
                gone += count
            return gone

        with ThreadPoolExecutor(1) as pool:
            clearing = pool.submit(clear)
            try:
                for number in range(200):
                    assert cache.save(where, key(cuda=number % 3), CONTENT)
                    assert cache.load(where, key(cuda=number % 3)) in (None, CONTENT)
            finally:
                done.set()
            assert clearing.result() > 0
        assert not warnings(caplog)


class TestKilled:
    CODE = """
import json, os, signal, sys
from pathlib import Path
from lowbatch_lmhead.tuning import cache
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
cache.save(Path(sys.argv[1]), json.loads(sys.argv[2]), {"rows": "half"})
"""

    def kill_one(self, where):
        done = subprocess.run(
            [sys.executable, "-c", self.CODE, where, json.dumps(KEY)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        (left,) = [path for path in where.iterdir() if path.suffix == ".tmp"]
        return left

    def test_between_writing_and_renaming(self, where, caplog):
        left = self.kill_one(where)
        assert cache.load(where, KEY) is None
        assert cache.entries(where) == []
        assert not warnings(caplog)
        cache.save(where, KEY, CONTENT)
        assert cache.load(where, KEY) == CONTENT
        assert cache.clear(where) == (1, [])
        assert left.exists(), "it could be a file that another process is writing"
        os.utime(left, (time.time() - 2 * objects.LEFT_OVER_S,) * 2)
        assert cache.clear(where) == (0, [])
        assert list(where.iterdir()) == []

    def test_the_one_before_stays(self, where):
        cache.save(where, KEY, CONTENT)
        self.kill_one(where)
        assert cache.load(where, KEY) == CONTENT

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    def test_an_interruption_leaves_nothing(self, where, error, monkeypatch):
        monkeypatch.setattr(objects.os, "replace", lambda *paths: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            cache.save(where, KEY, CONTENT)
        assert list(where.iterdir()) == []
