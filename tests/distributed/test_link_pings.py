"""Measuring links while training changes no bit, and a link that cannot be measured is reported."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from harness import run_distributed
from whole_runs import events_of, metrics_of, prepare_text, pretrain_rank, state_of, train_run, write_config

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(os.geteuid() != 0, reason="host names of their own need root"),
]

CLONE_NEWUTS = 0x04000000
"""Of Linux's ``unshare``: a host name of this process's own."""


def train_on_own_host(config: str, breaks_at: int) -> Any:
    """Body of a rank on a host of its own name; from a step on rank 0 gets nothing from rank 1 any more."""
    from megasdc.ops.health.hooks.links import LinkPings

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"host{os.environ['RANK']}")
    measure = LinkPings.after_step
    kept = []

    def after_step(self: LinkPings, run: Any, result: Any) -> None:
        if run.step == breaks_at and run.dims.rank == 1:  # as where a firewall has forgotten the connection
            own = self._connections[0].fileno()
            kept.append(os.dup(own))
            kept.append(silent_connection())
            os.dup2(kept[-1][0].fileno(), own)
        measure(self, run, result)

    LinkPings.after_step = after_step  # type: ignore[method-assign]  # ranks are processes of their own
    return pretrain_rank(config, [])


def silent_connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection; nobody writes into the second, nor reads from it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def connect_in_a_ring() -> Any:
    """Body of a rank of three, of which the last cannot find its address; returns its peers, and what failed."""
    import torch.distributed as dist

    from megasdc.ops.health.hooks import links

    def no_route(*_: str) -> str:
        raise OSError("no route to the first host")

    rank = dist.get_rank()
    if rank == 2:
        links.own_address_for_ranks = no_route
    connections, failed = links.connect_pairs([(0, 1), (0, 2), (1, 2)], rank, ["h0", "h1", "h2"], dist.group.WORLD)
    addresses = {connection.getsockname()[0] for connection in connections.values()}
    return sorted(connections), addresses, failed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def test_measured_links_change_no_bit_and_a_silent_one_is_reported(tmp_path: Path, data: Path) -> None:
    """Three hosts, measured after every step; one pair gets no answer in the fifth, and the others are measured on."""
    plain = write_config(tmp_path / "plain.json", data, tmp_path / "plain", deepspeed__train_batch_size=6)
    health = {"health__enabled": True, "health__ping_interval": 1, "deepspeed__train_batch_size": 6}
    measured = write_config(tmp_path / "measured.json", data, tmp_path / "measured", **health)
    assert [code for code, _ in train_run(plain, 3)] == [0] * 3
    results = run_distributed(train_on_own_host, 3, str(measured), 5, init=False)
    assert [code for code, _ in results] == [0] * 3, results
    assert metrics_of(tmp_path / "plain") == metrics_of(tmp_path / "measured")
    name = "checkpoints/step_00000006"
    assert state_of(tmp_path / "plain" / name) == state_of(tmp_path / "measured" / name)
    rows = [json.loads(line) for line in (tmp_path / "measured" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("health/ping_ms", 0) > 0] == [1, 2, 3, 4, 5, 6]
    (event,) = events_of(tmp_path / "measured", "health", "link_unmeasured")
    assert event["hosts"] == ["host0", "host1"] and "within 5 s" in event["problem"] and event["step"] == 5
    assert events_of(tmp_path / "measured", "health", "slow_link") == []


def test_a_rank_without_an_address_is_not_measured() -> None:
    """Its pairs fail with the reason, on all ranks; the others are connected, by the address of the first host."""
    results = run_distributed(connect_in_a_ring, 3)
    assert [peers for peers, _, _ in results] == [[1], [0], []]
    assert results[0][1] == results[1][1] == {"127.0.0.1"}
    for _, _, failed in results:
        assert set(failed) == {(0, 2), (1, 2)} and all("no route to" in problem for problem in failed.values())
