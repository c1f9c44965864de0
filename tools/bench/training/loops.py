"""The training loops that are compared: ours as a default run has it, DeepSpeed's bare one, and Hugging Face's.

All three train on the same samples in memory, with the same DeepSpeed configuration where a user would give it.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megasdc.config.checks import BatchLayout
from megasdc.config.hooks import HookSpec
from megasdc.config.load import RunConfig
from megasdc.config.model import ffn_width
from megasdc.config.sections import DeterminismSection
from megasdc.data.loader import MemoryStream, MicroBatchLoader
from megasdc.determinism import set_deterministic
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run, RunProgress
from megasdc.engine.step_times import TimeSplit
from megasdc.events import EventLog
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.pipeline import build_pipeline
from megasdc.model.sizes import model_sizes, padded_vocab_size
from megasdc.optim.zero1 import parameter_groups
from megasdc.parallel.dims import ParallelDims
from megasdc.train.build_engine import DTYPES, build_training_engine, deepspeed_config
from megasdc.train.gradient_bounds import GradientBounds
from megasdc.train.main import train
from megasdc.train.process import CollectionTimer, StartClock
from megasdc.train.report import Reporter
from megasdc.train.signals import StopSignals
from megasdc.train.stop import SkipWatch, StopWatch
from tools.bench.training.options import TrainBenchOptions

DISTINCT_STEPS = 8
"""Steps after which the samples repeat."""


class Loop(Protocol):
    """One of the loops that are compared, with DeepSpeed's engine or ours, and the mean loss of each step."""

    engine: Any
    losses: list[torch.Tensor]

    def run(self, steps: int) -> None:
        """Take so many more steps."""


class MegasdcLoop:
    """Our engine in ``megasdc.train.main.train``, with what a default run has around it except saving.

    Each call of ``run`` is a short run of its own, so the hooks are made anew and rank 0 reports at its end; a block of
    ten steps therefore bears exactly the default's one report in ten steps, and the making of the hooks on top.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: BatchLayout,
        dims: ParallelDims,
        options: TrainBenchOptions,
        stream: MemoryStream,
        folder: Path,
    ) -> None:
        self.config = config
        self.engine = build_training_engine(config, layout, dims, options.vocab, StartClock(time.monotonic()))
        self.signals = StopSignals()
        self.losses: list[torch.Tensor] = []
        self.split = TimeSplit(self.engine.device) if dims.rank == 0 else None
        self.bounding: list[Hook] = []
        loader = MicroBatchLoader(stream, options.micro_batch, dims.dp_rank, dims.data)
        self.run_state = Run(
            folder=folder,
            dims=dims,
            engine=self.engine,
            loader=loader,
            batches=loader if self.split is None else self.split.watch(loader),
            events=EventLog(folder, dims.rank),
            host_group=dist.new_group(backend="gloo") if torch.cuda.is_available() else dist.group.WORLD,
            progress=RunProgress(0),
        )
        self.writer = MetricsWriter(folder) if dims.rank == 0 else None

    def run(self, steps: int) -> None:
        """Take so many more steps."""
        self.run_state.progress.steps += steps
        self.run_state.hooks = self._hooks()
        train(self.run_state)
        self.run_state.hooks = []

    def _hooks(self) -> list[Hook]:
        sections = self.config.megasdc
        vocab = padded_vocab_size(self.run_state.loader.dataset.vocab_size, sections.model.vocab_multiple)
        sizes = model_sizes(sections.model, ffn_width(sections.model), vocab)
        return [
            *([] if self.split is None else [self.split]),
            *self.bounding,
            SkipWatch(sections.training.max_skipped_steps),
            StopWatch(self.signals, sections.training.time_limit_s, time.monotonic(), sections.training.stop_step),
            Reporter(
                interval=sections.logging.interval,
                flops_per_token=sizes.flops_per_token(sections.data.sequence_length),
                split=self.split,
                collections=CollectionTimer() if self.writer is not None else None,
                writer=self.writer,
                peak=sections.logging.peak_tflops,
                progress=sections.logging.progress_bar,
            ),
            _LossRecord(self.losses),
        ]

    def close(self) -> None:
        """Close the files and let go of the signals."""
        self.signals.close()
        self.run_state.events.close()
        if self.writer is not None:
            self.writer.close()


class DeterministicLoop(MegasdcLoop):
    """``MegasdcLoop`` in deterministic mode, which is switched on for each block and off again."""

    def __init__(self, config: RunConfig, *rest: Any) -> None:
        self.section = DeterminismSection.model_validate({"enabled": True})
        sections = config.megasdc.model_copy(update={"determinism": self.section})
        super().__init__(dataclasses.replace(config, megasdc=sections), *rest)

    def run(self, steps: int) -> None:
        """Take so many more steps."""
        undo = set_deterministic(self.section)
        try:
            super().run(steps)
        finally:
            undo()


HOOKS = [{"hook": "spike_aware", "theta": 1e6, "grace_steps": 0}, {"hook": "absolute", "theta": 1.0}]
"""Bounds that may act in every step, so that no work is skipped, and are rarely triggered."""


class BoundedLoop(MegasdcLoop):
    """``MegasdcLoop`` with gradient bounds."""

    def __init__(self, config: RunConfig, *rest: Any) -> None:
        specs = [HookSpec.model_validate(hook) for hook in HOOKS]
        sections = config.megasdc.model_copy(update={"optimizer_hooks": specs})
        super().__init__(dataclasses.replace(config, megasdc=sections), *rest)
        self.bounding = [GradientBounds(specs, self.run_state, sections.logging.interval, self.writer)]


class _LossRecord(Hook):
    """Keeps the loss of every step."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        self.losses = losses

    def after_step(self, run: Run, result: StepResult) -> None:
        """Keep it as DeepSpeed would return it."""
        self.losses.append(run.engine.agg_train_loss)


class PlainLoop:
    """DeepSpeed's own ``PipelineEngine`` over the same modules, in a loop that does nothing else.

    ``batches`` are this rank's micro-batches, without end.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: BatchLayout,
        dims: ParallelDims,
        options: TrainBenchOptions,
        batches: Iterator[Any],
    ) -> None:
        import deepspeed

        sections = config.megasdc
        pipeline, _ = build_pipeline(
            sections.model,
            sections.parallel,
            dims,
            vocab_size=options.vocab,
            seed=sections.training.seed,
            dtype=DTYPES[config.precision],
        )
        self.engine = deepspeed.initialize(
            model=pipeline, model_parameters=parameter_groups(pipeline), config=deepspeed_config(config, layout)
        )[0]
        self.batches = batches
        self.losses: list[torch.Tensor] = []

    def run(self, steps: int) -> None:
        """Take so many more steps."""
        for _ in range(steps):
            self.losses.append(self.engine.train_batch(data_iter=self.batches))


class HuggingFaceLoop:
    """``LlamaForCausalLM`` of the same sizes under DeepSpeed ZeRO-1, in the loop of DeepSpeed's documentation.

    What megasdc chooses and DeepSpeed leaves to the user, such as bucket sizes on a CPU, is at DeepSpeed's default.
    ``batches`` are this rank's micro-batches, without end; ``torch.compile`` has its default settings.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: BatchLayout,
        options: TrainBenchOptions,
        batches: Iterator[Any],
        compiled: bool = False,
    ) -> None:
        import deepspeed
        from transformers import LlamaConfig, LlamaForCausalLM

        model = config.megasdc.model
        torch.manual_seed(config.megasdc.training.seed)
        llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=padded_vocab_size(options.vocab, model.vocab_multiple),
                hidden_size=model.hidden_size,
                intermediate_size=ffn_width(model),
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_attention_heads,
                num_key_value_heads=model.num_attention_heads,
                max_position_embeddings=model.max_positions,
                rms_norm_eps=model.norm_epsilon,
                tie_word_embeddings=False,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )
        keys = deepspeed_config(config, layout)
        keys["zero_optimization"] = config.deepspeed["zero_optimization"]  # with DeepSpeed's own default sizes
        self.engine = deepspeed.initialize(model=llama, model_parameters=parameter_groups(llama), config=keys)[0]
        self.engine.train()
        if compiled:
            self.engine.compile()
        self.accumulation = options.accumulation
        self.batches = batches
        self.losses: list[torch.Tensor] = []

    def run(self, steps: int) -> None:
        """Take so many more steps."""
        for _ in range(steps):
            total = torch.zeros((), device=self.engine.device)
            for _ in range(self.accumulation):
                tokens, (labels, _mask) = next(self.batches)
                tokens, labels = tokens.to(self.engine.device), labels.to(self.engine.device)
                loss = self.engine(input_ids=tokens, labels=labels, shift_labels=labels).loss
                self.engine.backward(loss)
                self.engine.step()
                total += loss.detach()
            self.losses.append(total / self.accumulation)


def endless_batches(stream: MemoryStream, options: TrainBenchOptions, dims: ParallelDims) -> Iterator[Any]:
    """This rank's micro-batches, made beforehand and repeated; the same as a loader's over the stream."""
    loader = MicroBatchLoader(stream, options.micro_batch, dims.dp_rank, dims.data)
    steps = min(DISTINCT_STEPS, options.total_steps)
    return itertools.cycle([next(loader) for _ in range(steps * options.accumulation)])


def first_difference(ours: Any, other: Any) -> str | None:
    """Name the first tensor of two engines over the same modules whose bits differ; None if none does.

    Compares parameters, and the optimizer's fp32 shard and moments of this rank.
    """
    for (name, left), (_, right) in zip(ours.module.named_parameters(), other.module.named_parameters(), strict=True):
        if not torch.equal(left, right):
            return f"parameter {name}"
    mine, theirs = _optimizer_tensors(ours), _optimizer_tensors(other)
    if mine.keys() != theirs.keys():
        return f"optimizer state: {sorted(mine.keys() ^ theirs.keys())} on one side only"
    return next((f"optimizer {name}" for name in mine if not torch.equal(mine[name], theirs[name])), None)


def _optimizer_tensors(engine: Any) -> dict[str, torch.Tensor]:
    inner = engine.optimizer.optimizer
    found: dict[str, torch.Tensor] = {}
    for i, group in enumerate(inner.param_groups):
        for j, parameter in enumerate(group["params"]):
            found[f"group {i} tensor {j}"] = parameter
            for key, value in inner.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    found[f"group {i} tensor {j} {key}"] = value
    return found
