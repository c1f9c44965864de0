"""``python -m megasdc.ops.archive.background``: push one checkpoint of a run beside its training.

Prints one line of JSON at its end: the report of the push, or ``error`` and ``exit_code``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megasdc.common.errors import MegasdcError

WORKERS = 2
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Push, and prune where that is asked for; returns the exit code."""
    options = _parse(arguments)
    _end_with(options.parent)
    from megasdc.ops.archive.prune import prune_archive  # only now: importing PyTorch takes seconds of a processor
    from megasdc.ops.archive.push import push_checkpoint

    try:
        pushed = push_checkpoint(options.checkpoint, options.address, run=options.run, workers=WORKERS)
        found, code = asdict(pushed), 0
    except MegasdcError as error:
        found, code = {"error": str(error), "exit_code": error.exit_code}, error.exit_code
    except OSError as error:
        found, code = {"error": f"{error.filename}: {error.strerror}", "exit_code": 1}, 1
    if options.keep_last and not code:
        try:
            pruned = prune_archive(options.address, run=options.run, keep_last=options.keep_last)
            found["removed"] = pruned.removed
        except MegasdcError as error:
            found["not_pruned"] = str(error)
    print(json.dumps(found), flush=True)
    return code


def _end_with(parent: int) -> None:
    """End when the parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # what is stored is found by the next push
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGKILL)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megasdc.ops.archive.background", description=__doc__)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("address", help="of the archive")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--keep-last", type=int, default=0, help="then keep so many steps of the run; 0: all")
    parser.add_argument("--parent", type=int, required=True, help="process with which this one ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
