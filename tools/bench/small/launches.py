"""Launches: many runs in the same processes, each as if it was started by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from megasdc.common.errors import MegasdcError
from tools.bench.rank import Messages, run_in_ranks

Launch = tuple[Path, list[str], int]
"""Configuration, settings, and number of ranks."""
AT_A_TIME = 8
"""Launches in the same processes, which do not free what an ended one has left."""
POLL_S = 0.02
WAIT_S = 300.0


def launch(launches: Sequence[Launch], ranks: int, folder: Path, *, may_fail: bool = False) -> list[tuple[int, ...]]:
    """Exit codes by rank of each launch.

    Args:
        ranks: processes, the most ranks of a launch.
        folder: gets their output.
        may_fail: whether a rank may not come back; the codes of such a launch are empty.

    Raises:
        MegasdcError: a rank failed in another way than by ending its training.
    """
    codes: list[tuple[int, ...]] = []
    while left := launches[len(codes) :][:AT_A_TIME]:
        arguments = {"launches": left, "folder": Path(mkdtemp(prefix="ends_", dir=folder))}
        try:
            run_in_ranks(run_launches, arguments, ranks, folder, lambda message: codes.append(message["codes"]))
        except MegasdcError:
            if not may_fail:
                raise
            codes.append(())
    return codes


def run_launches(messages: Messages, launches: Sequence[Launch], folder: Path) -> None:
    """Train once for each launch, whose ranks may be fewer than those that this is one of.

    Rank 0 sends the exit codes by rank once all ranks of a launch have ended.
    """
    from megasdc.parallel import groups
    from megasdc.pretrain import pretrain

    given = dict(os.environ)
    rank = int(given["RANK"])
    for number, (config, settings, ranks) in enumerate(launches):
        os.environ.clear()  # a rank that went on without others has changed it
        os.environ.update({**given, "WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": str(number)})
        code = pretrain(str(config), settings)[0] if rank < ranks else 0
        groups.shutdown()  # after a failure they are left
        place = folder / f"launch_{number}"
        place.mkdir(exist_ok=True)
        (place / f"{rank}.new").write_text(str(code))
        (place / f"{rank}.new").rename(place / str(rank))
        codes = _codes(place, int(given["WORLD_SIZE"]))
        messages.send(codes=tuple(codes[:ranks]))


def _codes(place: Path, ranks: int) -> list[int]:
    """Exit codes, once all ranks have left theirs: only then another launch may begin."""
    end = time.monotonic() + WAIT_S
    while any(not (place / str(rank)).exists() for rank in range(ranks)):
        if time.monotonic() > end:
            raise TimeoutError(f"{place}: a rank has not ended its training within {WAIT_S:.0f} s")
        time.sleep(POLL_S)
    return [int((place / str(rank)).read_text()) for rank in range(ranks)]
