#!/usr/bin/env python3
"""Entry script for the ``deepspeed`` launcher: trains as one rank.

deepspeed --num_gpus 2 --module megasdc.entry.pretrain_gpt --config my.json --set megasdc.training.steps=20

Exit codes are listed in docs/reference/exit-codes.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Parse the command line, train, leave a record, end with the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the run's JSON file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b.c=value", help="override one value")
    parser.add_argument(
        "--allow-changed",
        action="append",
        default=[],
        metavar="a.b.c",
        help="resume although this field differs from the checkpoint",
    )
    parser.add_argument("--local_rank", type=int, help="set by the launcher; not read, LOCAL_RANK is used")
    arguments = parser.parse_args()
    # Before torch is imported: large tensors on the host get huge pages; a CPU run saves a tenth of its time in page
    # faults. PyTorch reads it once (c10/core/impl/alloc_cpu.cpp); 0 turns it off.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

    from megasdc.common.program import refuse_pipes
    from megasdc.ops.launch.orphans import follow_parent
    from megasdc.ops.launch.own_lines import CPP_LEVEL_VARIABLE, native_lines_to_log
    from megasdc.ops.launch.records import write_done, write_started
    from megasdc.parallel.rendezvous import NODE_RANK_VARIABLE
    from megasdc.pretrain import pretrain

    refuse_pipes()
    if NODE_RANK_VARIABLE in os.environ:
        follow_parent()  # DeepSpeed's launcher; a shell that started this may end
    rank = int(os.environ.get("RANK", "0"))
    run_dir = _run_dir(arguments.config, arguments.set)
    is_kept = run_dir is not None and native_lines_to_log(run_dir, rank)
    # On the console only errors of c10d appear, and none of its warnings, such as of names.
    os.environ.setdefault(CPP_LEVEL_VARIABLE, "WARNING" if is_kept else "ERROR")
    # A folder that cannot be written must not hide what training has to say; the launcher front misses the record.
    if run_dir is not None:
        with contextlib.suppress(OSError):
            write_started(run_dir, rank)

    ends: list[str] = []

    def leave(code: int, error: BaseException | None) -> NoReturn:
        """Record the end of this rank, and end its process."""
        if run_dir is not None:
            try:
                write_done(run_dir, rank, code, error, end=ends[-1] if ends and not code else None)
            except OSError as problem:
                print(f"rank {rank}: no record of the end could be written: {problem}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: after a failure, destructors of process groups may wait for ranks that have gone.
        os._exit(code)

    leave(*pretrain(arguments.config, arguments.set, arguments.allow_changed, leave, ends.append))


def _run_dir(config: str, overrides: list[str]) -> str | None:
    """The run folder, or null if the configuration cannot be read; what is wrong with it is reported by training."""
    from megasdc.common.errors import ConfigError
    from megasdc.config.load import load_config

    try:
        return load_config(config, overrides).megasdc.logging.run_dir
    except ConfigError:
        return None


if __name__ == "__main__":
    main()
