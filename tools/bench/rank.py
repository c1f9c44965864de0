"""Ranks of a benchmark: the one module that their processes run, and the function that starts them.

A rank is given a function and its arguments, which may be any Python objects, and sends objects back.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megasdc.parallel import run_ranks
from tools.bench.statistics import in_turn

if TYPE_CHECKING:
    from megasdc.parallel.dims import ParallelDims

TIMEOUT_S = 600.0
Progress = Callable[[str, int, int], None]
"""Called with the name of what is measured, how much is done, and the total."""
_PROGRESS = "progress"


def ignore_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


class Messages(run_ranks.ReportChannel):
    """Sends objects of a rank to the process that started it; those of all ranks but the first go nowhere."""

    def send(self, **fields: Any) -> None:
        """Send one message.

        Args:
            **fields: any objects that can be pickled; ``waits`` is for ``send_and_wait`` alone.
        """
        if self._file is not None:
            waits = fields.pop("waits", False)
            super().send(waits=waits, pickled=_encode(fields))

    def progress(self, what: str, done: int, total: int) -> None:
        """Send how much of something is done."""
        self.send(**{_PROGRESS: (what, done, total)})


def run_in_ranks(
    function: Callable[..., None],
    arguments: dict[str, Any],
    ranks: int,
    folder: Path,
    on_message: Callable[[dict[str, Any]], None] | None = None,
    *,
    on_progress: Progress = ignore_progress,
    threads: int = 1,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """Call a function in ranks on this machine, and wait until all have ended well.

    Args:
        function: of a module; called with a ``Messages`` and the arguments. Groups that it leaves are shut down.
        ranks: how many.
        folder: where their output goes.
        on_message: called with the fields of each message of rank 0, which waits for its return if it asked.
        on_progress: called with what ``Messages.progress`` sends, which is no other message.
        threads: CPU threads of each rank.
        fresh: see ``megasdc.parallel.processes.start_module``.

    Returns:
        Fields of the messages, in their order; none where ``on_message`` got them.

    Raises:
        MegasdcError: a rank failed, with the end of its output.
    """
    received: list[dict[str, Any]] = []

    def receive(message: dict[str, Any]) -> None:
        fields = _decode(message["pickled"])
        if _PROGRESS in fields:
            on_progress(*fields[_PROGRESS])
        else:
            (on_message or received.append)(fields)

    run_ranks.run_ranks(__name__, request_of(function, arguments), ranks, threads, folder, receive, fresh)
    return received


def request_of(function: Callable[..., None], arguments: dict[str, Any]) -> dict[str, str]:
    """What a process that runs this module is told, as JSON, to call a function with a ``Messages`` and arguments."""
    return {"call": _encode(partial(function, **arguments))}


def take_turns(
    messages: Messages,
    what: str,
    kinds: Sequence[str],
    blocks: int,
    step: Callable[[str], Any],
    after_block: Callable[[], None] = lambda: None,
) -> None:
    """Take steps of several kinds ``in_turn``, and send what each took, but for the first of each, which is slower.

    Args:
        what: name of the steps in progress.
        blocks: of one step of each kind.
        step: takes a step of a kind, on all ranks at once.
        after_block: called after each block that counts.
    """
    for kind in kinds:
        step(kind)
    for block in range(blocks):
        for kind in in_turn(kinds, block):
            messages.send(kind=kind, step=step(kind))
        after_block()
        messages.progress(what, block + 1, blocks)


def by_kind(messages: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """What each step took by its kind, one a block, from the messages of ``take_turns``."""
    found: dict[str, list[Any]] = {}
    for one in messages:
        if "kind" in one:
            found.setdefault(one["kind"], []).append(one["step"])
    return found


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder for what ranks write, removed in the end; in another folder than that of temporary files if asked."""
    with TemporaryDirectory(prefix="megasdc_bench_", dir=parent) as folder:
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

    from megasdc.train.logs import set_up_logging

    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    _decode(json.loads(sys.argv[1])["call"])(messages)

    import torch.distributed as dist  # only now: a training sets what it reads first

    from megasdc.parallel import groups

    if dist.is_initialized():
        dist.barrier()
        groups.shutdown()


if __name__ == "__main__":
    main()
