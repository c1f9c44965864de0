"""Do the ranks of a launch wait for each other while the first takes its folders?"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from megasdc.common.run_lock import LockedFolders, read_holder
from megasdc.train import build


@pytest.mark.slow
def test_a_rank_waits_longer_than_its_timeout_for_a_lock_that_is_watched(
    tmp_path: Path,
) -> None:
    """Rank 0 may have to watch another host's lock until it is stale; rank 1 adds that to its own timeout."""
    store = dist.HashStore()

    def hold(rank: int, held: LockedFolders) -> int:
        time.sleep(0.0 if rank else 1.0)
        return len(build.lock_folders([tmp_path / "run"], store, rank, 2, 0.1, held))

    held = [LockedFolders(), LockedFolders()]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(hold, (0, 1), held)) == [1, 0]
    assert held[0].token == held[1].token is not None
    held[0].release()
    assert read_holder(tmp_path / "run") is None
