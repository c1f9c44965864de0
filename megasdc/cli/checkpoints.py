"""Commands on checkpoints: `megasdc manifest`, `verify-checkpoint`, `inspect-checkpoint`, `convert-checkpoint`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from megasdc.cli.app import Json, app, input_argument, output_folder, print_text, stdout_to_stderr
from megasdc.common.errors import CheckpointError
from megasdc.common.program import echo

CheckpointFolder = Annotated[
    Path,
    input_argument(CheckpointError, help="Folder of one checkpoint, universal or not, or of several: all are checked."),
]


@app.command("verify-checkpoint", epilog="Example: megasdc verify-checkpoint runs/smoke/checkpoints")
def verify_checkpoint_command(
    folder: CheckpointFolder,
    checksums: Annotated[
        bool, typer.Option("--checksums/--no-checksums", help="Read every file; without: check only sizes and pickles.")
    ] = True,
    contents: Annotated[
        bool, typer.Option("--contents/--no-contents", help="Check every value; without: only the files.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Check every file of a checkpoint against its manifest, and what the files hold; exit code 72 if it is damaged.

    What they hold: shapes; copies of several ranks, equal in every bit; weights, equal to the rounded master weights;
    no NaN, no infinity; equal counts of steps.
    """
    from megasdc.checkpoint import verify
    from megasdc.lab.checkpoints.views.contents import verify_contents

    check = verify_contents if contents else verify.verify_checkpoint
    folders = verify.find_folders(folder, universal=True)
    reports = [check(path, checksums=checksums, progress=not as_json) for path in folders]
    print_text(reports, as_json)
    raise typer.Exit(0 if all(report.ok for report in reports) else CheckpointError.exit_code)


@app.command("inspect-checkpoint", epilog="Example: megasdc inspect-checkpoint runs/smoke/checkpoints/step_00000100")
def inspect_checkpoint_command(
    folder: Annotated[
        Path,
        input_argument(
            CheckpointError,
            help="A checkpoint of any format: of a layout, universal, of DeepSpeed with ZeRO-1 or 2, of torch DCP, a "
            "Hugging Face model, a .pt or .safetensors file; or a folder of several.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, without reading tensors: step, age, layout, model, tensors, states, writers.

    Exit code 0; 72 if it is not a checkpoint or something in it cannot be read.
    """
    from megasdc.lab.checkpoints.pages.inspection_page import inspection_page
    from megasdc.lab.checkpoints.views import inspect
    from megasdc.output.page import print_pages

    found = [inspect.inspect_checkpoint(path) for path in inspect.find_inspectable(folder)]
    if as_json:
        echo(json.dumps(found, indent=2))
    else:
        print_pages(map(inspection_page, found))
    raise typer.Exit(CheckpointError.exit_code if any(one["unread"] for one in found) else 0)


@app.command("manifest", epilog="Example: megasdc manifest runs/smoke/checkpoints/step_00000100 --out node1.manifest")
def write_manifest_command(
    path: Annotated[
        Path,
        input_argument(
            CheckpointError, help="A checkpoint of any kind, a folder of several, a model, or one file.", metavar="PATH"
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", help="File to write, - for standard output; default: NAME.HOST.manifest in this folder."),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Threads that read; default: one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Read everything once and write a small manifest of it, to be compared with those of other nodes.

    Digests of files, tensors and blocks of tensors, 9 to 15 KB a GB of large files. megasdc compare
    compares manifests.
    """
    from megasdc.lab.checkpoints.pages.manifest_command import make_manifest

    make_manifest(path, out, jobs, as_json)


@app.command("convert-checkpoint", epilog="Example: megasdc convert-checkpoint runs/smoke/checkpoints --to universal")
def convert_checkpoint(
    folder: Annotated[
        Path,
        input_argument(
            CheckpointError, help="Folder of one checkpoint (step_NNNNNNNN), or of several: the newest complete one."
        ),
    ],
    to: Annotated[Literal["universal"], typer.Option("--to", help="universal: to start from at any layout.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", **output_folder(help="Folder to write; default: universal_step_NNNNNNNN beside it.")),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing universal checkpoint.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; default: one per CPU, at most 4.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint, so that a run of another layout can start from it; exit code 72 if it is damaged.

    Set megasdc.checkpoint.universal of the new run to the result.
    """
    with stdout_to_stderr():
        from megasdc.interchange.convert import convert_to_universal
        from megasdc.train.signals import exiting_on_signals

        with exiting_on_signals():
            report = convert_to_universal(folder, out, force=force, workers=workers, progress=not as_json)
    print_text(report, as_json)
