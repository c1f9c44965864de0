"""The `megasdc` command: parses arguments and calls one library function each.

torch takes seconds to import, so every command imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from megasdc import __version__
from megasdc.errors import CheckpointError, ConfigError, MegasdcError

app = typer.Typer(
    name="megasdc",
    help="Pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware.",
    epilog="Example: megasdc check-config configs/smoke.json --world-size 2",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench_app = typer.Typer(
    help="Measure: each benchmark states its bar, its machine and its interval.",
    epilog="Example: megasdc bench train --against plain --blocks 30",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")

golden_app = typer.Typer(
    help="Golden traces: what trusted hardware computed, and whether this hardware computes the same.",
    epilog="Example: megasdc golden record --config configs/smoke.json --out smoke.golden",
    no_args_is_help=True,
)
app.add_typer(golden_app, name="golden")

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated. The value is read as JSON."),
]
ConfigOption = Annotated[Path, typer.Option("--config", help="JSON configuration file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megasdc {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("check-config", epilog="Example: megasdc check-config configs/smoke.json --world-size 2")
def check_config(
    file: Annotated[Path, typer.Argument(help="JSON configuration file.")],
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Also check layout and batch sizes for so many ranks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a configuration and print it with every default filled in; exit code 70 and all problems if it is wrong.

    Relative paths in the file mean the folder that the run is started in.
    """
    from megasdc.config import check_layout, find_warnings, load_config

    try:
        config = load_config(file, overrides or ())
        layout = check_layout(config, world_size) if world_size is not None else None
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"ok": False, "source": str(file), "problems": error.problems}, indent=2))
        raise typer.Exit(error.exit_code) from error
    warnings = find_warnings(config)
    if as_json:
        result = {
            "ok": True,
            "source": str(file),
            "warnings": warnings,
            "layout": asdict(layout) if layout is not None else None,
            "resolved": config.resolved(),
        }
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(json.dumps(config.resolved(), indent=2))
    for warning in warnings:
        typer.echo(f"megasdc: warning: {warning}", err=True)
    if layout is not None:
        typer.echo(
            f"{layout.world_size} ranks = tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}; "
            f"{layout.train_batch_size} samples a step = micro-batch {layout.micro_batch_size} x accumulation "
            f"{layout.accumulation_steps} x data {layout.data}",
            err=True,
        )


@app.command("config-table", epilog="Example: megasdc config-table --write README.md")
def config_table(
    write: Annotated[Path | None, typer.Option("--write", help="Put the table between the file's markers.")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Change nothing; exit code 1 if the file's table is out of date.")
    ] = None,
) -> None:
    """Print the markdown table of every configuration field, or keep the one in a file up to date."""
    from megasdc.config.table import render_table, update_readme

    if write is None and check is None:
        typer.echo(render_table(), nl=False)
        return
    try:
        if write is not None:
            typer.echo(f"{write}: {'was up to date' if update_readme(write) else 'table written'}")
        if check is not None and not update_readme(check, check=True):
            typer.echo(f"{check}: table is out of date; run: megasdc config-table --write {check}", err=True)
            raise typer.Exit(1)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


@app.command("prepare-data", epilog="Example: megasdc prepare-data --config configs/smoke.json --workers 2")
def prepare_data(
    config: ConfigOption,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; left out: megasdc.data.path of the file.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Tokenizing processes.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Make the data anew even if the folder holds some.")] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Turn text into token files: corpus to tokenizer to Megatron's .bin/.idx and a manifest.

    A call that was interrupted goes on where it stopped.
    """
    from megasdc.config import load_config
    from megasdc.data.prepare import prepare

    section = load_config(config, overrides or ()).megasdc.data
    target = out if out is not None else Path(section.path)
    manifest = prepare(section, target, workers, progress=not as_json, force=force)
    if as_json:
        typer.echo(json.dumps({"path": str(target), "manifest": manifest.model_dump(mode="json")}, indent=2))
        return
    typer.echo(f"prepared data in {target}; a token has {manifest.unigram_entropy_nats:.3f} nats by frequency alone")


@app.command("launch", epilog="Example: megasdc launch --hostfile launch/hostfile.example --config configs/smoke.json")
def launch(
    config: ConfigOption,
    launcher_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="More options for DeepSpeed's launcher.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", help="Lines `NAME slots=N`; without: this host.")
    ] = None,
    num_gpus: Annotated[
        int | None, typer.Option("--num-gpus", "--num-ranks", min=1, help="Ranks on each host.")
    ] = None,
    include: Annotated[str, typer.Option("--include", help="Only these: NAME[:SLOT,...][@NAME...].")] = "",
    exclude: Annotated[str, typer.Option("--exclude", help="All but these; same form.")] = "",
    launcher: Annotated[
        str, typer.Option("--launcher", help="pdsh, openmpi, slurm, ...: DeepSpeed's backend.")
    ] = "pdsh",
    script: Annotated[Path | None, typer.Option("--script", help="Training script; default: pretrain_gpt.py.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check all hosts, start DeepSpeed's launcher, and return the true exit code, naming who failed first and why."""
    from megasdc.launcher.front import DEFAULT_SCRIPT, LaunchRequest, launch_run

    request = LaunchRequest(
        config_path=config,
        hostfile=hostfile,
        num_gpus=num_gpus,
        include=include,
        exclude=exclude,
        backend=launcher,
        launcher_args=tuple(launcher_args or ()),
        overrides=tuple(overrides or ()),
        script=script or DEFAULT_SCRIPT,
    )
    result = launch_run(request, dry_run=dry_run, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    raise typer.Exit(result.exit_code)


@app.command("check-determinism", epilog="Example: megasdc check-determinism --config configs/smoke.json --steps 3")
def check_determinism(
    config: ConfigOption,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each run.")] = 3,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks on this machine; left out: the fewest that fit.")
    ] = None,
    lint_only: Annotated[bool, typer.Option("--lint-only", help="List causes, run nothing.")] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """List what could make two runs differ, then make two short runs here and compare every loss, norm, optimizer
    state and parameter by checksum.

    Exit code 0: nothing was found and the runs are equal; 1: they differ, and the first difference is named; 3: they
    are equal, but something was found that can make others differ.
    """
    from rich.console import Console

    from megasdc.bench.render import progress_bar
    from megasdc.bench.repeat import check_determinism
    from megasdc.config import load_config

    loaded = load_config(config, overrides or ())
    with progress_bar(Console(stderr=True, quiet=as_json)) as on_progress:
        report = check_determinism(loaded, ranks=ranks, steps=steps, lint_only=lint_only, on_progress=on_progress)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.render())
    raise typer.Exit(report.exit_code)


@app.command("summary", epilog="Example: megasdc summary runs/smoke")
def summary(
    run_dir: Annotated[Path, typer.Argument(help="Run folder (megasdc.logging.run_dir).")],
    require_finished: Annotated[
        bool, typer.Option("--require-finished", help="Exit code 1 if the run has not done all its steps.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a run came to: loss at begin and end, speed, checkpoints."""
    from megasdc.report.summary import render, summarize

    found = summarize(run_dir)
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else render(found))
    raise typer.Exit(int(require_finished and found.steps < found.planned_steps))


CheckpointFolder = Annotated[
    Path,
    typer.Argument(help="Folder of one checkpoint, universal or not, or of several: all are looked at."),
]


@app.command("verify-checkpoint", epilog="Example: megasdc verify-checkpoint runs/smoke/checkpoints")
def verify_checkpoint(
    folder: CheckpointFolder,
    checksums: Annotated[
        bool, typer.Option("--checksums/--no-checksums", help="Read every file; without: sizes and pickles alone.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Check every file of a checkpoint against its manifest; exit code 0 if it is whole, 72 if it is damaged."""
    from megasdc.checkpoint import verify

    reports = [
        verify.verify_checkpoint(path, checksums=checksums, progress=not as_json)
        for path in verify.find_folders(folder, universal=True)
    ]
    if as_json:
        typer.echo(json.dumps([report.as_dict() for report in reports], indent=2))
    else:
        typer.echo("\n".join(report.render() for report in reports))
    raise typer.Exit(0 if all(report.ok for report in reports) else CheckpointError.exit_code)


@app.command("inspect-checkpoint", epilog="Example: megasdc inspect-checkpoint runs/smoke/checkpoints/step_00000100")
def inspect_checkpoint(folder: CheckpointFolder, as_json: Json = False) -> None:
    """Say what a checkpoint holds, from its manifest alone: step, layout, versions, sizes."""
    from megasdc.checkpoint import verify

    found = [verify.inspect_checkpoint(path) for path in verify.find_folders(folder, universal=True)]
    typer.echo(json.dumps(found, indent=2) if as_json else "\n\n".join(verify.render_inspection(one) for one in found))


@app.command("convert-checkpoint", epilog="Example: megasdc convert-checkpoint runs/smoke/checkpoints --to universal")
def convert_checkpoint(
    folder: Annotated[
        Path, typer.Argument(help="Folder of one checkpoint (step_NNNNNNNN), or of several: the newest whole one.")
    ],
    to: Annotated[Literal["universal"], typer.Option("--to", help="universal: to start from at any layout.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; left out: universal_step_NNNNNNNN beside it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a universal checkpoint that is there.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; left out: one a CPU, at most 4.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint, so that a run of another layout can start from it; exit code 72 if it is damaged.

    The result is named in megasdc.checkpoint.universal of the run that goes on.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.checkpoint.convert import convert_to_universal
        from megasdc.train.signals import exiting_on_signals

        with exiting_on_signals():
            report = convert_to_universal(folder, out, force=force, workers=workers, progress=not as_json)
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.render())


WeightsFolder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A checkpoint, a folder of several (newest whole one), or a folder made by import-hf."
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="Folder or .model file; left out: the one of the prepared data."),
]


@app.command("export-hf", epilog="Example: megasdc export-hf runs/smoke/checkpoints exported/smoke")
def export_hf(
    source: WeightsFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="fp32, bf16 or as-saved: the type that the model was trained in.")
    ] = "as-saved",
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Size of one safetensors file.")] = "2GB",
    tokenizer: TokenizerOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Json = False,
) -> None:
    """Write a model for Hugging Face transformers: safetensors, config.json, tokenizer.

    Learned positions with LayerNorm become GPT2LMHeadModel, rope with RMSNorm and a gated MLP LlamaForCausalLM; others
    are refused. Needs no GPU, and memory for two layers.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.checkpoint.export_hf import export_hf
        from megasdc.train.signals import exiting_on_signals

        with exiting_on_signals():
            result = export_hf(
                source,
                out,
                dtype=dtype,  # type: ignore[arg-type]
                max_shard_size=max_shard_size,
                tokenizer=tokenizer,
                force=force,
                progress=not as_json,
            )
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else result.render())


@app.command("import-hf", epilog="Example: megasdc import-hf exported/smoke imported/smoke")
def import_hf(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a GPT-2 or Llama model, or its hub name.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier import.")] = False,
    as_json: Json = False,
) -> None:
    """Make initial weights from a Hugging Face model, for training at any layout; prints the `model` section for it."""
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.checkpoint.import_hf import import_hf
        from megasdc.train.signals import exiting_on_signals

        with exiting_on_signals():
            result = import_hf(model, out, force=force, progress=not as_json)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
        return
    typer.echo(f"{result.path}: {result.architecture}, {result.num_parameters:,} parameters", err=True)
    if result.note is not None:
        typer.echo(f"megasdc: warning: {result.note}", err=True)
    typer.echo("put this into the configuration, under megasdc.model:", err=True)
    typer.echo(json.dumps(result.model, indent=2))


@app.command("eval", epilog="Example: megasdc eval runs/smoke/checkpoints --split test --samples 64")
def evaluate(
    source: WeightsFolder,
    config: Annotated[
        Path | None, typer.Option("--config", help="File that names the data; left out: that of the checkpoint.")
    ] = None,
    split: Annotated[Literal["train", "valid", "test"], typer.Option("--split", help="Which documents.")] = "valid",
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, help="At most so many, each once; left out: training.eval_samples of the file."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Compute loss and perplexity of a model on one process, whatever layout it was trained at.

    --set may change the data, training.eval_samples, the micro-batch and the precision. Where the split holds fewer
    samples than asked for, all are used once, and the result says so. Of an imported model with more embedding rows
    than tokenizer entries all rows are in the softmax, as in transformers.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.train.inference import evaluate_weights

        result = evaluate_weights(
            source,
            config_path=config,
            split=split,
            samples=samples,
            overrides=overrides or (),
            progress=not as_json,
        )
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else result.render())


@app.command("generate", epilog='Example: megasdc generate runs/smoke/checkpoints --prompt "def " --max-tokens 40')
def generate(
    source: WeightsFolder,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to go on from; empty: begin a document.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to add.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: the most probable token; above: one is drawn.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw among so many; 0: among all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Seed of the draws.")] = 0,
    tokenizer: TokenizerOption = None,
    as_json: Json = False,
) -> None:
    """Continue a text, up to the end of the document.

    Keeps no cache: the whole text is computed again for each token. The model sees the last max_positions tokens.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.train.inference import generate

        result = generate(
            source,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            tokenizer=tokenizer,
            progress=not as_json,
        )
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else result.prompt + result.text)


@golden_app.command("record", epilog="Example: megasdc golden record --config configs/smoke.json --out smoke.golden")
def golden_record(
    config: ConfigOption,
    out: Annotated[Path, typer.Option("--out", help="The golden file to write; replaced if it exists.")],
    overrides: Overrides = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Data-parallel size of the golden layout.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each case in each set of processes.")] = 3,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds without progress: a hang.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Run the configuration's workload - seeded weights and tokens, a few steps - and keep its checksums.

    It runs in two sets of fresh processes; a workload that does not repeat bit for bit is refused. The file holds for
    devices, versions and layout like these; its key says which.
    """
    from rich.console import Console

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.config import load_config
        from megasdc.golden.progress import run_progress
        from megasdc.golden.record import record

        with run_progress(Console(stderr=True), "recording") as on_progress:
            golden = record(
                load_config(config, overrides or []),
                out,
                replicas=replicas,
                repeats=repeats,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )
    results = sum(len(trace) for trace in golden.traces.values())
    if as_json:
        typer.echo(json.dumps({"file": str(out), "key": golden.key, "results": results, "repeats": golden.repeats}))
        return
    typer.echo(
        f"{out}: {results:,} results of {golden.layout}, {len(golden.cases)} cases, equal in {golden.repeats} runs"
    )
    for name, value in golden.key.items():
        typer.echo(f"  {name}: {value}")


@golden_app.command("verify", epilog="Example: megasdc golden verify smoke.golden --repeats 10")
def golden_verify(
    file: Annotated[Path | None, typer.Argument(help="The golden file; left out with --library.")] = None,
    library: Annotated[
        Path | None, typer.Option("--library", help="Folder of *.golden files; the one for this machine is taken.")
    ] = None,
    local: Annotated[
        int | None,
        typer.Option("--local", min=0, help="Verify so many devices of this host, each alone; 0: all that are there."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each case.")] = 3,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0, help="Instead of --repeats: so long.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds without progress: a hang.")] = 600.0,
    faults: Annotated[
        Path | None, typer.Option("--faults", help="A drill: JSON file of faults that harm the ranks on purpose.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Compute the workload of a golden file on this host and compare every result.

    Exit code 0: every rank healthy; 73: some rank computed something else, named with its first result that differs;
    75, 79: a rank hung or died; 80: not comparable, or the file is no golden trace. Over many hosts:
    `deepspeed --hostfile H launch/golden_verify.py FILE`.
    """
    from rich.console import Console

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from megasdc.golden.drill import load_drill
        from megasdc.golden.library import choose_golden
        from megasdc.golden.progress import run_progress
        from megasdc.golden.result import render_result
        from megasdc.golden.verify import count_devices, verify_here

        devices = None if local is None else local or count_devices()
        if (file is None) == (library is None):
            raise typer.BadParameter("give either a golden file or --library DIR")
        if library is not None:
            file = choose_golden(library, None if devices is None else 1)
            typer.echo(f"{file} is for this machine", err=True)
        assert file is not None, "checked above"
        drill = None if faults is None else load_drill(faults)
        with run_progress(Console(stderr=True), "verifying") as on_progress:
            result = verify_here(
                file,
                devices=devices,
                repeats=repeats,
                minutes=minutes,
                timeout_s=timeout_s,
                drill=drill,
                on_progress=on_progress,
            )
    text = json.dumps(result.as_dict(), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render_result(result, Console())
    raise typer.Exit(result.exit_code)


@bench_app.command("train", epilog="Example: megasdc bench train --against plain --blocks 30 --out bench.json")
def bench_training(
    against: Annotated[
        Literal["plain", "hf", "determinism", "launch", "all"],
        typer.Option(
            "--against",
            help="A bare PipelineEngine loop, HF Llama + ZeRO-1, deterministic mode against without, time to first "
            "step, or all.",
        ),
    ] = "all",
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each loop.")] = 30,
    steps_per_block: Annotated[int, typer.Option("--steps-per-block", help="Steps of a block.")] = 10,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 256,
    layers: Annotated[int, typer.Option("--layers", help="Transformer layers.")] = 8,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")] = 256,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 12032,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a micro-batch.")] = 2,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")] = 2,
    ranks: Annotated[int, typer.Option("--ranks", help="Data-parallel ranks on this machine.")] = 2,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of a rank.")] = 1,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")] = "fp32",
    launches: Annotated[int, typer.Option("--launches", min=1, help="Launches whose time counts.")] = 5,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result, with every block, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Compare our training loop with other loops in alternating blocks; exit code 1 if a bar is missed.

    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from rich.console import Console

    from megasdc.bench.options import TrainBenchOptions
    from megasdc.bench.render import progress_bar, render
    from megasdc.bench.train import AGAINST, bench_train

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
    )
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_train(options, AGAINST if against == "all" else (against,), launches, on_progress)
    text = json.dumps(result.as_dict(), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render(result, Console())
    raise typer.Exit(int(not result.passed))


@bench_app.command("detection", epilog="Example: megasdc bench detection --faults 600 --clean 120 --out detection.json")
def bench_detecting(
    faults: Annotated[int, typer.Option("--faults", min=1, help="Faults to inject, over all layouts and types.")] = 600,
    clean: Annotated[int, typer.Option("--clean", min=1, help="Runs without a fault in between.")] = 120,
    layouts: Annotated[
        str, typer.Option("--layouts", help="Layouts, tensor x pipeline x data, with commas between.")
    ] = "1x1x2,2x1x1,1x2x1,2x2x2",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of every draw.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result, with every run, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Inject random faults and see whether a golden trace finds each and names the rank; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector says it did. Clean runs must raise nothing.
    """
    from rich.console import Console

    from megasdc.bench.detection import DetectionOptions, bench_detection, parse_layouts
    from megasdc.bench.detection_render import render_detection
    from megasdc.bench.render import progress_bar

    options = DetectionOptions(faults, clean, parse_layouts(layouts), seed=seed)
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_detection(options, on_progress)
    text = json.dumps(result.as_dict(), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render_detection(result, Console())
    raise typer.Exit(int(not result.passed))


@bench_app.command("data", epilog="Example: megasdc bench data --workers 2 --blocks 10 --out bench.json")
def bench_preparing(
    tokenizer: Annotated[
        Literal["sentencepiece", "huggingface", "all"], typer.Option("--tokenizer", help="Kind of tokenizer.")
    ] = "all",
    workers: Annotated[int, typer.Option("--workers", help="Tokenizing processes; 0: one a core.")] = 0,
    blocks: Annotated[int, typer.Option("--blocks", help="Runs of each side.")] = 10,
    characters: Annotated[int, typer.Option("--characters", help="Length of the text.")] = 24_000_000,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 4096,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result, with every block, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Compare prepare-data with Megatron's preprocess_data in alternating runs; exit code 1 if a bar is missed.

    Both read the same text with the same trained tokenizer and as many processes, and must write the same bytes.
    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from rich.console import Console

    from megasdc.bench.data import KINDS, DataBenchOptions, bench_data
    from megasdc.bench.render import progress_bar, render_data

    options = DataBenchOptions(workers=workers, blocks=blocks, characters=characters, vocab=vocab)
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_data(options, KINDS if tokenizer == "all" else (tokenizer,), on_progress)
    text = json.dumps(result.as_dict(), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render_data(result, Console())
    raise typer.Exit(int(not result.passed))


@bench_app.command("checksum", epilog="Example: megasdc bench checksum --blocks 40 --sizes 16 --sizes 64")
def bench_checksums(
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each side.")] = 40,
    sizes: Annotated[
        list[int] | None, typer.Option("--sizes", help="MiB of a tensor; may be repeated; default: 1 to 256.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of tensor.sum(); XXH3 has one.")] = 1,
    trials: Annotated[int, typer.Option("--trials", help="Faults of each kind.")] = 4000,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result, with every block, as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Compare checksums with reading a tensor, and count the faults they miss; exit code 1 if a bar is missed.

    On the host XXH3 against tensor.sum(); on a GPU the mixed sum against a sum reduction and a device copy. Ratios are
    our time over theirs in alternating blocks, with an exact interval of the median. Run it on a machine that does
    nothing else.
    """
    from rich.console import Console

    from megasdc.bench.checksum import ChecksumBenchOptions, bench_checksum
    from megasdc.bench.render import progress_bar, render_checksum

    options = ChecksumBenchOptions(
        blocks=blocks, sizes_mib=tuple(sizes or (1, 4, 16, 64, 256)), threads=threads, trials=trials
    )
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_checksum(options, on_progress)
    text = json.dumps(result.as_dict(), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render_checksum(result, Console())
    raise typer.Exit(int(not result.passed))


@bench_app.command("trace", epilog="Example: megasdc bench trace --blocks 10 --tflops 400 --bandwidth 2680")
def bench_tracing(
    blocks: Annotated[int, typer.Option("--blocks", help="Steps of each kind.")] = 10,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 1024,
    layers: Annotated[int, typer.Option("--layers", help="Transformer layers.")] = 2,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")] = 512,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 8192,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")] = 2,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.")] = 1,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")] = "fp32",
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", min=1.0, help="Accelerator: GB/s at which checksums read; 0.8 of an H100's.")
    ] = 2680.0,
    tflops: Annotated[
        float, typer.Option("--tflops", min=0.1, help="Accelerator: TFLOP/s that training reaches; 40 % of an H100's.")
    ] = 395.6,
    call_us: Annotated[
        float, typer.Option("--call-us", min=0.0, help="Accelerator: microseconds to launch one checksum.")
    ] = 10.0,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure what a trace costs by granularity, and predict it for an accelerator from the bytes that it reads.

    Cost is time inside our own calls over the time of a step, and, noisier, alternating steps with and without.
    """
    from rich.console import Console

    from megasdc.bench.options import TrainBenchOptions
    from megasdc.bench.render import progress_bar
    from megasdc.bench.trace import Accelerator, bench_trace
    from megasdc.bench.trace_render import render

    options = TrainBenchOptions(
        blocks=blocks,
        hidden=hidden,
        layers=layers,
        sequence=sequence,
        vocab=vocab,
        micro_batch=micro_batch,
        accumulation=accumulation,
        threads=threads,
        precision=precision,
    )
    accelerator = Accelerator(bytes_per_s=bandwidth * 1e9, flop_per_s=tflops * 1e12, call_s=call_us * 1e-6)
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_trace(options, accelerator, on_progress)
    text = json.dumps(result.as_dict(), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render(result, Console())


def main() -> None:
    """Run the command line; an error of megasdc's own becomes one message and its documented exit code."""
    try:
        app(prog_name="megasdc")
    except MegasdcError as error:
        typer.echo(f"megasdc: error: {error}", err=True)
        sys.exit(error.exit_code)
