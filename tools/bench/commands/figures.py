"""`python -m tools.bench figures`: figures of pages, from the results of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import input_option, write_atomically
from megasdc.common.errors import DataError
from tools.bench.commands.app import app


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
