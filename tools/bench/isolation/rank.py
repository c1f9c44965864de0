"""Ranks of the campaign of isolation: many runs in the same processes, each started as a launch of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tools.bench.rank import Messages

POLL_S = 0.02
WAIT_S = 300.0


def run_launches(messages: Messages, launches: list[tuple[str, list[str], int]], folder: str) -> None:
    """Train once for each launch: configuration, settings, number of ranks, of which this one may be none.

    Rank 0 sends the exit codes by rank once all ranks of a launch have ended.
    """
    from megasdc.parallel import groups
    from megasdc.pretrain import pretrain

    given = dict(os.environ)
    rank = int(given["RANK"])
    for number, (config, settings, ranks) in enumerate(launches):
        os.environ.clear()  # a rank that went on without others has changed it
        os.environ.update({**given, "WORLD_SIZE": str(ranks), "TORCHELASTIC_RESTART_COUNT": str(number)})
        code = pretrain(config, settings)[0] if rank < ranks else 0
        groups.shutdown()  # after a failure they are left
        place = Path(folder) / f"launch_{number}"
        place.mkdir(exist_ok=True)
        (place / f"{rank}.new").write_text(str(code))
        (place / f"{rank}.new").rename(place / str(rank))
        codes = _codes(place, int(given["WORLD_SIZE"]))
        messages.send(number=number, codes=codes[:ranks])


def _codes(place: Path, ranks: int) -> list[Any]:
    """Exit codes, once all ranks have left theirs: only then another launch may begin."""
    end = time.monotonic() + WAIT_S
    while any(not (place / str(rank)).exists() for rank in range(ranks)):
        if time.monotonic() > end:
            raise TimeoutError(f"{place}: a rank has not ended its training within {WAIT_S:.0f} s")
        time.sleep(POLL_S)
    return [int((place / str(rank)).read_text()) for rank in range(ranks)]
