"""A resume takes the newest checkpoint that nothing is known against, and says of newer ones what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from hand_made import seal, write_checkpoint

from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.resume import NoneUsableError, find_checkpoint
from megasdc.data.position import Position
from megasdc.parallel.dims import ParallelDims

WRONG = "megasdc.json: replicas have consumed 8 samples of the stream, 9 follow from its steps and decisions"


def test_a_place_in_the_data_that_was_saved_wrong_is_not_resumed_from(tmp_path: Path) -> None:
    """Whether its manifest says so or what it holds; with no other checkpoint that is an error, which names it."""
    write_checkpoint(tmp_path, 2)
    write_checkpoint(tmp_path, 4, wrong_place=WRONG)
    path = write_checkpoint(tmp_path, 5)
    shared = json.loads((path / "megasdc.json").read_text())
    loader = {"dp_size": 1, "order": Position().order.to_json(), "consumed": {"0": 8}, "again": {"0": []}}
    shared |= {"samples": 8, "uncounted_samples": 1, "loader": loader}
    shared["config"]["megasdc"]["data"] = {}
    (path / "megasdc.json").write_text(json.dumps(shared))
    seal(path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        found = find_checkpoint(tmp_path, ParallelDims(1, 1, 1, 0), CheckpointGroup())
        assert found is not None
        assert found.step == 2 and found.skipped == {4: [WRONG], 5: [WRONG]}
        with pytest.raises(NoneUsableError, match="9 follow from its steps and decisions"):
            find_checkpoint(write_checkpoint(tmp_path / "only", 4, wrong_place=WRONG).parent, None, CheckpointGroup())
    finally:
        dist.destroy_process_group()
