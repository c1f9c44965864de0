"""Ranks of a benchmark: the one module that their processes run, and the function that starts them.

A rank is given a function and its arguments, which may be any Python objects, and sends objects back.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megasdc.parallel import run_ranks

if TYPE_CHECKING:
    from megasdc.parallel.dims import ParallelDims

TIMEOUT_S = 600.0


class Messages(run_ranks.ReportChannel):
    """Sends objects of a rank to the process that started it; those of all ranks but the first go nowhere."""

    def send(self, **fields: Any) -> None:
        """Send one message.

        Args:
            **fields: any objects that can be pickled; ``waits`` is for ``ask`` alone.
        """
        if self._file is not None:
            waits = fields.pop("waits", False)
            super().send(waits=waits, pickled=_encode(fields))


def run_in_ranks(
    function: Callable[..., None],
    arguments: dict[str, Any],
    ranks: int,
    folder: Path,
    on_message: Callable[[dict[str, Any]], None],
    *,
    threads: int = 1,
    fresh: bool = False,
) -> None:
    """Call a function in ranks on this machine, and wait until all have ended well.

    Args:
        function: of a module; called with a ``Messages`` and the arguments. Groups that it leaves are shut down.
        ranks: how many.
        folder: where their output goes.
        on_message: called with the fields of each message of rank 0, which waits for its return if it asked.
        threads: CPU threads of each rank.
        fresh: see ``megasdc.parallel.processes.start_module``.

    Raises:
        MegasdcError: a rank failed, with the end of its output.
    """
    request = {"call": _encode(partial(function, **arguments))}
    run_ranks.run_ranks(
        __name__, request, ranks, threads, folder, lambda message: on_message(_decode(message["pickled"])), fresh
    )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for what ranks write, removed in the end."""
    with TemporaryDirectory(prefix="megasdc_bench_") as folder:
        yield Path(folder)


def join_ranks(tensor: int = 1, pipeline: int = 1, *, threads: int = 1, timeout_s: float = TIMEOUT_S) -> ParallelDims:
    """Make the groups of this process, and return the place of this rank.

    Args:
        threads: CPU threads of this rank.
        timeout_s: of collectives.

    Collective: all ranks of the world.
    """
    from megasdc.parallel import groups
    from megasdc.train.process import prepare_cpu

    prepare_cpu(threads)
    groups.init_process_group(timeout_s)
    return groups.init_model_parallel(tensor, pipeline, timeout_s)


def _encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def _decode(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def main() -> None:
    """Run as a rank: the first argument is the request, the second, on rank 0 alone, where messages go."""
    import json

    import torch.distributed as dist

    from megasdc.parallel import groups
    from megasdc.train.logs import set_up_logging

    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    _decode(json.loads(sys.argv[1])["call"])(messages)
    if dist.is_initialized():
        dist.barrier()
        groups.shutdown()


if __name__ == "__main__":
    main()
