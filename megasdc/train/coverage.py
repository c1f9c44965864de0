"""What do the checks of a run cover, and what do they read? Lines for the start of a run; formulas alone."""

from __future__ import annotations

from dataclasses import replace

from megasdc.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, WEIGHT_GRAD
from megasdc.config import RunConfig
from megasdc.config.detection_problems import samples_lost
from megasdc.engine.engine import TrainingEngine
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.sdc.cost import FP32_BYTES, Reads, Work, reads_of_step


def describe_checks(config: RunConfig, engine: TrainingEngine, vocab_size: int) -> list[str]:
    """Say for each tier what it covers, what it reads on a rank, and what an audit takes of the samples.

    What is read is that of a rank without pipeline parallelism divided by the stages.

    Args:
        config: the run's configuration.
        engine: of this rank.
        vocab_size: entries of the tokenizer's vocabulary.
    """
    sections, dims = config.megasdc, engine.dims
    audit, always_on = sections.audit, sections.sdc.always_on
    micro_batches = engine.micro_batches
    recomputes = bool(config.deepspeed.get("pipeline", {}).get("activation_checkpoint_interval"))
    work = Work(
        sections.model,
        vocab=padded_vocab_size(vocab_size, sections.model.vocab_multiple),
        sequence=sections.data.sequence_length,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation=micro_batches,
        tensor=dims.tensor,
        data=dims.data,
        width_bytes=FP32_BYTES if config.precision == "fp32" else 2,
        recompute=recomputes,
    )
    one = replace(work, accumulation=1)
    lines = []
    if audit.enabled:
        reads = reads_of_step(one, audit.granularity)
        read = _sum(reads, (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD), dims.pipeline)
        lines.append(
            f"audit every {audit.interval} steps: 1 of {micro_batches} micro-batches on {dims.data} replicas, about "
            f"{_size(read)} a rank; at most {samples_lost(sections, micro_batches):.2%} of the independent samples"
        )
    if always_on.enabled:
        covered = micro_batches if always_on.coverage == "all" else 1
        reads = reads_of_step(one, always_on.granularity)
        parts = []
        if recomputes and always_on.recompute is not False:
            read = _sum(reads, (FORWARD, RECOMPUTE), dims.pipeline) * covered
            parts.append(f"forward against recompute in {covered} of {micro_batches} micro-batches ({_size(read)})")
        if always_on.finite:
            read = _sum(reads, (FORWARD, BACKWARD), dims.pipeline) * covered
            parts.append(f"NaN and Inf in {covered} of {micro_batches} micro-batches ({_size(read)})")
        if always_on.parameters:
            gemm = reads_of_step(one, "gemm")
            parts.append(f"parameters of {dims.data} replicas ({_size(_sum(gemm, (PARAMETER,), dims.pipeline))})")
        if always_on.toleranced:
            parts.append("toleranced checks that only warn")
        arithmetic = work.flops / dims.pipeline / 1e12
        lines.append(f"every step, a rank: {', '.join(parts)}; arithmetic of the step {arithmetic:.3g} TFLOP")
    return lines


def _sum(reads: dict[str, Reads], phases: tuple[str, ...], stages: int) -> Reads:
    return sum((reads[phase] for phase in phases), Reads(0, 0)) * (1 / stages)


def _size(reads: Reads) -> str:
    return f"{reads.count:.0f} results, {reads.bytes / 1e6:.3g} MB"
