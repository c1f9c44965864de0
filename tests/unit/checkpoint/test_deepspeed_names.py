"""Names of DeepSpeed's files, against DeepSpeed's own functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from megasdc.checkpoint import files
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
    assert files.layer_file(103, dims.tp_rank) == layer
    assert (files.layer_of(layer), files.kind_of_file(layer)) == (103, "layers")
    stage = files.stage_number(dims)
    engine = SimpleNamespace(checkpoint_mp_rank=stage, zero_optimization_partition_weights=lambda: False)
    engine._get_zero_ckpt_prefix = partial(DeepSpeedEngine._get_zero_ckpt_prefix, engine)
    assert files.stage_file(stage) == (theirs := Path(DeepSpeedEngine._get_ckpt_name(engine, "", "")).name)
    assert (files.layer_of(theirs), files.kind_of_file(theirs)) == (None, "stages")
    for bf16, prefix in ((False, ""), (True, "bf16_")):
        path = DeepSpeedEngine._get_rank_zero_ckpt_name(engine, "", "", stage, dims.dp_rank, bf16)
        shard = Path(path).name
        assert files.shard_file(dims.dp_rank, stage, prefix) == shard
        assert shard in files.shard_files(dims)
        assert (files.find_prefix([layer, theirs, shard]), files.kind_of_file(shard)) == (prefix, "optimizer")
        assert Path(shard).match(files.SHARD_FILES)


def test_files_of_a_universal_checkpoint_and_of_others() -> None:
    """A state's path names parameter and state; files of megasdc, of experts and of nothing known are no kind."""
    path = files.parameter_file("3.mlp/odd.weight", "exp_avg_sq")
    assert path == "zero/3.mlp/odd.weight/exp_avg_sq.pt"
    assert files.parameter_of(path) == ("3.mlp/odd.weight", "exp_avg_sq")
    assert files.parameter_of(files.UNIVERSAL_OPTIMIZER) is None
    assert files.kind_of_file(path) == files.kind_of_file(files.UNIVERSAL_OPTIMIZER) == "parameters"
    for other in ("rank_00000_state.pt", "layer_0_expert_1_mp_rank_00_model_states.pt", "manifest.json", ""):
        assert (files.kind_of_file(other), files.layer_of(other)) == (None, None)
    assert files.find_prefix(["manifest.json"]) == ""
