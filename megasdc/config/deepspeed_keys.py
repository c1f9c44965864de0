"""DeepSpeed's keys that megasdc refuses with ZeRO-1 pipeline training, and parameters of its schedules.

DeepSpeed silently ignores unknown top-level keys (0.19.8), so all that it reads are declared: those that megasdc
supports as fields of the classes in `sections/deepspeed.py`, the others here. A test compares them with the installed
DeepSpeed.
"""

from __future__ import annotations

UNSUPPORTED_KEYS: dict[str, str] = {
    "amp": "use bf16 or fp16",
    "autotuning": "run it apart from megasdc",
    "compile": "modules run as they are written",
    "compression_training": "megasdc trains the full model",
    "curriculum_learning": "samples have one fixed length",
    "data_efficiency": "samples come from megasdc's own loader",
    "dataloader_drop_last": "samples come from megasdc's own loader",
    "datastates_ckpt": "checkpoints are written and verified by megasdc",
    "disable_python_gc": "megasdc's own loop does not read it",
    "eigenvalue": "DeepSpeed has removed it",
    "elasticity": "the layout is fixed for one run; change it between runs",
    "expert_parallel": "megasdc trains dense models",
    "flops_profiler": "megasdc reports FLOP/s itself",
    "gradient_allreduce_op": "gradients are averaged over data-parallel ranks",
    "graph_harvesting": "DeepSpeed has removed it",
    "hybrid_engine": "megasdc trains only",
    "managed_gradient_accumulation": "the pipeline schedule accumulates",
    "nebula": "checkpoints are written and verified by megasdc",
    "progressive_layer_drop": "the pipeline runs every layer",
    "quantize_training": "megasdc trains the full model",
    "sparse_attention": "attention is dense and causal",
    "sparse_gradients": "embedding gradients are dense",
    "tensor_parallel": "set megasdc.parallel.tensor",
    "torch_autocast": "use bf16 or fp16",
    "use_data_before_expert_parallelism": "megasdc trains dense models",
    "weight_quantization": "megasdc trains the full model",
}
"""Top-level keys that DeepSpeed 0.19 reads, or rejects by name because it has removed the feature, and that megasdc
refuses, with the remedy."""

SCHEDULER_PARAMS: dict[str, frozenset[str]] = {
    "WarmupLR": frozenset({"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}),
    "WarmupDecayLR": frozenset(
        {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"}
    ),
    "WarmupCosineLR": frozenset(
        {"warmup_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio"}
    ),
}
"""Parameters of DeepSpeed's LR schedules: warm-up, then constant, linear to 0, or cosine."""

_STAGE3 = "only ZeRO stage 3 reads it, and the pipeline engine trains with stage 1"
_STAGE3_KEYS = (
    "offload_param",
    "sub_group_size",
    "cpu_offload_param",
    "prefetch_bucket_size",
    "stage3_prefetch_bucket_size",
    "param_persistence_threshold",
    "stage3_param_persistence_threshold",
    "model_persistence_threshold",
    "stage3_model_persistence_threshold",
    "max_live_parameters",
    "stage3_max_live_parameters",
    "max_reuse_distance",
    "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "stage3_module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "stage3_allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "leaf_module",
)

_STAGE3_OFFLOAD_KEYS = (
    "nvme_path",
    "buffer_count",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
)

REFUSED: dict[str, str] = {
    **UNSUPPORTED_KEYS,
    "pipeline.stages": "set megasdc.parallel.pipeline",
    "pipeline.partition": "set megasdc.parallel.partition",
    "pipeline.seed_layers": "set megasdc.training.seed; layers are always seeded by their index",
    "optimizer.params.max_grad_norm": "set gradient_clipping",
    "data_types.param_dtype": "use bf16 or fp16",
    "data_types.buffer_dtype": "use bf16 or fp16",
    "data_types.keep_in_fp32_modules": "megasdc chooses what stays in fp32",
    "checkpoint.writer": "checkpoints are written and verified by megasdc",
    **{f"zero_optimization.{key}": _STAGE3 for key in _STAGE3_KEYS},
    **{f"zero_optimization.offload_optimizer.{key}": _STAGE3 for key in _STAGE3_OFFLOAD_KEYS},
    "zero_optimization.compute_grad_norm": "the gradient norm is always computed and reported",
    "zero_optimization.legacy_stage1": "DeepSpeed no longer reads it",
    "zero_optimization.zenflow": "it needs ZeRO stage 2 or 3",
    "zero_optimization.cpu_offload": "set offload_optimizer",
    "zero_optimization.cpu_offload_use_pin_memory": "set offload_optimizer",
    "zero_optimization.pipeline_loading_checkpoint": "it needs ZeRO stage 3",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizer is Adam or AdamW",
}
"""Dotted DeepSpeed keys that exist but are refused, with the remedy or reason."""
