"""Interchange with Hugging Face, and use of trained models: `megasdc export-hf`, `import-hf`, `eval`, `generate`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from megasdc.cli.app import Json, Overrides, app, input_argument, input_option, output_folder, stdout_kept_clean
from megasdc.errors import CheckpointError, ConfigError, DataError

WeightsFolder = Annotated[
    Path,
    input_argument(
        CheckpointError,
        missing=True,
        metavar="DIR",
        help="A checkpoint, a folder of several (newest complete one), or a folder made by import-hf.",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    input_option("--tokenizer", reads=DataError, help="Folder or .model file; default: the one of the prepared data."),
]


@app.command("export-hf", epilog="Example: megasdc export-hf runs/smoke/checkpoints exported/smoke")
def export_hf(
    source: WeightsFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", **output_folder(help="Folder to write."))],
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
    with stdout_kept_clean():
        from megasdc.interchange.export_hf import export_hf
        from megasdc.train.process.signals import exiting_on_signals

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
    out: Annotated[Path, typer.Argument(metavar="OUT", **output_folder(help="Folder to write."))],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier import.")] = False,
    as_json: Json = False,
) -> None:
    """Make initial weights from a Hugging Face model, for training at any layout; prints the `model` section for it."""
    with stdout_kept_clean():
        from megasdc.interchange.import_hf import import_hf
        from megasdc.train.process.signals import exiting_on_signals

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
        Path | None,
        input_option("--config", reads=ConfigError, help="File that names the data; default: that of the checkpoint."),
    ] = None,
    split: Annotated[Literal["train", "valid", "test"], typer.Option("--split", help="Split to evaluate.")] = "valid",
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, help="Maximum of samples, each used once; default: training.eval_samples of the file."
        ),
    ] = None,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Compute loss and perplexity of a model on one process, whatever layout it was trained at.

    --set may change the data, training.eval_samples, the micro-batch and the precision. Where the split holds fewer
    samples than asked for, all are used once, and the result says so. Of an imported model with more embedding rows
    than tokenizer entries all rows are in the softmax, as in transformers.
    """
    with stdout_kept_clean():
        from megasdc.train.inference import evaluate_weights

        result = evaluate_weights(
            source,
            config_path=config,
            split=split,
            samples=samples,
            overrides=overrides,
            progress=not as_json,
        )
    typer.echo(json.dumps(asdict(result), indent=2) if as_json else result.render())


@app.command("generate", epilog='Example: megasdc generate runs/smoke/checkpoints --prompt "def " --max-tokens 40')
def generate(
    source: WeightsFolder,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue; empty: begin a document.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Maximum of tokens to add.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: the most probable token; above: one is drawn.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw among so many; 0: among all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Seed of the draws.")] = 0,
    tokenizer: TokenizerOption = None,
    as_json: Json = False,
) -> None:
    """Continue a text, up to the end of the document.

    Keeps no cache: the whole text is recomputed for each token. The model sees the last max_positions tokens.
    """
    with stdout_kept_clean():
        from megasdc.train.generation import generate

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
