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
    """Body of a rank on a host of its own name; from a step on (0: never) its connections are closed under it."""
    from megasdc.train.health.links import LinkPings

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    socket.sethostname(f"host{os.environ['RANK']}")
    measure = LinkPings.after_step

    def after_step(self: LinkPings, run: Any, result: Any) -> None:
        if run.step == breaks_at and run.dims.rank == 1:
            for connection in self._connections.values():
                connection.shutdown(socket.SHUT_RDWR)
        measure(self, run, result)

    LinkPings.after_step = after_step  # type: ignore[method-assign]  # ranks are processes of their own
    return pretrain_rank(config, [])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def test_measured_links_change_no_bit_and_a_broken_one_is_reported(tmp_path: Path, data: Path) -> None:
    """Two hosts, measured after every step until the connection breaks in the fifth; the run goes on to its end."""
    plain = write_config(tmp_path / "plain.json", data, tmp_path / "plain")
    health = {"health__enabled": True, "health__ping_interval": 1}
    measured = write_config(tmp_path / "measured.json", data, tmp_path / "measured", **health)
    assert [code for code, _ in train_run(plain, 2)] == [0, 0]
    results = run_distributed(train_on_own_host, 2, str(measured), 5, init=False)
    assert [code for code, _ in results] == [0, 0], results
    assert metrics_of(tmp_path / "plain") == metrics_of(tmp_path / "measured")
    name = "checkpoints/step_00000006"
    assert state_of(tmp_path / "plain" / name) == state_of(tmp_path / "measured" / name)
    rows = [json.loads(line) for line in (tmp_path / "measured" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("health/ping_ms", 0) > 0] == [1, 2, 3, 4]
    (event,) = events_of(tmp_path / "measured", "health", "link_unmeasured")
    assert event["hosts"] == ["host0", "host1"] and event["problem"]
    assert events_of(tmp_path / "measured", "health", "slow_link") == []
