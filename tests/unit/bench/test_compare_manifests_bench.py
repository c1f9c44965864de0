"""Does the benchmark of manifests run the command that users call, and judge it?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from megasdc.common.errors import ConfigError
from megasdc.lab.checkpoints.digests import compare_digests
from tools.bench.checkpoints import compare_manifests
from tools.bench.checkpoints.compare_manifests import made_up_digest
from tools.bench.checkpoints.options import CompareManifestsOptions
from tools.bench.commands import app


@pytest.mark.slow
def test_a_small_one_is_found_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one block is found; a bar that is missed gives exit code 1."""
    monkeypatch.setattr(compare_manifests, "BAR_S", 0.0)
    arguments = ["compare-manifests", "--size-gb", "2", "--ranks", "16", "--runs", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["found"] and not found["passed"]
    assert found["num_files"] == 16 + 16 + 640
    assert found["peak_bytes"] > 50e6


def test_sizes_are_those_of_the_checkpoint() -> None:
    """The files make up the checkpoint that was asked for, and with no rank harmed manifests are the same."""
    options = CompareManifestsOptions(size_gb=100, ranks=64)
    digests = [made_up_digest(host, options, None) for host in ("a", "b")]
    assert abs(digests[0].size_bytes / 100e9 - 1) < 0.01
    assert compare_digests(digests).same
    with pytest.raises(ConfigError, match="multiple of 8"):
        replace(options, ranks=63)
