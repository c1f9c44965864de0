"""The predicted peak of a step is what the allocator's own events add up to, on each stage."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_distributed

from megasdc.config import check_layout, parse_config
from megasdc.train.memory_step import predict_step_memory

SIZES = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "max_positions": 512}
LLAMA = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_mlp": True,
    "bias": False,
    "tie_embeddings": False,
}
BF16 = {"bf16": {"enabled": True}}


@dataclass(frozen=True)
class Case:
    """A configuration, and how many ranks it runs on."""

    ranks: int
    model: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    vocab: int = 8192
    sequence: int = 256

    def config(self):
        """The checked configuration."""
        own = {
            "model": {**SIZES, **self.model},
            "data": {"path": "x", "sequence_length": self.sequence},
            "parallel": self.parallel,
            "training": {"steps": 10},
            "logging": {"run_dir": "r"},
        }
        batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
        return parse_config({**batch, **self.deepspeed, "megasdc": own})


FOUR = {"gradient_accumulation_steps": 4}
CASES = {
    "two stages": Case(2, deepspeed=FOUR, parallel={"pipeline": 2}),
    "two replicas in bf16": Case(2, LLAMA, BF16),
}
"""Short ones, in every test run."""
CAMPAIGN = {
    "fp32": Case(1),
    "bf16": Case(1, LLAMA, BF16),
    "bf16 in bf16": Case(1, deepspeed={**BF16, "data_types": {"grad_accum_dtype": "bf16"}}),
    "tensor 2": Case(2, LLAMA, parallel={"tensor": 2}),
    "data 2": Case(2, LLAMA),
    "recomputation": Case(
        1,
        deepspeed={"train_micro_batch_size_per_gpu": 4, "pipeline": {"activation_checkpoint_interval": 1}},
        sequence=512,
    ),
    "2 x 2 x 2": Case(8, LLAMA, FOUR, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
    "vocabulary": Case(1, deepspeed=BF16, vocab=32768),
}


def _peak(case):
    """(stage, peak bytes of the third step), from torch.profiler's allocator events since before the build."""
    from torch.profiler import ProfilerActivity, profile

    from megasdc.bench.loops import MemoryStream
    from megasdc.data.loader import MicroBatchLoader
    from megasdc.parallel import groups
    from megasdc.train.build_engine import build_training_engine
    from megasdc.train.startup import StartClock

    config = case.config()
    layout = check_layout(config, dist.get_world_size())
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, 60)
    stream = MemoryStream(case.vocab, config.megasdc.data.sequence_length, 8, 1000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine = build_training_engine(config, layout, dims, case.vocab, StartClock(time.monotonic()))
        loader = MicroBatchLoader(stream, layout.micro_batch_size, dims.dp_rank, dims.data)
        for _ in range(2):
            engine.train_step(loader)
        begin = time.time_ns()
        engine.train_step(loader)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, held)
    return dims.pp_rank, peak


def _compare(case):
    predicted = predict_step_memory(case.config(), check_layout(case.config(), case.ranks), case.vocab)
    for stage, peak in run_distributed(_peak, case.ranks, case, timeout_s=300.0):
        assert predicted[stage].total == pytest.approx(peak, rel=0.1), (stage, predicted[stage])


@pytest.mark.parametrize("name", CASES)
def test_each_stages_peak_is_predicted_within_a_tenth(name):
    """What check-config prints is within 10 % of the measured peak on every rank."""
    _compare(CASES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", CAMPAIGN)
def test_peaks_of_eight_configurations(name):
    """The same over precisions, layouts, recomputation and vocabularies."""
    _compare(CAMPAIGN[name])
