"""Where do ranks meet that this process starts? At a port that nobody else has, or nowhere."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.common.errors import LaunchError, MegasdcError
from megasdc.parallel import local_ranks
from megasdc.parallel.local_ranks import LocalMeeting, free_port, local_rank_environment, reserved_port
from megasdc.parallel.rendezvous import Identity, join_store


def test_a_free_port_is_no_port_of_connections() -> None:
    """What Linux hands out by itself starts above it, and it can be listened on."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first = int(file.read().split()[0])
    port = free_port()
    assert port < first
    with socket.create_server(("", port)):
        pass


def test_a_taken_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and where there is no other, the range is named."""
    with socket.create_server(("", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(local_ranks, "UNASSIGNED_PORTS", range(taken, taken + 1))
        with pytest.raises(MegasdcError, match=f"no port from {taken} to {taken} is free"):
            free_port()
    assert free_port() == taken


def test_ranks_meet_in_a_folder_of_the_user_alone() -> None:
    """Meetings side by side have folders of their own, which end with them; nobody else can look into them."""
    meetings = [LocalMeeting(), LocalMeeting()]
    folders = [one.folder for one in meetings]
    assert folders[0] != folders[1] and all(one.stat().st_mode & 0o777 == 0o700 for one in folders)
    environment = local_rank_environment(0, 2, 1, meetings[0].environment)
    assert (environment["MEGASDC_MEETING"], environment["TORCHELASTIC_USE_AGENT_STORE"]) == (str(folders[0]), "True")
    meetings[0].close()
    del meetings
    assert not any(one.exists() for one in folders)


def test_a_meeting_of_a_killed_process_is_removed_by_the_next() -> None:
    """And one whose process lives stays."""
    code = "from megasdc.parallel.local_ranks import LocalMeeting as M; m = M(); print(m.folder, flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        LocalMeeting()
        assert folder.is_dir()
        holder.kill()
    LocalMeeting()
    assert not folder.exists()


def test_a_meeting_in_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, one that others may write to, or a link to one: nothing of it is read."""
    link, opened = tmp_path / "link", tmp_path / "open"
    opened.mkdir(mode=0o700)
    link.symlink_to(opened)
    own = Identity(0, 1, "l", None, None, "n", "b", None, (1, 1))
    monkeypatch.setenv("MEGASDC_MEETING", str(link))
    with pytest.raises(LaunchError, match="this user's alone"):
        join_store(own, 5.0)
    monkeypatch.setenv("MEGASDC_MEETING", str(opened))
    opened.chmod(0o770)
    with pytest.raises(LaunchError, match="this user's alone"):
        join_store(own, 5.0)
    opened.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(LaunchError, match="this user's alone"):
        join_store(own, 5.0)


def listening(pid: int) -> set[str]:
    """Addresses and ports on which a process listens, as the kernel prints them."""
    own = set()
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1])
    return found


RANK = """
import os, torch, torch.distributed as dist
from megasdc.parallel.rendezvous import Identity
from megasdc.parallel.rendezvous import meet
rank = int(os.environ["RANK"])
store = meet(Identity.own(rank, 2, None), 60.0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
value = torch.ones(1)
dist.all_reduce(value)
print(int(value), flush=True)
input()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_join_a_meeting() -> None:
    """Who wants to come as rank 1 neither finds the store nor can make one in its place."""
    meeting = LocalMeeting()
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            for attempt in (os.listdir, os.rmdir, lambda folder: (folder / "store").touch()):
                with contextlib.suppress(PermissionError):
                    attempt(meeting.folder)
                    code = 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and meeting.folder.is_dir()


@pytest.mark.slow
def test_ranks_of_one_host_listen_on_loopback_alone() -> None:
    """Neither the ranks, which meet and sum, nor the process that holds their meeting can be reached from elsewhere."""
    before = listening(os.getpid())
    meeting = LocalMeeting()
    ranks = []
    for rank in range(2):
        environment = local_rank_environment(rank, 2, 1, meeting.environment)
        command = [sys.executable, "-c", RANK]
        ranks.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    try:
        assert [one.stdout.readline() for one in ranks if one.stdout] == ["2\n", "2\n"]
        addresses = {one.partition(":")[0] for rank in ranks for one in listening(rank.pid)}
        assert addresses == {"0100007F"}
        assert listening(os.getpid()) <= before
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def test_a_held_port_is_for_one_listener() -> None:
    """While it is held, one store can listen there, a second one cannot, and nobody is given it as free."""
    import torch.distributed as dist

    with reserved_port() as port:
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        del store
