"""Which DeepSpeed keys exist, and which of them can go with ZeRO-1 pipeline training.

DeepSpeed ignores unknown top-level keys without a word (0.19.8), so the names are listed here; a test compares the
list with the installed DeepSpeed. Keys below the top level are checked by DeepSpeed's own classes where it has them,
and here where it does not.
"""

from __future__ import annotations

KNOWN_KEYS = frozenset(
    """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comms_logger comet communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    disable_allgather disable_python_gc dump_state elasticity eigenvalue expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor
    graph_harvesting hybrid_engine load_from_fp32_weights log_level managed_gradient_accumulation memory_breakdown
    nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training scheduler
    seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization zero_optional_parallel_size
    """.split()
)
"""Top-level keys that DeepSpeed 0.19 reads."""

UNSUPPORTED_KEYS: dict[str, str] = {
    "amp": "use bf16 or fp16",
    "autotuning": "run it apart from megasdc",
    "compression_training": "megasdc trains the full model",
    "curriculum_learning": "samples have one fixed length",
    "data_efficiency": "samples come from megasdc's own loader",
    "disable_python_gc": "megasdc's own loop does not read it",
    "elasticity": "the layout is fixed for one run; change it between runs",
    "expert_parallel": "megasdc trains dense models",
    "gradient_allreduce_op": "gradients are averaged over data-parallel ranks",
    "hybrid_engine": "megasdc trains only",
    "managed_gradient_accumulation": "the pipeline schedule accumulates",
    "nebula": "checkpoints are written and verified by megasdc",
    "progressive_layer_drop": "the pipeline runs every layer",
    "quantize_training": "megasdc trains the full model",
    "sparse_attention": "attention is dense and causal",
    "sparse_gradients": "embedding gradients are dense",
    "tensor_parallel": "set megasdc.parallel.tensor",
    "torch_autocast": "use bf16 or fp16",
    "weight_quantization": "megasdc trains the full model",
    "zero_optional_parallel_size": "DeepSpeed no longer reads it",
}
"""Known keys that megasdc refuses, with the remedy."""

OPTIMIZER_KEYS = frozenset({"type", "params", "legacy_fusion"})
OPTIMIZER_TYPES = ("Adam", "AdamW")
OPTIMIZER_PARAMS = frozenset(
    {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "bias_correction", "fused", "foreach"}
)
SCHEDULER_KEYS = frozenset({"type", "params"})
SCHEDULER_PARAMS: dict[str, frozenset[str]] = {
    "WarmupLR": frozenset({"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}),
    "WarmupDecayLR": frozenset(
        {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"}
    ),
    "WarmupCosineLR": frozenset(
        {"warmup_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps", "cos_min_ratio"}
    ),
}
"""LR schedules of DeepSpeed: warm-up then constant, linear to 0, cosine."""
PIPELINE_KEYS = frozenset(
    {
        "activation_checkpoint_interval",
        "use_reentrant",
        "pipe_partitioned",
        "grad_partitioned",
        "seed_layers",
        "partition",
        "stages",
    }
)
DATA_TYPES_KEYS = frozenset({"grad_accum_dtype"})
CHECKPOINT_KEYS = frozenset({"tag_validation", "parallel_write", "load_universal", "use_node_local_storage", "writer"})
