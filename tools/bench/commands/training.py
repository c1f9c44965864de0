"""`python -m tools.bench train`, `data`, `memory` and `checksum`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megasdc.cli.app import input_option
from megasdc.common.errors import ConfigError
from tools.bench.commands.app import app
from tools.bench.detection.options import ChecksumBenchOptions
from tools.bench.options import add_command
from tools.bench.training.options import DataBenchOptions, TrainBenchOptions


@add_command(app, "train", "--against plain --blocks 30 --out bench.json")
def bench_training(
    on_progress: Any,
    against: Annotated[
        Literal["plain", "hf", "hf-compiled", "determinism", "bounds", "launch", "all"],
        typer.Option(
            "--against",
            help="A bare PipelineEngine loop, HF Llama + ZeRO-1, the same under torch.compile, deterministic mode or "
            "bounds against without, time to first step, or all.",
        ),
    ] = "all",
    *,
    options: TrainBenchOptions,
    launches: Annotated[int, typer.Option("--launches", min=1, help="Timed launches of each command.")] = 5,
) -> Any:
    """Compare our training loop with other loops in alternating blocks; exit code 1 if a bar is missed.

    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from tools.bench.training.steps import AGAINST, bench_train

    return bench_train(options, AGAINST if against == "all" else (against,), launches, on_progress)


@add_command(app, "data", "--workers 2 --blocks 10 --out bench.json")
def bench_preparing(
    on_progress: Any,
    tokenizer: Annotated[
        Literal["sentencepiece", "huggingface", "all"], typer.Option("--tokenizer", help="Kind of tokenizer.")
    ] = "all",
    *,
    options: DataBenchOptions,
) -> Any:
    """Compare prepare-data with Megatron's preprocess_data in alternating runs; exit code 1 if a bar is missed.

    Both read the same text with the same trained tokenizer and as many processes, and must write the same bytes.
    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from tools.bench.training.data import KINDS, bench_data

    return bench_data(options, KINDS if tokenizer == "all" else (tokenizer,), on_progress)


@add_command(app, "memory", "--config my.json --ranks 2")
def bench_step_memory(
    on_progress: Any,
    config: Annotated[
        Path | None,
        input_option("--config", reads=ConfigError, help="Measure this configuration instead of the built-in ones."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --config: ranks on this machine; default: 1.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", min=1, help="With --config: entries; default: data.tokenizer.vocab_size."),
    ] = None,
) -> Any:
    """Compare predicted with measured peak memory of a step; exit code 1 if a stage is off by more than 10 %.

    Each configuration is trained for three steps on random tokens, and nothing is written.
    """
    from megasdc.config.load import load_config
    from megasdc.parallel.local_ranks import count_accelerators
    from tools.bench.training.memory import bench_memory, default_cases

    given = {"--ranks": ranks, "--vocab-size": vocab_size}
    if config is None and (alone := [name for name, value in given.items() if value is not None]):
        raise ConfigError(
            [f"{name}: the built-in configurations have their own; it goes with --config" for name in alone]
        )
    if config is None:
        cases = default_cases(count_accelerators())
    else:
        loaded = load_config(config)
        cases = {config.name: (loaded, ranks or 1, vocab_size or loaded.megasdc.data.tokenizer.vocab_size)}
    return bench_memory(cases, on_progress)


@add_command(app, "checksum", "--blocks 40 --sizes 16 --sizes 64")
def bench_checksums(on_progress: Any, options: ChecksumBenchOptions) -> Any:
    """Compare checksums with reading a tensor, and count the faults they miss; exit code 1 if a bar is missed.

    On the host XXH3 against tensor.sum(); on a GPU the mixed sum against a sum reduction and a device copy. Ratios are
    our time over theirs in alternating blocks, with an exact interval of the median. Run it on a machine that does
    nothing else.
    """
    from tools.bench.detection.checksum import bench_checksum

    return bench_checksum(options, on_progress)
