"""`megasdc test-hosts`: several hosts on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import COMMAND, app, noted_as
from megasdc.common.errors import StorageError


@app.command(
    "test-hosts",
    epilog="Example: megasdc test-hosts 2 --slots 2 -- megasdc launch --hostfile {hostfile} --config my.json",
)
def test_hosts(
    num_hosts: Annotated[int, typer.Argument(metavar="N", min=1, max=64, help="How many: node1, node2, ...")],
    command: Annotated[list[str], typer.Argument(metavar=COMMAND, help="Program that runs on node1, with arguments.")],
    slots: Annotated[int, typer.Option("--slots", min=1, help="Ranks of each host in the hostfile.")] = 1,
    private: Annotated[
        list[Path] | None,
        typer.Option(
            "--private",
            metavar="FOLDER",
            help="Each host has a folder of its own there, empty at first; may be repeated. All else is shared.",
            **noted_as(StorageError),
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            help="Keep logs, home folders and private folders of the hosts there; default: they go with the hosts.",
            **noted_as(StorageError),
        ),
    ] = None,
) -> None:
    """Make several hosts on this machine, with real SSH between them, for as long as a command runs: to rehearse a
    launch, a supervised run or the loss of a host.

    In the command {hostfile} is a hostfile of them all; the variables MEGASDC_TEST_HOSTFILE and MEGASDC_TEST_HOSTS
    are its path and the names of the hosts. To cut the power of node2: ssh node2 kill 1; its network: ssh node2 ip
    link set eth0 down. The hosts end with the command, also by a signal, which it gets first. Needs root, and says
    which Debian packages are missing.

    Exit code: that of the command; 78: there can be no test hosts here.
    """
    from megasdc.ops.cluster import run_on_hosts

    own = [path.absolute() for path in private or ()]
    raise typer.Exit(run_on_hosts(command, num_hosts, slots, own, folder))
