"""Verdict on a launch without a front, for schedulers that start DeepSpeed's launcher on each node themselves.

    python -m megasdc.ops.launch.gather --hostfile H --launcher-code N --config F.json [--set a.b.c=value ...]

The launch id comes from ``MEGASDC_LAUNCH_ID``; the run folder must be visible on this host. Whether a stop was
requested is not known here, and not needed: the exit code is 0 if every rank's record has 0, whatever the launcher
returned, which is never 0 after a signal.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megasdc.common.errors import LaunchError, MegasdcError
from megasdc.config.load import load_config
from megasdc.ops.launch.hosts import place_on_hosts, read_hostfile
from megasdc.ops.launch.launch_verdict import judge_launch
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, collect


def main(argv: Sequence[str]) -> int:
    """Print how the launch ended and return its exit code; ``argv`` is without the program's name.

    Raises:
        ConfigError: the configuration cannot be read.
        LaunchError: the hostfile cannot be read, or the launch id is not set.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megasdc.ops.launch.gather",
        description="Judge a launch by the records of its ranks.",
        epilog="Example: python -m megasdc.ops.launch.gather --hostfile H --launcher-code 0 "
        "--config configs/smoke.json",
    )
    parser.add_argument("--hostfile", required=True, help="the hosts of the launch")
    parser.add_argument("--launcher-code", required=True, type=int, help="exit code of what started the ranks")
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b.c=value", help="override one value")
    parser.add_argument("--allow-changed", action="append", metavar="a.b.c", help="as the ranks had it; not read here")
    arguments = parser.parse_args(argv)
    launch_id = os.environ.get(LAUNCH_ID_VARIABLE)
    if not launch_id:
        raise LaunchError(f"{LAUNCH_ID_VARIABLE} is not set; give it the value that the ranks had")
    run_dir = load_config(arguments.config, arguments.set).megasdc.logging.run_dir
    placement = place_on_hosts(read_hostfile(arguments.hostfile))
    verdict = judge_launch(placement.host_of_rank, collect(run_dir, launch_id), arguments.launcher_code)
    print("\n".join(verdict.lines))
    return verdict.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MegasdcError as error:
        print(f"megasdc: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
