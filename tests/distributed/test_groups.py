"""What does DeepSpeed start in a rank, and what not?"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import run_distributed

from megasdc.parallel import groups

pytestmark = pytest.mark.distributed


def _join_and_reduce() -> tuple[float, list[str]]:
    import deepspeed
    import torch

    groups.init_process_group(60.0)
    value = torch.ones(1)
    deepspeed.comm.inference_all_reduce(value)
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return value.item(), [line for line in mapped if "deepspeed_" in line]


def test_ranks_need_no_compiler_and_no_shared_memory(tmp_path: Path) -> None:
    """With nothing built and compilers that fail, ranks of one host meet; DeepSpeed sums through the group."""
    compilers = {"CC": "/bin/false", "CXX": "/bin/false"}
    settings = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "own"), "LOCAL_SIZE": "2", **compilers}
    assert run_distributed(_join_and_reduce, 2, init=False, env=settings, timeout_s=60.0) == [(2.0, [])] * 2
    assert not (tmp_path / "own").exists()


def _network_threads() -> tuple[float, float, int]:
    import torch
    import torch.distributed as dist

    groups.init_process_group(60.0)
    others = [dist.new_group([0, 1], backend="gloo") for _ in range(5)]
    value, other = torch.ones(1), torch.ones(1)
    dist.all_reduce(value, group=others[0])
    dist.all_reduce(other, group=others[-1])
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return value.item(), other.item(), names.count("gloo_tcp_loop")


def test_all_groups_of_a_rank_share_one_network_thread() -> None:
    """Each sums for itself."""
    assert run_distributed(_network_threads, 2, init=False, timeout_s=60.0) == [(2.0, 2.0, 1)] * 2
