"""The commands of ``python -m tools.bench``: each parses its options and calls one function, imported only then."""

from __future__ import annotations

import json
from importlib import import_module
from inspect import Parameter, Signature
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
    RefereeOptions,
    TracedModel,
)
from tools.bench.drops.options import DropCostOptions, DropSpeedupOptions, DropTrainOptions
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


def benchmark(name: str, example: str, target: str, help: str, **parameters: Any) -> None:
    """Make a command of a benchmark.

    Args:
        example: arguments, shown below its help.
        target: ``module:function`` in this package, called with the parameters in their order and ``on_progress``.
        **parameters: annotations, by name; a dataclass of options, ``Log`` or ``Keep``.
    """

    def command(on_progress: Any, **values: Any) -> Any:
        module, _, function = target.partition(":")
        call = getattr(import_module(f"tools.bench.{module}"), function)
        return call(*(values[one] for one in parameters), on_progress)

    kinds = Parameter.POSITIONAL_OR_KEYWORD
    own = [
        Parameter(one, kinds, annotation=kind, default=None if kind in (Log, Keep) else Parameter.empty)
        for one, kind in parameters.items()
    ]
    command.__doc__ = help
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


benchmark(
    "checksum",
    "--blocks 40 --sizes 16 --sizes 64",
    "detection.checksum:bench_checksum",
    """Compare checksums with reading a tensor, and count the faults they miss; exit code 1 if a bar is missed.

    On the host XXH3 against tensor.sum(); on a GPU the mixed sum against a sum reduction and a device copy. Ratios are
    our time over theirs in alternating blocks, with an exact interval of the median. Run it on a machine that does
    nothing else.
    """,
    options=ChecksumBenchOptions,
)


@add_command(app, "detection", "--live --faults 1000 --out detection.json")
def bench_detecting(on_progress: Any, options: CampaignOptions, log: Log = None) -> Any:
    """Inject random faults and see whether each is found and its rank named; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector reports, with --live also for the checks that users have today. Clean runs must raise no alarm. With
    --drills whole runs have faults in the links from tokens to parameters; each must end with the bits of a run
    without, or the run says in its coverage that such a fault may pass.
    """
    if (options.drills or options.kinds) and not options.live:
        raise typer.BadParameter("--drills and --kinds need --live: they are whole runs")
    if options.faults == 0 and not options.live:
        raise typer.BadParameter("--faults 0 needs --live: nothing else would be injected")
    if log is not None and not options.live:
        raise typer.BadParameter("--log needs --live: a campaign of golden traces does not go on from one")
    from tools.bench.detection.golden import bench_detection
    from tools.bench.detection.live import bench_live

    if options.live:
        return bench_live(LiveOptions(**options.arguments), on_progress, log)
    return bench_detection(DetectionOptions(**options.arguments), on_progress)


benchmark(
    "referee",
    "--elements 100000 --out referee.json",
    "detection.referee:bench_referee",
    """Ask the referee of results of a healthy device, and of flipped bits; exit code 1 if it accuses a healthy one.

    Each kind of result is computed in several ways - on a processor with one thread and two, with oneDNN and without,
    on a GPU by several libraries - and these are given to it as if two ranks had computed them.
    """,
    options=RefereeOptions,
)

benchmark(
    "guard",
    "--trainings 16 --names zero1 --out guard.json",
    "guard.campaign:bench_guard",
    """Plant faults in trainings that are not megasdc's own; exit code 1 if a guard names another or none.

    Rank, submodule and direction must be named, and in trainings without a fault nobody.
    """,
    options=GuardOptions,
    log=Log,
)

benchmark(
    "guard-disputes",
    "--healthy 40 --faults 12 --out disputes.json",
    "guard.disputes:bench_disputes",
    """Let the referee judge two replicas of small models in one process; exit code 1 if it names a wrong one.

    Healthy ones compute in two right ways, and nobody may be named; of faults at drawn places 95 % are to be.
    """,
    options=DisputeOptions,
)

benchmark(
    "guard-cost",
    "--pairs 4 --out cost.json",
    "guard.cost:bench_guard_cost",
    """Measure what a guard costs a training that is not megasdc's own; exit code 1 if it is more than it may be.""",
    options=GuardCostOptions,
)

benchmark(
    "isolation",
    "--drills 20 --layouts 1x1x3 --out isolation.json",
    "isolation.campaign:bench_isolation",
    """Leave replicas out of runs whose faults go on; exit code 1 if one does not end with the right bits.

    Exactly the wrong replicas must be left out, and every loss and the last checkpoint must be those of a run without
    faults whose replicas end at the same steps; clean runs leave nobody out.
    """,
    options=IsolationOptions,
    log=Log,
)

benchmark(
    "isolation-rate",
    "--rounds 1 --out rate.json",
    "isolation.rate:bench_isolation_rate",
    """Measure the rate of a run that goes on without a replica, and what it costs that it could; exit code 1 off a bar.

    Micro-batches are slept. Bars: (N - 1) / N of the samples per second within 3 %, and 1.01 of a step's time while no
    replica is left out.
    """,
    options=RateOptions,
)

benchmark(
    "trace",
    "--blocks 10 --tflops 400 --bandwidth 2680",
    "detection.trace:bench_trace",
    """Measure what a trace costs by granularity, and predict it for an accelerator from the bytes that it reads.

    Cost is time inside our own calls over the time of a step, and, noisier, alternating steps with and without.
    """,
    sizes=TracedModel,
    accelerator=PredictedAccelerator,
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


benchmark(
    "bubbles",
    "--blocks 15 --out bubbles.json",
    "detection.bubbles:bench_bubbles",
    """Measure how much of a permuted replay is hidden where the stages of a pipeline wait; exit code 1 below a bar.

    Audited steps without a replay, with one in the bubbles, and with one after all micro-batches, in turn. Bars, where
    passes are slept: 60 % of a stage's replay with two stages and 4 micro-batches, 80 % with four and 8.
    """,
    options=BubblesOptions,
)

benchmark(
    "bounds",
    "--blocks 30 --sizes 4 --sizes 64",
    "bounds.cost:bench_bounds",
    """Compare gradient bounds with reading g and V once, and with optimizer steps; exit code 1 if a bar is missed.

    The pass bounds elements and sums squares for the norm. Read once is the faster of a compiled loop that adds both up
    and g.sum(), V.sum(). Ratios are our time over theirs in alternating blocks, with an exact interval of the median.
    Run it on a machine that does nothing else; the first run compiles DeepSpeed's CPU Adam, for a minute or more.
    """,
    options=BoundsBenchOptions,
)

benchmark(
    "bound-training",
    "--absolute 2e-4,1e-3 --spike-aware 100",
    "bounds.training:bench_bound_training",
    """Train a small GPT healthy and with faults on one replica's gradient, without and with gradient bounds.

    Prints final losses as the table of Pei et al. 2025 does: worst case, number of worse cases, diverged runs; and the
    cost of each bound on healthy runs. It only measures; there is no bar.
    """,
    options=BoundTrainOptions,
)

benchmark(
    "compare",
    "--size 2048 --out compare.json",
    "checkpoints.compare:bench_compare",
    """Compare two equal files of tensors in the page cache, against cat and cmp; exit code 1 if a bar is missed.

    At least 0.8 of the rate of cat, and at most 16 MiB more memory for four times the size. Run it on a machine that
    does nothing else.
    """,
    options=CompareBenchOptions,
)

benchmark(
    "compare-manifests",
    "--size-gb 1000 --ranks 4096",
    "checkpoints.compare_manifests:bench_compare_manifests",
    """Compare two synthetic manifests of a large checkpoint; exit code 1 if it takes more than 30 s or 1 GiB.

    The command that users call is run in a process of its own, its start with it, and must name the one block that
    differs.
    """,
    options=CompareManifestsOptions,
)

benchmark(
    "archive",
    "--steps 200 --precisions fp32,bf16",
    "checkpoints.archive:bench_archive",
    """Train small models, archive two successive checkpoints of each, and resume from quantized moments; no bar.

    Size against raw and against zstd alone, by kind of tensor; rates of pushing and pulling; the share that the second
    checkpoint has in common with the first; losses after a resume from moments of 8 bits.
    """,
    options=ArchiveBenchOptions,
)

benchmark(
    "save-stall",
    "--sizes 256x4,512x8 --ranks 1 --out save_stall.json",
    "checkpoints.stall:bench_save_stall",
    """Measure what saves cost training, on the disk and in memory; exit code 1 if a bar is missed.

    A save beside training stalls it for at most 5 % of one that waits, and but for the wait for its copy for 1 % of a
    step; micro-batches beside a copy or a writer take at most 1.03 of quiet ones, and steps of one rank that are all
    kept in memory 1.02. The sizes of the default take an hour on a machine that does nothing else.
    """,
    options=StallOptions,
)

benchmark(
    "restore",
    "--sizes 512x8 --restarts 1 --out restore.json",
    "checkpoints.restore:bench_restore",
    """Measure how fast checkpoints are restored, and the parts of restarts; exit code 1 if a bar is missed.

    At least 0.8 of the rate at which cat reads the same files from the disk. Restarts are from memory, from partners,
    and from the disk, which is also slowed down; for the last, and for partners, a user needs rights to limit disks and
    to name hosts, as root has them.
    """,
    options=RestoreOptions,
)

benchmark(
    "recoveries",
    "--drills 14 --log recoveries.jsonl --out recoveries.json",
    "checkpoints.recoveries:bench_recoveries",
    """Kill and damage runs that save beside training, and start them again; exit code 1 if one does not end right.

    All losses and the last checkpoint as without a fault, each start from the newest step that was whole, no checkpoint
    lost that a fault did not destroy, nothing left in memory. Kinds with several hosts or a full disk need root.
    """,
    options=RecoveryOptions,
    log=Log,
)

benchmark(
    "dropcompute",
    "--steps 20 --out dropcompute.json",
    "drops.cost:bench_drop_cost",
    """Measure what DropCompute costs while nothing is dropped; exit code 1 if it is more than 0.2 % of a step.

    Cost is time inside its own calls over the time of a step; waiting for another stage or tensor rank to decide is not
    in it. The bar is for micro-batches of 0.5 s and more. Run it on a machine that does nothing else.
    """,
    options=DropCostOptions,
)

benchmark(
    "drop-speedup",
    "--drop-rates 0.05,0.1 --steps 28",
    "drops.speedup:bench_drop_speedup",
    """Measure how much faster DropCompute makes replicas that sleep, against the prediction; exit code 1 beyond 5 %.

    Runs without a threshold, with thresholds, and one that chooses its own take steps in turn; other steps predict. The
    fewer --steps, the more often the bar is missed by chance. Run it on a machine that does nothing else.
    """,
    options=DropSpeedupOptions,
)

benchmark(
    "drop-training",
    "--log runs.jsonl --out loss.json",
    "drops.training:bench_drop_training",
    """Train a small GPT with dropped micro-batches, at several drop rates and with each compensation at 10 %.

    Which ones are late is simulated for many replicas and repeated by two that train. Prints final losses as Table 1
    of Giladi et al. 2023 does, and loss against steps and simulated time. It only measures; there is no bar.
    """,
    options=DropTrainOptions,
    log=Log,
)

benchmark(
    "hangs",
    "--drills 14 --clean-steps 500 --log hangs.jsonl --out hangs.json",
    "health.hangs:bench_hangs",
    """Make runs hang in many ways, and see who is named and how fast they end; exit code 1 if a bar is missed.

    The right rank in 99 % of the hangs, no other one ever, all ranks ended ten seconds after the limit of their phases,
    and no alarm in runs without a hang under other load.
    """,
    options=HangOptions,
    log=Log,
)

benchmark(
    "stragglers",
    "--log stragglers.jsonl --out stragglers.json",
    "health.stragglers:bench_stragglers",
    """Measure who is named as a straggler among replicas that sleep; exit code 1 if one is missed or named wrongly.

    A replica that is 10 % slower must be named in 95 % of the runs, one that is 30 % slower in all, nobody else at any
    time; and 90 % of a micro-batch's time must be sleep. The whole table takes more than an hour.
    """,
    options=StragglerOptions,
    log=Log,
)

benchmark(
    "health-cost",
    "--steps 100 --out health_cost.json",
    "health.cost:bench_health_cost",
    """Measure what health costs; exit code 1 if it is more than 0.05 % of a step or 1 % of a core for the agent.

    Time inside all calls of its hooks over the time of a step, an agent's processor time after its start, losses with
    and without it bit for bit, and memory and files of an agent's parts over a simulated time.
    """,
    options=HealthCostOptions,
)

benchmark(
    "supervised",
    "--drills 15 --log supervised.jsonl --out supervised.json",
    "supervised.campaign:bench_supervised",
    """Bring faults about in supervised runs between test hosts; exit code 1 if one does not end right by itself.

    All losses, the last checkpoint and the places in the data as without a fault, bit for bit; few attempts; no host
    away whose test has passed, and none used again that computed wrong results. Needs root. A run with two faults
    takes a minute or two, with --slurm up to five: requeued jobs wait, and a lost node is known after a while.
    """,
    options=SupervisedOptions,
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
