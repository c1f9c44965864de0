"""Options of the benchmarks of training and of preparing data, and the configuration of a training that they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasdc.config.load import RunConfig, parse_config
from tools.bench.options import Options, option
from tools.bench.small.gpt import raw_config
from tools.trainings.styles import LLAMA

HEAD_WIDTH = 64


@dataclass(frozen=True)
class TrainBenchOptions(Options):
    """Sizes of a measurement of training steps; all ranks are data parallel, and the bare loop has ``fuse`` too."""

    blocks: int = option(30, "Blocks of each loop.", least=1)
    steps_per_block: int = option(10, "Steps of a block.", least=1)
    hidden: int = option(256, "Width h; a multiple of 64.", least=1)
    layers: int = option(8, "Transformer layers.", least=1)
    sequence: int = option(256, "Tokens of a sample.", least=1)
    vocab: int = option(12032, "Entries of the vocabulary.", least=1)
    micro_batch: int = option(2, "Samples of a micro-batch.", least=1)
    accumulation: int = option(2, "Micro-batches of a step.", least=1)
    ranks: int = option(2, "Data-parallel ranks on this machine.", least=1)
    threads: int = option(1, "CPU threads of a rank.", least=1)
    precision: Literal["fp32", "bf16"] = option("fp32", "Type of parameters.")
    fuse: bool = option(False, "With model.fuse; its bars are lower.")

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = []
        if self.hidden % HEAD_WIDTH:
            found.append(f"--hidden: {self.hidden} must be a multiple of {HEAD_WIDTH}, the width of a head")
        if self.precision not in ("fp32", "bf16"):
            found.append(f"--precision: {self.precision} must be fp32 or bf16")
        return found

    @property
    def work(self) -> str:
        """Model and batch of a step, as reports show them."""
        return (
            f"Llama-like H={self.hidden} L={self.layers} S={self.sequence} vocabulary {self.vocab}; "
            f"{self.accumulation} micro-batches of {self.micro_batch}"
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.ranks * self.accumulation * self.micro_batch * self.sequence

    @property
    def warmup_steps(self) -> int:
        """Steps of each loop before the first block: a block, so that reports every ten steps stay in step."""
        return self.steps_per_block

    @property
    def total_steps(self) -> int:
        """Steps that each loop takes in all: a block to warm up, the measured ones, and a profiled one."""
        return self.warmup_steps + (self.blocks + 1) * self.steps_per_block


@dataclass(frozen=True)
class DataBenchOptions(Options):
    """Sizes of a measurement of preparing data; the whole library has about 30 million characters."""

    workers: int = option(0, "Tokenizing processes; 0: one per core.", least=0)
    blocks: int = option(10, "Runs of each side.", least=1)
    characters: int = option(24_000_000, "Length of the text.", least=1)
    vocab: int = option(4096, "Entries of the vocabulary.", least=400)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers == 0:
            object.__setattr__(self, "workers", len(os.sched_getaffinity(0)))


def run_config(options: TrainBenchOptions, folder: Path, devices: int = 0) -> RunConfig:
    """A Llama-like model with every setting that is not a size at its default.

    Args:
        folder: where the run writes; also stands for the data, which are in memory.
        devices: GPUs of this host, which the ranks share where there are fewer; 0: ranks compute on its processor.
    """
    heads = options.hidden // HEAD_WIDTH
    sizes = {"num_layers": options.layers, "hidden_size": options.hidden, "num_attention_heads": heads}
    shared = 0 < devices < options.ranks
    parallel = {"threads": options.threads, "timeout_s": 600.0, "share_devices": shared}
    model = {**sizes, **LLAMA, "fuse": options.fuse}
    more = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
    }
    config = raw_config(folder, folder, model, options.sequence, options.total_steps, {"parallel": parallel}, more)
    if options.precision == "bf16":
        config["bf16"] = {"enabled": True}
    return parse_config(config, source="the benchmark's options")
