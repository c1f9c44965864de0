"""Interchange with Hugging Face, and use of trained models: `megasdc export-hf`, `import-hf`, `eval`, `generate`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from megasdc.cli.app import (
    Json,
    Overrides,
    app,
    input_argument,
    input_option,
    output_folder,
    print_text,
    stdout_to_stderr,
)
from megasdc.common.errors import CheckpointError, ConfigError, DataError
from megasdc.common.program import at_home, echo

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
def export_hf_command(
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
    with stdout_to_stderr():
        from megasdc.interchange.export_hf import export_hf
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
    print_text(result, as_json)


@app.command("import-hf", epilog="Example: megasdc import-hf exported/smoke imported/smoke")
def import_hf_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", callback=at_home, help="Folder of a GPT-2 or Llama model, or its hub name."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", **output_folder(help="Folder to write."))],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier import.")] = False,
    as_json: Json = False,
) -> None:
    """Make initial weights from a Hugging Face model, for training at any layout; prints the `model` section for it."""
    with stdout_to_stderr():
        from megasdc.interchange.import_hf import import_hf
        from megasdc.train.signals import exiting_on_signals

        with exiting_on_signals():
            result = import_hf(model, out, force=force, progress=not as_json)
    if as_json:
        print_text(result, as_json)
        return
    echo(f"{result.path}: {result.architecture}, {result.num_parameters:,} parameters", err=True)
    echo(result.logits.render(), err=True)
    if result.note is not None:
        echo(f"megasdc: warning: {result.note}", err=True)
    echo("put this into the configuration, under megasdc.model:", err=True)
    echo(json.dumps(result.model, indent=2))


@dataclass(frozen=True)
class QuestionOptions:
    """Options of ``megasdc eval`` for multiple-choice questions."""

    choices: Annotated[
        Path | None,
        input_option(
            "--choices",
            reads=DataError,
            help='Answer the questions of this file instead: {"prompt": TEXT, "choices": [TEXT, ...], "answer": INDEX} '
            "a line.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        input_option(
            "--against",
            reads=CheckpointError,
            missing=True,
            help="Weights that answer too: shows how many questions both answer differently.",
        ),
    ] = None
    tokenizer: TokenizerOption = None

    def check(self, others: bool) -> None:
        """Refuse options that do not go together; ``others``: whether some of a split were given."""
        if self.choices is None and (self.against is not None or self.tokenizer is not None):
            raise typer.BadParameter("--against and --tokenizer go with --choices")
        if self.choices is not None and others:
            raise typer.BadParameter("--config, --split, --samples and --set are of a split, not of --choices")


@app.command("eval", epilog="Example: megasdc eval runs/smoke/checkpoints --split test --samples 64")
def evaluate(
    source: WeightsFolder,
    questions: QuestionOptions,
    config: Annotated[
        Path | None,
        input_option("--config", reads=ConfigError, help="File that names the data; default: that of the checkpoint."),
    ] = None,
    split: Annotated[
        Literal["train", "valid", "test"] | None, typer.Option("--split", help="Split to evaluate; default: valid.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", min=1, help="Maximum of samples, each used once; default: training.eval_samples of the file."
        ),
    ] = None,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Compute loss and perplexity of a model on one process, whatever its layout was, or its answers to questions.

    --set may change the data, training.eval_samples, the micro-batch and the precision. Where the split holds fewer
    samples than asked for, all are used once, and the result says so. Of an imported model with more embedding rows
    than tokenizer entries all rows are in the softmax, as in transformers.

    With --choices its answer to a question is the choice with the largest sum of the log-probabilities of its tokens,
    given the prompt; of equal ones the first. Lengths are not compensated.
    """
    questions.check(bool(config or split or samples or overrides))
    if questions.choices is not None:
        _answer(source, questions, questions.choices, as_json)
        return
    with stdout_to_stderr():
        from megasdc.train.inference import evaluate_weights

        result = evaluate_weights(
            source,
            config_path=config,
            split=split or "valid",
            samples=samples,
            overrides=overrides,
            progress=not as_json,
        )
    print_text(result, as_json)


def _answer(source: Path, options: QuestionOptions, file: Path, as_json: bool) -> None:
    """Print the answers of a model to the questions of a file."""
    with stdout_to_stderr():
        from megasdc.lab.studies.choices import evaluate_choices

        result = evaluate_choices(
            source, file, against=options.against, tokenizer=options.tokenizer, progress=not as_json
        )
    print_text(result, as_json)


@app.command("generate", epilog='Example: megasdc generate runs/smoke/checkpoints --prompt "def " --max-tokens 40')
def generate_command(
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
    with stdout_to_stderr():
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
    print_text(result, as_json, result.prompt + result.text)
