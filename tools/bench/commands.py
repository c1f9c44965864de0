"""The commands of ``python -m tools.bench``: each parses its options and calls one function, imported only then."""

from __future__ import annotations

import json
from importlib import import_module
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megasdc.cli.app import Application, input_option, output_folder, output_option, write_atomically
from megasdc.cli.config import render_commands, update_tables
from megasdc.common.errors import ConfigError, DataError
from megasdc.common.program import run_program
from tools.bench.bounds.options import BoundsBenchOptions, BoundTrainOptions
from tools.bench.checkpoints.options import (
    ArchiveBenchOptions,
    CompareBenchOptions,
    CompareManifestsOptions,
    RecoveryOptions,
    RestoreOptions,
    StallOptions,
)
from tools.bench.detection.options import (
    BubblesOptions,
    CampaignOptions,
    ChecksumBenchOptions,
    DetectionOptions,
    LiveOptions,
    OverheadOptions,
    PredictedAccelerator,
    ProtectOptions,
    RefereeOptions,
    TracedModel,
)
from tools.bench.drops.options import (
    DropCostOptions,
    DropPartialOptions,
    DropSpeedupOptions,
    DropTrainOptions,
    LocalFaultOptions,
    LocalSgdOptions,
)
from tools.bench.guard.options import DisputeOptions, GuardCostOptions, GuardOptions
from tools.bench.health.options import HangOptions, HealthCostOptions, StragglerOptions
from tools.bench.isolation.options import IsolationOptions, RateOptions
from tools.bench.options import Log, add_command
from tools.bench.supervised.options import SupervisedOptions
from tools.bench.training.options import DataBenchOptions, TrainBenchOptions

Keep = Annotated[
    Path | None,
    typer.Option(**output_folder(help="Folder that gets the runs' folders, without checkpoints, for plan-run.")),
]
app = Application(
    name="python -m tools.bench",
    help="Measure: each benchmark states its bar, its machine and its interval; exit code 1 if a bar is missed.",
    epilog="Example: python -m tools.bench train --against plain --blocks 30",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; an error of megasdc's own becomes one message and its documented exit code."""
    run_program(lambda: app(prog_name="python -m tools.bench"), "bench")


def benchmark(name: str, target: str, example: str, *options: type, **files: Any) -> None:
    """Make a command of a benchmark, whose help is the docstring of its options, up to their ``Args``.

    Args:
        target: ``module:function`` in this package, called with the parameters in their order and ``on_progress``.
        example: arguments, shown below its help.
        *options: dataclasses of options.
        **files: ``Log`` or ``Keep``, by name.
    """
    parameters = {f"options_{number}": one for number, one in enumerate(options)} | files

    def command(on_progress: Any, **values: Any) -> Any:
        module, _, function = target.partition(":")
        call = getattr(import_module(f"tools.bench.{module}"), function)
        return call(*(values[one] for one in parameters), on_progress)

    kinds = Parameter.POSITIONAL_OR_KEYWORD
    own = [
        Parameter(one, kinds, annotation=kind, default=None if one in files else Parameter.empty)
        for one, kind in parameters.items()
    ]
    command.__doc__ = cleandoc(options[0].__doc__ or "").partition("\n\nArgs:")[0]
    command.__signature__ = Signature([Parameter("on_progress", kinds), *own])  # type: ignore[attr-defined]
    add_command(app, name, example)(command)


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


benchmark("checksum", "detection.checksum:bench_checksum", "--blocks 40 --sizes 16 --sizes 64", ChecksumBenchOptions)


@add_command(app, "detection", "--live --faults 1000 --out detection.json")
def bench_detecting(on_progress: Any, options: CampaignOptions, log: Log = None) -> Any:
    """Inject random faults and see whether each is found and its rank named; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector reports, with --live also for the checks that users have today. Clean runs must raise no alarm. With
    --drills whole runs have faults in the links from tokens to parameters; each must end with the bits of a run
    without, or the run says in its coverage that such a fault may pass. With --protect a preset alone protects these
    runs, and the table says by kind what it finds.
    """
    if (options.drills or options.kinds) and not options.live:
        raise typer.BadParameter("--drills and --kinds need --live: they are whole runs")
    if (options.protect or options.budget) and not (options.live and options.drills):
        raise typer.BadParameter("--protect and --budget need --live and --drills: they are of whole runs")
    if options.faults == 0 and not options.live:
        raise typer.BadParameter("--faults 0 needs --live: nothing else would be injected")
    if log is not None and not options.live:
        raise typer.BadParameter("--log needs --live: a campaign of golden traces does not go on from one")
    from tools.bench.detection.golden import bench_detection
    from tools.bench.detection.live import bench_live

    if options.live:
        return bench_live(LiveOptions(**options.arguments), on_progress, log)
    return bench_detection(DetectionOptions(**options.arguments), on_progress)


benchmark("referee", "detection.referee:bench_referee", "--elements 100000 --out referee.json", RefereeOptions)

benchmark("guard", "guard.campaign:bench_guard", "--trainings 16 --names zero1 --out guard.json", GuardOptions, log=Log)

benchmark(
    "guard-disputes", "guard.disputes:bench_disputes", "--healthy 40 --faults 12 --out disputes.json", DisputeOptions
)

benchmark("guard-cost", "guard.cost:bench_guard_cost", "--pairs 4 --out cost.json", GuardCostOptions)

benchmark(
    "isolation",
    "isolation.campaign:bench_isolation",
    "--drills 20 --layouts 1x1x3 --out isolation.json",
    IsolationOptions,
    log=Log,
)

benchmark("isolation-rate", "isolation.rate:bench_isolation_rate", "--rounds 1 --out rate.json", RateOptions)

benchmark(
    "trace",
    "detection.trace:bench_trace",
    "--blocks 10 --tflops 400 --bandwidth 2680",
    TracedModel,
    PredictedAccelerator,
)


@add_command(app, "detection-overhead", "--blocks 8 --figure overhead.html")
def bench_overheads(
    on_progress: Any,
    options: OverheadOptions,
    figure: Annotated[Path | None, output_option("--figure", help="Draw cost against width as an HTML page.")] = None,
) -> Any:
    """Measure what the checks of a run cost by tier, and predict it for an accelerator; exit code 1 if a bar is missed.

    Cost is time inside our own calls over the rest of the step, reductions over the ranks included, and, noisier,
    alternating steps with and without. Bars: checks of every step at their defaults 1 %, audits 0.5 % over all steps.
    Run it on a machine that does nothing else.
    """
    from megasdc.output.html import write_page
    from tools.bench.detection.overhead import bench_overhead
    from tools.bench.detection.overhead_page import overhead_page

    result = bench_overhead(options, on_progress)
    return result if figure is None else (result, lambda: write_page(overhead_page(result), figure, "--figure"))


benchmark("protect", "detection.protected:bench_protect", "--blocks 12 --out protect.json", ProtectOptions)

benchmark("bubbles", "detection.bubbles:bench_bubbles", "--blocks 15 --out bubbles.json", BubblesOptions)

benchmark("bounds", "bounds.cost:bench_bounds", "--blocks 30 --sizes 4 --sizes 64", BoundsBenchOptions)

benchmark(
    "bound-training",
    "bounds.training:bench_bound_training",
    "--absolute 2e-4,1e-3 --spike-aware 100",
    BoundTrainOptions,
)

benchmark("compare", "checkpoints.compare:bench_compare", "--size 2048 --out compare.json", CompareBenchOptions)

benchmark(
    "compare-manifests",
    "checkpoints.compare_manifests:bench_compare_manifests",
    "--size-gb 1000 --ranks 4096",
    CompareManifestsOptions,
)

benchmark("archive", "checkpoints.archive:bench_archive", "--steps 200 --precisions fp32,bf16", ArchiveBenchOptions)

benchmark(
    "save-stall",
    "checkpoints.stall:bench_save_stall",
    "--sizes 256x4,512x8 --ranks 1 --out save_stall.json",
    StallOptions,
)

benchmark(
    "restore", "checkpoints.restore:bench_restore", "--sizes 512x8 --restarts 1 --out restore.json", RestoreOptions
)

benchmark(
    "recoveries",
    "checkpoints.recoveries:bench_recoveries",
    "--drills 14 --log recoveries.jsonl --out recoveries.json",
    RecoveryOptions,
    log=Log,
)

benchmark("dropcompute", "drops.cost:bench_drop_cost", "--steps 20 --out dropcompute.json", DropCostOptions)

benchmark("local-sgd", "drops.local_sgd:bench_local_sgd", "--rounds 18 --out local.json", LocalSgdOptions)

benchmark(
    "local-sgd-faults",
    "drops.local_sgd_faults:bench_local_sgd_faults",
    "--values 30 --times 15 --out faults.json",
    LocalFaultOptions,
)

benchmark("drop-speedup", "drops.speedup:bench_drop_speedup", "--drop-rates 0.05,0.1 --steps 28", DropSpeedupOptions)

benchmark(
    "drop-training", "drops.training:bench_drop_training", "--log runs.jsonl --out loss.json", DropTrainOptions, log=Log
)

benchmark(
    "drop-partial",
    "drops.partial:bench_drop_partial",
    "--log runs.jsonl --out partial.json",
    DropPartialOptions,
    log=Log,
)

benchmark(
    "hangs",
    "health.hangs:bench_hangs",
    "--drills 14 --clean-steps 500 --log hangs.jsonl --out hangs.json",
    HangOptions,
    log=Log,
)

benchmark(
    "stragglers",
    "health.stragglers:bench_stragglers",
    "--log stragglers.jsonl --out stragglers.json",
    StragglerOptions,
    log=Log,
)

benchmark("health-cost", "health.cost:bench_health_cost", "--steps 100 --out health_cost.json", HealthCostOptions)

benchmark(
    "supervised",
    "supervised.campaign:bench_supervised",
    "--drills 15 --log supervised.jsonl --out supervised.json",
    SupervisedOptions,
    log=Log,
    keep=Keep,
)


@app.command("reference", epilog="Example: python -m tools.bench reference --check docs/reference/command-line.md")
def reference(
    write: Annotated[
        Path | None, input_option("--write", reads=DataError, help="Put it between the file's markers `bench`.")
    ] = None,
    check: Annotated[
        Path | None, input_option("--check", reads=DataError, help="Change nothing; exit code 1 if it is out of date.")
    ] = None,
) -> None:
    """Keep the documentation of these commands in a file up to date."""
    update_tables(write, check, {"bench": _render}, "python -m tools.bench reference")


def _render() -> str:
    return render_commands(app, "python -m tools.bench")


@app.command("figures", epilog="Example: python -m tools.bench figures --take result.json --name detection-links")
def figures(
    take: Annotated[
        Path | None, input_option("--take", reads=DataError, help="Keep this result of a benchmark (its `--out`).")
    ] = None,
    name: Annotated[str, typer.Option(help="Under which name, that pages use; with `--take`.")] = "",
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 if a page differs.")] = False,
) -> None:
    """Put figures of benchmarks into README and docs/results, each with its command, commit, date and machine.

    A number in those pages that is neither generated nor transcribed from earlier measurements is exit code 1.
    """
    from tools.bench.figures import DATA, PAGES, condensed, fresh, unsourced
    from tools.bench.machine import ROOT

    if bool(take) != bool(name):
        raise typer.BadParameter("--take and --name need each other")
    if take is not None:
        DATA.mkdir(exist_ok=True)
        kept = condensed(json.loads(take.read_text(encoding="utf-8")))
        write_atomically(DATA / f"{name}.json", json.dumps(kept, indent=1) + "\n")
    wrong = False
    for page in PAGES:
        text, renewed = fresh(ROOT / page)
        if text != renewed and check:
            typer.echo(f"{page}: differs from its data; run: python -m tools.bench figures", err=True)
        elif text != renewed:
            write_atomically(ROOT / page, renewed)
            typer.echo(f"{page}: figures written")
        wrong |= text != renewed and check
        for one in unsourced(ROOT / page, page):
            typer.echo(f"{page}: numbers of no data: {' '.join(one.split())[:100]}", err=True)
            wrong = True
    raise typer.Exit(int(wrong))
