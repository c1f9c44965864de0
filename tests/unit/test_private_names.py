"""Are the private names of DeepSpeed, Megatron-core and torch that megasdc builds on still there?"""

from __future__ import annotations

import inspect


def test_names_of_deepspeed():
    """Every overridden or called private name of the pinned DeepSpeed exists where it is expected."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for name in (
        "_exec_forward_pass",
        "_exec_backward_pass",
        "_exec_reduce_tied_grads",
        "_exec_reduce_grads",
        "_exec_optimizer_step",
        "_aggregate_total_loss",
        "_reduce_outputs",
        "_bcast_pipe_scalar",
        "_loss_stage_global_rank",
    ):
        assert callable(getattr(PipelineEngine, name)), name
    kinds = set(PipelineEngine._INSTRUCTION_MAP)
    assert {
        schedule.ForwardPass,
        schedule.BackwardPass,
        schedule.ReduceTiedGrads,
        schedule.ReduceGrads,
        schedule.OptimizerStep,
    } <= kinds
    for name in ("_partition_layers", "_set_bounds"):
        assert callable(getattr(PipelineModule, name)), name
    for name in ("_get_ckpt_name", "_get_zero_ckpt_name"):
        assert callable(getattr(DeepSpeedEngine, name)), name
    assert "self._config.load_universal_checkpoint" in inspect.getsource(DeepSpeedEngine.load_universal_checkpoint)
    assert "self.optimizer.update_lp_params()" in inspect.getsource(DeepSpeedEngine.load_checkpoint)
    assert "averaged_gradients" in inspect.getsource(DeepSpeedZeroOptimizer)
    for name in ("scaled_global_norm", "has_overflow"):
        assert callable(getattr(DeepSpeedZeroOptimizer, name)), name
    for name in ("_lazy_init_hp_params_optimizer_state", "update_lp_params", "clear_hp_grads", "clear_lp_grads"):
        assert callable(getattr(BF16_Optimizer, name)), name
    assert "if self.check_grad_overflow:" in inspect.getsource(DeepSpeedZeroOptimizer.step)
    assert "fp32_groups_gradients_flat" in inspect.getsource(BF16_Optimizer)
    assert "_hp_grad" in inspect.getsource(BF16_Optimizer)


def test_names_of_torch_and_megatron():
    """The timeouts of groups and the modules whose device is substituted are there."""
    from megatron.core import utils
    from megatron.core.tensor_parallel import layers, mappings
    from torch.distributed import distributed_c10d

    assert callable(distributed_c10d._set_pg_timeout)
    assert callable(distributed_c10d._get_default_store)
    assert callable(distributed_c10d.ProcessGroup._get_backend)
    assert hasattr(distributed_c10d.ProcessGroup, "_device_types")
    assert hasattr(distributed_c10d.ProcessGroupGloo._Options, "_timeout")
    assert all(hasattr(module, "torch") for module in (layers, mappings, utils))


def test_torch_notes_where_a_storage_lies(tmp_path):
    """Loaded on ``meta``, the storage of a tensor says at which byte of the file it begins."""
    import torch

    torch.save({"a": torch.arange(7), "b": torch.arange(100, 1100)}, tmp_path / "file.pt")
    state = torch.load(tmp_path / "file.pt", map_location="meta", weights_only=True)
    start = state["b"].untyped_storage()._checkpoint_offset
    assert (tmp_path / "file.pt").read_bytes()[start : start + 8000] == torch.arange(100, 1100).numpy().tobytes()
