"""What tests with several ranks share: DeepSpeed's device, and the values of every field of tests of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fused_switch import apply_fused_switch
from harness import fork_fresh_ranks

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for shared in ("config", "ops/archive", "checkpoint"):  # field_values, run_to_archive, hand_made
    sys.path.append(str(Path(__file__).parents[1] / "unit" / shared))
apply_fused_switch()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share; modules that need another have a fixture of their own."""
    from whole_runs import prepare_text

    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that this process starts are forks of the server, also those that would be fresh processes."""
    fork_fresh_ranks(monkeypatch.setattr)
