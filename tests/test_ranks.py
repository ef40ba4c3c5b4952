"""Ranks in lock-step: they get the same values, and they fail together, in time, whatever happens to one of them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import python

from lowbatch_lmhead.tuning import ranks as ranks_module
from lowbatch_lmhead.tuning.ranks import RankFailure, Ranks

SHORT, LONG = 1.0, 30.0  # timeouts: one that is waited for, and one that must not be
PROMPT = 4.0  # seconds within which a failure that needs no timeout is known, on a busy machine

# Children are forked from a server that has torch imported: they start in no time, and without the threads of this process.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["torch.distributed", "torch.testing"])


def together(scenario, folder, size=2, store="tcp", **arguments):
    """What ``scenario(rank, **arguments)`` gives on each rank of a new process group: its value, or an exit code.

    With ``store="tcp"`` the store is in the process of rank 0, as it is without torchrun.
    """
    ends, running = [], []
    for rank in range(size):
        end, other = processes.Pipe(duplex=False)
        child = processes.Process(
            target=_child, args=(scenario, rank, size, store, str(folder), other, arguments), daemon=True
        )
        child.start()
        other.close()
        ends.append(end)
        running.append(child)
    by = time.monotonic() + 40
    said = []
    try:
        for end, child in zip(ends, running):
            assert end.poll(max(by - time.monotonic(), 0)), "a rank hangs"
            try:
                said.append(end.recv())
            except EOFError:
                child.join(5)
                said.append(child.exitcode)
        for child in running:
            child.join(10)
            assert child.exitcode is not None, "a rank does not end"
    finally:
        for child in running:
            child.kill()
    broken = [value for value in said if isinstance(value, str)]
    assert not broken, "\n".join(broken)
    return said


def _child(scenario, rank, size, store, folder, end, arguments):
    try:
        dist.init_process_group(
            "gloo",
            store=_store(store, rank, size, Path(folder)),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=20),
        )
        dist.barrier()
        end.send(scenario(rank, **arguments))
    except BaseException as error:
        end.send(f"rank {rank}: {type(error).__name__}: {error}")
    end.close()


def _store(kind, rank, size, folder):
    if kind == "file":
        return dist.FileStore(str(folder / "store"), size)
    note = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        os.replace(folder / "new", note)
        return store
    while not note.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(note.read_text()), size, is_master=False)


def attempt(function):
    """How ``function()`` ends: (its value or None, the error's type name or None, its message, seconds)."""
    begin = time.monotonic()
    try:
        value, kind, message = function(), None, ""
    except BaseException as error:
        value, kind, message = None, type(error).__name__, str(error)
    return value, kind, message, time.monotonic() - begin


def group_works():
    """The process group still does its collectives, with all of its ranks."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == dist.get_world_size()


def failures(ends, message, within):
    for _, kind, said, seconds in ends:
        assert (kind, said) == ("RankFailure", message)
        assert seconds < within


# What runs on the ranks, in their processes.


def exchanging(rank, count=3):
    with Ranks(dist.group.WORLD, LONG) as ranks:
        got = [
            ranks.exchange({"rank": rank, "turn": turn, "text": "ü\ud800", "times": [0.5, None]})
            for turn in range(count)
        ]
        return ranks.rank, ranks.size, got, threading.active_count()


def raising(rank, raiser, error, after=1, pause=0.0):
    """All exchange ``after`` times, then ``raiser`` raises, and the others exchange once more or leave."""

    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            for _ in range(after):
                ranks.exchange(rank)
            if rank == raiser:
                time.sleep(pause)
                raise error
            return ranks.exchange(rank)

    return attempt(run), group_works()


def raising_last(rank, raiser):
    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            got = ranks.exchange(rank)
            if rank == raiser:
                raise ValueError("no room")
            return got

    return attempt(run), group_works()


def raising_both(rank):
    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            ranks.exchange(None)
            time.sleep(0.7 if rank == 2 else 0.3)
            if rank == 2:
                return ranks.exchange(None)
            raise ValueError(f"of {rank}")

    return attempt(run)


def late(rank, where):
    """Rank 1 sleeps beyond the timeout, before it enters, exchanges or leaves."""
    begin, reached = time.monotonic(), []

    def sleep(place):
        reached.append(place)
        if rank == 1 and place == where:
            time.sleep(2.5 * SHORT)

    def run():
        sleep("enter")
        with Ranks(dist.group.WORLD, SHORT) as ranks:
            sleep("exchange")
            ranks.exchange(rank)
            sleep("leave")

    result = attempt(run)
    return result, time.monotonic() - begin, group_works(), reached[-1]


def killed(rank, victim, where):
    """``victim`` ends without a word: before it enters, in the block, or while it waits for the others."""

    def end():
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        if rank == victim and where == "enter":
            end()
        with Ranks(dist.group.WORLD, SHORT if where == "enter" else LONG) as ranks:
            ranks.exchange(rank)
            if rank == victim:
                if where == "exchange":
                    threading.Timer(0.3, end).start()
                    return ranks.exchange(rank)
                end()
            if rank == 2:
                time.sleep(0.5)  # busy while it happens
            begin = time.monotonic()
            try:
                return ranks.exchange(rank)
            finally:
                nonlocal waited
                waited = time.monotonic() - begin

    waited = 0.0
    result = attempt(run)
    return (*result[:3], waited or result[3])


def stopped(rank):
    """The process with the store stops, and answers nobody until the other one has given up."""
    keeper = 0

    def run():
        nonlocal keeper
        with Ranks(dist.group.WORLD, SHORT) as ranks:
            keeper = ranks.exchange(os.getpid())[0]
            time.sleep(0.3)  # both have left the exchange
            if rank == 0:
                os.kill(keeper, signal.SIGSTOP)
            time.sleep(0.3)
            ranks.exchange(0)

    result = attempt(run)
    if rank == 1:
        os.kill(keeper, signal.SIGCONT)
    return result


def never(rank):
    def run():
        with Ranks(dist.group.WORLD, SHORT) as ranks:
            return ranks.exchange(rank)

    return attempt(run) if rank == 0 else None, group_works()


def missing(rank, entries):
    """Rank 0 misses the first entry, and comes to the others."""

    def run():
        with Ranks(dist.group.WORLD, SHORT) as ranks:
            return ranks.exchange(rank)

    ends = [attempt(run)] if rank else []
    for _ in range(entries):
        dist.barrier()
        ends.append(attempt(run))
    return [value for value, *_ in ends[-entries:]]


def interrupted(rank, waiting):
    """Rank 1 gets SIGINT: while it works, or while it waits for the other one."""

    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            ranks.exchange(rank)
            if rank == 1:
                threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
            if (rank == 1) is not waiting:
                time.sleep(1.0)
            return ranks.exchange(rank)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return attempt(run), group_works()


def swallowing(rank):
    """A failure that the block does not let out is a failure of its leaving; and so is one that is wrapped."""

    def run(wrap):
        with Ranks(dist.group.WORLD, LONG) as ranks:
            if rank == 1:
                ranks.exchange(1)
                raise ValueError("no room")
            try:
                ranks.exchange(0)
                ranks.exchange(0)
            except RankFailure as error:
                if wrap:
                    raise OSError("wrapped") from error

    return attempt(lambda: run(False)), attempt(lambda: run(True)), group_works()


def astray(rank):
    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            if rank == 0:
                ranks.exchange("one more")

    return attempt(run), group_works()


def unserializable(rank):
    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            return ranks.exchange(torch.bfloat16 if rank else 0)

    return attempt(run), group_works()


def subgroup(rank):
    """Of ranks 2 and 0 out of three; rank 1 has nothing to do with it."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return str(attempt(lambda: Ranks(group))[1:3]), group_works()
    with Ranks(group, LONG) as ranks:
        got = ranks.rank, ranks.size, ranks.exchange(f"global {rank}")

    def run():
        with Ranks(group, LONG) as ranks:
            if rank == 2:
                raise ValueError("no room")
            ranks.exchange(0)

    return got, attempt(run), group_works()


def groups(rank):
    """Entries of two groups of the same ranks, one inside of the other."""
    group, got = dist.new_group([0, 1]), []
    for _ in range(3):
        with Ranks(dist.group.WORLD, LONG) as outer, Ranks(group, LONG) as inner:
            got.append([outer.exchange(rank), inner.exchange(-rank), outer.exchange(rank + 10)])
    return got


def repeatedly(rank):
    """Twelve entries, every third of which fails, half of them with one object; and twenty to look for leaks."""

    def run(ranks, turn):
        with ranks:
            if turn % 3 == 2 and rank == turn % 2:
                raise ValueError(f"turn {turn}")
            return ranks.exchange([rank, turn])

    one, ends = Ranks(dist.group.WORLD, LONG), []
    for turn in range(12):
        ranks = Ranks(dist.group.WORLD, LONG) if turn < 6 else one
        ends.append(attempt(lambda ranks=ranks, turn=turn: run(ranks, turn)))
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with one:
            one.exchange(0)
    return ends, len(os.listdir("/proc/self/fd")) - descriptors, group_works()


def leaving_at_the_last_moment(rank):
    """Rank 1 comes to the end at about the time when rank 0 gives up."""
    dice, ends = random.Random(5), []
    for _ in range(10):
        delay = 0.3 + dice.uniform(-0.02, 0.02)

        def run(delay=delay):
            with Ranks(dist.group.WORLD, 0.3) as ranks:
                ranks.exchange(rank)
                if rank == 1:
                    time.sleep(delay)

        dist.barrier()
        ends.append(attempt(run)[1])
    return ends


def gone_at_once(rank, fail):
    """Rank 0, which has the store, ends its process right after; rank 1 looks at the store much later than rank 0."""
    if rank == 1:
        ranks_module.PAUSE_S = (0.4, 0.4)

    def run():
        with Ranks(dist.group.WORLD, LONG) as ranks:
            ranks.exchange(rank)
            if fail and rank == 0:
                raise ValueError("no room")

    result = attempt(run)
    if rank == 0:
        os._exit(7)
    return result


class TestExchange:
    @pytest.mark.parametrize(("size", "store"), [(2, "tcp"), (2, "file"), (3, "tcp")])
    def test_values_of_all_in_their_order(self, size, store, tmp_path):
        expected = [
            [{"rank": rank, "turn": turn, "text": "ü\ud800", "times": [0.5, None]} for rank in range(size)]
            for turn in range(3)
        ]
        for rank, (own, count, got, threads) in enumerate(together(exchanging, tmp_path, size, store)):
            assert (own, count, threads) == (rank, size, 1)
            assert got == expected

    def test_many_times(self, tmp_path):
        for rank, (ends, leaked, works) in enumerate(together(repeatedly, tmp_path)):
            for turn, (value, kind, message, seconds) in enumerate(ends):
                assert seconds < PROMPT
                if turn % 3 != 2:
                    assert value == [[0, turn], [1, turn]], message
                elif rank == turn % 2:
                    assert (kind, message) == ("ValueError", f"turn {turn}")
                else:
                    assert (kind, message) == ("RankFailure", f"rank {turn % 2}: ValueError: turn {turn}")
            assert leaked <= 0
            assert works

    def test_groups_of_the_same_ranks(self, tmp_path):
        for got in together(groups, tmp_path):
            assert got == 3 * [[[0, 1], [0, -1], [10, 11]]]

    def test_subgroup(self, tmp_path):
        first, outside, second = together(subgroup, tmp_path, 3)
        values = ["global 0", "global 2"]
        assert (first[0], second[0]) == ((0, 2, values), (1, 2, values))
        failures([first[1]], "rank 1: ValueError: no room", PROMPT)
        assert second[1][1:3] == ("ValueError", "no room")
        assert "ValueError" in outside[0]
        assert "outside of the group" in outside[0]
        assert first[2]
        assert second[2]
        assert outside[1]


class TestRaising:
    @pytest.mark.parametrize("raiser", [0, 1])
    @pytest.mark.parametrize("after", [0, 2])
    def test_others_fail_at_once(self, raiser, after, tmp_path):
        ends = together(raising, tmp_path, raiser=raiser, error=ValueError("no room"), after=after, pause=0.2)
        assert all(works for _, works in ends)
        assert ends[raiser][0][1:3] == ("ValueError", "no room")
        assert ends[raiser][0][3] < PROMPT
        failures([ends[1 - raiser][0]], f"rank {raiser}: ValueError: no room", PROMPT)

    def test_three(self, tmp_path):
        ends = together(raising, tmp_path, 3, "file", raiser=1, error=KeyboardInterrupt())
        assert all(works for _, works in ends)
        assert ends[1][0][1] == "KeyboardInterrupt"
        failures([ends[0][0], ends[2][0]], "rank 1: KeyboardInterrupt", PROMPT)

    def test_after_the_last_exchange(self, tmp_path):
        first, second = together(raising_last, tmp_path, raiser=1)
        assert second[0][1:3] == ("ValueError", "no room")
        failures([first[0]], "rank 1: ValueError: no room", PROMPT)
        assert first[1]
        assert second[1]

    def test_all_that_raised_are_named(self, tmp_path):
        ends = together(raising_both, tmp_path, 3)
        assert [end[1] for end in ends] == ["ValueError", "ValueError", "RankFailure"]
        assert ends[2][2] == "rank 0: ValueError: of 0; rank 1: ValueError: of 1"

    def test_a_failure_cannot_be_swallowed(self, tmp_path):
        first, second = together(swallowing, tmp_path)
        failures([first[0]], "rank 1: ValueError: no room", PROMPT)
        assert first[1][1:3] == ("OSError", "wrapped")
        assert second[0][1:3] == second[1][1:3] == ("ValueError", "no room")
        assert first[2]
        assert second[2]

    def test_not_in_lock_step(self, tmp_path):
        ends = together(astray, tmp_path)
        for end, works in ends:
            assert works
            assert end[1] == "RankFailure"
            assert "rank 1: was at leaving when rank 0 was at an exchange" in end[2] or (
                "rank 0: was at an exchange when rank 1 was at leaving" in end[2]
            )
            assert end[3] < PROMPT

    def test_a_value_that_is_not_plain(self, tmp_path):
        first, second = together(unserializable, tmp_path)
        assert second[0][1] == "TypeError"
        assert first[0][1] == "RankFailure"
        assert first[0][2].startswith("rank 1: TypeError: Object of type dtype")

    @pytest.mark.parametrize("waiting", [False, True])
    def test_interrupt(self, waiting, tmp_path):
        first, second = together(interrupted, tmp_path, waiting=waiting)
        assert second[0][1] == "KeyboardInterrupt"
        assert second[0][3] < PROMPT
        failures([first[0]], "rank 1: KeyboardInterrupt", PROMPT)
        assert first[1]
        assert second[1]


class TestSilence:
    @pytest.mark.parametrize("where", ["enter", "exchange", "leave"])
    def test_late(self, where, tmp_path):
        ends = together(late, tmp_path, where=where)
        failures([end for end, *_ in ends], f"rank 1: no answer within {SHORT:g} s", 2.5 * SHORT + 1)
        assert SHORT <= ends[0][1] < SHORT + ranks_module.GRACE_S + 0.5
        assert ends[1][1] < 2.5 * SHORT + 0.5
        assert ends[1][3] == where, "the late one fails when it comes, though all values are there"
        assert all(works for _, _, works, _ in ends)

    def test_never_comes(self, tmp_path):
        first, second = together(never, tmp_path)
        failures([first[0]], f"rank 1: no answer within {SHORT:g} s", SHORT + ranks_module.GRACE_S + 0.5)
        assert first[1]
        assert second[1]

    @pytest.mark.parametrize("store", ["tcp", "file"])
    def test_an_entry_that_one_rank_missed_sets_it_back_once(self, store, tmp_path):
        assert together(missing, tmp_path, 2, store, entries=4) == [[None, [0, 1], [0, 1], [0, 1]]] * 2

    @pytest.mark.parametrize(("where", "store"), [("block", "tcp"), ("block", "file"), ("exchange", "tcp")])
    def test_killed(self, where, store, tmp_path):
        first, second, third = together(killed, tmp_path, 3, store, victim=1, where=where)
        assert second == -signal.SIGKILL
        failures([first, third], "rank 1: its process ended", PROMPT)

    def test_killed_with_the_store(self, tmp_path):
        first, second, third = together(killed, tmp_path, 3, victim=0, where="block")
        assert first == -signal.SIGKILL
        # The one of them that sees it later may find that the other one has ended since.
        ends = [(kind, said.partition(";")[0]) for _, kind, said, _ in (second, third)]
        assert ends == 2 * [("RankFailure", "rank 0: its process ended")]
        assert max(second[3], third[3]) < PROMPT

    def test_killed_before_it_enters(self, tmp_path):
        first, second = together(killed, tmp_path, victim=1, where="enter")
        assert second == -signal.SIGKILL
        failures([first], f"rank 1: no answer within {SHORT:g} s", SHORT + ranks_module.GRACE_S + 0.5)

    def test_killed_and_not_watched(self, tmp_path):
        """On another machine, say, or where process descriptors are forbidden: when the time is up."""
        first, second = together(killed_unseen, tmp_path)
        assert second == -signal.SIGKILL
        failures([first], f"rank 1: no answer within {SHORT:g} s", SHORT + ranks_module.GRACE_S + 0.5)

    def test_store_that_stops(self, tmp_path):
        first, second = together(stopped, tmp_path)
        assert second[1] == "RankFailure"
        assert second[2].startswith("rank 1: lost the store of the process group: it does not answer")
        assert second[3] < 0.6 + SHORT + 2 * ranks_module.GRACE_S + 0.5
        assert first[1] == "RankFailure"


def killed_unseen(rank):
    ranks_module._process = lambda: None

    def run():
        with Ranks(dist.group.WORLD, SHORT) as ranks:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.exchange(rank)

    return attempt(run)


class TestLeaving:
    def test_all_or_none(self, tmp_path):
        first, second = together(leaving_at_the_last_moment, tmp_path)
        assert first == second
        assert set(first) <= {None, "RankFailure"}

    @pytest.fixture
    def sessions(self):
        """Those of two ranks that have entered, and whose exchanges do nothing from then on."""
        store = dist.HashStore()
        sessions = [ranks_module._Session(store, rank, 2, LONG) for rank in (0, 1)]
        threads = [threading.Thread(target=session.enter) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for session in sessions:
            session.exchange = lambda at, text: []
        return sessions

    def test_a_rank_gives_up_when_another_has_left_with_success(self, sessions):
        sessions[0].agree()
        assert sessions[1]._decide("failed", {0: "no answer"}) == "agreed"
        sessions[1]._fail({0: "no answer"})  # raises nothing
        sessions[1].agree()

    def test_a_rank_comes_to_the_end_when_another_has_given_up(self, sessions):
        assert sessions[1]._decide("failed", {0: "no answer"}) == "failed"
        with pytest.raises(RankFailure, match=r"^rank 0: no answer$"):
            sessions[0].agree()

    def test_process_of_the_store_ends_with_success(self, tmp_path):
        first, second = together(gone_at_once, tmp_path, fail=False)
        assert first == 7
        assert second[1:3] == (None, "")

    def test_process_of_the_store_ends_with_a_failure(self, tmp_path):
        first, second = together(gone_at_once, tmp_path, fail=True)
        assert first == 7
        failures([second], "rank 0: ValueError: no room", PROMPT)


class TestAlone:
    def test_none_is_one_rank(self):
        with Ranks(None) as ranks:
            assert (ranks.rank, ranks.size) == (0, 1)
            assert ranks.exchange({"a": [1, None]}) == [{"a": [1, None]}]
            assert ranks.exchange((1, 2)) == [[1, 2]], "as with several ranks"
        with pytest.raises(TypeError):
            ranks.exchange(torch.bfloat16)

    def test_exceptions_pass(self):
        with pytest.raises(KeyboardInterrupt), Ranks(None):
            raise KeyboardInterrupt

    def test_torch_distributed_is_not_touched(self):
        code = """
import sys, types
import torch
class Broken(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError(f"torch.distributed.{name} was touched")
from lowbatch_lmhead.tuning.ranks import Ranks
sys.modules["torch.distributed"] = torch.distributed = Broken("torch.distributed")
with Ranks(None) as ranks:
    print(ranks.exchange(5))
try:
    Ranks("world")
except AssertionError as error:
    print(error)
"""
        assert python(code).split("\n")[:2] == ["[5]", "torch.distributed.is_available was touched"]

    def test_group_of_one(self, tmp_path):
        ((rank, size, got, _),) = together(exchanging, tmp_path, 1)
        assert (rank, size, len(got)) == (0, 1, 3)


class TestArguments:
    @pytest.mark.parametrize("group", ["world", 0, 5, True, [0, 1], dist.ProcessGroup, object()])
    def test_no_process_group(self, group):
        with pytest.raises(ValueError, match=r"torch\.distributed\.group\.WORLD, or None for one; it is ") as raised:
            Ranks(group)
        assert repr(group) in str(raised.value)

    def test_group_of_other_ranks(self):
        with pytest.raises(ValueError, match="-100, which new_group gives to ranks outside of the group"):
            Ranks(dist.GroupMember.NON_GROUP_MEMBER)

    def test_distributed_is_not_available(self, monkeypatch):
        monkeypatch.setattr(dist, "is_available", lambda: False)
        with pytest.raises(ValueError, match="it is 'world'"):
            Ranks("world")

    def test_group_without_a_store(self):
        with pytest.raises(ValueError, match="has no store"):
            Ranks(dist.ProcessGroup(0, 2))

    def test_exchange_outside_of_the_block(self):
        ranks = Ranks(dist.ProcessGroup(dist.HashStore(), 0, 2))
        with pytest.raises(RuntimeError, match="inside of the with block"):
            ranks.exchange(0)

    def test_timeout_is_read_at_the_call(self, monkeypatch):
        ranks = Ranks(dist.ProcessGroup(dist.HashStore(), 1, 2))
        monkeypatch.setattr(ranks_module, "TIMEOUT_S", 0.2)
        monkeypatch.setattr(ranks_module, "GRACE_S", 0.1)
        _, kind, message, seconds = attempt(ranks.__enter__)
        assert (kind, message) == ("RankFailure", "rank 0: no answer within 0.2 s")
        assert seconds < 1

    def test_failure_can_be_pickled(self):
        failure = pickle.loads(pickle.dumps(RankFailure("rank 1: ValueError: no room")))
        assert str(failure) == "rank 1: ValueError: no room"
