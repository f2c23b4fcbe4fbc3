"""Lock files that the kernel lets go when a worker's process dies."""

import os
import signal
from pathlib import Path

from omniq.storage.liveness import WorkerLocks


def child_holding(folder: Path, worker: str) -> int:
    """A process that holds the lock of a worker until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        WorkerLocks(folder).hold(worker)
        os.write(write, b"!")
        while True:
            signal.pause()
    os.close(write)
    os.read(read, 1)
    os.close(read)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_without_a_folder_nobody_is_lost(tmp_path: Path) -> None:
    assert WorkerLocks(tmp_path / "none").lost() == []


def test_a_worker_is_lost_when_its_process_has_died(tmp_path: Path) -> None:
    locks = WorkerLocks(tmp_path / "locks")
    child = child_holding(tmp_path / "locks", "host:1:abc")
    assert locks.lost() == []
    locks.forget("host:1:abc")
    assert locks.lost() == []
    kill(child)
    assert locks.lost() == ["host:1:abc"]
    locks.forget("host:1:abc")
    assert locks.lost() == []
    assert list((tmp_path / "locks").iterdir()) == []


def test_ones_own_worker_is_never_lost_and_looking_does_not_cost_its_lock(tmp_path: Path) -> None:
    """A POSIX lock goes when its process closes any descriptor of the file."""
    locks = WorkerLocks(tmp_path / "locks")
    locks.hold("mine")
    assert locks.lost() == []
    assert WorkerLocks(tmp_path / "locks").lost() == []
    locks.forget("mine")
    child = os.fork()
    if child == 0:
        os._exit(len(WorkerLocks(tmp_path / "locks").lost()))
    assert os.waitpid(child, 0)[1] == 0
    locks.release("mine")
    assert list((tmp_path / "locks").iterdir()) == []
    locks.release("mine")


def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        WorkerLocks(folder).hold("parent")
        grandchild = os.fork()
        if grandchild == 0:
            while True:
                signal.pause()
        os.write(write, grandchild.to_bytes(8))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    grandchild = int.from_bytes(os.read(read, 8))
    os.close(read)
    os.close(write)
    try:
        assert WorkerLocks(folder).lost() == ["parent"]
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_any_text_may_be_a_workers_name(tmp_path: Path) -> None:
    name = "höst/../x:1:%41 y"
    child = child_holding(tmp_path / "locks", name)
    kill(child)
    assert WorkerLocks(tmp_path / "locks").lost() == [name]
    assert [p.parent for p in (tmp_path / "locks").iterdir()] == [tmp_path / "locks"]


def test_the_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    locks = WorkerLocks(tmp_path / "locks")
    locks.hold("w")
    assert (tmp_path / "locks").stat().st_mode & 0o077 == 0
    locks.release("w")


def test_no_name_leaves_the_folder_and_each_comes_back(tmp_path: Path) -> None:
    for worker in ("..", ".", "../x", "x" * 5000, "\r\n" * 100, "🐝" * 100, "a/b\0c", "+plus"):
        locks = WorkerLocks(tmp_path / "locks")
        child = child_holding(tmp_path / "locks", worker)
        kill(child)
        assert locks.lost() == [worker]
        locks.forget(worker)
        assert list((tmp_path / "locks").iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["locks"]


def test_what_no_worker_left_there_hides_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    kill(child_holding(folder, "dead"))
    for name in (b"caf\xe9", b"%E9", b"a b", b"+", b"+caf\xe9"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"\xff\xfe")
    assert WorkerLocks(folder).lost() == ["dead"]
