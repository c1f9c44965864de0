"""`megasdc study`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, app, input_argument, print_result
from megasdc.common.errors import DataError


class _By(StrEnum):
    part, kind, submodule, rank = "part", "kind", "submodule", "rank"


@app.command("study", epilog="Example: megasdc study runs/study --by submodule")
def study(
    run_dir: Annotated[Path, input_argument(DataError, help="Run folder of a study (megasdc.logging.run_dir).")],
    by: Annotated[
        _By,
        typer.Option("--by", help="Rows of mismatches: attention, ffn, ...; kinds; submodules; or parts of each rank."),
    ] = _By.part,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Show how replicas differ from the trusted one: mismatch frequency and severity, noise in gradients,
    distance of parameters, losses, disagreement; also while the study runs.
    """
    from megasdc.lab.report.study_tables import summary_page
    from megasdc.lab.studies.tables import summarize_study
    from megasdc.output.page import printer

    print_result(summarize_study(run_dir, by.value), printer(summary_page), out=out, as_json=as_json)
