"""Does a checkpoint come back bit for bit, after kills too, and is everything else refused without a loss?"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from run_to_archive import RUN, contents, invoke, killed_command

from megasdc.checkpoint.manifest import has_marker, read_manifest
from megasdc.checkpoint.save import Retention, find_due, list_due
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.checkpoint.writer_process import Act, act
from megasdc.common.errors import CheckpointError, ConfigError, StorageError
from megasdc.ops.archive import cut, lease, store
from megasdc.ops.archive.entries import read_entries
from megasdc.ops.archive.prune import prune_archive
from megasdc.ops.archive.pull import pull_checkpoint
from megasdc.ops.archive.push import push_checkpoint
from megasdc.ops.archive.record import LEASES, open_archive
from megasdc.ops.archive.verify import verify_archive


@pytest.mark.parametrize("memory", [False, True], ids=["folder", "store that renames"])
def test_a_pull_gives_every_bit_back(checkpoints: Path, tmp_path: Path, memory: bool) -> None:
    """Both steps; what did not change is stored once; a second push stores nothing."""
    address = f"memory://{tmp_path.name}" if memory else str(tmp_path / "archive")
    first = push_checkpoint(checkpoints / "step_00000002", address)
    again = push_checkpoint(checkpoints / "step_00000002", address)
    assert again.already and not again.new_blocks and again.known_bytes == first.new_bytes
    second = push_checkpoint(checkpoints, address)
    assert second.step == 4 and second.known_blocks > 0, "the random generators did not change"
    for step in (2, 4):
        report = pull_checkpoint(address, tmp_path / "out", step=step)
        assert contents(Path(report.path)) == contents(checkpoints / f"step_{step:08d}")
        assert verify_checkpoint(report.path).ok
    assert (tmp_path / "out" / "latest").read_text() == "step_00000004\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest", "step_00000002", "step_00000004"]
    assert pull_checkpoint(address, tmp_path / "out", step=4).kept_bytes == second.size_bytes
    assert verify_archive(address).ok


def test_a_checkpoint_of_another_run_is_not_put_into_a_run(checkpoints: Path, tmp_path: Path) -> None:
    """The run would go on from it; named by its id it is. Into the folder of its own run it comes without."""
    push_checkpoint(checkpoints, str(tmp_path / "archive"))
    (tmp_path / "other").mkdir()
    identity = (checkpoints.parent / "run.json").read_text()
    (tmp_path / "other" / "run.json").write_text(identity.replace(RUN, "20261125-100000-000000"))
    with pytest.raises(
        CheckpointError, match=f"of run 20261125-100000-000000, and the archive has {RUN}: pull it into"
    ):
        pull_checkpoint(str(tmp_path / "archive"), tmp_path / "other" / "checkpoints")
    assert not (tmp_path / "other" / "checkpoints").exists()
    assert pull_checkpoint(str(tmp_path / "archive"), tmp_path / "other" / "checkpoints", run=RUN).step == 4
    shutil.rmtree(checkpoints / "step_00000004")
    assert pull_checkpoint(str(tmp_path / "archive"), checkpoints).step == 4


def test_fp32_weights_and_master_weights_are_stored_once(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter of a layer's file has the blocks that it has in a shard of the optimizer."""
    import hand_made

    monkeypatch.setattr(cut, "LARGE_BYTES", 1 << 10)
    whole = hand_made.make_whole(6)
    hand_made.write_checkpoint(checkpoints, 6, whole={**whole, "weight": whole["master"]})
    report = push_checkpoint(checkpoints / "step_00000006", str(tmp_path / "archive"))
    weights = sum(tensor.nbytes for tensor in whole["master"].values() if tensor.nbytes >= 1 << 10)
    assert report.known_bytes >= weights


@pytest.mark.slow
def test_a_push_that_was_killed_goes_on(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed in the middle: no step is there, and the next push stores the other blocks only."""
    address = tmp_path / "archive"
    blocks = "blocks/*/[0-9a-f]*"
    killed = killed_command(
        ["push", checkpoints, address, "--workers", 1], lambda: len(list(address.glob(blocks))) >= 5
    )
    assert killed == -signal.SIGKILL
    assert read_entries(open_archive(str(address))) == [] and len(list(address.glob("leases/*.json"))) == 1
    there = {path.name for path in address.glob(blocks)}
    report = push_checkpoint(checkpoints, str(address))
    assert report.known_blocks >= len(there) >= 5 and report.new_blocks > 0
    assert pull_checkpoint(str(address), tmp_path / "out").step == 4
    with pytest.raises(StorageError, match="goes on; prune when it has ended"):
        prune_archive(str(address))
    monkeypatch.setattr(lease, "STALE_S", 0.0)
    prune_archive(str(address))
    assert not list(address.glob("leases/*")) and not list(address.rglob(".tmp_*")) and verify_archive(str(address)).ok


@pytest.mark.slow
def test_a_pull_that_was_killed_goes_on(checkpoints: Path, tmp_path: Path) -> None:
    """What it wrote is not fetched again; until the end there is no checkpoint."""
    address, out = tmp_path / "archive", tmp_path / "out"
    push_checkpoint(checkpoints, str(address))
    killed = killed_command(["pull", address, out, "--workers", 1], lambda: len(list(out.rglob("*.pt"))) >= 4)
    assert killed == -signal.SIGKILL and not (out / "step_00000004").exists()
    report = pull_checkpoint(str(address), out)
    assert report.kept_bytes > 0
    assert contents(out / "step_00000004") == contents(checkpoints / "step_00000004")
    assert sorted(path.name for path in out.iterdir()) == ["latest", "step_00000004"]


@pytest.mark.slow
def test_a_prune_that_was_killed_is_finished_by_the_next(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each deletion that it does; the step that is kept is whole at any moment."""
    for number in range(1, 8, 2):
        address = str(tmp_path / f"archive{number}")
        push_checkpoint(checkpoints / "step_00000002", address)
        push_checkpoint(checkpoints / "step_00000004", address)
        left, delete = [number], os.unlink

        def unlink(path: Any, left: list[int] = left, delete: Any = delete, **options: Any) -> None:
            if f"/{LEASES}/" not in str(path) and "/archive" in str(path):
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
            delete(path, **options)

        with monkeypatch.context() as patch:
            patch.setattr(store.os, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                prune_archive(address, keep_last=1)
        assert pull_checkpoint(address, tmp_path / f"out{number}", step=4).step == 4
        prune_archive(address, keep_last=1)
        report = verify_archive(address)
        assert report.ok and report.num_steps == 1 and report.unneeded == 0


@pytest.mark.slow
def test_a_real_kill_of_a_prune_loses_nothing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL while it deletes: the step that is kept is whole, the lease keeps others away until it is stale."""
    address = tmp_path / "archive"
    for step in (2, 4):
        push_checkpoint(checkpoints / f"step_{step:08d}", str(address))
    record = address / "runs" / RUN / "step_00000002" / "all.json"
    assert killed_command(["prune", address, "--keep-last", 1], lambda: not record.exists()) == -signal.SIGKILL
    assert pull_checkpoint(str(address), tmp_path / "out").step == 4
    with pytest.raises(StorageError, match="a prune of all runs"):
        prune_archive(str(address))
    monkeypatch.setattr(lease, "STALE_S", 0.0)
    prune_archive(str(address), keep_last=1)
    report = verify_archive(str(address))
    assert report.ok and report.num_steps == 1 and report.unneeded == 0


def test_another_content_of_a_step_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    """Nothing is overwritten; the same content saved again is the same; a step can be removed by name."""
    import hand_made

    address = str(tmp_path / "archive")
    push_checkpoint(checkpoints / "step_00000004", address)
    hand_made.write_checkpoint(tmp_path / "same", 4, layout=(1, 1, 2), save_id="another")
    assert push_checkpoint(tmp_path / "same", address, run=RUN).already
    other = hand_made.write_checkpoint(tmp_path / "other", 4, layout=(1, 1, 2), whole=hand_made.make_whole(5))
    code, text = invoke("push", other, address, "--run", RUN)
    assert code == 72 and "with other content" in text and f"--run {RUN} --step 4" in text
    code, text = invoke("push", checkpoints, address, "--quantize-moments", 8)
    assert code == 72 and "with other content" in text
    assert contents(Path(pull_checkpoint(address, tmp_path / "out").path)) == contents(checkpoints / "step_00000004")
    assert push_checkpoint(other, address, run="another-run").new_blocks > 0
    prune_archive(address, run=RUN, steps=(4,))
    assert push_checkpoint(other, address, run=RUN).known_blocks > 0
    assert invoke("prune", address, "--step", 4)[0] == 70
    assert invoke("pull", address, tmp_path / "two")[0] == 72, "two runs, none is named"


def test_rules_keep_the_newest_and_multiples(checkpoints: Path, tmp_path: Path) -> None:
    """Blocks that another step or run needs stay; --dry-run removes nothing."""
    address = str(tmp_path / "archive")
    for step in (2, 4):
        push_checkpoint(checkpoints / f"step_{step:08d}", address)
    push_checkpoint(checkpoints / "step_00000002", address, run="other")
    dry = prune_archive(address, run=RUN, keep_last=1, dry_run=True)
    assert dry.removed == {RUN: [2]} and len(read_entries(open_archive(address))) == 3
    assert prune_archive(address, run=RUN, keep_last=1, keep_every=2).removed == {}
    with pytest.raises(CheckpointError, match=f"has no run nobody; it holds {RUN}"):
        prune_archive(address, run="nobody", keep_last=1)
    report = prune_archive(address, keep_last=1)
    assert report.removed == {RUN: [2]} and report.num_blocks == 0, "the other run needs them"
    assert pull_checkpoint(address, tmp_path / "out", run="other").step == 2 and verify_archive(address).ok
    assert prune_archive(address, run="other", steps=(2,)).num_blocks > 0
    assert [entry.step for entry in read_entries(open_archive(address))] == [4] and verify_archive(address).ok


def test_quantized_moments_are_marked_and_must_be_accepted(checkpoints: Path, tmp_path: Path) -> None:
    """In the list, in the refusal, in the manifest; weights and masters keep every bit; zip checksums are right."""
    address = str(tmp_path / "archive")
    exact = push_checkpoint(checkpoints, str(tmp_path / "exact"))
    report = push_checkpoint(checkpoints, address, quantize_bits=8)
    assert report.stored_bytes < 0.65 * exact.stored_bytes and report.quantized is not None
    assert "quantized to 8 bits" in invoke("list", address)[1]
    code, text = invoke("pull", address, tmp_path / "out")
    assert code == 72 and "--accept-quantized" in text and "quantized to 8 bits" in text
    found = Path(pull_checkpoint(address, tmp_path / "out", accept_quantized=True).path)
    assert verify_checkpoint(found).ok and verify_archive(address).ok
    assert read_manifest(found).quantized_moments_bits == 8
    code, text = invoke("push", found, tmp_path / "again", "--run", RUN)
    assert code == 72 and "has quantized moments" in text
    assert read_manifest(checkpoints / "step_00000004").quantized_moments_bits is None
    for name, saved in contents(checkpoints / "step_00000004").items():
        if "optim_states" not in name:
            assert name == "manifest.json" or (found / name).read_bytes() == saved
            continue
        with zipfile.ZipFile(found / name) as members:
            assert members.testzip() is None
        one, other = (torch.load(folder / name, weights_only=False) for folder in (checkpoints / found.name, found))
        for place, state in one["optimizer_state_dict"]["base_optimizer_state"]["state"].items():
            got = other["optimizer_state_dict"]["base_optimizer_state"]["state"][place]
            large = state["exp_avg"].nbytes >= cut.LARGE_BYTES
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[moment], got[moment]) is not large
                np.testing.assert_allclose(got[moment], state[moment], atol=float(state[moment].abs().max()) / 30)
        masters = (state["optimizer_state_dict"]["single_partition_of_fp32_groups"] for state in (one, other))
        assert all(torch.equal(a, b) for a, b in zip(*masters, strict=True))


def test_parts_of_nodes_make_a_step(checkpoints: Path, tmp_path: Path) -> None:
    """Each node pushes its folder; the step is complete when all have; a pull takes a node's part."""
    import hand_made

    from megasdc.checkpoint.manifest import write_marker

    address, nodes = str(tmp_path / "archive"), {"n": [0], "m": [1]}
    folders = {}
    for node in nodes:
        of_node = {"storage": "node_local", "nodes": nodes, "node": node}
        path = hand_made.write_checkpoint(tmp_path / node, 6, layout=(1, 1, 2), **of_node)
        write_marker(path, read_manifest(path))
        folders[node] = path
    push_checkpoint(folders["n"], address, run=RUN)
    code, text = invoke("list", address)
    assert code == 72 and "node-m of 2 parts missing" in text
    assert invoke("pull", address, tmp_path / "early", "--node", "n")[0] == 72
    push_checkpoint(folders["m"], address, run=RUN)
    assert invoke("list", address)[0] == 0
    report = pull_checkpoint(address, tmp_path / "out", node="m")
    assert contents(Path(report.path)) == contents(folders["m"])
    assert has_marker(Path(report.path), read_manifest(Path(report.path)))
    code, text = invoke("pull", address, tmp_path / "out")
    assert code == 72 and "name one of its nodes with --node: m, n" in text
    (folders["n"] / "complete").unlink()
    assert invoke("push", folders["n"], address, "--run", RUN)[0] == 72, "not every node finished the save"


def test_a_checkpoint_that_is_pushed_is_not_deleted(checkpoints: Path, tmp_path: Path) -> None:
    """Retention leaves it to a later save; a killed push holds nothing."""
    killed = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time\nfrom pathlib import Path\nfrom megasdc.checkpoint.files import read_lock\n"
            "with read_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n",
            str(checkpoints / "step_00000002"),
        ],
        stdout=subprocess.PIPE,
    )
    assert killed.stdout is not None and killed.stdout.readline() == b"held\n"
    assert list_due(checkpoints, 4, Retention(last=1)) == [2]
    delete = Act(due=lambda: find_due(checkpoints, 4, Retention(last=1)))
    assert "is being archived" in act(delete).failed[0] and list_due(checkpoints, 4, Retention(last=1)) == [2]
    killed.kill()
    killed.wait()
    assert act(delete).failed == [] and list_due(checkpoints, 4, Retention(last=1)) == []


@pytest.mark.slow
def test_damaged_sources_are_not_archived(checkpoints: Path, tmp_path: Path) -> None:
    """A flipped bit in any file of the checkpoint: exit code 72, and no step in the archive."""
    address = tmp_path / "archive"
    for path in sorted((checkpoints / "step_00000004").glob("*.pt")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 4]) + whole[-99:])
        code, text = invoke("push", checkpoints, address)
        assert code == 72 and path.name in text and "damaged" in text
        path.write_bytes(whole[:-1])
        assert invoke("push", checkpoints, address)[0] == 72
        path.write_bytes(whole)
    assert read_entries(open_archive(str(address))) == []


def test_places_that_cannot_be_used_are_named(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full disk, no archive, no run, an unknown scheme, a missing package, a file in the way, another checkpoint."""
    address = str(tmp_path / "archive")
    push_checkpoint(checkpoints, address)
    assert invoke("pull", tmp_path / "nothing", tmp_path / "out")[0] == 72
    assert invoke("push", tmp_path / "nothing", address)[0] == 72
    shutil.copytree(checkpoints, tmp_path / "away" / "from" / "it")
    code, text = invoke("push", tmp_path / "away" / "from" / "it", address)
    assert code == 70 and "--run ID" in text
    code, text = invoke("list", "nosuch://bucket/a")
    assert code == 70 and "nosuch" in text
    for scheme in ("gs", "gcs"):
        monkeypatch.delitem(_registry, scheme, raising=False)  # another test may have loaded it
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    code, text = invoke("list", "gs://bucket/a")
    assert code == 78 and "pip install 'gcsfs>=2024.2'" in text
    (tmp_path / "file").touch()
    code, text = invoke("push", checkpoints, tmp_path / "file" / "archive")
    assert code == 77 and str(tmp_path / "file" / "archive") in text
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10))  # type: ignore[attr-defined]
        code, text = invoke("pull", address, tmp_path / "out")
    assert code == 77 and "0.0 MB free" in text
    shutil.copytree(checkpoints / "step_00000002", tmp_path / "out" / "step_00000004")
    code, text = invoke("pull", address, tmp_path / "out")
    assert code == 72 and "is there already" in text


@pytest.mark.parametrize(
    "address",
    ["s3://user:s3cr3t@bucket/a", "s3://KEY:s3/cr3t@bucket/a", "s3://bucket/a?key=s3cr3t", "ftp://u:s3cr3t@host/a"],
)
def test_credentials_in_an_address_are_refused_and_not_shown(checkpoints: Path, address: str) -> None:
    """Exit code 70, with what to do, without a word of the address."""
    for arguments in (["list", address], ["push", str(checkpoints), address], ["verify", address]):
        code, text = invoke(*arguments)
        assert code == 70 and "AWS_ACCESS_KEY_ID" in text
        assert "cr3t" not in text and "bucket" not in text


def test_addresses_without_credentials_are_taken() -> None:
    """A port, a container of Azure, a question mark in a path are no credentials."""
    from megasdc.common.credentials import find_credentials

    for address in ("sftp://host:22/a@b", "abfs://container@account.dfs.core.windows.net/a", "/a?b=c", "s3://b/x:y"):
        assert find_credentials(address) is None


def test_a_store_that_is_not_reached_is_not_taken_for_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the HTTP client of most stores, which has a number as that of a disk has: 77, check the network."""

    async def get(port: int) -> None:
        async with aiohttp.ClientSession() as session:
            await session.get(f"http://127.0.0.1:{port}")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *arguments, **options: asyncio.run(get(port)))
        code, text = invoke("list", "memory://a")
    assert code == 77 and "ClientConnectorError" in text and "that this machine reaches it" in text


def test_a_push_waits_for_a_prune_and_sees_what_it_deleted(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune that begins while a push goes on gives way; a push gives up when a prune never ends."""
    address = str(tmp_path / "archive")
    push_checkpoint(checkpoints / "step_00000002", address)
    opened = open_archive(address)
    with lease.pushing(opened, "a push of the test", print), pytest.raises(StorageError, match="a push of the test"):
        prune_archive(address)
    monkeypatch.setattr(lease, "WAIT_S", 0.0)
    with lease.pruning(opened, "a prune of the test"), pytest.raises(StorageError, match="a prune of the test"):
        push_checkpoint(checkpoints, address)
    assert push_checkpoint(checkpoints, address).new_blocks > 0


def test_results_are_json(checkpoints: Path, tmp_path: Path) -> None:
    """Each command's --json is one object or list."""
    address = tmp_path / "archive"
    assert json.loads(invoke("push", checkpoints, address, "--json")[1])["step"] == 4
    assert json.loads(invoke("list", address, "--json")[1])[0]["run"] == RUN
    assert json.loads(invoke("verify", address, "--json")[1])["ok"] is True
    assert json.loads(invoke("prune", address, "--json")[1])["num_blocks"] == 0
    assert json.loads(invoke("pull", address, tmp_path / "out", "--json")[1])["step"] == 4


def test_names_that_leave_the_archive_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    """A run or node with slashes or dots."""
    for name in ("../x", "a/b", "", ".hidden", "x" * 200):
        with pytest.raises((ConfigError, CheckpointError)):
            push_checkpoint(checkpoints, str(tmp_path / "archive"), run=name or " ")
