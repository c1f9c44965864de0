"""Commands on one step of a run: `megasdc inspect-data`, `triage`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, Overrides, app, input_argument, input_option, print_result, stdout_to_stderr
from megasdc.cli.options import option
from megasdc.common.errors import ConfigError, CorruptionError, DataError, LaunchError


@dataclass(frozen=True)
class DataOptions:
    """Options of ``megasdc inspect-data``: which run, and what of the step."""

    run_dir: Annotated[
        Path | None, input_argument(DataError, metavar="RUN", help="Run folder (megasdc.logging.run_dir).")
    ] = None
    config: Path | None = option(
        None, "Instead of RUN: configuration of a run that is planned.", make=input_option, reads=ConfigError
    )
    world_size: int | None = option(None, "With --config: number of ranks.", min=1)
    replicas: tuple[int, ...] = option((), "Only this replica; may be repeated.", "--replica", min=0)
    micro_batches: tuple[int, ...] = option((), "Only this micro-batch; may be repeated.", "--micro-batch", min=0)
    text: bool = option(False, "Also decode the text of the documents.", "--text")
    overrides: Overrides = ()


@app.command("inspect-data", epilog="Example: megasdc inspect-data runs/smoke --at-step 40 --text")
def inspect_data(
    at_step: Annotated[int, typer.Option("--at-step", min=1, help="The step; the first is 1.")],
    options: DataOptions,
    as_json: Json = False,
) -> None:
    """Show which documents each replica and micro-batch of a step is trained on, token by token with --json.

    Of a run: as it was, after resumes and changed layouts, with micro-batches that were dropped or shared by an audit;
    --set names data that are elsewhere now. Exit code 71: no such step, or files of the run or its data are missing or
    damaged; 72: the data are not those of the run.
    """
    run_dir, config, world_size = options.run_dir, options.config, options.world_size
    if (run_dir is None) == (config is None) or (config is None) != (world_size is None):
        raise typer.BadParameter("give either a run folder, or --config FILE with --world-size N")
    with stdout_to_stderr():
        from megasdc.config.load import load_config
        from megasdc.lab.triage.step_data import Wanted, data_of_plan, data_of_run
        from megasdc.lab.triage.step_data_page import step_data_page
        from megasdc.output.page import print_pages

        wanted = Wanted(at_step, options.replicas, options.micro_batches, options.text)
        if run_dir is not None:
            result = data_of_run(run_dir, wanted, options.overrides)
        else:
            assert config is not None and world_size is not None, "checked above"
            result = data_of_plan(load_config(config, options.overrides), world_size, wanted)
    print_result(result, lambda found, _: print_pages([step_data_page(found)]), out=None, as_json=as_json)


@app.command("triage", epilog="Example: megasdc triage runs/smoke 40")
def triage(
    run_dir: Annotated[Path, input_argument(DataError, metavar="RUN", help="Run folder (megasdc.logging.run_dir).")],
    step: Annotated[int, typer.Argument(metavar="STEP", min=1, help="The step; the first is 1.")],
    hostfile: Annotated[
        Path | None, input_option("--hostfile", reads=LaunchError, help="Hosts of the replays; without: this host.")
    ] = None,
    second_hostfile: Annotated[
        Path | None,
        input_option("--second-hostfile", reads=LaunchError, help="Hosts of the second replay; without: the same."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Rows of a table that are shown.")] = 20,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Data, optimizer or hardware? Replays a step of a run twice, bit for bit, from a checkpoint before it.

    The replays are compared with each other and with what the run recorded, result by result; documents are shown with
    their losses, parameters with their gradients and updates. They need as many ranks as the run has.

    Exit code 0: nothing unusual, or the cause is data or optimizer; 73: hardware; 1: inconclusive; 71: no such step;
    72: no checkpoint leads to it; 78: a replay cannot be started; that of a replay that failed.
    """
    with stdout_to_stderr():
        from megasdc.lab.triage.triage import triage_step
        from megasdc.lab.triage.triage_page import triage_page
        from megasdc.output.page import print_pages
        from megasdc.train.signals import exiting_on_signals

        with exiting_on_signals():
            result = triage_step(run_dir, step, hostfile=hostfile, second_hostfile=second_hostfile)
    print_result(result, lambda found, _: print_pages([triage_page(found, limit)]), out=out, as_json=as_json)
    raise typer.Exit({"hardware": CorruptionError.exit_code, "inconclusive": 1}.get(result.conclusion.verdict, 0))
