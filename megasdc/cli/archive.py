"""`megasdc archive push`, `pull`, `list`, `verify` and `prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, archive_app, input_argument, output_folder, print_text
from megasdc.common.errors import CheckpointError
from megasdc.common.program import at_home, echo

Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        callback=at_home,
        help="Of the archive: a folder, or a URL of fsspec, such as s3://bucket/archive. Credentials come from where "
        "the store's own clients look, never from the address.",
    ),
]
RunId = Annotated[str | None, typer.Option("--run", metavar="ID", help="Id of the run (run.json in its folder).")]
Workers = Annotated[int, typer.Option("--workers", min=1, max=64, help="Threads.")]


@archive_app.command(
    "push",
    epilog="Example: megasdc archive push runs/smoke/checkpoints /backup/archive\n\nWith S3: s3://bucket/archive",
)
def push(
    checkpoint: Annotated[
        Path, input_argument(CheckpointError, help="A checkpoint, or a folder of several: the newest complete one.")
    ],
    address: Address,
    run: RunId = None,
    quantize_moments: Annotated[
        int | None,
        typer.Option(
            "--quantize-moments",
            min=8,
            max=8,
            help="8: store the optimizer's moments in 8 bits. A run does not continue from it bit for bit.",
        ),
    ] = None,
    workers: Workers = 4,
    as_json: Json = False,
) -> None:
    """Store a checkpoint, compressed; blocks that are there already are not stored again.

    After a kill, push again: what is there is not moved again. Exit code 72: it is damaged, or the archive has other
    content for this step; 77: the archive cannot be reached or written; 70: the address is refused; 78: a package is
    missing.
    """
    from megasdc.ops.archive.push import push_checkpoint

    print_text(
        push_checkpoint(
            checkpoint, address, run=run, quantize_bits=quantize_moments, workers=workers, progress=not as_json
        ),
        as_json,
    )


@archive_app.command("pull", epilog="Example: megasdc archive pull /backup/archive runs/again/checkpoints --step 100")
def pull(
    address: Address,
    out: Annotated[
        Path, typer.Argument(metavar="DIR", **output_folder(help="Folder of checkpoints to write it into."))
    ],
    run: RunId = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Default: the newest that is complete.")] = None,
    node: Annotated[
        str | None,
        typer.Option("--node", help="With node-local storage: the node whose files are wanted; default: this host."),
    ] = None,
    accept_quantized: Annotated[
        bool, typer.Option("--accept-quantized", help="Pull one whose moments were quantized.")
    ] = False,
    workers: Workers = 4,
    as_json: Json = False,
) -> None:
    """Bring a checkpoint back, bit for bit; it appears under its name when every file and pickle was checked.

    After a kill, pull again: what is there is not moved again. Exit code 72: it is damaged, not there, or quantized and
    that was not accepted; 77: the archive cannot be reached, or DIR not written.
    """
    from megasdc.ops.archive.pull import pull_checkpoint

    report = pull_checkpoint(
        address,
        out,
        run=run,
        step=step,
        node=node,
        accept_quantized=accept_quantized,
        workers=workers,
        progress=not as_json,
    )
    print_text(report, as_json)


@archive_app.command("list", epilog="Example: megasdc archive list /backup/archive")
def list_archive(address: Address, run: RunId = None, as_json: Json = False) -> None:
    """List the steps of each run, with size, time, layout, and whether moments are quantized.

    Exit code 72: a record is damaged, or parts are missing; all others are listed.
    """
    import time

    from megasdc.ops.archive.entries import read_entries
    from megasdc.ops.archive.record import open_archive

    entries = read_entries(open_archive(address), run)
    if as_json:
        print_text(entries, as_json)
    for entry in entries if not as_json else ():
        told = entry.as_dict()
        when = "" if told["time"] is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["time"]))
        line = f"{entry.run}  step {entry.step}  {entry.size_bytes / 1e6:.1f} MB  {told['layout'] or ''}  {when}"
        echo("  ".join(part for part in (line, entry.quantized) if part))
        for problem in entry.problems:
            echo(f"  - {problem}")
    if not entries and not as_json:
        echo(f"{address} holds no checkpoint" + (f" of run {run}" if run else ""))
    raise typer.Exit(CheckpointError.exit_code if any(entry.problems for entry in entries) else 0)


@archive_app.command("verify", epilog="Example: megasdc archive verify /backup/archive")
def verify_archive_command(
    address: Address,
    delete_damaged: Annotated[
        bool,
        typer.Option("--delete-damaged", help="Delete damaged blocks, so that the next push of the step stores them."),
    ] = False,
    workers: Workers = 4,
    as_json: Json = False,
) -> None:
    """Read the whole archive, decompress every block and compare its digest; exit code 72 if something is damaged.

    Damaged blocks are named, with the steps that need them. The originals are not needed.
    """
    from megasdc.ops.archive.verify import verify_archive

    report = verify_archive(address, delete_damaged=delete_damaged, workers=workers, progress=not as_json)
    print_text(report, as_json)
    raise typer.Exit(0 if report.ok else CheckpointError.exit_code)


@archive_app.command("prune", epilog="Example: megasdc archive prune /backup/archive --keep-last 5 --keep-every 1000")
def prune(
    address: Address,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Of one run; default: of each run.")] = None,
    keep_last: Annotated[int, typer.Option("--keep-last", min=0, help="Newest steps kept; 0: all.")] = 0,
    keep_every: Annotated[
        int, typer.Option("--keep-every", min=0, help="Steps that are a multiple are kept too; 0: none.")
    ] = 0,
    step: Annotated[
        tuple[int, ...], typer.Option("--step", min=0, help="Remove this step of --run; may be repeated.")
    ] = (),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove steps by rules, and all blocks that no step needs; without rules only such blocks.

    Exit code 77: a push goes on; 72: a record that cannot be read may need blocks, so that none was removed.
    """
    from megasdc.ops.archive.prune import prune_archive

    print_text(
        prune_archive(address, run=run, keep_last=keep_last, keep_every=keep_every, steps=step, dry_run=dry_run),
        as_json,
    )
