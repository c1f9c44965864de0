"""`python -m tools.bench train`, `data`, `memory` and `checksum`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megasdc.cli.app import Json, Out, input_option, print_result
from megasdc.errors import ConfigError
from tools.bench.commands.app import app
from tools.bench.commands.options import Accumulation, Layers, MicroBatch, Precision, Sequence, Threads, Vocab


@app.command("train", epilog="Example: python -m tools.bench train --against plain --blocks 30 --out bench.json")
def bench_training(
    against: Annotated[
        Literal["plain", "hf", "hf-compiled", "determinism", "bounds", "launch", "all"],
        typer.Option(
            "--against",
            help="A bare PipelineEngine loop, HF Llama + ZeRO-1, the same under torch.compile, deterministic mode or "
            "bounds against without, time to first step, or all.",
        ),
    ] = "all",
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each loop.")] = 30,
    steps_per_block: Annotated[int, typer.Option("--steps-per-block", help="Steps of a block.")] = 10,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 256,
    layers: Layers = 8,
    sequence: Sequence = 256,
    vocab: Vocab = 12032,
    micro_batch: MicroBatch = 2,
    accumulation: Accumulation = 2,
    ranks: Annotated[int, typer.Option("--ranks", help="Data-parallel ranks on this machine.")] = 2,
    threads: Threads = 1,
    precision: Precision = "fp32",
    fuse: Annotated[bool, typer.Option("--fuse", help="With model.fuse; its bars are lower.")] = False,
    launches: Annotated[int, typer.Option("--launches", min=1, help="Timed launches of each command.")] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare our training loop with other loops in alternating blocks; exit code 1 if a bar is missed.

    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from megasdc.progress import progress_bars
    from tools.bench.render import render
    from tools.bench.training.options import TrainBenchOptions
    from tools.bench.training.steps import AGAINST, bench_train

    options = TrainBenchOptions(
        blocks=blocks,
        steps_per_block=steps_per_block,
        hidden=hidden,
        layers=layers,
        sequence=sequence,
        vocab=vocab,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=ranks,
        threads=threads,
        precision=precision,
        fuse=fuse,
    )
    with progress_bars() as on_progress:
        result = bench_train(options, AGAINST if against == "all" else (against,), launches, on_progress)
    print_result(result, render, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@app.command("data", epilog="Example: python -m tools.bench data --workers 2 --blocks 10 --out bench.json")
def bench_preparing(
    tokenizer: Annotated[
        Literal["sentencepiece", "huggingface", "all"], typer.Option("--tokenizer", help="Kind of tokenizer.")
    ] = "all",
    workers: Annotated[int, typer.Option("--workers", help="Tokenizing processes; 0: one per core.")] = 0,
    blocks: Annotated[int, typer.Option("--blocks", help="Runs of each side.")] = 10,
    characters: Annotated[int, typer.Option("--characters", help="Length of the text.")] = 24_000_000,
    vocab: Vocab = 4096,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare prepare-data with Megatron's preprocess_data in alternating runs; exit code 1 if a bar is missed.

    Both read the same text with the same trained tokenizer and as many processes, and must write the same bytes.
    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from megasdc.progress import progress_bars
    from tools.bench.render import render_data
    from tools.bench.training.data import KINDS, DataBenchOptions, bench_data

    options = DataBenchOptions(workers=workers, blocks=blocks, characters=characters, vocab=vocab)
    with progress_bars() as on_progress:
        result = bench_data(options, KINDS if tokenizer == "all" else (tokenizer,), on_progress)
    print_result(result, render_data, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@app.command("memory", epilog="Example: python -m tools.bench memory --config my.json --ranks 2")
def bench_step_memory(
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
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare predicted with measured peak memory of a step; exit code 1 if a stage is off by more than 10 %.

    Each configuration is trained for three steps on random tokens, and nothing is written.
    """
    from megasdc.config import load_config
    from megasdc.parallel.local_ranks import count_accelerators
    from megasdc.progress import progress_bars
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
    with progress_bars() as on_progress:
        result = bench_memory(cases, on_progress)
    print_result(
        result, lambda found, console: console.print(found.render(), highlight=False), out=out, as_json=as_json
    )
    raise typer.Exit(int(not result.passed))


@app.command("checksum", epilog="Example: python -m tools.bench checksum --blocks 40 --sizes 16 --sizes 64")
def bench_checksums(
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each side.")] = 40,
    sizes: Annotated[
        list[int] | None, typer.Option("--sizes", help="MiB of a tensor; may be repeated; default: 1 to 256.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of tensor.sum(); XXH3 has one.")] = 1,
    trials: Annotated[int, typer.Option("--trials", help="Faults of each kind.")] = 4000,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare checksums with reading a tensor, and count the faults they miss; exit code 1 if a bar is missed.

    On the host XXH3 against tensor.sum(); on a GPU the mixed sum against a sum reduction and a device copy. Ratios are
    our time over theirs in alternating blocks, with an exact interval of the median. Run it on a machine that does
    nothing else.
    """
    from megasdc.progress import progress_bars
    from tools.bench.detection.checksum import ChecksumBenchOptions, bench_checksum
    from tools.bench.render import render_checksum

    options = ChecksumBenchOptions(
        blocks=blocks, sizes_mib=tuple(sizes or (1, 4, 16, 64, 256)), threads=threads, trials=trials
    )
    with progress_bars() as on_progress:
        result = bench_checksum(options, on_progress)
    print_result(result, render_checksum, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))
