"""What goes into a file is what DeepSpeed gives, but for enumerations, which Python may pickle as code."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from megasdc.checkpoint.allowlist import find_unsafe_classes
from megasdc.checkpoint.snapshot import CapturingWriter, write_file


def test_the_zero_stage_is_saved_as_a_number(tmp_path):
    """Whatever this version of Python makes of enumerations, the file holds none and nothing else is changed."""
    state = {"optimizer_state_dict": {"zero_stage": ZeroStageEnum.optimizer_states, "x": torch.ones(2)}, "step": 3}
    writer = CapturingWriter(None)
    writer.save(state, str(tmp_path / "optim_states.pt"))
    assert writer.problem is None
    (file,) = writer.captured
    write_file(tmp_path / file.name, file)
    assert find_unsafe_classes(tmp_path / "optim_states.pt") == []
    found = torch.load(tmp_path / "optim_states.pt", weights_only=True)
    assert type(found["optimizer_state_dict"]["zero_stage"]) is int
    assert found["optimizer_state_dict"]["zero_stage"] == ZeroStageEnum.optimizer_states and found["step"] == 3
    assert state["optimizer_state_dict"]["zero_stage"] is ZeroStageEnum.optimizer_states
