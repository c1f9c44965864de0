"""`megasdc init`: a first configuration, from options or from answers on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megasdc.cli.app import Json, app, input_option, writable
from megasdc.cli.options import option
from megasdc.common.errors import LaunchError
from megasdc.common.program import echo, write_atomically
from megasdc.common.words import number_of

if TYPE_CHECKING:
    from megasdc.lab.planning.first_config import FirstAnswers, FirstConfig

Precision = Literal["fp32", "bf16", "fp16"]
Protection = Literal["off", "standard", "strict"]


@dataclass(frozen=True)
class InitOptions:
    """Options of ``megasdc init``; None: asked on a terminal, or what follows from the others."""

    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", readable=False, callback=writable, help="To write; its name is the run's."),
    ] = Path("my.json")
    text: str | None = option(
        None, "stdlib (that of Python), a file, folder or glob of text, hub:NAME, or a folder of prepared data."
    )
    tokenizer: str | None = option(
        None, "train or train:N (N entries), a SentencePiece model, a folder, or a name on the hub; default: train."
    )
    parameters: str | None = option(None, "Size of the model, such as 10m, 124m or 1.5b; its shape follows.")
    ranks: int | None = option(None, "Ranks on this host.", "--ranks", "--num-ranks", min=1)
    hostfile: Path | None = option(
        None, "Instead of --ranks: lines `NAME slots=N`.", make=input_option, reads=LaunchError
    )
    precision: Precision | None = option(None, "Default: bf16 where this host has a GPU, else fp32.")
    protect: Protection | None = option(None, "Preset that protects the run; default: standard.")
    steps: int | None = option(None, "Steps; default: 20 tokens a parameter, at most four times the text.", min=1)
    samples: int | None = option(None, "Samples of a step; default: up to half a million tokens, by size.", min=1)
    sequence_length: int = option(512, "Tokens of a sample.", min=1)
    tensor: int = option(1, "Tensor-parallel ranks.", min=1)
    pipeline: int = option(1, "Pipeline stages.", min=1)
    force: bool = option(False, "Replace FILE if it is there.", "--force")


@app.command("init", epilog="Example: megasdc init my.json --text stdlib --parameters 1m --ranks 2")
def init(options: InitOptions, as_json: Json = False) -> None:
    """Write a first configuration, check it, and say the next three commands.

    Asks on a terminal for what no option gives. What follows from the rest is left out of the file: micro-batches from
    the ranks, warm-up and decay from the steps, the vocabulary from the data.
    """
    from megasdc.cli.config import check_config_file
    from megasdc.config.checks import check_layout
    from megasdc.config.load import parse_config
    from megasdc.lab.planning.first_config import propose_config

    if options.file.exists() and not options.force:
        raise typer.BadParameter(f"{options.file} is there already: name another FILE, or add --force")
    answers = _answers(_asked(options) if sys.stdin.isatty() and sys.stderr.isatty() else options)
    found = propose_config(answers)
    check_layout(parse_config(found.config, source=str(options.file)), answers.ranks)
    write_atomically(options.file, found.text)
    checked = check_config_file(options.file, world_size=answers.ranks, vocab_size=found.shape.vocabulary)
    if as_json:
        echo(json.dumps(_as_dict(options.file, found, checked.as_dict()), indent=2))
        return
    echo(f"{options.file}: written, {number_of(found.text.count(chr(10)), 'line')}")
    echo("\n".join(found.notes))
    checked.print()
    echo("\nNext")
    width = max(len(command) for command, _ in found.commands)
    for command, purpose in found.commands:
        echo(f"  {command:{width}}  # {purpose}")


def _as_dict(file: Path, found: FirstConfig, checked: dict[str, Any]) -> dict[str, Any]:
    return {
        "file": str(file),
        "config": found.config,
        "parameters": found.shape.parameters,
        "vocabulary": found.shape.vocabulary,
        "about": found.notes,
        "commands": [command for command, _ in found.commands],
        "check": checked,
    }


def _answers(options: InitOptions) -> FirstAnswers:
    """The answers that options give, with defaults.

    Raises:
        BadParameter: some that have no default are missing, or contradict; names all of them.
        LaunchError: the hostfile cannot be read.
    """
    from megasdc.lab.planning.first_config import FirstAnswers, parse_parameters

    where = None if options.ranks is None and options.hostfile is None else True
    needed = {"--text": options.text, "--parameters": options.parameters, "--ranks (or --hostfile)": where}
    if missing := [name for name, value in needed.items() if value is None]:
        raise typer.BadParameter(
            f"missing {', '.join(missing)}: give them, or call it on a terminal, where it asks "
            "(megasdc init my.json --text stdlib --parameters 1m --ranks 2)"
        )
    if options.ranks is not None and options.hostfile is not None:
        raise typer.BadParameter("give --ranks, for this host, or --hostfile, not both")
    assert options.text is not None and options.parameters is not None, "checked above"
    try:
        parameters = parse_parameters(options.parameters)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--parameters") from error
    return FirstAnswers(
        file=options.file,
        text=options.text,
        tokenizer=options.tokenizer or "train",
        parameters=parameters,
        ranks=options.ranks or _slots(options.hostfile),
        hostfile=options.hostfile,
        precision=options.precision or _precision(),
        protect=options.protect or "standard",
        steps=options.steps,
        samples=options.samples,
        sequence_length=options.sequence_length,
        tensor=options.tensor,
        pipeline=options.pipeline,
    )


def _slots(hostfile: Path | None) -> int:
    from megasdc.ops.launch.hosts import read_hostfile

    assert hostfile is not None, "--ranks or --hostfile is given"
    return sum(read_hostfile(hostfile).values())


def _has_gpu() -> bool:
    return bool(list(Path("/dev").glob("nvidia[0-9]*"))) or Path("/dev/kfd").exists()


def _precision() -> Precision:
    return "bf16" if _has_gpu() else "fp32"


def _asked(options: InitOptions) -> InitOptions:
    """The options, with an answer for each that decides about the file and was not given."""
    from megasdc.lab.planning.first_config import STDLIB, parse_parameters

    found: dict[str, Any] = {}

    def ask(name: str, question: str, default: str, check: Callable[[str], Any] = str) -> None:
        if getattr(options, name) is None:
            found[name] = typer.prompt(question, default=default, value_proc=_checked(check), err=True)

    ask("text", "Text (stdlib, a file, folder or glob, hub:NAME, prepared data)", STDLIB, _there)
    ask("tokenizer", "Tokenizer (train, train:N, a file or folder, a name on the hub)", "train")
    ask("parameters", "Parameters (10m, 124m, 1.5b ...)", "124m" if _has_gpu() else "1m", _same(parse_parameters))
    if options.ranks is None and options.hostfile is None:
        answer = typer.prompt(
            "Ranks on this host, or a hostfile", default="2", value_proc=_checked(_ranks_or_hosts), err=True
        )
        found["ranks" if isinstance(answer, int) else "hostfile"] = answer
    ask("precision", "Precision (fp32, bf16, fp16)", _precision(), _one_of("fp32", "bf16", "fp16"))
    ask("protect", "Protection (standard, strict, off)", "standard", _one_of("standard", "strict", "off"))
    return replace(options, **found)


def _checked(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function for a prompt, which asks again where ``check`` raises ValueError."""

    def process(text: str) -> Any:
        try:
            return check(text.strip())
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return process


def _same(check: Callable[[str], Any]) -> Callable[[str], str]:
    def process(text: str) -> str:
        check(text)
        return text

    return process


def _one_of(*words: str) -> Callable[[str], str]:
    def process(text: str) -> str:
        if text not in words:
            raise ValueError(f"got {text!r}, needed {', '.join(words)}")
        return text

    return process


def _there(text: str) -> str:
    from glob import glob

    if text != "stdlib" and not text.startswith("hub:") and not glob(text):
        raise ValueError(f"there is no {text}; a name on the Hugging Face hub is written hub:NAME")
    return text


def _ranks_or_hosts(text: str) -> int | Path:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if not Path(text).is_file():
        raise ValueError(f"got {text!r}, needed a number of ranks, or a file with lines `NAME slots=N`")
    return Path(text)
