"""Processes that the kernel has ended for want of memory, by made-up cgroups of both versions and a made-up log."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from megasdc.common.host import FIRST_PIDS, MemoryKill, MemoryWatch, memory_use, own_prefix

MIB = 1 << 20
LINE = "3,900,{at},-;{what} Killed process {pid} (python) total-vm:9kB, anon-rss:{kib}kB, file-rss:4kB, shmem-rss:0kB\n"


class Host:
    """A host with 1000 MiB, and a cgroup of this process, which counts where it has a version."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.cgroups, self.log = folder / "proc", folder / "cgroups", folder / "kmsg"
        self.shared = folder / "shared"
        (self.proc / "self" / "ns").mkdir(parents=True)
        (self.proc / "self" / "ns" / "pid").symlink_to(FIRST_PIDS)
        self.version = version
        place = {0: "0::/\n", 1: "4:memory:/job/step\n0::/\n", 2: "0::/job/step\n"}[version]
        (self.proc / "self" / "cgroup").write_text(place)
        self.own = self.cgroups / ("memory/job/step" if version == 1 else "job/step")
        self.log.write_text("")
        self.in_files = 0
        self.uses(used=100)

    def uses(self, used: int, kills: int = 0) -> None:
        """Of MiB without files, in all, and how many the cgroup counts as killed."""
        meminfo = f"MemTotal: {1000 * 1024} kB\nMemAvailable: {500 * 1024} kB\nAnonPages: {used * 1024} kB\n"
        (self.proc / "meminfo").write_text(meminfo)
        if not self.version:
            return
        self.own.mkdir(parents=True, exist_ok=True)
        limit, stat, count = {
            1: ("limit_in_bytes", "total_rss", "oom_control"),
            2: ("max", "anon", "events"),
        }[self.version]
        (self.own / f"memory.{limit}").write_text(f"{800 * MIB}\n")
        (self.own / "memory.stat").write_text(f"file 5\n{stat} {used * MIB}\n")
        (self.own / f"memory.{count}").write_text(f"oom_kill_disable 0\nunder_oom 0\noom 7\noom_kill {kills}\n")

    def runs(self, pid: int, mib: int) -> None:
        """A process with so much memory."""
        (self.proc / str(pid)).mkdir()
        (self.proc / str(pid) / "status").write_text(f"Name: x\nRssAnon: {mib * 1024} kB\nRssFile: 9 kB\n")

    def says(self, pid: int, mib: int, what: str = "Memory cgroup out of memory:") -> None:
        """An entry of the kernel's log."""
        with self.log.open("a") as file:
            file.write("6,1,2,-;device eth0 entered promiscuous mode\n")
            file.write(LINE.format(at=5, what=what, pid=pid, kib=mib * 1024))

    def watch(self) -> MemoryWatch:
        """From now on."""
        return MemoryWatch(self.proc, self.cgroups, self.log, self.shared)

    def holds(self, name: str, mib: int) -> None:
        """A file in memory, which counts as such, written now."""
        path = self.shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes(mib * MIB))
            os.fsync(file.fileno())  # the disk of this test gives it blocks then
        with (self.proc / "meminfo").open("a") as file:
            self.in_files += mib
            file.write(f"Shmem: {self.in_files * 1024} kB\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_count_of_the_cgroup_that_grew_says_so(tmp_path: Path, version: int) -> None:
    """Where the log is not read. What was counted before does not; the numbers leave out what ranks that live have."""
    host = Host(tmp_path, version)
    host.log.unlink()
    host.uses(used=100, kills=3)
    watch = host.watch()
    host.runs(8, 250)
    assert watch.of(7, [8]) is None, "somebody else has killed it"
    host.uses(used=370, kills=4)
    assert watch.of(7, [8, 9]) == MemoryKill(800 * MIB, 120 * MIB, 100 * MIB, None)
    assert watch.of(6, [8]) is None, "one was counted, and told of"
    host.uses(used=370, kills=5)
    watch.all_run()
    watch.all_run()
    assert watch.of(6, [8]) is None, "a worker was it, and all ranks went on"


def test_the_log_of_the_kernel_says_so_where_it_is_read(tmp_path: Path) -> None:
    """Of the process itself and since then, whatever a cgroup counts; not where its ids are those of others."""
    host = Host(tmp_path, 2)
    host.says(5, 1)
    watch = host.watch()
    host.uses(used=700, kills=1)
    host.says(7, 600, "Out of memory:")
    assert watch.of(6, []) is None and watch.of(5, []) is None
    assert watch.of(7, []) == MemoryKill(800 * MIB, 700 * MIB, 100 * MIB, 600 * MIB)
    (host.proc / "self" / "ns" / "pid").unlink()
    (host.proc / "self" / "ns" / "pid").symlink_to("pid:[4026532000]")
    host.version = 0
    (host.proc / "self" / "cgroup").write_text("0::/\n")
    assert watch.of(7, []) is None


@pytest.mark.parametrize("what", ["Out of memory (oom_kill_allocating_task):", "", "Memory cgroup out of memory:"])
def test_entries_of_all_kernels_are_read(tmp_path: Path, what: str) -> None:
    """With what one of a sysctl says before, and with nothing, as until 5.0."""
    host = Host(tmp_path, 0)
    watch = host.watch()
    host.says(7, 600, what)
    assert (kill := watch.of(7, [])) is not None and kill.process == 600 * MIB


def test_numbers_that_a_host_does_not_tell_are_none(tmp_path: Path) -> None:
    """The launcher goes on, and so it does with a cgroup whose name is no UTF-8."""
    host = Host(tmp_path, 0)
    (host.proc / "self" / "cgroup").write_bytes(b"0::/\xff\n")
    assert host.watch().of(7, []) is None
    (host.proc / "meminfo").unlink()
    watch = host.watch()
    host.says(7, 600)
    assert watch.of(7, []) == MemoryKill(None, None, None, 600 * MIB)


def test_memory_that_is_set_apart_as_huge_pages_is_not_for_programs(tmp_path: Path) -> None:
    """Which get none of it without asking."""
    host = Host(tmp_path, 0)
    with (host.proc / "meminfo").open("a") as file:
        file.write(f"Hugetlb: {300 * 1024} kB\n")
    assert memory_use(host.proc, host.cgroups).total == 700 * MIB


@pytest.mark.parametrize("version", [0, 1, 2])
def test_shared_memory_is_told_and_is_nobodys(tmp_path: Path, version: int) -> None:
    """What lies in /dev/shm may be the run's own snapshots: a host is not blamed for it."""
    host = Host(tmp_path, version)
    watch = host.watch()
    if version:
        with (host.own / "memory.stat").open("a") as file:
            file.write(f"{'shmem' if version == 2 else 'total_shmem'} {200 * MIB}\n")
    else:
        with (host.proc / "meminfo").open("a") as file:
            file.write(f"Shmem: {200 * 1024} kB\n")
    host.says(7, 600)
    assert (kill := watch.of(7, [])) is not None and (kill.others, kill.shared) == (100 * MIB, 200 * MIB)


def test_a_host_that_tells_nothing_has_no_sign_of_it(tmp_path: Path) -> None:
    """No log that this user may read, and no cgroup."""
    host = Host(tmp_path, 0)
    host.log.unlink()
    assert host.watch().of(7, []) is None


@pytest.mark.parametrize("stranger", [False, True])
def test_files_in_memory_are_others_where_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: bool
) -> None:
    """Those of other users, and what was there before; what this user has written since may be the run's own."""
    host = Host(tmp_path, 0)
    host.holds("torch_left_by_an_earlier_job", 3)
    os.utime(host.shared / "torch_left_by_an_earlier_job", (1.0, 1.0))
    host.holds(f"{own_prefix()}memory-run-node1/rank_0", 5)
    os.utime(host.shared / f"{own_prefix()}memory-run-node1/rank_0", (1.0, 1.0))
    watch = host.watch()
    left = memory_use(host.proc, host.cgroups, host.shared)
    assert left.total - left.used == (1000 - 100 - 3) * MIB and left.shared == 5 * MIB, "snapshots are the run's own"
    host.holds("folder/written_since", 20)
    if stranger:
        monkeypatch.setattr(os, "getuid", lambda: 12345678)
    host.says(7, 600)
    kill = watch.of(7, [])
    assert kill is not None and kill.before == 103 * MIB
    assert (kill.others, kill.shared) == ((128 * MIB, None) if stranger else (103 * MIB, 25 * MIB))


def test_a_data_worker_that_was_killed_for_memory_has_ended_its_rank(tmp_path: Path) -> None:
    """By what PyTorch says of it, and the kernel's log; not one that somebody else has killed."""
    host = Host(tmp_path, 0)
    watch = host.watch()
    with pytest.raises(RuntimeError, match="worker") as raised:
        list(torch.utils.data.DataLoader(Killed(), num_workers=1))
    said = str(raised.value)
    (pid,) = (int(word) for word in re.findall(r"pid(?:\(s\))? (\d+)", said))
    host.says(pid + 1, 600)
    assert watch.of_worker(said, []) is None
    host.says(pid, 600)
    assert watch.of_worker(said, []) == MemoryKill(1000 * MIB, 100 * MIB, 100 * MIB, 600 * MIB)
    assert watch.of_worker("shard 3 is damaged", []) is None


class Killed(torch.utils.data.Dataset[int]):
    """Data whose worker is killed."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return place


@pytest.mark.parametrize("age_s", [1.0, 100.0])
def test_a_worker_was_it_where_the_cgroup_has_counted_shortly_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """A rank takes its time to end, and runs meanwhile; what was counted long before has not ended it."""
    host, now = Host(tmp_path, 2), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    host.log.unlink()
    host.uses(used=100, kills=3)
    watch = host.watch()
    said = "A process in the process pool was terminated abruptly while the future was running or pending."
    assert watch.of_worker(said, []) is None
    host.uses(used=700, kills=4)
    for _ in range(3):
        watch.all_run()
        now[0] += age_s
    assert (watch.of_worker(said, []) is None) == (age_s > 60.0)
    assert watch.of_worker("shard 3 is damaged", []) is None
