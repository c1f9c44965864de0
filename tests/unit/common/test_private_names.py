"""Are the private names of DeepSpeed, Megatron-core and torch that megasdc builds on still there?"""

from __future__ import annotations

from megasdc.checkpoint.allowlist import load_checked
from megasdc.common.versions import OWNERS, missing_names


def test_private_names_are_there():
    """The installed versions have every private name of the list (megasdc/common/versions.py)."""
    assert missing_names(OWNERS) == []


def test_the_engine_replaces_instructions_that_exist():
    """DeepSpeed's engine runs a step by the instructions that megasdc's engine replaces."""
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert {
        schedule.ForwardPass,
        schedule.BackwardPass,
        schedule.ReduceTiedGrads,
        schedule.ReduceGrads,
        schedule.OptimizerStep,
    } <= set(PipelineEngine._INSTRUCTION_MAP)


def test_torch_notes_where_a_storage_lies(tmp_path):
    """Loaded on ``meta``, the storage of a tensor says at which byte of the file it begins."""
    import torch

    torch.save({"a": torch.arange(7), "b": torch.arange(100, 1100)}, tmp_path / "file.pt")
    state = load_checked(tmp_path / "file.pt", map_location="meta")
    start = state["b"].untyped_storage()._checkpoint_offset
    assert (tmp_path / "file.pt").read_bytes()[start : start + 8000] == torch.arange(100, 1100).numpy().tobytes()
