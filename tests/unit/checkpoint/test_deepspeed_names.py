"""Names of DeepSpeed's files, against DeepSpeed's own functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megasdc.checkpoint import files as names
from megasdc.parallel.dims import ParallelDims

LAYOUT = (2, 3, 2)
"""Tensor, pipeline and data ranks."""


@pytest.mark.parametrize("rank", range(12))
def test_names_are_those_that_deepspeed_gives(rank: int) -> None:
    """Files of a layer, of a stage and of a shard, of every rank; a layer and a prefix are read from them again."""
    tensor, pipeline, data = LAYOUT
    dims = ParallelDims(tensor, pipeline, data, rank)
    topology = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    module = SimpleNamespace(_local_start=99, _grid=SimpleNamespace(_topo=topology), global_rank=rank)
    layer = Path(PipelineModule.ckpt_layer_path(module, "", 4)).name
    assert names.layer_file(103, dims.tp_rank) == layer
    assert (names.layer_of(layer), names.kind_of_file(layer)) == (103, "layers")
    stage = names.stage_number(dims)
    engine = SimpleNamespace(checkpoint_mp_rank=stage, zero_optimization_partition_weights=lambda: False)
    engine._get_zero_ckpt_prefix = partial(DeepSpeedEngine._get_zero_ckpt_prefix, engine)
    assert names.stage_file(stage) == (theirs := Path(DeepSpeedEngine._get_ckpt_name(engine, "", "")).name)
    assert (names.layer_of(theirs), names.kind_of_file(theirs)) == (None, "stages")
    for bf16, prefix in ((False, ""), (True, "bf16_")):
        path = DeepSpeedEngine._get_rank_zero_ckpt_name(engine, "", "", stage, dims.dp_rank, bf16)
        shard = Path(path).name
        assert names.shard_file(dims.dp_rank, stage, prefix) == shard
        assert shard in names.shard_files(dims)
        assert (names.find_prefix([layer, theirs, shard]), names.kind_of_file(shard)) == (prefix, "optimizer")
        assert Path(shard).match(names.SHARD_FILES)


def test_files_of_a_universal_checkpoint_and_of_others() -> None:
    """A state's path names parameter and state; files of megasdc, of experts and of nothing known are no kind."""
    path = names.parameter_file("3.mlp/odd.weight", "exp_avg_sq")
    assert path == "zero/3.mlp/odd.weight/exp_avg_sq.pt"
    assert names.parameter_of(path) == ("3.mlp/odd.weight", "exp_avg_sq")
    assert names.parameter_of(names.UNIVERSAL_OPTIMIZER) is None
    assert names.kind_of_file(path) == names.kind_of_file(names.UNIVERSAL_OPTIMIZER) == "parameters"
    for other in ("rank_00000_state.pt", "layer_0_expert_1_mp_rank_00_model_states.pt", "manifest.json", ""):
        assert (names.kind_of_file(other), names.layer_of(other)) == (None, None)
    assert names.find_prefix(["manifest.json"]) == ""
